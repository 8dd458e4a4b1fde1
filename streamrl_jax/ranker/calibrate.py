"""From scores to expected tokens: isotonic regression against observed lengths. NumPy only.

A ranking loss says nothing about the size of a score; what the dispatcher plans with are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Float32, Float64

from streamrl_jax.errors import UserError

_LONGEST: Final = np.iinfo(np.int32).max
_ORDER: Final = 1e-3
"""Share of the range of lengths that keeps the scores' order where the regression is flat (10 tokens of 10,000)."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """A function from scores to tokens that never falls.

    It grows strictly where it has two knots of different tokens. With one knot it is constant: on the prompts that it
    was fitted to, a higher score told no longer answer, so that scores order nothing either.

    Invariant: the knots' scores grow strictly and their tokens never fall, both finite, so a higher score never
    gives fewer tokens; what comes out lies within the tokens of the first and the last knot.

    Attributes:
        scores: The knots, at least one.
        tokens: Expected tokens at each of them.
    """

    scores: Float64[np.ndarray, " knots"]
    tokens: Float64[np.ndarray, " knots"]

    def __post_init__(self) -> None:
        """Checks the invariant.

        Raises:
            ValueError: It does not hold.
        """
        finite = np.isfinite(self.scores).all() and np.isfinite(self.tokens).all()
        grows = (np.diff(self.scores) > 0).all() and (np.diff(self.tokens) >= 0).all()
        if self.scores.shape != self.tokens.shape or not len(self.scores) or not finite or not grows:
            raise ValueError(
                f"calibration of {len(self.scores)} scores and {len(self.tokens)} lengths: finite numbers are needed, "
                "scores growing, lengths not falling"
            )

    def lengths(self, scores: Float[np.ndarray, " prompts"]) -> Float32[np.ndarray, " prompts"]:
        """Expected tokens of an answer.

        Linear between the knots; a thousandth part of their range is the score's own place, so that prompts keep their
        order where the regression is flat and beyond its ends. Where it is flat from end to end there is no such range,
        and all prompts get the same.

        Args:
            scores: From the ranker that this was fitted for.
        """
        low, high = self.tokens[0], self.tokens[-1]
        middle = (self.scores[0] + self.scores[-1]) / 2
        spread = max((self.scores[-1] - self.scores[0]) / 2, 1e-9)
        exact = np.asarray(scores, np.float64)
        place = 0.5 + np.arctan((exact - middle) / spread) / np.pi
        expected = np.interp(exact, self.scores, self.tokens)
        return ((1 - _ORDER) * expected + _ORDER * (low + place * (high - low))).astype(np.float32)

    def to_json(self) -> dict[str, list[float]]:
        """What `from_json` takes."""
        return {"scores": self.scores.tolist(), "tokens": self.tokens.tolist()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], where: str) -> Calibration:
        """Reads one back.

        Args:
            fields: From `to_json`.
            where: What to call the source in an error.

        Raises:
            UserError: A field is missing or wrong.
        """
        try:
            scores, tokens = (np.asarray(fields[name], np.float64) for name in ("scores", "tokens"))
            if scores.ndim != 1 or not ((tokens >= 1) & (tokens <= _LONGEST)).all():
                raise ValueError(f"two lists are needed, the lengths from 1 to {_LONGEST} tokens")
            return cls(scores, tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: field 'calibration' is damaged ({error}); fit the ranker again"
            ) from error


def calibrate(
    scores: Float[np.ndarray, " prompts"],
    lengths: Float[np.ndarray, " prompts"],
    weights: Float[np.ndarray, " prompts"] | None = None,
) -> Calibration:
    """Fits expected tokens as a never falling function of the score, by least squares.

    Isotonic regression by pooling adjacent violators (Ayer et al. 1955); a knot is the mean score and the mean length
    of each pool. Fit it on prompts that the ranker was not trained on: on the others it is too sure of itself.

    Args:
        scores: Of the ranker.
        lengths: Mean tokens of the answers observed. Cut ones count as what they are, so the result is what an answer
            takes under that limit, and never more than it.
        weights: Answers observed of each prompt; None: equal.

    Raises:
        ValueError: There is no prompt, or a number is not finite.
    """
    if not len(scores) or not np.isfinite(scores).all() or not np.isfinite(lengths).all():
        raise ValueError(
            f"calibrating needs finite scores and lengths of prompts, found {len(scores)} prompts"
        )
    weights = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
    # Prompts of one score are one point, or the order among them would matter.
    points, place = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    mass = np.bincount(place, weights)
    means = np.bincount(place, weights * lengths) / mass
    pools = isotonic(means, mass)
    starts = np.flatnonzero(np.diff(pools, prepend=-np.inf))
    pooled = np.add.reduceat(mass, starts)
    return Calibration(np.add.reduceat(points * mass, starts) / pooled, pools[starts])


def isotonic(
    values: Float[np.ndarray, " points"], weights: Float[np.ndarray, " points"]
) -> Float64[np.ndarray, " points"]:
    """The never falling sequence of least weighted squared distance (pool adjacent violators).

    Args:
        values: In the order along which the result must not fall.
        weights: Above 0.
    """
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, count = value, weight, 1
        while means and means[-1] >= mean:
            earlier = masses.pop()
            mean = (means.pop() * earlier + mean * mass) / (earlier + mass)
            mass, count = earlier + mass, count + counts.pop()
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    return np.repeat(np.array(means, np.float64), counts)
