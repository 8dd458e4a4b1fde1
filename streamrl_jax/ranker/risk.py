"""What plans come to when lengths turn out otherwise than predicted. Pure, NumPy only, deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Float64, Int

from streamrl_jax.ranker.plans import Plan, Server, Work, line_seconds, lines_of


@dataclass(frozen=True, eq=False)
class Spread:
    """How lengths turn out, measured against their predictions.

    Attributes:
        deviation: Standard deviation of log(length / prediction); 0: the lengths are known.
        seen: Such logarithms as were observed, in any order; none: normal ones of that deviation, whose mean length is
            the prediction. Observed ones have heavier tails: an answer in a thousand runs on for many times its
            prediction, and such answers decide when a stage ends.
    """

    deviation: float
    seen: Float64[np.ndarray, " answers"] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.deviation >= 0:
            raise ValueError(f"deviation = {self.deviation} is below 0")

    @classmethod
    def of(cls, seen: Float64[np.ndarray, " answers"]) -> Spread:
        """As observed; one logarithm at least."""
        return cls(float(seen.std()), seen)

    def draws(
        self, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> Float64[np.ndarray, "draws groups n"]:
        """Logarithms of length / prediction that correlate by half within a group: a prediction's error is the
        prompt's, chance each answer's own.

        Args:
            rng: Where they come from.
            shape: Draws, groups, answers of each.
        """
        of_group = (*shape[:2], 1)
        if self.seen.size:
            shared, own = rng.choice(self.seen, of_group), rng.choice(self.seen, shape)
            return np.where(rng.random(shape) < math.sqrt(0.5), shared, own)
        normal = (rng.standard_normal(of_group) + rng.standard_normal(shape)) / math.sqrt(2)
        return self.deviation * normal - self.deviation**2 / 2


KNOWN: Final = Spread(0.0)
"""Lengths are as predicted."""

USUAL: Final = Spread(0.3)
"""What a plan allows for if nothing better is known: answers of one model to one prompt differ by about as much."""

_DRAWS: Final = 8

_LINES: Final = 2_000
"""Servers times draws beyond which there are fewer draws, two at least."""

_MOST: Final = 200_000
"""Answers beyond which the lengths are taken as predicted: with so many a line, single ones matter little, and drawing
them would take longer than the plan."""


def expected_makespans(
    plans: Sequence[Plan], work: Work, servers: Sequence[Server], spread: Spread, limit: float | None = None
) -> Float64[np.ndarray, " plans"]:
    """The mean end of each plan over draws of the lengths, the same draws for all.

    The order of a line stays that of the predictions.

    Args:
        plans: Of this work.
        work: With the predictions.
        servers: As the plans count them.
        spread: How lengths turn out.
        limit: Tokens at which answers are cut; None: those of the longest prediction. Without any, a single draw far
            beyond all others would end every plan alike.

    Returns:
        Seconds.
    """
    answers = work.lengths.size * work.n
    if not spread.deviation or not answers or answers > _MOST:
        return np.array([plan.makespan_s for plan in plans])
    rng, count = np.random.default_rng(0), max(2, min(_DRAWS, _LINES // len(servers)))
    turned = work.lengths[:, None] * np.exp(spread.draws(rng, (count, work.lengths.size, work.n)))
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
