"""A score that is no number, in the main job: the update is refused, and the samples are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.samples_log import read_samples
from streamrl_jax.trace import read_trace
from streamrl_jax.train.checkpoint import Checkpointer

from .job_world import SAMPLES, jax_settings_kept, left_behind, metrics_of, write_config, write_world

_REWARD = """
def digits_or_nan(prompt, text, generation):
    digits = sum(character.isdigit() for character in text) / 8
    bad = generation.sample_id.startswith("train/1/") and generation.sample_id.endswith("/2")
    return {"score": float("nan") if bad else digits, "digits": digits, "odd": float("inf") if bad else 1.0}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        folder = write_world(tmp_path_factory.mktemp("world"))
        (folder / "nan.py").write_text(_REWARD)
        yield folder


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def test_the_run_stops_and_names_the_samples_or_passes_over_them(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        world,
        run={"name": "nan"},
        reward={"function": f"{world / 'nan.py'}:digits_or_nan"},
        trainer={"total_training_steps": 3, "save_freq": 1, "test_freq": 0},
    )
    run = world / "runs" / "nan"
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    bad = [s.sample_id for s in read_samples(run, 1) if np.isnan(s.reward)]
    assert len(bad) == 4 and all(name in error for name in bad), error
    assert "iteration 1: the update was refused" in error and "Traceback" not in error
    with Checkpointer(run / "checkpoints", 1) as found:
        assert found.steps() == (1,)
    assert left_behind(run) == []

    assert main(["train", "--resume", str(run), "trainer.on_non_finite=skip"]) == 0
    lines = metrics_of(run)
    assert [line.step for line in lines] == [1, 2, 3]
    assert [line.number("training/update_refused") for line in lines] == [0, 1, 0]
    assert [line.number("training/samples") for line in lines] == [SAMPLES] * 3
    assert [line.number("reward/odd/mean") for line in lines] == [1, None, 1]
    for line, iteration in zip(lines, range(3), strict=True):
        digits = [sample.reward_extras["digits"] for sample in read_samples(run, iteration)]
        assert line.number("reward/digits/mean") == pytest.approx(sum(digits) / SAMPLES)
    for text in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=no_constant)
    json.loads(json.dumps(read_trace(run / "trace.json")), parse_constant=no_constant)
    assert left_behind(run) == []
