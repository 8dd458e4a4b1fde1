"""Staleness of any bound: what is consumed is never older, generation that is quick runs as far ahead as it may, and
nothing is dropped for its age (DESIGN rule 5).

Real services, streams and controller; the engines count, at speeds that are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import Job
from streamrl_jax.data import Order, PromptSet
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.trace import Trace
from streamrl_jax.train.rollouts import Rollouts
from streamrl_jax.types import NO_VERSION, Fence, Prompt, Sample, expand_runs
from tests.fakes import FakeEngine

from .control_world import FENCE, SAMPLING, SETTINGS, Run, World, manifest, running, source

BATCH, N, TOTAL = 3, 2, 7


def prompt_set() -> PromptSet:
    prompts = tuple(Prompt(str(row), np.array([1, row], np.int32), {}) for row in range(40))
    return PromptSet("numbers", prompts, Order(40, seed=9), BATCH)


@contextmanager
def door(run: Run, folder: Path, staleness: int, start: int = 0, total: int = TOTAL) -> Iterator[Rollouts]:
    cfg = Config.model_validate(
        {
            "data": {"train_batch_size": BATCH},
            "rollout": {"n": N},
            "trainer": {
                "max_staleness": staleness,
                "total_training_steps": total,
                "sample_timeout_s": 60.0,
            },
        }
    )
    with Trace(folder / "trace.json") as trace:
        yield Rollouts(cfg, run.controller, prompt_set(), SAMPLING, trace, StopSignal(), start)


def lags(samples: list[Sample], version: int) -> np.ndarray:
    return version - np.concatenate([expand_runs(sample.generation.versions) for sample in samples])


def wanted(iteration: int) -> list[str]:
    prompts = prompt_set().iteration(iteration)
    return sorted(f"train/{iteration}/{p.prompt_id}/{k}" for p in prompts for k in range(N))


def check_nothing_is_lost(run: Run, delivered: int) -> None:
    run.wait_for(lambda: not any(run.controller.sizes().values()))
    run.controller.close()
    counts = dict(run.controller.counters())
    expected = dict.fromkeys(("opened", "dispatched", "finished", "delivered"), delivered)
    assert {name: count for name, count in counts.items() if count} == expected


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    staleness=st.integers(0, 4),
    speeds=st.lists(st.sampled_from([200.0, 1000.0, 5000.0]), min_size=1, max_size=2),
    update_s=st.sampled_from([0.0, 0.02]),
    in_flight=st.booleans(),
    training_s=st.lists(st.sampled_from([0.0, 0.01, 0.03]), min_size=TOTAL, max_size=TOTAL),
)
def test_no_consumed_token_is_older_than_the_bound(
    tmp_path: Path,
    staleness: int,
    speeds: list[float],
    update_s: float,
    in_flight: bool,
    training_s: list[float],
) -> None:
    pace = {name: speed for name, speed in zip("ab", speeds, strict=False)}
    world = World(
        tuple(pace), engine=lambda name, life: FakeEngine(tokens_per_s=pace[name], update_s=update_s)
    )
    control = replace(SETTINGS, in_flight=in_flight)
    with running(world, control) as run, door(run, tmp_path, staleness) as found:
        found.open(version=0)
        for iteration in range(TOTAL):
            samples = list(found.samples(iteration))
            assert sorted(sample.sample_id for sample in samples) == wanted(iteration)
            behind = lags(samples, iteration)
            assert behind.min() >= 0 and behind.max() <= staleness
            time.sleep(training_s[iteration])
            run.publish(iteration + 1)
            found.open(version=iteration + 1)
        check_nothing_is_lost(run, TOTAL * BATCH * N)


@pytest.mark.parametrize("staleness", range(5))
def test_generation_that_is_quick_runs_ahead_as_far_as_it_may(tmp_path: Path, staleness: int) -> None:
    """Whatever is admitted is finished before the trainer goes on: then each token is as old as the bound allows."""
    with running(World(("a", "b")), SETTINGS) as run, door(run, tmp_path, staleness) as found:
        found.open(version=0)
        for iteration in range(TOTAL):
            opened = len(found.open_iterations)
            assert opened == min(iteration + staleness + 1, TOTAL)
            run.wait_for(lambda opened=opened: run.controller.counters()["finished"] == opened * BATCH * N)
            assert set(lags(list(found.samples(iteration)), iteration)) == {min(iteration, staleness)}
            run.publish(iteration + 1).result(60)
            found.open(version=iteration + 1)
        check_nothing_is_lost(run, TOTAL * BATCH * N)


def test_generation_that_is_slow_serves_the_older_iteration_first(tmp_path: Path) -> None:
    """What the trainer waits for is not behind what it will want later."""
    world = World(("a",), engine=lambda name, life: FakeEngine(slots=1))
    with running(world, SETTINGS) as run, door(run, tmp_path, staleness=3, total=4) as found:
        found.open(version=0)
        list(found.samples(3))
        started = [line.split("/")[1] for line in world.now("a").engine.log if line.startswith("start")]
    assert started == sorted(started) and set(started) == set("0123")


def test_a_resumed_run_opens_the_same_iterations_with_newer_versions(tmp_path: Path) -> None:
    """Ended at version 2 with iterations 2 to 5 open; they are asked anew, in another life, of version 2 and later."""
    jobs: list[Job] = []
    with running(World(("a",)), SETTINGS, version=2) as run, door(run, tmp_path, 3, start=2) as found:
        submit = run.controller.submit
        run.controller.submit = lambda job, into="": (jobs.append(job), submit(job, into))[1]
        found.open(version=2)
        next(found.samples(2))
    later = Fence(FENCE.run_id, 1)
    with (
        running(World(("a", "b")), SETTINGS, version=NO_VERSION, fence=later) as run,
        door(run, tmp_path, 3, start=2) as found,
    ):
        run.controller.publish(manifest(2, later), source(2))
        found.open(version=2)
        assert list(found.open_iterations)[2:] == [job.iteration for job in jobs] == [2, 3, 4, 5]
        for iteration in range(2, TOTAL):
            samples = list(found.samples(iteration))
            assert sorted(sample.sample_id for sample in samples) == wanted(iteration)
            versions = iteration - lags(samples, iteration)
            assert versions.min() >= max(2, iteration - 3) and versions.max() <= iteration
            run.controller.publish(manifest(iteration + 1, later), source(iteration + 1))
            found.open(version=iteration + 1)
        check_nothing_is_lost(run, (TOTAL - 2) * BATCH * N)
    asked = {f"{job.job_id}/{prompt.prompt_id}" for job in jobs for prompt in job.prompts}
    assert asked == {name.rpartition("/")[0] for i in range(2, 6) for name in wanted(i)}
