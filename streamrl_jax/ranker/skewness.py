"""Skewness-aware dispatching without the paper's two classes. Pure, NumPy only.

Several plans are made: longest first over all instances; the paper's split; and shares that a walk from the longest
answer down finds (`walk`), with few or many instances set apart. Which one ends first depends on how much of a step is
paid whatever the batch, on the tail, and on how far lengths are known: an answer that begins late and turns out long
ends last of all. So all are compared by one model (`plans`), with lengths as predicted and as they may turn out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from streamrl_jax.ranker.paper_dispatch import equal_servers, paper_of
from streamrl_jax.ranker.plans import Plan, Server, Work, checked_work, longest_first, lpt_of, plan_of
from streamrl_jax.ranker.risk import USUAL, Spread, expected_makespans
from streamrl_jax.ranker.walk import Walk

_SATURATED: Final = 0.999
"""A batch with this share of the best throughput is as good as a larger one, and quicker for each answer."""

_MANY: Final = 100_000
"""Groups from which one walk is tried instead of a dozen: a second's work is then a plan or two."""

_REACHES: Final = (1.0, 0.0, 2.0)
"""Standard deviations by which an instance's longest answer may exceed its prediction."""

_DOUBT: Final = 0.02
"""The share that a plan must save over plain longest first while lengths are uncertain: the mean of a few draws errs by
about as much."""

_LINES: Final = 1_500
"""Servers times plans that are tried."""


def plan_skewness(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
    spread: Spread = USUAL,
    limit: float | None = None,
) -> Plan:
    """Gives long answers instances of their own as far as that ends the stage earlier.

    Of the plans that are tried the one that ends first by `risk.expected_makespans` is returned; while lengths are
    uncertain plain longest first is kept unless another saves more than 2 %. With known lengths the plan is
    thus never worse by the model than longest first nor, where the servers are equal, than the paper's split with
    D = ``lengths``; else by at most those 2 %. With even lengths it is balanced spreading with full batches.

    Args:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        servers: At least one; they may differ.
        prompt_tokens: Of each group; None: 0.
        spread: How lengths turn out, measured against their predictions.
        limit: Tokens at which answers are cut; None: those of the longest prediction.

    Returns:
        The plan; ``makespan_s`` is that of the lengths as predicted, ``saves`` allows for how they turn out.

    Raises:
        UserError: A value is outside its range.
    """
    given = checked_work(lengths, n, servers, prompt_tokens)
    order = longest_first(given.lengths)
    work = given[order]
    plans = [lpt_of(work, servers)]
    if work.lengths.size:
        if equal_servers(servers):
            plans.append(paper_of(work, servers, work.lengths)[0])
        reaches = np.exp(spread.deviation * np.array(_REACHES)) if spread.deviation else np.ones(1)
        walk = Walk(work, servers, limit or float(work.lengths[0]))
        plans += _walked(walk, work, servers, plans[0].makespan_s * float(reaches.max()), reaches.tolist())
    ends = expected_makespans(plans, work, servers, spread, limit)
    doubt = _DOUBT if spread.deviation else 0.0
    number = int(np.argmin(ends)) if ends.min() < (1 - doubt) * ends[0] else 0
    best, saves = plans[number], float(1 - ends[number] / ends[0]) if ends[0] else 0.0
    instance, rank = np.empty_like(best.instance), np.empty_like(best.rank)
    instance[order], rank[order] = best.instance, best.rank
    return replace(best, instance=instance, rank=rank, saves=saves)


def _walked(
    walk: Walk, work: Work, servers: Sequence[Server], bound_s: float, reaches: Sequence[float]
) -> Iterator[Plan]:
    """Plans by the walk for work in falling order."""
    order = np.arange(work.lengths.size)
    context = float((work.lengths / 2 + work.prompts).mean())
    least = {(server.cost, server.slots): saturating_batch(server, context) for server in servers}
    batches = [least[server.cost, server.slots] for server in servers]
    fewer = any(batch < server.slots for batch, server in zip(batches, servers, strict=True))
    seen: set[tuple[int, ...]] = set()
    for classes, reach in _settings(work, len(servers), reaches):
        taken = walk.least(bound_s, classes, reach)
        if taken is None or taken in seen:
            continue
        seen.add(taken)
        instance = walk.place(taken)
        yield plan_of(instance, order, work, servers)
        if fewer:
            yield plan_of(instance, order, work, servers, batches)


def _settings(work: Work, servers: int, reaches: Sequence[float]) -> list[tuple[int, float]]:
    """The classes and reaches to try: as many as a second's work allows."""
    if work.lengths.size >= _MANY:
        return [(servers, reaches[0])]
    fewer = [1 << power for power in range(servers.bit_length()) if 1 << power < servers]
    tries = [(servers, reach) for reach in reaches]
    tries += [(classes, reach) for classes in fewer for reach in reaches]
    return tries[: max(3, _LINES // servers)]


def saturating_batch(server: Server, context: float) -> int:
    """The smallest batch of which a larger one has next to no more tokens a second.

    Args:
        server: The instance.
        context: Mean tokens of an answer's context.
    """
    batch = np.arange(1, server.slots + 1)
    rate = batch / server.cost.ptl(batch, context)
    return int(batch[(rate >= _SATURATED * rate.max()).argmax()])
