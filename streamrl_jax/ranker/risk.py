"""What plans come to when lengths turn out otherwise than predicted. Pure, NumPy only, deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int

from streamrl_jax.ranker.plans import Plan, Server, Work, line_seconds, lines_of

NOISE: Final = 0.3
"""Standard deviation of log(length / prediction) that a plan allows for if nothing better is known: answers of one
model to one prompt differ by about as much."""

_DRAWS: Final = 8

_LINES: Final = 2_000
"""Servers times draws beyond which there are fewer draws, two at least."""

_MOST: Final = 200_000
"""Answers beyond which the lengths are taken as predicted: with so many a line, single ones matter little, and drawing
them would take longer than the plan."""


def expected_makespans(
    plans: Sequence[Plan], work: Work, servers: Sequence[Server], noise: float, limit: float | None = None
) -> Float64[np.ndarray, " plans"]:
    """The mean end of each plan over draws of the lengths, the same draws for all.

    A length is its prediction times exp(noise · z − noise² / 2) with z standard normal: half of the variance is the
    prompt's, as a prediction's error is, half each answer's own. The order of a line stays that of the predictions.

    Args:
        plans: Of this work.
        work: With the predictions.
        servers: As the plans count them.
        noise: 0: the lengths are as predicted.
        limit: Tokens at which answers are cut; None: those of the longest prediction. Without any, a single draw far
            beyond all others would end every plan alike.

    Returns:
        Seconds.
    """
    answers = work.lengths.size * work.n
    if not noise or not answers or answers > _MOST:
        return np.array([plan.makespan_s for plan in plans])
    rng, count = np.random.default_rng(0), max(2, min(_DRAWS, _LINES // len(servers)))
    shared = rng.standard_normal((count, work.lengths.size, 1))
    draws = (shared + rng.standard_normal((count, work.lengths.size, work.n))) / np.sqrt(2)
    turned = work.lengths[:, None] * np.exp(noise * draws - noise**2 / 2)
    turned = np.minimum(turned, limit or work.lengths.max())
    ends = np.zeros(len(plans))
    for number, plan in enumerate(plans):
        lines = lines_of(plan)
        for lengths in turned:
            ends[number] += max(
                line_seconds(server.cost, int(batch), _one_by_one(work, lengths, line))
                for server, batch, line in zip(servers, plan.batch, lines, strict=True)
            )
    return ends / count


def _one_by_one(work: Work, lengths: Float64[np.ndarray, "groups n"], line: Int[np.ndarray, " line"]) -> Work:
    """The answers of a line as groups of one, each with its prompt, for every plan alike."""
    return Work(lengths[line].reshape(-1), 1, np.repeat(work.prompts[line], work.n))
