"""What `streamrl bench dispatch` says of its rounds: figures of each policy, and how far the model's were from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from streamrl_jax.bench.dispatch_draws import BASE, BEST
from streamrl_jax.bench.dispatch_model import Foretold
from streamrl_jax.bench.dispatch_rounds import Played
from streamrl_jax.bench.intervals import Interval, paired_ratio

MEASURED_HEADER: Final = (
    "policy", "seconds", "decode steps", "steps of all", f"steps / {BEST}", f"steps / {BASE}", f"seconds / {BEST}",
    f"seconds / {BASE}",
)  # fmt: skip
FORETOLD_HEADER: Final = (
    "policy", "steps: measured", "model", "error", f"steps / {BASE}: measured", "model", "error",
    f"seconds / {BASE}: measured", "model", "error",
)  # fmt: skip
POOLS_HEADER: Final = (
    "policy",
    "instances",
    "decode steps",
    f"steps / {BEST}",
    f"steps / {BASE}",
    f"seconds / {BASE}",
)


@dataclass(frozen=True)
class Ratios:
    """A policy against another, round by round.

    Attributes:
        steps: Of the busiest instance.
        seconds: Of the makespan.
    """

    steps: Interval
    seconds: Interval


@dataclass(frozen=True)
class Found:
    """One policy over all rounds of a size.

    Attributes:
        seconds: Median makespan.
        steps: Median decode steps of the busiest instance.
        total: Median decode steps of all instances.
        against: By the other policy's name; without those that did not run.
    """

    seconds: float
    steps: float
    total: float
    against: Mapping[str, Ratios]

    def cells(self, name: str) -> list[str]:
        """For the table of what was measured."""
        ratios = [self.against.get(other) for other in (BEST, BASE)]
        steps = ["" if one is None else str(one.steps) for one in ratios]
        seconds = ["" if one is None else str(one.seconds) for one in ratios]
        return [name, f"{self.seconds:.2f}", f"{self.steps:.0f}", f"{self.total:.0f}", *steps, *seconds]


def found(rounds: Sequence[Mapping[str, Played | Foretold]]) -> dict[str, Found]:
    """Figures of each policy.

    Args:
        rounds: Of each, all policies by name; at least two rounds.
    """
    lines = {}
    for name in rounds[0]:
        own = [one[name] for one in rounds]
        against = {}
        for other in (BEST, BASE):
            if other in rounds[0]:
                their = [one[other] for one in rounds]
                against[other] = Ratios(
                    paired_ratio([one.longest for one in own], [one.longest for one in their]),
                    paired_ratio([one.seconds for one in own], [one.seconds for one in their]),
                )
        lines[name] = Found(
            statistics.median(one.seconds for one in own),
            statistics.median(one.longest for one in own),
            statistics.median(one.total for one in own),
            against,
        )
    return lines


@dataclass(frozen=True)
class Share:
    """A measured figure beside the model's.

    Attributes:
        measured: On the instances.
        model: Of the model, on the same lengths.
        error: The model's over the measured one, less 1: the mean over rounds, each compared with itself.
        greatest: Of a single round, by size.
    """

    measured: float
    model: float
    error: Interval
    greatest: float

    def cells(self, digits: int) -> list[str]:
        """For the table."""
        error = self.error
        return [
            f"{self.measured:.{digits}f}",
            f"{self.model:.{digits}f}",
            f"{error.value:+.1%} ({error.low:+.1%} to {error.high:+.1%})",
        ]


@dataclass(frozen=True)
class Compared:
    """How the model did for one policy.

    Attributes:
        steps: Decode steps of the busiest instance, geometric mean over rounds.
        steps_ratio: Steps over those of `BASE`; None: that did not run.
        seconds_ratio: Seconds over those of `BASE`; None: that did not run, or no cost was given.
    """

    steps: Share
    steps_ratio: Share | None
    seconds_ratio: Share | None

    def cells(self, name: str) -> list[str]:
        """For the table of the model's figures."""
        ratios = [[""] * 3 if one is None else one.cells(3) for one in (self.steps_ratio, self.seconds_ratio)]
        return [name, *self.steps.cells(0), *ratios[0], *ratios[1]]


def compared(
    measured: Sequence[Mapping[str, Played]],
    model: Sequence[Mapping[str, Foretold]],
    *,
    with_seconds: bool,
) -> dict[str, Compared]:
    """The model's figures beside the measured ones, round by round.

    Args:
        measured: Of each round, all policies by name; at least two rounds.
        model: Of the same rounds and policies.
        with_seconds: The model knows how long a step takes.
    """
    lines = {}
    steps = [_figures(rounds, lambda one: one.longest) for rounds in (measured, model)]
    seconds = [_figures(rounds, lambda one: one.seconds) for rounds in (measured, model)]
    for name in measured[0]:
        over = BASE if BASE in measured[0] else None
        lines[name] = Compared(
            _share(steps[0][name], steps[1][name]),
            over and _share(steps[0][name] / steps[0][over], steps[1][name] / steps[1][over]),
            over and _share(seconds[0][name] / seconds[0][over], seconds[1][name] / seconds[1][over])
            if with_seconds
            else None,
        )
    return lines


def _figures(
    rounds: Sequence[Mapping[str, Played | Foretold]], read: Callable[[Played | Foretold], float]
) -> dict[str, Float64[np.ndarray, " rounds"]]:
    return {name: np.asarray([read(one[name]) for one in rounds], np.float64) for name in rounds[0]}


def _share(measured: Float64[np.ndarray, " rounds"], model: Float64[np.ndarray, " rounds"]) -> Share:
    off = paired_ratio(model.tolist(), measured.tolist())
    return Share(
        float(np.exp(np.log(measured).mean())),
        float(np.exp(np.log(model).mean())),
        Interval(off.value - 1, off.low - 1, off.high - 1),
        float(np.abs(model / measured - 1).max()),
    )


@dataclass(frozen=True)
class Worst:
    """The largest errors of the model over all policies, as shares.

    Attributes:
        steps: In steps, mean over rounds.
        round: In steps, in a single round.
        steps_ratio: In steps over `BASE`, mean over rounds; 0: there is none.
        seconds_ratio: In seconds over `BASE`; 0: there is none.
    """

    steps: float
    round: float
    steps_ratio: float
    seconds_ratio: float


def worst(lines: Mapping[str, Compared]) -> Worst:
    """Sums up how far the model was off."""

    def largest(shares: Iterable[Share | None]) -> float:
        return max((abs(one.error.value) for one in shares if one is not None), default=0.0)

    return Worst(
        largest(line.steps for line in lines.values()),
        max(line.steps.greatest for line in lines.values()),
        largest(line.steps_ratio for line in lines.values()),
        largest(line.seconds_ratio for line in lines.values()),
    )


def pool_cells(name: str, instances: int, line: Found) -> list[str]:
    """For the table of larger pools."""
    best, base = line.against.get(BEST), line.against.get(BASE)
    return [
        name,
        str(instances),
        f"{line.steps:.0f}",
        "" if best is None else str(best.steps),
        "" if base is None else str(base.steps),
        "" if base is None else str(base.seconds),
    ]
