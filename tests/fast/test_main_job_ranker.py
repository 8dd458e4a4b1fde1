"""The main job with `dispatch.policy` set: predictions reach the jobs, and what they are made from survives a resume.

One run in two lives; the engine computes in NumPy. Every iteration asks the same sixteen prompts.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.metric_names import undeclared
from streamrl_jax.metrics import Missing
from streamrl_jax.ranker.knowledge import grouped
from streamrl_jax.ranker.metrics import recall_at
from streamrl_jax.ranker.state import state_directory, state_faults
from streamrl_jax.samples_log import read_samples
from streamrl_jax.train.checkpoint import Checkpointer

from .job_world import (
    ANSWERS,
    jax_settings_kept,
    left_behind,
    training_lines,
    write_config,
    write_world,
)

STEPS, PROMPTS = 6, 16


def changes(world: Path) -> dict[str, dict[str, Any]]:
    rows = [{"prompt": f"{first}+{second}="} for first in (12, 34, 56, 78) for second in (21, 43, 65, 87)]
    prompts = world / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digits = Tokenizer.load(world / "model").encode("0123456789")
    signalled = {"at": f"train/{STEPS - 2}", "number": int(signal.SIGUSR1)}
    return {
        "run": {"name": "ranked"},
        "data": {"train": str(prompts), "test": "", "train_batch_size": PROMPTS},
        # An untrained policy draws evenly: most answers end within a few tokens, and some at the limit.
        "rollout": {"stop_token_ids": [int(token) for token in digits]},
        "gen": {"instances": 2},
        "dispatch": {"policy": "skewness"},
        "ranker": {"refresh_every": 2, "refresh_steps": 10, "max_wait_s": 250.0},
        "reward": {"function": f"{world / 'functions.py'}:signalling", "kwargs": signalled},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "trainer": {"total_training_steps": STEPS, "save_freq": 2, "test_freq": 0, "val_before_train": False},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ended by a signal in its last but one iteration, and resumed."""
    with jax_settings_kept():
        world = write_world(tmp_path_factory.mktemp("world"))
        path = world / "runs" / "ranked"
        assert main(["train", str(write_config(world, **changes(world)))]) == 75
        assert [line.step for line in training_lines(path)] == list(range(1, STEPS - 1))
        assert state_faults(path, STEPS - 2) == []
        assert main(["train", "--resume", str(path), 'reward.kwargs={at = "never", number = 0}']) == 0
        yield path


def test_each_iteration_says_how_well_it_was_predicted(run: Path) -> None:
    lines = training_lines(run)
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    assert undeclared(name for line in lines for name in line.metrics) == []
    for iteration, line in enumerate(lines):
        assert line.number("training/samples") == PROMPTS * ANSWERS
        assert (line.number("timing_s/rank") or 0.0) > 0.0
        # The second iteration's prompts are prepared while the first one's answers come. A resumed run has the history.
        known = iteration >= 2
        assert line.number("ranker/with_history") == (1.0 if known else 0.0)
        assert line.number("ranker/unpredicted") == (0.0 if known else PROMPTS)
        for name in ("ranker/recall_20", "ranker/log_error"):
            assert isinstance(line.metrics[name], Missing) is not known
        # In tokens, and not in another unit: most answers have a few, and the limit is many times that.
        assert not known or 0.0 < (line.number("ranker/log_error") or 0.0) < 1.0


def test_what_was_said_before_a_resume_is_what_the_answers_are_held_against(run: Path) -> None:
    """The iteration in flight was predicted by the run's first life, and answered in its second."""
    step = STEPS - 2
    said = json.loads((state_directory(run, step) / "knowledge.json").read_bytes())["said"][str(step)]
    observed = {row.prompt_id: row.mean for row in grouped(read_samples(run, step))}
    lengths = np.array([observed[prompt_id] for prompt_id in said["ids"]])
    tokens, line = np.array(said["tokens"]), training_lines(run)[step]
    assert line.number("ranker/log_error") == pytest.approx(np.abs(np.log(tokens / lengths)).mean(), rel=1e-4)
    assert line.number("ranker/recall_20") == pytest.approx(recall_at(0.2, tokens, lengths))


def test_the_state_goes_with_the_checkpoints(run: Path) -> None:
    with Checkpointer(run / "checkpoints", 1) as checkpoints:
        steps = checkpoints.steps()
    assert STEPS in steps and STEPS - 2 in steps
    for step in steps:
        assert state_faults(run, step) == []
        record = json.loads((state_directory(run, step) / "knowledge.json").read_bytes())
        assert record["trained"] or record["due"], "a refresh is begun behind every second iteration"
    in_flight = json.loads((state_directory(run, STEPS - 2) / "knowledge.json").read_bytes())["said"]
    assert list(in_flight) == [str(STEPS - 2)] and len(in_flight[str(STEPS - 2)]["tokens"]) == PROMPTS
    assert left_behind(run) == []
