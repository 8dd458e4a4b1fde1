"""Fits a `TokenLatency` to measured steps. NumPy only.

Least squares on the relative residuals, model / measured - 1, with no coefficient below 0: so the result is monotone
whatever was measured. The unknowns are few (a start, a slope for each of at most `MOST_SEGMENTS` segments, the price of
a token of context), and each point enters as the median of its repeats, which an outlier does not move; or as a lower
quantile, where other work on the machine adds to many of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
from jaxtyping import Float

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import FLAT, MEDIAN, HeldOut, PrefillPoint, Ramp, StepPoint, TokenLatency

K = TypeVar("K")

MOST_SEGMENTS: Final = 6
"""Of the time by the batch. `least_squares_from_zero_up` tries all subsets of the unknowns."""


def fit(
    points: Sequence[StepPoint], prefill: Sequence[PrefillPoint] = (), quantile: float = MEDIAN
) -> TokenLatency:
    """Fits the model to measurements.

    Args:
        points: Of decode steps, in any order, repeats among them. Two batches at least, and one of them with two
            different contexts.
        prefill: Of taking in prompts, of two lengths at least; none: prefill costs nothing.
        quantile: Of the repeats of a point, for which it stands.

    Returns:
        The model. Below the smallest batch measured a step costs as much as there, beyond the largest the last slope
        goes on; prefill likewise.

    Raises:
        UserError: The points do not determine it; says which are missing. Or one of them is no measurement.
    """
    _check_measured(points, prefill)
    steps = merged((((point.batch, point.kv_tokens), point.seconds) for point in points), quantile)
    batches = sorted({batch for batch, _ in steps})
    _check_determined(batches, steps)
    batch, kv_token_s = _fit_ramp(
        np.array([batch for batch, _ in steps], np.float64),
        np.array(list(steps.values())),
        np.array([kv_tokens for _, kv_tokens in steps]),
    )
    if batch.knots[0] > 1:
        batch = Ramp(batch.start, (1.0, *batch.knots), (0.0, *batch.slopes))
    return TokenLatency(batch, kv_token_s, _fit_prefill(prefill, quantile))


def held_out_error(cost: TokenLatency, points: Sequence[StepPoint], quantile: float = MEDIAN) -> HeldOut:
    """How far the model is off on points that it was not fitted to.

    Args:
        cost: The model.
        points: Measured.
        quantile: Of the repeats of a point, for which it stands.

    Raises:
        UserError: There are none.
    """
    if not points:
        raise UserError("no point is held out; hold out a larger share of the points")
    steps = merged((((point.batch, point.kv_tokens), point.seconds) for point in points), quantile)
    predicted = cost.step_s(
        np.array([batch for batch, _ in steps]), np.array([tokens for _, tokens in steps])
    )
    errors = np.abs(predicted / np.array(list(steps.values())) - 1)
    return HeldOut(len(errors), float(np.median(errors)), float(errors.max()))


def merged(measured: Iterable[tuple[K, float]], quantile: float) -> dict[K, float]:
    """A quantile of the repeats of each point, in the order of the points."""
    repeats: defaultdict[K, list[float]] = defaultdict(list)
    for point, seconds in measured:
        repeats[point].append(seconds)
    return {point: float(np.quantile(seconds, quantile)) for point, seconds in repeats.items()}


def _check_measured(points: Sequence[StepPoint], prefill: Sequence[PrefillPoint]) -> None:
    for point in (*points, *prefill):
        if not 0 < point.seconds < math.inf:
            raise UserError(f"{point}: seconds = {point.seconds} is no measured time; leave the point out")
    for point in points:
        if point.batch < 1 or not 0 <= point.kv_tokens < math.inf:
            raise UserError(
                f"{point}: a step has 1 sequence at least, and a finite number of tokens; leave the point out"
            )
    for point in prefill:
        if point.tokens < 1:
            raise UserError(f"{point}: a prompt has 1 token at least; leave the point out")


def _check_determined(batches: Sequence[int], steps: Mapping[tuple[int, float], float]) -> None:
    if len(batches) < 2:
        raise UserError(
            f"steps were measured with {f'batch {batches[0]} only' if batches else 'no batch at all'}: what a step "
            f"costs by its batch takes two different batches at least; measure a larger one too"
        )
    contexts = {batch: {tokens for other, tokens in steps if other == batch} for batch in batches}
    if all(len(found) < 2 for found in contexts.values()):
        shown = ", ".join(f"{batch}: {min(found):g}" for batch, found in contexts.items())
        raise UserError(
            f"each batch was measured with one number of context tokens only ({shown}): what a token of context "
            f"costs takes two for one of the batches; measure batch {batches[-1]} with another context too"
        )


def _fit_prefill(points: Sequence[PrefillPoint], quantile: float) -> Ramp:
    if not points:
        return FLAT.prefill
    steps = merged(((point.tokens, point.seconds) for point in points), quantile)
    if len(steps) < 2:
        raise UserError(
            f"prefill was measured with prompts of {next(iter(steps))} tokens only: two lengths at least are needed; "
            f"measure longer prompts too"
        )
    return _fit_ramp(np.array(list(steps), np.float64), np.array(list(steps.values())))[0]


def _fit_ramp(
    x: Float[np.ndarray, " points"],
    seconds: Float[np.ndarray, " points"],
    beside: Float[np.ndarray, " points"] | None = None,
) -> tuple[Ramp, float]:
    """A ramp over ``x``, and the price of what is beside it, 0 where there is nothing."""
    knots = _knots(np.unique(x))
    ends = np.append(knots[1:], np.inf)
    columns = [
        np.ones_like(x),
        *(np.clip(x - low, 0, high - low) for low, high in zip(knots, ends, strict=True)),
    ]
    if beside is not None:
        columns.append(beside)
    features = np.stack(columns, 1) / seconds[:, None]
    found = least_squares_from_zero_up(features, np.ones_like(seconds)).tolist()
    slopes = found[1 : 1 + len(knots)]
    return Ramp(found[0], tuple(knots.tolist()), tuple(slopes)), found[-1] if beside is not None else 0.0


def _knots(distinct: Float[np.ndarray, " values"]) -> Float[np.ndarray, " knots"]:
    """Where the slope may change: at measured values, spread evenly over them, the largest excepted."""
    inner = distinct[:-1]
    chosen = np.unique(np.linspace(0, len(inner) - 1, MOST_SEGMENTS).round().astype(int))
    return inner[chosen]


def least_squares_from_zero_up(
    features: Float[np.ndarray, "rows unknowns"], target: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " unknowns"]:
    """The least squares solution among those with no number below 0.

    The best one is the unconstrained solution over the unknowns that it does not set to 0; so all subsets are tried,
    which for a handful of unknowns is exact and quick.

    Args:
        features: Of few unknowns: the work doubles with each.
        target: What their sum, weighted with the solution, is to reach.
    """
    unknowns = features.shape[1]
    scale = np.maximum(np.linalg.norm(features, axis=0), np.finfo(np.float64).tiny)
    scaled = features / scale
    best, least = np.zeros(unknowns), float(target @ target)
    for size in range(1, unknowns + 1):
        for subset in itertools.combinations(range(unknowns), size):
            part = scaled[:, subset]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((part @ solution - target) ** 2))
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(unknowns), error
                best[list(subset)] = solution
    return best / scale
