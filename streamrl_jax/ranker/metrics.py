"""How well predicted lengths order prompts: recall of the longest, Kendall's tau-b, and what can be known at all.

Part of a length is chance. The *ceiling* is what a second, independent sampling of the same prompts reaches as the
predictor, by the same rule: no reading of the prompt is asked to do better. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Float64, Int64

_ROWS_AT_ONCE: Final = 512  # of the pairs' matrix of Kendall's tau

Measure = Callable[[Int64[np.ndarray, " drawn"]], float]
"""A measure of the prompts with these indices; the same index may come several times."""


@dataclass(frozen=True)
class Interval:
    """A measure with its bootstrap interval over prompts.

    Attributes:
        value: On the prompts as they are.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def recall_at(
    share: float, predicted: Float[np.ndarray, " prompts"], observed: Float[np.ndarray, " prompts"]
) -> float:
    """Which part of the longest prompts is among those that were predicted longest.

    With k = max(1, round(share * prompts)): of the k prompts of largest `observed`, the part that is among the k of
    largest `predicted`. Ties follow one rule that knows no order of the prompts. Observed: where several are tied for
    the last of the k places (answers cut at the limit often are), any of them counts, up to the number of those
    places. Predicted: of tied ones those that get the places that are left are drawn by chance, and the mean over such
    draws is taken, exactly. So `recall_at(share, x, x)` is 1, and a constant prediction gets what chance gets.

    Args:
        share: 0 to 1.
        predicted: Any numbers that grow with the length that is expected.
        observed: Lengths.

    Returns:
        0 to 1.

    Raises:
        ValueError: There is no prompt, the shapes differ, or a number is NaN.
    """
    _check(predicted, observed)
    places = max(1, round(share * len(observed)))
    certain, tied, left = _longest(observed, places)
    chosen, shared, room = _longest(predicted, places)
    weight = chosen + shared * (room / max(int(shared.sum()), 1))
    sure, marked = int(chosen[tied].sum()), int(shared[tied].sum())
    hits = float(weight[certain].sum()) + min(sure, left)
    return (hits + _mean_drawn(int(shared.sum()), marked, room, max(left - sure, 0))) / places


def kendall_tau(predicted: Float[np.ndarray, " prompts"], observed: Float[np.ndarray, " prompts"]) -> float:
    """Kendall's tau-b (Kendall 1945): concordant less discordant pairs, corrected for ties.

    (C - D) / sqrt((P - T_p)(P - T_o)), with P pairs in all and T_p, T_o of them tied in either. Quadratic in the number
    of prompts: a second for 20,000.

    Args:
        predicted: As for `recall_at`.
        observed: Lengths.

    Returns:
        -1 to 1; 0 where either is constant.

    Raises:
        ValueError: There is no prompt, the shapes differ, or a number is NaN.
    """
    _check(predicted, observed)
    agreement, untied = 0.0, np.zeros(2)
    for start in range(0, len(observed), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        signs = [np.sign(x[rows, None] - x[None, :]).astype(np.float32) for x in (predicted, observed)]
        agreement += float(np.vdot(signs[0], signs[1]))
        untied += [float(np.count_nonzero(sign)) for sign in signs]
    return agreement / float(np.sqrt(untied.prod())) if untied.all() else 0.0


def recall_of_answers(
    share: float, predicted: Float[np.ndarray, " prompts"], lengths: Float[np.ndarray, "prompts answers"]
) -> float:
    """`recall_at` of single answers: each answer's number in turn is the observed length, and the mean is taken.

    Args:
        share: 0 to 1.
        predicted: One number a prompt.
        lengths: The answers observed, as many for each prompt.
    """
    return float(np.mean([recall_at(share, predicted, column) for column in lengths.T]))


def ceiling(
    measure: Callable[[Float[np.ndarray, " prompts"], Float[np.ndarray, " prompts"]], float],
    first: Float[np.ndarray, "prompts answers"],
    second: Float[np.ndarray, "prompts others"],
    *,
    of_means: bool,
) -> float:
    """What one sampling says of another, averaged over both directions (and over all pairs of single answers).

    Args:
        measure: Takes predicted and observed numbers, as `recall_at` with its share and `kendall_tau` do.
        first: Lengths of one sampling.
        second: Of another one of the same prompts, independent of the first.
        of_means: Compare the prompts' means; else every answer of the first with every one of the second.
    """
    one = [first.mean(axis=1)] if of_means else list(first.T)
    other = [second.mean(axis=1)] if of_means else list(second.T)
    return float(np.mean([(measure(a, b) + measure(b, a)) / 2 for a in one for b in other]))


def bootstrap(
    measure: Measure, prompts: int, *, seed: int, draws: int = 500, level: float = 0.95
) -> Interval:
    """The percentile interval of a measure over prompts drawn with replacement.

    A ratio of two measures of the same prompts is to be one `measure`: then both see the same draws, and what they
    have in common cancels.

    Args:
        measure: Of the prompts with the given indices.
        prompts: How many there are.
        seed: Of the draws.
        draws: How many.
        level: Share of the draws within the interval.
    """
    rng = np.random.default_rng(seed)
    found = [measure(rng.integers(0, prompts, prompts)) for _ in range(draws)]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(measure(np.arange(prompts)), float(low), float(high))


def concordance(
    predicted: Float[np.ndarray, " prompts"],
    lengths: Sequence[Sequence[int]],
    cut: Sequence[Sequence[bool]],
) -> float:
    """Harrell's C: of the pairs of answers to different prompts whose order is known, the share in predicted order.

    An answer is known to be longer than one that ended by itself at fewer tokens, or at as many where it was cut
    itself. Of two answers neither order is known where the shorter one was cut. Equal predictions count one half.

    Args:
        predicted: One number a prompt.
        lengths: The answers to each.
        cut: Which of them the limit ended.

    Returns:
        0 to 1; 0.5 where no order is known.
    """
    prompt = np.repeat(np.arange(len(lengths)), [len(row) for row in lengths])
    tokens = np.array([value for row in lengths for value in row], np.float64)
    ended = ~np.array([value for row in cut for value in row], bool)
    right = known = 0.0
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        longer = (tokens[rows, None] > tokens) | ((tokens[rows, None] == tokens) & ~ended[rows, None])
        longer &= ended & (prompt[rows, None] != prompt)
        gap = predicted[prompt[rows], None] - predicted[prompt]
        right += float(np.count_nonzero(longer & (gap > 0))) + 0.5 * float(
            np.count_nonzero(longer & (gap == 0))
        )
        known += float(np.count_nonzero(longer))
    return right / known if known else 0.5


def _longest(values: Float[np.ndarray, " prompts"], places: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Who has one of the places for certain, who is tied for the last of them, and how many those are."""
    last: Float64[np.ndarray, ""] = np.partition(values, len(values) - places)[len(values) - places]
    certain = values > last
    return certain, values == last, places - int(certain.sum())


def _mean_drawn(total: int, marked: int, drawn: int, bound: int) -> float:
    """The mean of min(marked ones drawn, bound) where `drawn` of `total` are drawn, and `marked` of those are marked.

    The number of marked ones is hypergeometric; its chances follow from the ratios of neighbouring ones.
    """
    low, high = max(0, drawn + marked - total), min(drawn, marked)
    if high <= bound:
        return marked * drawn / total
    count = np.arange(low, high, dtype=np.float64)
    ratios = (marked - count) * (drawn - count) / ((count + 1) * (total - marked - drawn + count + 1))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    chances = np.exp(logs - logs.max())
    return float((chances * np.minimum(np.arange(low, high + 1), bound)).sum() / chances.sum())


def _check(predicted: np.ndarray, observed: np.ndarray) -> None:
    if predicted.shape != observed.shape or predicted.ndim != 1 or not len(observed):
        raise ValueError(
            f"predicted {predicted.shape} and observed {observed.shape}: one of each a prompt is needed"
        )
    for name, values in (("predicted", predicted), ("observed", observed)):
        if np.isnan(values).any():
            raise ValueError(f"{name}: {int(np.isnan(values).sum())} of {len(values)} numbers are NaN")
