"""Longest processing time first over many machines, fast enough for a million items. Pure, NumPy only."""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
from jaxtyping import Float, Int32

_BLOCKS_FROM: Final = 32
"""Servers from which blocks beat a heap: a block costs some 50 µs and places about one item on each server."""


def assign_lpt(
    work: Float[np.ndarray, " items"],
    seconds: Float[np.ndarray, " servers"],
    busy: Float[np.ndarray, " servers"] | None = None,
) -> Int32[np.ndarray, " items"]:
    """Gives each item in turn to the server that would end it first (Graham 1969: within 4/3 − 1/(3m) of the optimum
    on m equal servers).

    Args:
        work: Above 0, falling.
        seconds: What a unit of work takes each server, above 0; at least one server.
        busy: Seconds that each server works already; None: none.

    Returns:
        The server of each item; the first of equals. With unequal `seconds` and 32 servers or more, the items of one
        block are compared by the first one's work: the order of servers may then differ from the rule a little.
    """
    loads = np.zeros(seconds.size) if busy is None else np.asarray(busy, np.float64).copy()
    if seconds.size < _BLOCKS_FROM or work.size <= seconds.size // 4:
        return _one_by_one(work, seconds, loads)
    return _by_blocks(work, seconds, loads)


def _one_by_one(
    work: Float[np.ndarray, " items"],
    seconds: Float[np.ndarray, " servers"],
    loads: Float[np.ndarray, " servers"],
) -> Int32[np.ndarray, " items"]:
    # Among servers of one speed the least loaded ends first, so one heap a speed is enough.
    speeds = np.unique(seconds).tolist()
    heaps = [
        [(load, server) for server, load in enumerate(loads.tolist()) if seconds[server] == speed]
        for speed in speeds
    ]
    for heap in heaps:
        heapq.heapify(heap)
    chosen: list[int] = []
    for item in work.tolist():
        if len(heaps) == 1:
            kind = 0
        else:
            ends = [
                (heap[0][0] + item * speed, heap[0][1]) for heap, speed in zip(heaps, speeds, strict=True)
            ]
            kind = ends.index(min(ends))
        load, server = heaps[kind][0]
        heapq.heapreplace(heaps[kind], (load + item * speeds[kind], server))
        chosen.append(server)
    return np.asarray(chosen, np.int32)


def _by_blocks(
    work: Float[np.ndarray, " items"],
    seconds: Float[np.ndarray, " servers"],
    loads: Float[np.ndarray, " servers"],
) -> Int32[np.ndarray, " items"]:
    # With the servers in order of load, item j of a block goes to server j exactly as long as none of those that
    # got an item of this block would be free before server j.
    chosen = np.empty(work.size, np.int32)
    quickest = seconds.min()
    start = 0
    while start < work.size:
        block = work[start : start + seconds.size]
        order = np.argsort(loads + block[0] * seconds, kind="stable")[: block.size]
        ends = loads[order] + block * seconds[order]
        again = np.minimum.accumulate(ends)[:-1] + block[1:] * quickest
        late = ends[1:] >= again
        size = int(late.argmax()) + 1 if late.any() else block.size
        chosen[start : start + size] = order[:size]
        loads[order[:size]] = ends[:size]
        start += size
    return chosen
