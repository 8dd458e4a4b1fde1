"""Skewness-aware dispatching without the paper's two classes. Pure, NumPy only.

The paper cuts the prompts in two and runs each class's instances full to the end. Here the instances' shares follow
from the time T that all of them shall take, found by a binary search. Walking from the longest answer down, an instance
takes answers until, all begun at once, they end at T. For answers of lengths L_1 ≥ L_2 ≥ … ≥ L_m that takes, with
Δ_j = base(j) − base(j − 1) and base(0) = 0,

    Σ_j L_j · Δ_j + kv_token_s · Σ_j L_j (prompt_j + L_j / 2) + prefill,

since j of them run while the (j + 1)-th has ended and the j-th has not. The first answer pays the whole base of a step
for its length, each further one only what it adds: so long answers share an instance, with few beside them, and the
next instance takes more of the shorter ones: as many classes as the lengths ask for. The first instance whose slots (or
KV cache) are full before T is where the walk ends: it and those after it have time for more than one answer a slot,
none of them is held up by a single answer, and the rest is spread over them by longest processing time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float, Float64, Int, Int32

from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.cost import TokenLatency
from streamrl_jax.ranker.paper_dispatch import equal_servers, paper_of
from streamrl_jax.ranker.plans import (
    Plan,
    Server,
    Work,
    checked_work,
    full_token_s,
    longest_first,
    lpt_of,
    plan_of,
)

_HALVINGS: Final = 14
"""Of the interval of T: to a 16,000th of the plain plan's makespan."""

_SATURATED: Final = 0.999
"""A batch with this share of the best throughput is as good as a larger one, and quicker for each answer."""


def plan_skewness(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
    spread: float = 1.0,
) -> Plan:
    """Gives long answers instances of their own as far as that ends the stage earlier.

    Several plans are made, and the one that ends first by one model (`plans.predicted_makespan`) is returned, the
    first of equals: longest processing time first, the walk above, the same with smaller batches where larger ones
    bring no throughput, and, where the servers are equal, the paper's with D = ``lengths``. So it is never worse than
    these by that model, and with even lengths it is plain balanced spreading with full batches. Servers that differ
    are walked from the one whose single answer is quickest on.

    Args:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        servers: At least one; they may differ.
        prompt_tokens: Of each group; None: 0.
        spread: By how much the longest answer of an instance may exceed its prediction, as a factor from 1 up:
            an instance is left that much time for it.

    Returns:
        The plan.

    Raises:
        UserError: A value is outside its range.
        ValueError: ``spread`` is below 1.
    """
    if not spread >= 1:
        raise ValueError(f"spread = {spread} is below 1")
    given = checked_work(lengths, n, servers, prompt_tokens)
    order = longest_first(given.lengths)
    work = given[order]
    plans = [lpt_of(work, servers)]
    if work.lengths.size:
        if equal_servers(servers):
            plans.append(paper_of(work, servers, work.lengths)[0])
        plans += _walked(work, servers, plans[0].makespan_s, spread)
    best = min(plans, key=lambda plan: plan.makespan_s)
    instance, rank = np.empty_like(best.instance), np.empty_like(best.rank)
    instance[order], rank[order] = best.instance, best.rank
    return replace(best, instance=instance, rank=rank)


def _walked(work: Work, servers: Sequence[Server], bound_s: float, spread: float) -> list[Plan]:
    """The walk's plans for work in falling order; none if it finds nothing below `bound_s`."""
    walk = _Walk(work, servers, spread)
    low, high, best = 0.0, bound_s * spread, None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        taken = walk.takes(middle)
        low, high = (middle, high) if taken is None else (low, middle)
        best = best if taken is None else taken
    if best is None:
        return []
    instance, order = walk.place(best), np.arange(work.lengths.size)
    plans = [plan_of(instance, order, work, servers)]
    context = float((work.lengths / 2 + work.prompts).mean())
    least = {server.cost: saturating_batch(server, context) for server in servers}
    batches = [min(least[server.cost], server.slots) for server in servers]
    if any(batch < server.slots for batch, server in zip(batches, servers, strict=True)):
        plans.append(plan_of(instance, order, work, servers, batches))
    return plans


def saturating_batch(server: Server, context: float) -> int:
    """The smallest batch of which a larger one has next to no more tokens a second.

    Args:
        server: The instance.
        context: Mean tokens of an answer's context.
    """
    batch = np.arange(1, server.slots + 1)
    rate = batch / server.cost.ptl(batch, context)
    return int(batch[(rate >= _SATURATED * rate.max()).argmax()])


@dataclass(frozen=True, eq=False)
class _Kind:
    """Servers of one make."""

    steps: Float64[
        np.ndarray, " places"
    ]  # seconds that the j-th group adds for each token of its answers' lengths
    fixed: Float64[
        np.ndarray, " groups"
    ]  # seconds of each group whatever runs beside it: contexts and prefill


class _Walk:
    """Fills servers from the longest group down (see above).

    Args:
        work: The longest group first.
        servers: At least one.
        spread: As in `plan_skewness`.
    """

    def __init__(self, work: Work, servers: Sequence[Server], spread: float) -> None:
        self._work, self._servers, self._spread = work, servers, spread
        single = {server.cost: float(server.cost.ptl(1, 0)) for server in servers}
        self._turn = sorted(range(len(servers)), key=lambda index: single[servers[index].cost])
        kinds = {(server.cost, server.slots) for server in servers}
        self._kinds = {(cost, slots): _kind(cost, slots, work) for cost, slots in kinds}
        self._token_s = full_token_s(work, servers)

    def takes(self, end_s: float) -> list[int] | None:
        """How many groups each server in turn takes until the walk ends; None: they do not end by `end_s`."""
        lengths = self._work.lengths
        taken: list[int] = []
        start = 0
        for index in self._turn:
            if start == lengths.size:
                return taken
            server = self._servers[index]
            kind = self._kinds[server.cost, server.slots]
            places = self._places(server, kind, start)
            block = slice(start, start + places)
            steps = kind.steps[:places]
            ends = np.cumsum(lengths[block] * steps + kind.fixed[block])
            late = (self._spread - 1) * lengths[start] * steps[0]
            fit = int(np.searchsorted(ends, end_s - late, side="right"))
            if not fit:
                return None
            if fit == places and start + places < lengths.size:
                break
            taken.append(fit)
            start += fit
        left = self._turn[len(taken) :]
        need = float(lengths[start:].sum()) * self._work.n
        return taken if need <= end_s * float((1 / self._token_s[left]).sum()) else None

    def place(self, taken: Sequence[int]) -> Int32[np.ndarray, " groups"]:
        """The server of each group."""
        done = sum(taken)
        instance = np.empty(self._work.lengths.size, np.int32)
        instance[:done] = np.repeat(self._turn[: len(taken)], taken)
        left = np.asarray(self._turn[len(taken) :], np.int32)
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
