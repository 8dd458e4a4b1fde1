"""`streamrl sft`: from checkpoint to checkpoint, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.commands.warmstart import METRICS_FILE, run
from streamrl_jax.config import Config
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.metric_names import METRICS
from streamrl_jax.metrics import read_metrics
from streamrl_jax.train.hf_directory import map_tensors_of, read_arch

from .job_world import jax_settings_kept, job_config, write_config, write_world

SFT: dict[str, Any] = {"data": "task:arithmetic", "steps": 6, "batch_size": 32, "stop_check_every": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        yield write_world(tmp_path_factory.mktemp("world"))


def config(world: Path, **sft: Any) -> Config:
    optim = {"lr": 1e-2, "lr_warmup_steps": 0, "lr_scheduler": "constant"}
    return job_config(world, sft=SFT | {"optim": optim} | sft, actor={"ppo_max_token_len_per_gpu": 64})


@pytest.fixture(scope="module")
def warm(world: Path) -> Path:
    return run(config(world), world / "deep" / "warm")


def test_it_learns_and_writes_a_checkpoint_like_the_one_it_read(world: Path, warm: Path) -> None:
    losses = [line.number("sft/loss") or 0.0 for line in read_metrics(warm / METRICS_FILE)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.2
    before, after = read_arch(world / "model"), read_arch(warm)
    assert replace(before, hf_config_json="") == replace(after, hf_config_json="")
    texts = [Tokenizer.load(folder).encode("12+34=").tolist() for folder in (world / "model", warm)]
    assert texts[0] == texts[1]
    theirs, ours = map_tensors_of(world / "model", before), map_tensors_of(warm, after)
    assert theirs.keys() == ours.keys() and ours["model.norm.weight"].dtype == np.float32
    assert not np.array_equal(theirs["model.norm.weight"], ours["model.norm.weight"])


def test_the_stop_set_is_measured_now_and_then_and_at_the_end(warm: Path) -> None:
    lines = read_metrics(warm / METRICS_FILE)
    assert [line.step for line in lines if "sft/accuracy" in line.metrics] == [4, 6]
    assert {name for line in lines for name in line.metrics} == {n for n in METRICS if n.startswith("sft/")}


def test_the_place_of_the_checkpoint_is_looked_at_first(world: Path, warm: Path) -> None:
    with pytest.raises(UserError, match=r"warm exists already; give a new directory"):
        run(config(world), warm)
    with pytest.raises(UserError, match=r"its folder cannot be made: (Not a directory|File exists)"):
        run(config(world), world / "functions.py" / "warm")


def test_an_update_that_is_not_finite_ends_it_and_nothing_is_written(world: Path) -> None:
    broken = {"lr": 1e30, "lr_warmup_steps": 0, "lr_scheduler": "constant"}
    with pytest.raises(UserError, match=r"step \d: loss or gradient is not finite; lower sft.optim.lr"):
        run(config(world, optim=broken), world / "broken")
    assert not (world / "broken").exists()


def test_what_is_wrong_is_one_paragraph(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "examples.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    path = write_config(world, sft={"data": str(world / "examples.jsonl")})
    assert main(["sft", str(path), "--out", str(world / "none")]) == 2
    error = capsys.readouterr().err
    assert "examples.jsonl" in error and "field 'answer' is missing" in error and error.count("\n") == 1
    assert not (world / "none").exists()
