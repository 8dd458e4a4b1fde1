"""A ranker and what it is compared with, measured on the same held-out prompts. NumPy only.

A prompt has several observed answers, and a second, independent sampling of the same prompts may be there. Two views:

- *answers*: the observed length of a prompt is that of one answer, as in the paper; the mean over all answers.
- *means*: it is the mean of a sampling's answers, which is what a group of answers costs, and is less chance.

With two samplings, every predictor is measured on both and averaged, as the ceiling is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Float, Float64, Int64

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.lengths import ObservedLengths, merged
from streamrl_jax.ranker.metrics import (
    Interval,
    bootstrap,
    ceiling,
    kendall_tau,
    recall_at,
    recall_of_answers,
)

SHARES: Final = (0.05, 0.10, 0.20)
CEILING: Final = "ceiling"

View = Literal["answers", "means"]


@dataclass(frozen=True, eq=False)
class Samplings:
    """Observed lengths of the same prompts, from one sampling or two.

    Attributes:
        rows: The prompts, with the first sampling's answers.
        first: Their lengths, as many answers for each prompt: those of a prompt that has more are left out.
        second: Of the second sampling; None: there is none.
    """

    rows: Sequence[ObservedLengths]
    first: Float64[np.ndarray, "prompts answers"]
    second: Float64[np.ndarray, "prompts others"] | None

    @property
    def all(self) -> list[Float64[np.ndarray, "prompts answers"]]:
        """The samplings that are there."""
        return [self.first] if self.second is None else [self.first, self.second]


@dataclass(frozen=True)
class Line:
    """How one predictor does in one view.

    Attributes:
        name: Of the predictor.
        recall: At each of `SHARES`.
        of_ceiling: Its share of the ceiling's, on the same draws of prompts; None: there is no second sampling.
        tau: Kendall's tau-b.
    """

    name: str
    recall: tuple[Interval, ...]
    of_ceiling: tuple[Interval, ...] | None
    tau: float


def pair_up(
    first: Sequence[ObservedLengths], second: Sequence[ObservedLengths] | None, where: str
) -> Samplings:
    """Brings two samplings of the same prompts together.

    Args:
        first: Of the prompts that are measured.
        second: Of the same ones, in any order; None: there is none.
        where: What to call the second in an error.

    Raises:
        UserError: The second lacks prompts of the first.
    """
    rows = merged(first)
    if second is None:
        return Samplings(rows, _table(rows), None)
    return Samplings(rows, _table(rows), _table(_found(rows, second, where)))


def history_of(
    rows: Sequence[ObservedLengths], history: Sequence[ObservedLengths], where: str
) -> Float64[np.ndarray, " prompts"]:
    """The mean length that each prompt had in a file.

    Args:
        rows: The prompts that are measured.
        history: Lengths of the same ones, in any order.
        where: What to call the file in an error.

    Raises:
        UserError: It lacks prompts.
    """
    return np.array([row.mean for row in _found(rows, history, where)])


def measure(
    samplings: Samplings,
    predictors: Mapping[str, Float[np.ndarray, " prompts"]],
    view: View,
    *,
    seed: int = 0,
    draws: int = 200,
) -> list[Line]:
    """Measures predictors, and the ceiling where there is a second sampling.

    Args:
        samplings: What was observed.
        predictors: A number a prompt, by name; it grows with the length that is expected.
        view: Single answers, or the means of a sampling's answers.
        seed: Of the bootstrap over prompts.
        draws: Of the bootstrap.

    Returns:
        A line each, the ceiling's last.
    """
    lines = [_line(name, values, samplings, view, seed, draws) for name, values in predictors.items()]
    if samplings.second is not None:
        lines.append(_ceiling_line(samplings, view, seed, draws))
    return lines


def _line(
    name: str,
    predicted: Float[np.ndarray, " prompts"],
    samplings: Samplings,
    view: View,
    seed: int,
    draws: int,
) -> Line:
    def recall(share: float, drawn: Int64[np.ndarray, " drawn"]) -> float:
        return _recall(share, predicted[drawn], [part[drawn] for part in samplings.all], view)

    def of_ceiling(share: float, drawn: Int64[np.ndarray, " drawn"]) -> float:
        return recall(share, drawn) / max(_ceiling(share, samplings, drawn, view), 1e-9)

    def at_each_share(
        measured: Callable[[float, Int64[np.ndarray, " drawn"]], float],
    ) -> tuple[Interval, ...]:
        of_share = [functools.partial(measured, share) for share in SHARES]
        return tuple(bootstrap(one, len(predicted), seed=seed, draws=draws) for one in of_share)

    ratio = None if samplings.second is None else at_each_share(of_ceiling)
    tau = float(np.mean([kendall_tau(predicted, column) for column in _columns(samplings.all, view)]))
    return Line(name, at_each_share(recall), ratio, tau)


def _ceiling_line(samplings: Samplings, view: View, seed: int, draws: int) -> Line:
    assert samplings.second is not None

    def at(share: float) -> Interval:
        def measured(drawn: Int64[np.ndarray, " drawn"]) -> float:
            return _ceiling(share, samplings, drawn, view)

        return bootstrap(measured, len(samplings.rows), seed=seed, draws=draws)

    tau = ceiling(kendall_tau, samplings.first, samplings.second, of_means=view == "means")
    return Line(CEILING, tuple(map(at, SHARES)), None, tau)


def _ceiling(share: float, samplings: Samplings, drawn: Int64[np.ndarray, " drawn"], view: View) -> float:
    assert samplings.second is not None

    def recall(predicted: np.ndarray, observed: np.ndarray) -> float:
        return recall_at(share, predicted, observed)

    return ceiling(recall, samplings.first[drawn], samplings.second[drawn], of_means=view == "means")


def _recall(share: float, predicted: np.ndarray, observed: Sequence[np.ndarray], view: View) -> float:
    if view == "means":
        return float(np.mean([recall_at(share, predicted, part.mean(axis=1)) for part in observed]))
    return float(np.mean([recall_of_answers(share, predicted, part) for part in observed]))


def _columns(observed: Sequence[np.ndarray], view: View) -> list[np.ndarray]:
    """The numbers that a predictor is held against, one array a sampling or an answer."""
    if view == "means":
        return [part.mean(axis=1) for part in observed]
    return [column for part in observed for column in part.T]


def _found(
    rows: Sequence[ObservedLengths], others: Sequence[ObservedLengths], where: str
) -> list[ObservedLengths]:
    by_prompt = {row.token_ids.tobytes(): row for row in merged(others)}
    missing = [row.prompt_id for row in rows if row.token_ids.tobytes() not in by_prompt]
    if missing:
        raise UserError(
            f"{where}: {len(missing)} of {len(rows)} prompts are not there, the first is {missing[0]!r}; give lengths "
            "of the same prompts, collected with another --seed"
        )
    return [by_prompt[row.token_ids.tobytes()] for row in rows]


def _table(rows: Sequence[ObservedLengths]) -> Float64[np.ndarray, "prompts answers"]:
    answers = min(len(row.lengths) for row in rows)
    return np.array([row.lengths[:answers] for row in rows], np.float64)
