"""The benchmark of the stream: real processes on a small scale, and figures that are what they are called."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.bench.counting_engine import Pace
from streamrl_jax.bench.stream import HEADER, add_options, measure, run, summary
from streamrl_jax.bench.stream_costs import unit_costs
from streamrl_jax.bench.stream_rounds import OPEN, Round, Setting, join
from streamrl_jax.errors import UserError


def options(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_a_line_holds_medians_over_rounds() -> None:
    latency = np.linspace(0.0, 0.1, 101)
    rounds = [Round(100, wall, latency * factor, 0.01 * factor) for wall, factor in ((1, 1), (2, 2), (4, 3))]
    line = summary("way", 50.0, rounds, 3 << 20)
    assert (line.per_s, line.peak_mib) == (50, 3)
    assert line.latency_ms == pytest.approx((100, 190, 198))
    assert line.cpu_us == pytest.approx(200)
    assert line.cells() == ["way", "50/s", "50", "100.00 / 190.00 / 198.00", "200", "3"]
    assert len(line.cells()) == len(HEADER)


def test_every_way_carries_every_sample(tmp_path: Path) -> None:
    setting = Setting(Pace(tokens=16, per_s=200, pieces=4), 2, 4, 2, 0.005, samples=240)
    lines = measure(tmp_path, setting, 3, list(OPEN))
    assert [line.way for line in lines] == ["bare gRPC", *OPEN]
    for line in lines:
        assert 0 < line.per_s < 2000, "two instances at 200 a second, which make up for what is late"
        assert 0 < line.latency_ms[0] <= line.latency_ms[1] <= line.latency_ms[2]


def test_an_instance_that_has_loaded_joins_within_two_seconds(tmp_path: Path) -> None:
    """The bound of a join beyond its own start-up, with room for a machine that is busy."""
    assert any(0 < join(tmp_path, -1, number) < 2.0 for number in range(8)), (
        "one of eight: not whenever it is busy"
    )


def test_every_stage_costs_something() -> None:
    assert all(cost > 0 for cost in unit_costs(16).values())


@pytest.mark.parametrize("option", [("--rate", "0"), ("--rounds", "0"), ("--joins", "-1")])
def test_numbers_that_make_no_sense_are_refused(option: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="must be positive"):
        run(options(*option))


def test_the_pace_travels_as_json() -> None:
    pace = Pace(tokens=7, per_s=2.5, pieces=3, core=1, load_s=0.5)
    assert Pace(**json.loads(json.dumps(pace.__dict__))) == pace
