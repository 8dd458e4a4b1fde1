"""Resume is exact (DESIGN rule 7): killed in mid-step and between steps, a run goes on as if nothing had been, and its
recorded samples give the same losses again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.samples_log import SUPERSEDED, read_samples, recorded_iterations
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.replay import replay
from streamrl_jax.train.seal import is_sealed
from streamrl_jax.types import expand_runs

from .job_world import (
    child_environment,
    jax_settings_kept,
    left_behind,
    metrics_of,
    training_lines,
    wait_until,
    write_config,
    write_world,
)

STEPS = 7
COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/vf_loss", "critic/grad_norm")


@dataclass
class Life:
    """What was there when a life of the run was killed."""

    prompts: dict[int, list[str]]  # per recorded iteration, in the order of their ids
    steps: list[int]
    whole: int  # its newest whole checkpoint
    gone_after_s: float


@dataclass
class History:
    """A run that was killed twice and then finished."""

    path: Path
    lives: list[Life] = field(default_factory=list)


def killed(arguments: list[str], run_dir: Path, when: Callable[[], bool]) -> Life:
    """Starts a life of the run, kills its trainer once ``when`` is true, waits for the end of its instances."""
    command = [sys.executable, "-m", "streamrl_jax", "train", *arguments]
    run_dir.parent.mkdir(exist_ok=True)
    with run_dir.with_suffix(".log").open("ab") as log:
        trainer = subprocess.Popen(command, env=child_environment(), stdout=log, stderr=log)
    wait_until(lambda: when() or trainer.poll() is not None, 400)
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait(60) == -signal.SIGKILL, run_dir.with_suffix(".log").read_text()[-2000:]
    died = time.monotonic()
    wait_until(lambda: not [entry for entry in left_behind(run_dir) if "/dev/shm" not in entry], 30)
    gone = time.monotonic() - died
    recorded = {i: prompt_ids(run_dir, i) for i in recorded_iterations(run_dir / "samples")}
    steps_there = [line.step for line in training_lines(run_dir)]
    with Checkpointer(run_dir / "checkpoints", 1) as checkpoints:
        return Life(recorded, steps_there, checkpoints.latest() or 0, gone)


def prompt_ids(run_dir: Path, iteration: int) -> list[str]:
    return sorted(sample.prompt.prompt_id for sample in read_samples(run_dir, iteration))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """Seven steps with a checkpoint at each second one; a sample's reward takes 100 ms, an iteration 800.

    Where a life is killed its run is held by a reward that does not come.
    """
    with jax_settings_kept():
        world = write_world(tmp_path_factory.mktemp("world"))
        config = write_config(
            world,
            run={"name": "job"},
            reward={"timeout_s": 900.0},
            trainer={"total_training_steps": STEPS},
            eval={"max_prompts": 2, "n": 1},
        )
        run = world / "runs" / "job"
        found = History(run)

        def held(samples: str) -> str:
            return f'reward.kwargs={{delay_s = 0.1, hold = "{samples}"}}'  # merged: `hold` is given each time

        def between() -> bool:
            return len(training_lines(run)) >= 2

        def amid() -> bool:
            return len(training_lines(run)) >= 5 and is_sealed(run / "checkpoints/step_4")

        # Between steps: the second one is recorded; its evaluation, which gets no rewards, and its checkpoint are not.
        found.lives.append(killed([str(config), held("eval/2/*")], run, between))
        # In mid-step, with a whole checkpoint.
        found.lives.append(killed(["--resume", str(run), held("train/5/*/3")], run, amid))
        assert main(["train", "--resume", str(run), held("")]) == 0
        yield found


def test_the_instances_of_a_killed_trainer_are_gone_within_thirty_seconds(history: History) -> None:
    assert max(life.gone_after_s for life in history.lives) < 30
    assert left_behind(history.path) == [], "and what it left in shared memory is swept by the next life"


def test_steps_and_versions_go_on_and_no_line_is_there_twice(history: History) -> None:
    first, second = history.lives
    assert first.steps == [1, 2] and second.steps == list(range(1, second.steps[-1] + 1))
    assert second.whole == 4 <= second.steps[-1] < STEPS, "it was killed in good time"
    lines = training_lines(history.path)
    assert [line.step for line in lines] == [line.number("training/version") for line in lines]
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    evaluated = [line.step for line in metrics_of(history.path) if "val/accuracy" in line.metrics]
    assert evaluated == [0, 2, 4, 6, 7]
    assert json.loads((history.path / "run.json").read_text())["incarnation"] == 2
    assert all((history.path / name).exists() for name in ("provenance-1.json", "provenance-2.json"))


def test_iterations_that_are_done_again_have_the_same_prompts(history: History) -> None:
    for life in history.lives:
        for iteration, prompts in life.prompts.items():
            assert prompt_ids(history.path, iteration) == prompts
    for iteration in range(STEPS):
        versions = [expand_runs(s.generation.versions) for s in read_samples(history.path, iteration)]
        assert set(np.concatenate(versions)) == {iteration}


def test_training_overlaps_generation(history: History) -> None:
    """Three of four micro-batches are worked on while samples still come; iteration 0 waits for its whitening."""
    shares = [line.number("training/overlapped") for line in training_lines(history.path)]
    assert shares[0] == 0.0 and max(share or 0.0 for share in shares) == 0.75


def test_what_was_recorded_beyond_the_checkpoint_is_set_aside(history: History) -> None:
    assert recorded_iterations(history.path / "samples") == list(range(STEPS))
    aside = history.path / "samples" / SUPERSEDED
    for number, life in enumerate(history.lives, 1):
        again = [iteration for iteration in life.prompts if iteration >= life.whole]
        assert (recorded_iterations(aside / str(number)) if again else []) == again


@pytest.mark.parametrize("first", [0, 4])
def test_recorded_samples_give_the_same_losses_again(history: History, first: int) -> None:
    """From the start, and from the checkpoint that the last life began with: all three lives are one."""
    cfg = load_config([history.path / "config.toml"], [])
    lines = training_lines(history.path)
    for iteration, result in replay(cfg, history.path, range(first, STEPS)):
        for name in COMPARED:
            assert result.metrics[name] == pytest.approx(lines[iteration].number(name), rel=1e-6), name


def test_a_replay_names_what_is_not_recorded(history: History) -> None:
    cfg = load_config([history.path / "config.toml"], [])
    with pytest.raises(UserError, match=r"iteration_000007.parquet does not exist.*\(0 to 6 are\)"):
        list(replay(cfg, history.path, range(7, 8)))
