"""Admission: which iteration may be generated when, and with which versions (DESIGN rule 5)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import Job
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.trace import Trace
from streamrl_jax.train.rollouts import Rollouts, arriving, newest_admitted, training_sampling
from streamrl_jax.types import Prompt, Sampling

SAMPLING = Sampling(1.0, 8, (1,))


@dataclass
class Recorded:
    """Stands where the controller does, and keeps what it is given; its samples never come."""

    jobs: list[Job] = field(default_factory=list)

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def samples(self, job_id: str, timeout_s: float) -> Iterator[object]:
        threading.Event().wait(timeout_s)
        yield from ()


class Prompts:
    """Iteration i holds prompt i."""

    def iteration(self, number: int) -> tuple[Prompt, ...]:
        return (Prompt(str(number), np.ones(1, np.int32), {}),)

    def further(self, number: int) -> Iterator[Prompt]:
        yield from ()


def rollouts(trace: Trace, staleness: int, total: int, start: int) -> tuple[Rollouts, Recorded]:
    cfg = Config.model_validate({"trainer": {"max_staleness": staleness, "total_training_steps": total}})
    controller, prompts = Recorded(), Prompts()
    door = Rollouts(cfg, cast(Any, controller), cast(Any, prompts), SAMPLING, trace, StopSignal(), start)
    return door, controller


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 3])
def test_each_iteration_is_opened_once_and_never_too_early(
    tmp_path: Path, staleness: int, start: int
) -> None:
    """Iteration i is consumed at version i: opened at version v, its tokens are i - v behind at most."""
    total = 6
    opened_at: dict[int, int] = {}
    with Trace(tmp_path / "trace.json") as trace:
        door, controller = rollouts(trace, staleness, total, start)
        for version in range(start, total + 1):
            door.open(version)
            for job in controller.jobs:
                opened_at.setdefault(job.iteration, version)
            assert list(door.open_iterations) == list(range(min(version + staleness, total - 1) + 1))
    assert [job.iteration for job in controller.jobs] == list(range(start, total)), "each once, in order"
    for job in controller.jobs:
        assert job.job_id == f"train/{job.iteration}" and job.n == 8
        assert job.min_version == max(0, job.iteration - staleness)
        assert job.iteration - opened_at[job.iteration] <= staleness
        assert [prompt.prompt_id for prompt in job.prompts] == [str(job.iteration)]
        assert job.priority == job.iteration, "the older iteration first"


def test_the_newest_admitted_iteration() -> None:
    assert [newest_admitted(version, 0, 4) for version in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [newest_admitted(version, 1, 4) for version in range(6)] == [1, 2, 3, 3, 3, 3]
    assert [newest_admitted(version, 3, 6) for version in range(6)] == [3, 4, 5, 5, 5, 5]


def test_training_samples_from_the_policy_itself() -> None:
    """Nothing but temperature, length, stop ids and seed (rule 4)."""
    cfg = Config.model_validate(
        {"run": {"seed": 7}, "rollout": {"temperature": 0.6}, "data": {"max_response_length": 9}}
    )
    assert training_sampling(cfg, (2, 5)) == Sampling(0.6, 9, (2, 5), seed=7)


def test_a_signal_ends_the_wait_for_a_sample() -> None:
    controller = Recorded()
    with StopSignal().listening() as stop:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(StopRequested, match="SIGUSR1"):
            list(arriving(cast(Any, controller), "train/0", 20.0, stop))
        timer.join()
