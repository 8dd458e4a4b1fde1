"""Dynamic sampling from the generation side: what takes the place of groups that teach nothing is known beforehand.

Real services, streams and controller; the engines count. Whether a group teaches depends on its prompt alone, and the
trainer's part (to see that a group's scores are equal) is a few lines here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.config import Config
from streamrl_jax.control.events import EventKind
from streamrl_jax.control.faults import ControlError
from streamrl_jax.data import Order, PromptSet
from streamrl_jax.gen.protocol import Delta
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.rewards import RewardResult
from streamrl_jax.trace import Trace
from streamrl_jax.train.rollouts import Rollouts
from streamrl_jax.types import NO_VERSION, Assignment, Fence, Generation, Prompt, Sample, expand_runs
from tests.fakes import FakeEngine

from .control_world import FENCE, SAMPLING, SETTINGS, Run, World, job, manifest, running, source

BATCH, N = 4, 3


def prompt_set(count: int = 60, seed: int | None = 3) -> PromptSet:
    prompts = tuple(Prompt(str(row), np.array([1, row], np.int32), {}) for row in range(count))
    return PromptSet("numbers", prompts, Order(count, seed), BATCH)


def every_third(prompt: Prompt) -> bool:
    return int(prompt.token_ids[1]) % 3 == 0


def rewards(teaches: Callable[[Prompt], bool]) -> Callable[[Prompt, str, Generation], RewardResult]:
    def reward(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        index = int(answer.sample_id.rpartition("/")[2])
        return RewardResult(float(index % 2) if teaches(prompt) else 1.0)

    return reward


@contextmanager
def door(
    run: Run, folder: Path, prompts: PromptSet, *, batches: int = 10, staleness: int = 0, start: int = 0
) -> Iterator[Rollouts]:
    cfg = Config.model_validate(
        {
            "data": {"train_batch_size": BATCH},
            "rollout": {"n": N},
            "algorithm": {
                "adv_estimator": "grpo",
                "filter_groups": {"enable": True, "max_num_gen_batches": batches},
            },
            "trainer": {"max_staleness": staleness, "sample_timeout_s": 60.0},
        }
    )
    with Trace(folder / "trace.json") as trace:
        yield Rollouts(cfg, run.controller, prompts, SAMPLING, trace, StopSignal(), start)


def consume(
    found: Rollouts, iteration: int, at: Mapping[int, Callable[[], object]] | None = None
) -> list[Sample]:
    """What the loop does with an iteration; ``at`` happens at so many samples."""
    taken: list[Sample] = []
    scores: dict[str, list[float]] = defaultdict(list)
    for sample in found.samples(iteration):
        taken.append(sample)
        if at and (do := at.get(len(taken))):
            do()
        group = scores[sample.prompt.prompt_id]
        group.append(sample.reward)
        found.replace(iteration, int(len(group) == N and len(set(group)) == 1))
    return taken


def expected(
    prompts: PromptSet, iteration: int, teaches: Callable[[Prompt], bool], bound: int = 10
) -> list[str]:
    """By hand: one further prompt after the other, until enough groups teach. Groups' names."""
    asked = {f"train/{iteration}/{p.prompt_id}": teaches(p) for p in prompts.iteration(iteration)}
    further = enumerate(prompts.further(iteration))
    while sum(asked.values()) < BATCH and len(asked) < bound * BATCH:
        if (one := next(further, None)) is None:
            break
        asked[f"train/{iteration}+{one[0]}/{one[1].prompt_id}"] = teaches(one[1])
    return sorted(asked)


def check(samples: list[Sample], groups: list[str], run: Run) -> None:
    """Each sample of these groups was consumed once, and no prompt came twice."""
    ids = Counter(sample.sample_id for sample in samples)
    assert sorted(ids) == sorted(f"{group}/{index}" for group in groups for index in range(N))
    assert set(ids.values()) == {1}
    assert max(Counter((sample.iteration, sample.prompt.prompt_id) for sample in samples).values()) == N
    run.wait_for(lambda: not any(run.controller.sizes().values()))
    run.controller.close()
    counts = run.controller.counters()
    assert counts["delivered"] == counts["finished"] == len(samples)


@pytest.mark.parametrize("instances", [1, 3])
def test_groups_are_replaced_until_enough_of_them_teach(tmp_path: Path, instances: int) -> None:
    prompts, world = prompt_set(), World(tuple("abc"[:instances]))
    groups = expected(prompts, 0, every_third)
    assert len(groups) > 2 * BATCH, "replacements were replaced"
    with running(world, SETTINGS, reward=rewards(every_third)) as run, door(run, tmp_path, prompts) as found:
        found.open(version=0)
        samples = consume(found, 0)
        assert found.replaced(0) == len(groups) - BATCH and found.replaced(1) == 0
        check(samples, groups, run)
    assert all(sample.iteration == 0 for sample in samples)


def test_where_every_group_teaches_nothing_is_asked(tmp_path: Path) -> None:
    prompts = prompt_set()
    with (
        running(World(("a",)), SETTINGS, reward=rewards(lambda prompt: True)) as run,
        door(run, tmp_path, prompts) as found,
    ):
        found.open(version=0)
        samples = consume(found, 0)
        assert found.replaced(0) == 0
        check(samples, expected(prompts, 0, lambda prompt: True), run)


class Holding(FakeEngine):
    """Begins a replacement, and never ends one."""

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        async for delta in super().generate(assignment):
            if "+" in assignment.sample_id:
                await asyncio.Event().wait()
            yield delta


def test_an_instance_that_dies_while_replacements_run_loses_none(tmp_path: Path) -> None:
    """Both do, one after the other."""
    prompts = prompt_set()
    world = World(("a", "b"), lambda name, life: FakeEngine() if life else Holding(slots=16))
    with running(world, SETTINGS, reward=rewards(every_third)) as run, door(run, tmp_path, prompts) as found:

        def kill_both() -> None:
            def at_work(name: str) -> int:
                return world.now(name).engine._running  # pyright: ignore[reportPrivateUsage]

            run.wait_for(lambda: any(map(at_work, world.names)))
            one, other = sorted(world.names, key=at_work, reverse=True)
            world.now(one).kill()
            run.wait_for(lambda: len(run.seen(EventKind.UPDATED, one)) == 2)
            world.now(other).kill()

        found.open(version=0)
        samples = consume(found, 0, {BATCH * N: kill_both})
        assert run.controller.counters()["redispatched"] > 0
        check(samples, expected(prompts, 0, every_third), run)


def test_a_resumed_iteration_asks_the_same_prompts(tmp_path: Path) -> None:
    """Ended in the middle, begun anew in another life, with other instances at another speed."""
    prompts, iteration = prompt_set(), 5
    groups = expected(prompts, iteration, every_third)
    with (
        running(World(("a",)), SETTINGS, reward=rewards(every_third), version=5) as run,
        door(run, tmp_path, prompts, start=iteration) as found,
    ):
        found.open(version=5)
        samples = found.samples(iteration)
        begun = {next(samples).sample_id for _ in range(5)}
        found.replace(iteration, 2)
        begun |= {next(samples).sample_id for _ in range(BATCH * N)}
    assert begun <= {f"{group}/{index}" for group in groups for index in range(N)}
    assert any("+1/" in sample_id for sample_id in begun)
    world = World(("a", "b"), engine=lambda name, life: FakeEngine(slots=1 + len(name), tokens_per_s=5000))
    later = Fence(FENCE.run_id, 1)
    with (
        running(world, SETTINGS, reward=rewards(every_third), version=NO_VERSION, fence=later) as run,
        door(run, tmp_path, prompt_set(), start=iteration) as found,
    ):
        run.controller.publish(manifest(5, later), source(5))
        found.open(version=5)
        check(consume(found, iteration), groups, run)


@pytest.mark.parametrize(
    ("batches", "count", "why"),
    [
        (1, 60, "max_num_gen_batches = 1 allows no more prompts"),
        (3, 60, "max_num_gen_batches = 3 allows no more prompts"),
        (10, 7, "the prompt set has no other prompts"),
    ],
)
def test_past_the_bound_the_iteration_goes_on_with_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batches: int, count: int, why: str
) -> None:
    prompts = prompt_set(count)
    only = prompts.iteration(0)[1].prompt_id  # the one group that teaches
    groups = expected(prompts, 0, lambda prompt: prompt.prompt_id == only, batches)
    assert len(groups) == min(batches * BATCH, count)
    with (
        caplog.at_level(logging.WARNING, "streamrl_jax.train.rollouts"),
        running(World(("a", "b")), SETTINGS, reward=rewards(lambda prompt: prompt.prompt_id == only)) as run,
        door(run, tmp_path, prompts, batches=batches) as found,
    ):
        found.open(version=0)
        check(consume(found, 0), groups, run)
    (told,) = caplog.messages
    left_out = len(groups) - 1
    assert f"iteration 0: {left_out} of {len(groups)} groups were left out" in told and why in told
    assert (
        told.endswith("3 of them were not replaced (" + told.split("(")[1]) and "with 1 of 4 groups" in told
    )


def test_replacements_are_as_new_as_their_iteration_and_go_before_the_next(tmp_path: Path) -> None:
    """Two steps stale: three iterations are queued; what is added to the first is not served after the last."""
    prompts = prompt_set()
    slow = World(("a",), lambda name, life: FakeEngine(slots=1, tokens_per_s=200))
    taken: list[str] = []

    def reward(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        taken.append(answer.sample_id)
        return rewards(every_third)(prompt, text, answer)

    with (
        running(slow, SETTINGS, reward=reward, version=7) as run,
        door(run, tmp_path, prompts, staleness=2, start=7) as found,
    ):
        found.open(version=7)
        samples = consume(found, 7)
        assert not [one for one in taken[: len(samples)] if one.startswith("train/9")]
        groups = [group for i in (7, 8, 9) for group in expected(prompts, i, every_third)]
        for i in (8, 9):
            samples += consume(found, i)
        check(samples, groups, run)
    assert min(expand_runs(sample.generation.versions).min() for sample in samples) >= 7


def test_what_is_added_to_a_job_that_is_over_is_refused(tmp_path: Path) -> None:
    with running(World(("a",)), SETTINGS) as run:
        run.controller.submit(job(0, count=1, n=1))
        assert len(list(run.controller.samples("train/0", 60))) == 1
        with pytest.raises(
            ControlError, match="job train/0 was not submitted, or all its samples were taken"
        ):
            run.controller.submit(job(1, count=1, n=1), into="train/0")
