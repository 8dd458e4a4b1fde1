"""Dispatch: which instance answers which prompt, in which order, with how many at once. Pure, NumPy only.

The parts: `plans` (servers, plans, the model that compares them), `balance` (longest first over many servers),
`paper_dispatch` (the paper's algorithm 2), `skewness` (the better one), `steal` (what an instance that runs dry takes).
This module has the two plain policies and what the others share, and gives all names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.paper_dispatch import equal_servers, plan_paper
from streamrl_jax.ranker.plans import (
    Plan,
    Server,
    checked_work,
    lines_of,
    lpt_of,
    plan_of,
    predicted_makespan,
    predicted_seconds,
)
from streamrl_jax.ranker.risk import USUAL, Spread
from streamrl_jax.ranker.skewness import plan_skewness
from streamrl_jax.ranker.steal import Line, Theft, steal, take_over

__all__ = [
    "Line",
    "Plan",
    "Server",
    "Theft",
    "equal_servers",
    "lines_of",
    "plan_answers",
    "plan_arrival",
    "plan_lpt",
    "plan_paper",
    "plan_skewness",
    "predicted_makespan",
    "predicted_seconds",
    "steal",
    "take_over",
]

_EVENS_OUT: Final = 64
"""Prompts an instance from which parting them is not tried."""

_WORTH: Final = 1.01
"""What parting has to gain."""


def plan_lpt(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
) -> Plan:
    """Longest processing time first: each group, the longest first, to the instance that would end it first if it
    ran full.

    Args:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        servers: At least one; they may differ.
        prompt_tokens: Of each group; None: 0.

    Returns:
        The plan; batches as large as slots and KV cache allow.

    Raises:
        UserError: A value is outside its range.
    """
    return lpt_of(checked_work(lengths, n, servers, prompt_tokens), servers)


def plan_arrival(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
) -> Plan:
    """First come, first served: the groups as they are given, to the instances in turn, as many to each as its share
    of the slots. The lengths serve the prediction alone.

    Args:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        servers: At least one.
        prompt_tokens: Of each group; None: 0.

    Returns:
        The plan; the batches are those that slots and KV cache allow.

    Raises:
        UserError: A value is outside its range.
    """
    work = checked_work(lengths, n, servers, prompt_tokens)
    shares = np.array([1.0 / server.slots for server in servers])
    instance = assign_lpt(np.ones(work.lengths.size), shares)
    return plan_of(instance, np.arange(work.lengths.size), work, servers)


def plan_answers(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"],
    spread: Spread = USUAL,
    limit: float | None = None,
) -> tuple[Plan, int]:
    """Plans as `plan_skewness`, with the n answers of a prompt on one instance or each for itself.

    Apart, each instance that gets one takes in the prompt again, and its cache holds it once more. Together, an
    instance gets n answers of one very long prompt at once, which may lengthen the longest line. With many prompts an
    instance that evens out.

    Args:
        lengths: Predicted tokens of an answer, of each prompt.
        n: Answers of each prompt.
        servers: At least one.
        prompt_tokens: Of each prompt.
        spread: As for `plan_skewness`.
        limit: As for `plan_skewness`.

    Returns:
        The plan, and how many answers its groups have: 1 where the plan of single answers, with all their prefills,
        ends earlier by more than a hundredth, else n.
    """
    together = plan_skewness(lengths, n, servers, prompt_tokens, spread, limit)
    if n == 1 or len(lengths) >= _EVENS_OUT * len(servers):
        return together, n
    apart = plan_skewness(np.repeat(lengths, n), 1, servers, np.repeat(prompt_tokens, n), spread, limit)
    return (together, n) if together.makespan_s <= _WORTH * apart.makespan_s else (apart, 1)
