"""Means and paired ratios over rounds, with the interval in which they lie with 95 % confidence.

Ways that are compared run in the same rounds, on the same draw of the work: what a round has of its own (its draw,
noise of the machine) meets all of them, and cancels in the ratio of two ways of one round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

CONFIDENCE: Final = 0.95
_POINTS: Final = 50_001
_FAR: Final = 200.0


@dataclass(frozen=True)
class Interval:
    """An estimate.

    Attributes:
        value: The estimate itself.
        low: Lower end; equal to ``value`` where all rounds agree.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Interval:
    """The geometric mean of the ratios of two ways that ran in the same rounds.

    The logarithms of the ratios are taken for draws of one normal distribution; the interval is Student's over the
    rounds, which unlike a bootstrap does not come out too narrow for a handful of them.

    Args:
        values: Of one way, a number above 0 for each round.
        base: Of the other, in the same order.

    Returns:
        ``values`` over ``base``.

    Raises:
        ValueError: Fewer than two rounds, or not as many of both.
    """
    logs = np.log(np.asarray(values, np.float64)) - np.log(np.asarray(base, np.float64))
    middle, half = _mean(logs)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def mean(values: Sequence[float]) -> Interval:
    """The arithmetic mean over rounds, with Student's interval.

    Raises:
        ValueError: Fewer than two rounds.
    """
    middle, half = _mean(np.asarray(values, np.float64))
    return Interval(middle, middle - half, middle + half)


@cache
def student(rounds: int, confidence: float = CONFIDENCE) -> float:
    """Half the width of Student's interval over ``rounds`` values, in standard errors.

    Args:
        rounds: How many values, at least two.
        confidence: Share of all experiments whose interval holds the truth.
    """
    freedom = rounds - 1
    # x = far * u^3 puts the points where the density is large; far out enough for the heaviest tail, of two rounds.
    x = _FAR * np.linspace(0.0, 1.0, _POINTS) ** 3
    log_norm = math.lgamma(rounds / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_norm - rounds / 2 * np.log1p(x * x / freedom))
    within = np.cumsum(np.diff(x) * (density[1:] + density[:-1]))  # by the trapezium rule, on both sides of 0
    return float(np.interp(confidence, within, x[1:]))


def _mean(values: np.ndarray) -> tuple[float, float]:
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"an interval needs at least two rounds, and there are {values.shape}")
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()), student(len(values)) * error
