"""The whole main job under faults: its trainer killed, its disks full; what it consumed is what it asked for, once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl_jax.samples_log import read_samples, recorded_iterations
from tests.fast.job_world import (
    ANSWERS,
    PROMPTS,
    SAMPLES,
    child_environment,
    left_behind,
    training_lines,
    wait_until,
    write_config,
    write_world,
)

STEPS = 3
FULL_BYTES = 4096  # of the disk that is as good as full


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def config(world: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Two instances, a short lease, partial answers; a sample's reward takes 30 ms, so that an iteration lasts."""
    path = write_config(
        world,
        run={"name": name},
        gen={"instances": 2, "lease_s": 5.0, "progress_interval_s": 0.05},
        reward=changes.get("reward", {"kwargs": {"delay_s": 0.03}}),
        trainer={"total_training_steps": STEPS, "save_freq": 1, "test_freq": 0, **changes.get("trainer", {})},
        eval={"max_prompts": 2, "n": 1},
    )
    return path.rename(world / f"{name}.toml")


class Life:
    """One process of the main job, with its output in a file."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        run_dir.parent.mkdir(exist_ok=True)
        self.output = run_dir.with_suffix(".log")
        command = [sys.executable, "-m", "streamrl_jax", "train", *arguments]
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(command, env=child_environment(), stdout=log, stderr=log)

    def until(self, what: Callable[[], object]) -> None:
        """Waits; an end before that is an error."""
        wait_until(lambda: what() or self.process.poll() is not None, 400)
        assert self.process.poll() is None, self.output.read_text()[-3000:]

    def end(self) -> str:
        """Waits for its end; what it said. The exit code is in ``process``."""
        self.process.wait(400)
        return self.output.read_text()


def alive(run_dir: Path) -> set[int]:
    """Processes of the instances, those of killed lives left out."""
    found: set[int] = set()
    for path in run_dir.glob("instances/*.address"):
        with contextlib.suppress(FileNotFoundError):  # a launcher of the next life removes what it finds
            found.add(json.loads(path.read_text())["pid"])
    return {pid for pid in found if psutil.pid_exists(pid)}


def check_consumed(run_dir: Path) -> None:
    """Rule 1 in the records: of each iteration each answer to each prompt, once."""
    assert recorded_iterations(run_dir / "samples") == list(range(STEPS))
    for iteration in range(STEPS):
        samples = read_samples(run_dir, iteration)
        ids = Counter(sample.sample_id for sample in samples)
        assert len(samples) == len(ids) == SAMPLES
        groups = Counter(sample.sample_id.rpartition("/")[0] for sample in samples)
        assert set(groups.values()) == {ANSWERS} and len(groups) == PROMPTS
        assert {sample.sample_id.rpartition("/")[2] for sample in samples} == set(map(str, range(ANSWERS)))
    assert [line.step for line in training_lines(run_dir)] == list(range(1, STEPS + 1))


def test_a_killed_trainer_and_a_killed_instance(world: Path) -> None:
    """kill -9 of the trainer in mid-step, then, in its next life, of an instance in mid-step."""
    run_dir = world / "runs" / "killed"
    first = Life(run_dir, str(config(world, "killed")))
    first.until(lambda: training_lines(run_dir))
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(60)
    wait_until(lambda: not [entry for entry in left_behind(run_dir) if "/dev/shm" not in entry], 300)
    done = len(training_lines(run_dir))
    second = Life(run_dir, "--resume", str(run_dir))
    before = alive(run_dir)
    second.until(lambda: alive(run_dir) - before and len(training_lines(run_dir)) >= done)
    os.kill(min(alive(run_dir)), signal.SIGKILL)
    said = second.end()
    assert second.process.returncode == 0, said[-3000:]
    warned = [line for line in said.splitlines() if "WARNING" in line and "was left half done" not in line]
    assert warned == [], "a run that ends in order warns of nothing but what the killed one left"
    check_consumed(run_dir)
    assert left_behind(run_dir) == []


@contextmanager
def full_disk(folder: Path, process: subprocess.Popen[bytes], gate: Path) -> Iterator[None]:
    """A disk with next to no room in the place of a folder, until the process has ended; the rewards wait for it.

    Where nothing may be mounted, no file of the process grows any more, as under a quota.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    gate.touch()
    try:
        process.wait(400)
        yield
    finally:
        process.kill()
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("folder", ["samples", "checkpoints"])
def test_a_full_disk_ends_the_run_with_file_and_remedy_and_it_can_be_resumed(
    world: Path, folder: str
) -> None:
    run_dir = world / "runs" / f"full-{folder}"
    gate = world / f"{folder}.open"
    reward = {
        "function": f"{world / 'functions.py'}:gated",
        "kwargs": {"gate": str(gate)},
        "timeout_s": 600.0,  # of the reward that waits until the disk is full
    }
    life = Life(run_dir, str(config(world, run_dir.name, reward=reward)))
    life.until((run_dir / folder).exists)
    with full_disk(run_dir / folder, life.process, gate):
        said = life.end()
    assert life.process.returncode == 2, said[-3000:]
    # Orbax's own threads print what they met, too.
    end = re.search(
        rf"error: ({run_dir}/{folder}/\w+.* could not be written|.*no room for the weights)[^\n]*", said
    )
    assert end is not None, said[-3000:]
    assert re.search(r"Free some|Enlarge", end[0])
    again = Life(run_dir, "--resume", str(run_dir))
    said = again.end()
    assert again.process.returncode == 0, said[-3000:]
    check_consumed(run_dir)
