"""`streamrl bench stream`: samples a second through one controller, added latency, and what a bare gRPC stream does.

The instances are processes with the real service around an engine that counts; the way from there to the reader is a
run's own. The controller is bound to one core, the instances to another, and every round through a controller follows
one over bare streams: noise of the machine meets both.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamrl_jax.errors import UserError

if TYPE_CHECKING:
    from streamrl_jax.bench.stream_rounds import Round, Setting

HEADER: Final = (
    "way", "offered", "samples/s", "added latency, ms: median / p95 / p99", "CPU, µs a sample", "peak RSS, MiB",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One way at one rate: medians over the rounds.

    Attributes:
        way: What the samples go through.
        offered: Samples a second that the instances finish; 0: as many as are taken.
        per_s: Samples a second that arrived.
        latency_ms: From an answer's end on the instance to its arrival at the reader: median, p95, p99.
        cpu_us: Of the measured process, a sample.
        peak_mib: Its largest resident size.
    """

    way: str
    offered: float
    per_s: float
    latency_ms: tuple[float, float, float]
    cpu_us: float
    peak_mib: float

    def cells(self) -> list[str]:
        """For the table."""
        offered = f"{self.offered:,.0f}/s" if self.offered else "all"
        latency = " / ".join(f"{value:.2f}" for value in self.latency_ms)
        return [
            self.way,
            offered,
            f"{self.per_s:,.0f}",
            latency,
            f"{self.cpu_us:.0f}",
            f"{self.peak_mib:.0f}",
        ]


def summary(way: str, offered: float, rounds: Sequence[Round], peak_bytes: int) -> Line:
    """Medians over the rounds."""
    import numpy as np

    quantiles = [np.quantile(one.latency_s, (0.5, 0.95, 0.99)) * 1e3 for one in rounds]
    median, p95, p99 = (statistics.median(float(one[place]) for one in quantiles) for place in range(3))
    return Line(
        way,
        offered,
        statistics.median(one.samples / one.wall_s for one in rounds),
        (median, p95, p99),
        statistics.median(one.cpu_s / one.samples for one in rounds) * 1e6,
        peak_bytes / 2**20,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def measure(home: Path, setting: Setting, rounds: int, ways: Sequence[str]) -> list[Line]:
    """All ways at one rate, round by round in turn.

    Args:
        home: A directory for the instances' files.
        setting: Rate and sizes.
        rounds: Of each way; one more comes first and is left out.
        ways: Of `WAYS`.
    """
    from streamrl_jax.bench import stream_rounds as here

    found: dict[str, list[Round]] = {"bare gRPC": []}
    found |= {way: [] for way in ways}
    offered = setting.pace.per_s * setting.instances
    with contextlib.ExitStack() as stack:
        through = {}
        for way in ways:
            through[way] = stack.enter_context(here.OPEN[way](home / way.split()[-1], setting))
        bare = here.Bare(here.bare_addresses(home / ways[0].split()[-1]), setting)
        for number in range(rounds + 1):
            for way, entries in found.items():
                done = through[way].run(setting.samples) if way in through else bare.run(setting.samples)
                if number:
                    entries.append(done)
        peaks = {way: here.peak_bytes(one.pid) for way, one in through.items()}
    return [summary(way, offered, entries, peaks.get(way, 0)) for way, entries in found.items()]


def add_options(parser: ArgumentParser) -> None:
    """Those of `streamrl bench stream`."""
    parser.add_argument("--instances", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--slots", type=int, default=64, metavar="N", help="answers at once of each; default: 64"
    )
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each answer; default: 512")
    parser.add_argument("--samples", type=int, default=6000, metavar="N", help="of each round; default: 6000")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each way; default: 5")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[500.0], metavar="PER_S",
        help="samples a second at which the latency is measured, beside as fast as possible; default: 500",
    )  # fmt: skip
    parser.add_argument(
        "--progress-interval", type=float, default=0.0, metavar="S",
        help="seconds between two Progress messages of an answer, which then comes in 8 pieces; default: none",
    )  # fmt: skip
    parser.add_argument("--joins", type=int, default=5, metavar="N", help="instances that join; default: 5")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also as .json or .md")


def run(arguments: Namespace) -> int:
    """Prints the tables.

    Raises:
        UserError: A number is not positive, or the machine has one core only.
    """
    counts = (arguments.instances, arguments.slots, arguments.tokens, arguments.samples, arguments.rounds)
    if min(counts) < 1 or min(arguments.rate) <= 0 or arguments.progress_interval < 0 or arguments.joins < 0:
        raise UserError(
            "--instances, --slots, --tokens, --samples, --rounds and --rate must be positive, --progress-interval and "
            "--joins not negative"
        )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError(
            "streamrl bench stream needs two cores: one for the controller, one for the instances"
        )
    os.sched_setaffinity(0, {cores[0]})
    lines, joins, costs = _measured(arguments, cores[0], cores[1])
    text = "\n\n".join(
        [
            table(HEADER, [line.cells() for line in lines]),
            table(("stage", "µs a sample"), [(stage, f"{cost:.1f}") for stage, cost in costs.items()]),
            _joined(joins),
        ]
    )
    print(text)
    if arguments.out is not None:
        _write(arguments.out, text, lines, joins, costs)
    return 0


def _measured(
    arguments: Namespace, own: int, core: int
) -> tuple[list[Line], list[float], Mapping[str, float]]:
    from streamrl_jax.bench.counting_engine import Pace
    from streamrl_jax.bench.stream_costs import unit_costs
    from streamrl_jax.bench.stream_rounds import OPEN, Setting, join

    costs = unit_costs(arguments.tokens)
    lines: list[Line] = []
    pieces = 8 if arguments.progress_interval else 1
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        for rate in (0.0, *arguments.rate):
            pace = Pace(arguments.tokens, rate / arguments.instances, pieces, core)
            samples = int(min(arguments.samples, rate * 4)) if rate else arguments.samples
            setting = Setting(
                pace, arguments.instances, arguments.slots, 8, arguments.progress_interval, samples, own
            )
            lines += measure(Path(folder) / f"{rate:g}", setting, arguments.rounds, list(OPEN))
        joins = [join(Path(folder) / f"join-{number}", core, number) for number in range(arguments.joins)]
    return lines, joins, costs


def _joined(joins: Sequence[float]) -> str:
    if not joins:
        return ""
    low, middle, high = min(joins), statistics.median(joins), max(joins)
    return (
        f"An instance's engine loaded to its first sample at the reader (polling, greeting, weights, one answer): "
        f"median {middle:.2f} s, {low:.2f} to {high:.2f} s in {len(joins)} joins."
    )


def _write(
    out: Path, text: str, lines: Sequence[Line], joins: Sequence[float], costs: Mapping[str, float]
) -> None:
    if out.suffix == ".json":
        found = {"ways": [asdict(line) for line in lines], "costs_us": dict(costs), "join_s": list(joins)}
        text = json.dumps(found, indent=1)
    out.write_text(text + "\n")
