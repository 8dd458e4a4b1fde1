"""What `streamrl bench dispatch` says of its rounds: figures of each policy, and how far the model's were from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    """

    measured: float
    model: float

    @property
    def error(self) -> float:
        """The model's relative to the measured one, less 1."""
        return self.model / self.measured - 1

    def cells(self, digits: int) -> list[str]:
        """For the table."""
        return [f"{self.measured:.{digits}f}", f"{self.model:.{digits}f}", f"{self.error:+.1%}"]


@dataclass(frozen=True)
class Compared:
    """How the model did for one policy.

    Attributes:
        steps: Decode steps of the busiest instance, median over rounds.
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
    measured: Mapping[str, Found], model: Mapping[str, Found], *, with_seconds: bool
) -> dict[str, Compared]:
    """The model's figures beside the measured ones.

    Args:
        measured: Of all policies.
        model: Of the same ones.
        with_seconds: The model knows how long a step takes.
    """
    lines = {}
    for name, own in measured.items():
        ours, theirs = own.against.get(BASE), model[name].against.get(BASE)
        steps_ratio = seconds_ratio = None
        if ours is not None and theirs is not None:
            steps_ratio = Share(ours.steps.value, theirs.steps.value)
            seconds_ratio = Share(ours.seconds.value, theirs.seconds.value) if with_seconds else None
        lines[name] = Compared(Share(own.steps, model[name].steps), steps_ratio, seconds_ratio)
    return lines


def worst(lines: Mapping[str, Compared]) -> tuple[float, float]:
    """The largest error of the model: in steps, and in steps over `BASE` (0: there is none)."""
    shares = [line.steps_ratio for line in lines.values() if line.steps_ratio is not None]
    return (
        max(abs(line.steps.error) for line in lines.values()),
        max((abs(share.error) for share in shares), default=0.0),
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
