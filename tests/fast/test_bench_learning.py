"""The table of what algorithms learn: its cases load, and its figures are those of the runs' records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from streamrl_jax.bench.learning import STALENESS, Curve, cases, read_curve, table
from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", cases())
def test_every_case_is_a_configuration_that_loads(name: str) -> None:
    case = cases()[name]
    layers = [CONFIGS / "demo_grpo.toml"]
    if case.layer:
        layers.append(CONFIGS / "algorithms" / f"{case.layer}.toml")
    cfg = load_config(layers, list(case.overrides))
    assert cfg.trainer.max_staleness in (0, *STALENESS)
    assert name.startswith("grpo-") == (cfg.trainer.max_staleness > 0)


def write(path: Path, entries: Sequence[tuple[int, Mapping[str, float | None]]]) -> Path:
    lines = [json.dumps({"step": step, "time": 0.0, "metrics": metrics}) for step, metrics in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_curve_is_read_off_a_runs_metrics(tmp_path: Path) -> None:
    iteration = {"training/staleness/mean": 1.0, "training/staleness/max": 2.0, "rollout_corr/rho/max": 1.5}
    curve = read_curve(
        write(
            tmp_path / "metrics.jsonl",
            [
                (0, {"val/accuracy": 0.1}),
                (1, iteration | {"actor/entropy": 0.5, "perf/mfu/actor": None}),
                (
                    2,
                    iteration
                    | {"training/staleness/mean": 0.5, "actor/entropy": 0.4, "rollout_corr/rho/max": 1.2},
                ),
                (2, {"val/accuracy": 0.92}),
                (4, {"val/accuracy": 0.88}),
            ],
        )
    )
    assert curve.accuracy == {0: 0.1, 2: 0.92, 4: 0.88}
    assert (curve.first_at(0.9), curve.first_at(0.95)) == (2, None)
    assert (curve.last["actor/entropy"], curve.staleness) == (0.4, 0.75)
    row = table({("grpo", 11): curve}).splitlines()[-1]
    assert row == "| grpo | 11 | 0.100 | 0.880 | 2 | nan | 0.400 | 0.000 | 0.75 / 2 | 1.50 |"


def test_a_run_without_an_iteration_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished iteration"):
        read_curve(write(tmp_path / "metrics.jsonl", [(0, {"val/accuracy": 0.1})]))
    half = [
        (0, {"val/accuracy": 0.1}),
        (1, {"training/staleness/mean": 0.0}),
    ]
    with pytest.raises(UserError, match="holds 1 of 2 iterations; remove the run"):
        read_curve(write(tmp_path / "metrics.jsonl", half), iterations=2)
    assert Curve({0: 0.1}, {}, {}, 0.0).first_at(0.9) is None
