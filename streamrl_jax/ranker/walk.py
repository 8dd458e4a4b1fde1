"""The walk from the longest answer down that finds each instance's share. Pure, NumPy only.

The paper cuts the prompts in two and runs each class's instances full to the end. Here the instances' shares follow
from the time T that all of them shall take, found by a binary search. Walking from the longest answer down, an instance
takes answers until, all begun at once, they end at T. For answers of lengths L_1 ≥ L_2 ≥ … ≥ L_m that takes, with
Δ_j = base(j) − base(j − 1) and base(0) = 0,

    Σ_j L_j · Δ_j + kv_token_s · Σ_j L_j (prompt_j + L_j / 2) + prefill,

since j of them run while the (j + 1)-th has ended and the j-th has not. The first answer pays the whole base of a step
for its length, each further one only what it adds: so long answers share an instance, with few beside them, and the
next instance takes more of the shorter ones: as many classes as the lengths ask for. The first instance whose slots (or
KV cache) are full before T is where the walk ends: it and those after it have time for more than one answer a slot,
none of them is held up by a single answer, and the rest is spread over them by longest processing time first. Where
that would not end by T, it is given the one fill of its slots, and the walk goes on behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32

from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.cost import TokenLatency
from streamrl_jax.ranker.plans import Server, Work, full_token_s


@dataclass(frozen=True, eq=False)
class _Kind:
    """Servers of one make."""

    steps: Float64[np.ndarray, " places"]  # what the j-th group adds to a step, seconds
    fixed: Float64[np.ndarray, " groups"]  # seconds of each whatever runs beside it: contexts, prefill


_HALVINGS: Final = 14
"""Of the interval of T: to a 16,000th of the bound."""


class Walk:
    """Fills servers from the longest group down (see above), those first on which a single answer is quickest.

    Args:
        work: The longest group first, at least one.
        servers: At least one.
        limit: Tokens at which answers are cut.
    """

    def __init__(self, work: Work, servers: Sequence[Server], limit: float) -> None:
        self._work, self._servers, self._limit = work, servers, max(limit, float(work.lengths[0]))
        self._slots = np.array([server.slots for server in servers], np.float64)
        single = {server.cost: float(server.cost.ptl(1, 0)) for server in servers}
        turn = sorted(range(len(servers)), key=lambda index: single[servers[index].cost])
        self._turn = np.array(turn, np.int32)
        kinds = {(server.cost, server.slots) for server in servers}
        self._kinds = {(cost, slots): _kind(cost, slots, work) for cost, slots in kinds}
        self._base = np.array([single[server.cost] for server in servers])
        self._token_s = full_token_s(work, servers)
        self._before = np.append(0.0, np.cumsum(work.lengths))  # tokens of the groups before each

    def least(self, bound_s: float, classes: int, reach: float) -> tuple[int, ...] | None:
        """The shares with which all end earliest.

        Args:
            bound_s: By when they shall end.
            classes: The most servers that are filled one by one; the others are all alike.
            reach: Factor, from 1 up, by which a server's longest answer may exceed its prediction, up to the limit:
                the server is left the time for it.

        Returns:
            How many groups each server in turn takes, for `place`; None: they do not end by then.
        """
        low, high, best = 0.0, bound_s, None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            taken = self.takes(middle, classes, reach)
            low, high = (middle, high) if taken is None else (low, middle)
            best = best if taken is None else taken
        return best

    def takes(self, end_s: float, classes: int, reach: float) -> tuple[int, ...] | None:
        """How many groups each server in turn takes to end at a time; None: they do not all end by then."""
        lengths = self._work.lengths
        taken: list[int] = []
        start = 0
        for index in self._turn[:classes].tolist():
            server = self._servers[index]
            kind = self._kinds[server.cost, server.slots]
            places = self._places(server, kind, start)
            block = slice(start, start + places)
            ends = np.cumsum(lengths[block] * kind.steps[:places] + kind.fixed[block])
            beyond = max(0.0, min(self._limit, reach * lengths[start]) - lengths[start])
            fit = int(np.searchsorted(ends, end_s - beyond * kind.steps[0], side="right"))
            if not fit:
                return None
            full = fit == places and start + places < lengths.size
            if full and self._fits_rest(end_s, len(taken), start, reach):
                return tuple(taken)
            # If it is full: spread over all that are left, the long ones among these hold too much up. It takes one
            # fill of its slots, and the walk goes on.
            taken.append(fit)
            start += fit
            if start == lengths.size:
                return tuple(taken)
        return tuple(taken) if self._fits_rest(end_s, len(taken), start, reach) else None

    def _fits_rest(self, end_s: float, filled: int, start: int, reach: float) -> bool:
        """Whether the groups from `start` on, spread over the servers after the `filled` first ones, end by then."""
        left = self._turn[filled:]
        slots, base, each = self._slots[left], self._base[left], self._token_s[left]
        longest = min(self._limit, reach * float(self._work.lengths[start]))
        full = end_s / each
        # The base of a step, once for each of the longest answer's tokens; for the others what a token costs beyond it.
        held = (end_s - base * longest) / np.maximum(each - base / slots, 1e-300)
        room = np.where(full >= longest * slots, full, np.clip(held, 0.0, full)).sum()
        return float(self._before[-1] - self._before[start]) * self._work.n <= float(room)

    def place(self, taken: Sequence[int]) -> Int32[np.ndarray, " groups"]:
        """The server of each group."""
        done = sum(taken)
        instance = np.empty(self._work.lengths.size, np.int32)
        instance[:done] = np.repeat(self._turn[: len(taken)], taken)
        left = self._turn[len(taken) :]
        if done < instance.size:
            instance[done:] = left[assign_lpt(self._work.lengths[done:], self._token_s[left])]
        return instance

    def _places(self, server: Server, kind: _Kind, start: int) -> int:
        """Groups that begin at once: those that the slots and, in the mean, the KV cache hold."""
        n, places = self._work.n, min(kind.steps.size, self._work.lengths.size - start)
        block = self._work[slice(start, start + places)]
        if n * places * (block.lengths[0] / 2 + block.prompts.max()) <= server.kv_tokens:
            return places
        read = np.cumsum(block.lengths * (block.prompts + block.lengths / 2))
        held = n * np.arange(1, places + 1) * read / np.cumsum(block.lengths)
        over = held > server.kv_tokens
        return max(1, int(over.argmax())) if over.any() else places


def _kind(cost: TokenLatency, slots: int, work: Work) -> _Kind:
    running = np.minimum(np.arange(1, max(1, slots // work.n) + 1) * work.n, slots)
    base = cost.step_s(running, 0)
    reads = work.n * work.lengths * (work.prompts + work.lengths / 2)
    prefill = cost.prefill_s(work.prompts) - cost.prefill_s(0)
    return _Kind(np.diff(base, prepend=0.0), cost.kv_token_s * reads + prefill)
