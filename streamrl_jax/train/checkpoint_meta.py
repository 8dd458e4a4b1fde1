"""What goes into a checkpoint beside the arrays, and which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamrl_jax.errors import UserError

BEST_METRIC: Final = "val/accuracy"
"""What the best checkpoint is the best by."""


@dataclass(frozen=True)
class Frontier:
    """What of the prompts has been consumed; prompts are a function of the iteration, so a number says it."""

    iteration: int  # the first one that the trainer has not consumed
    in_flight: tuple[int, ...] = ()  # later ones that were handed out; a resume generates them anew


@dataclass(frozen=True)
class Meta:
    """What a run needs beside its arrays to go on."""

    step: int
    version: int  # of the policy's weights
    incarnation: int  # of the run that wrote it
    frontier: Frontier
    config_digest: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this step, to compare checkpoints by


def meta_from_json(value: Any, where: str) -> Meta:
    """Reads what ``dataclasses.asdict`` made of a ``Meta``.

    Args:
        value: parsed JSON.
        where: what to call the source in an error.

    Returns:
        The record.

    Raises:
        UserError: a field is missing or unknown: another release wrote it.
    """
    try:
        frontier = value["frontier"]
        frontier = Frontier(**{**frontier, "in_flight": tuple(frontier["in_flight"])})
        return Meta(**{**value, "frontier": frontier})
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{where} was written by another release of this program ({type(error).__name__}: {error}). "
            "Read it with that release, and start a run here from its exported weights."
        ) from error


def outdated(steps: Sequence[int], scores: Mapping[int, float], keep: int) -> list[int]:
    """Which checkpoints are removed: all but the newest ``keep`` and the best.

    Args:
        steps: those that are complete.
        scores: the metric of a step where it is known, larger is better.
        keep: at least 1.

    Returns:
        Steps, oldest first.
    """
    best = best_step({step: scores[step] for step in steps if step in scores})
    kept = {*sorted(steps)[-keep:], best}
    return [step for step in sorted(steps) if step not in kept]


def best_step(scores: Mapping[int, float]) -> int | None:
    """The step of the highest finite score, the newest of equals; None if there is none."""
    ranked = [(score, step) for step, score in scores.items() if math.isfinite(score)]
    return max(ranked)[1] if ranked else None
