"""The paper's skewness-aware dispatching (arXiv 2504.15930, algorithm 2), as it stands. Pure, NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float, Int32, Int64

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.plans import Plan, Server, Work, checked_work, longest_first, plan_of

ALPHA: Final = 0.2
"""The share of the prompts that counts as long-tailed, in the paper."""


def plan_paper(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    recent: Sequence[float] | Float[np.ndarray, " answers"],
    alpha: float = ALPHA,
) -> Plan:
    """Splits the instances between the long-tailed and the regular prompts.

    Prompts are sorted by predicted length; the first ``alpha`` of them are long-tailed. With D the recent distribution
    of lengths, L_long = P90(D) and L_regular = P50(D). For each split N_long + N_regular = N, both at least 1, a class
    of M answers an instance takes

        PTL(BS) · L · ⌈M / BS⌉,   BS = min(slots, KV tokens / L, M),

    and the split with the least maximum over the classes wins.

    What the paper leaves open, and what is done here:

    - How a class is spread over its instances: longest first, each prompt to the instance that would end it first; in
      the estimate M is the class's answers over its instances, rounded up.
    - The class's size: ⌈alpha · prompts⌉.
    - Ties: the fewest long-tailed instances.
    - PTL's context: L / 2, what an answer meets on average; the prompt's tokens do not count. A batch that is not
      full runs as it is (BS ≤ M): from this the long-tailed instances' smaller batches come.
    - No split: a class without instances cannot be answered, so N_long = 0 is no choice. One instance, or one class
      without prompts: all is one class, with L_long, in which everything is spread alike.
    - Each instance is bounded to its class's BS before it is cut to M.

    Args:
        lengths: Predicted tokens of an answer, of each prompt.
        n: Answers of each prompt.
        servers: All equal but for their names.
        recent: D, lengths of answers, not empty.
        alpha: The share of long-tailed prompts, from 0 to 1.

    Returns:
        The plan; its ``makespan_s`` is the estimate above.

    Raises:
        UserError: The servers are not equal, ``recent`` is empty, or a value is outside its range.
    """
    work = checked_work(lengths, n, servers)
    checked_work(recent, 1, servers)
    if not 0 <= alpha <= 1:
        raise UserError(f"dispatch.alpha = {alpha}: the share of long-tailed prompts lies from 0 to 1")
    if not np.size(recent):
        raise UserError("dispatch: the paper's policy needs recent lengths, and there are none")
    if not equal_servers(servers):
        raise UserError(
            "dispatch.policy = 'paper': its model knows equal instances only, and these differ in slots, KV tokens or "
            "cost; take policy = 'skewness'"
        )
    plan, estimate = paper_of(work, servers, np.asarray(recent, np.float64), alpha)
    return replace(plan, makespan_s=estimate)


def paper_of(
    work: Work, servers: Sequence[Server], recent: Float[np.ndarray, " answers"], alpha: float = ALPHA
) -> tuple[Plan, float]:
    """The plan that `plan_paper` makes of checked work, predicted as all others are (`plans`), and the paper's own
    estimate of it."""
    order = longest_first(work.lengths)
    n, long = work.n, math.ceil(alpha * order.size)
    tokens = (float(np.quantile(recent, 0.9)), float(np.quantile(recent, 0.5)))
    split, estimate = best_split(servers[0], len(servers), (long * n, (order.size - long) * n), tokens)
    instance = np.empty(order.size, np.int32)
    if split:
        instance[order[:long]] = _spread(work.lengths[order[:long]], split)
        instance[order[long:]] = split + _spread(work.lengths[order[long:]], len(servers) - split)
    else:
        instance[order] = _spread(work.lengths[order], len(servers))
    bounds = [class_batch(servers[0], length) for length in tokens]
    batches = [bounds[0] if index < split or not split else bounds[1] for index in range(len(servers))]
    return plan_of(instance, order, work, servers, batches), estimate


def equal_servers(servers: Sequence[Server]) -> bool:
    """Whether they differ in name alone."""
    return len({(server.slots, server.kv_tokens, server.cost) for server in servers}) <= 1


def class_batch(server: Server, length: float) -> int:
    """BS of a class before it is cut to M: answers of `length` tokens that slots and KV cache hold."""
    return max(1, min(server.slots, int(server.kv_tokens // length)))


def best_split(
    server: Server, instances: int, answers: tuple[int, int], tokens: tuple[float, float]
) -> tuple[int, float]:
    """Enumerates the splits.

    Args:
        server: Each of the instances.
        instances: N.
        answers: Of the long-tailed and of the regular class.
        tokens: L_long and L_regular.

    Returns:
        N_long, 0 for no split, and the estimate in seconds.
    """
    if not sum(answers):
        return 0, 0.0
    if instances == 1 or not all(answers):
        whole = class_latency(server, np.array([-(-sum(answers) // instances)]), tokens[0])
        return 0, float(whole[0])
    long = np.arange(1, instances)
    latency = np.maximum(
        class_latency(server, -(-answers[0] // long), tokens[0]),
        class_latency(server, -(-answers[1] // (instances - long)), tokens[1]),
    )
    best = int(latency.argmin())
    return int(long[best]), float(latency[best])


def class_latency(
    server: Server, answers: Int64[np.ndarray, " splits"], length: float
) -> Float[np.ndarray, " splits"]:
    """PTL(BS) · L · ⌈M / BS⌉ for M `answers` an instance."""
    batch = np.minimum(class_batch(server, length), answers)
    return server.cost.ptl(batch, length / 2) * length * -(-answers // batch)


def _spread(falling: Float[np.ndarray, " groups"], servers: int) -> Int32[np.ndarray, " groups"]:
    return assign_lpt(falling, np.ones(servers))
