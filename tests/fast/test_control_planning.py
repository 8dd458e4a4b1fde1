"""Jobs are planned beside the loop: it goes on, their order is kept, and what goes wrong ends the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl_jax.control.dispatching import Arrangement, DispatchSettings, Ready, arrange
from streamrl_jax.control.events import EventKind
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.placing import Room
from streamrl_jax.control.planning import Planning
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.work import Work
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Fence, Prompt, Sampling
from tests.fakes import FakeEngine

from .control_world import SETTINGS, World, running
from .control_world import job as job_of

LPT = DispatchSettings("lpt")
READY = (Ready("a", 8, 0), Ready("b", 8, 0))
ARRANGE = "streamrl_jax.control.work.arrange"


def job(number: int, predicted: list[float] | None = None, **rest: Any) -> Job:
    prompts = [Prompt(str(row), np.asarray([1, row], np.int32), {}) for row in range(2)]
    return Job(f"train/{number}", prompts, 1, Sampling(1.0, 64, (0,)), number, 0, predicted=predicted, **rest)


class Scene:
    """Jobs on their way into a queue, from which nothing is handed out but what a test takes."""

    def __init__(self) -> None:
        rewards = RewardWorkers(lambda *_: RewardResult(0.0), lambda ids: "", 1.0, 1)
        self.work = Work(Fence("run", 0), rewards, HeldQueue(), 3, Intake(1000), lambda *_, **__: None, LPT)
        self.tasks: list[asyncio.Task[None]] = []
        self.pumped = 0
        self.ready: tuple[Ready, ...] = READY
        self.planning = Planning(self.work, lambda: self.ready, self._pump, self._spawn)

    def _pump(self) -> None:
        self.pumped += 1

    def _spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        self.tasks.append(asyncio.create_task(coroutine, name=name))

    def add(self, asked: Job) -> None:
        self.work.open(asked)
        self.planning.add(asked)

    def taken(self) -> list[str]:
        return [one.sample_id for _, one in self.work.take([Room("a", 9, 100, 0)])]


def held_up(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[Ready, ...]]) -> threading.Event:
    """Plans wait for the event."""
    go_on = threading.Event()

    def slow(asked: Job, how: DispatchSettings, ready: tuple[Ready, ...], *rest: Any) -> Arrangement:
        if asked.predicted is not None:
            seen.append(ready)
            assert go_on.wait(100)
        return arrange(asked, how, ready, *rest)

    monkeypatch.setattr(ARRANGE, slow)
    return go_on


async def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_the_loop_goes_on_and_no_job_overtakes_one_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes before everything, or is late already, does not wait; a plan is for whoever is there by then."""
    seen: list[tuple[Ready, ...]] = []
    go_on = held_up(monkeypatch, seen)

    async def scenario() -> None:
        scene = Scene()
        scene.add(job(3, [1.0, 9.0]))
        scene.add(job(4))
        scene.add(job(5, [7.0, 2.0]))
        await until(lambda: seen)
        scene.ready = READY[:1]
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert time.monotonic() - began < 30 and scene.taken() == [] and scene.pumped == 0
        scene.work.submit(replace(job(6, probe=True, priority=-9, pinned="a"), job_id="probe/6"))
        assert scene.taken() == ["probe/6/0/0", "probe/6/1/0"]
        go_on.set()
        await until(lambda: scene.pumped == 3)
        assert seen == [READY, READY[:1]]
        wanted = ["train/3/1/0", "train/3/0/0", "train/4/0/0", "train/4/1/0", "train/5/0/0", "train/5/1/0"]
        assert scene.taken() == wanted and scene.taken() == []
        await asyncio.gather(*scene.tasks)
        scene.work.ledger.check()
        scene.add(job(7, [5.0, 6.0]))  # once more from the start
        await until(lambda: scene.pumped == 4)
        assert scene.taken() == ["train/7/1/0", "train/7/0/0"]

    asyncio.run(scenario())


def test_what_needs_no_plan_is_queued_at_once() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.add(job(3))
        assert scene.taken() == ["train/3/0/0", "train/3/1/0"] and not scene.tasks

    asyncio.run(scenario())


def test_instances_answer_and_are_lost_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the plan counts on is lost before it is ready: the other answers all of it, each once."""
    seen: list[tuple[Ready, ...]] = []
    go_on = held_up(monkeypatch, seen)
    world = World(("a", "b"), engine=lambda name, life: FakeEngine(slots=2, start_s=3.0 * life))
    how = replace(SETTINGS, dispatch=DispatchSettings("paper"))
    with running(world, how) as run:
        run.controller.submit(job_of(0, count=4, n=4))
        run.controller.submit(job_of(1, count=4, n=4, min_version=0, predicted=[4.0, 1.0, 9.0, 2.0]))
        run.controller.submit(job_of(2, count=4, n=4, min_version=0))
        assert len(list(run.controller.samples("train/0", 60))) == 16, "the loop is not held up"
        run.wait_for(lambda: seen)
        world.now("b").kill()
        run.wait_for(lambda: run.seen(EventKind.LOST, "b"))
        go_on.set()
        for iteration in (1, 2):
            samples = list(run.controller.samples(f"train/{iteration}", 60))
            assert len({sample.sample_id for sample in samples}) == len(samples) == 16
        assert [told.in_lines for told in run.controller.dispatched()] == [False, True, False]
        assert [[one.name for one in ready] for ready in seen] == [["a", "b"]]


def test_a_plan_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Arrangement:
        raise ZeroDivisionError("in the plan")

    how = replace(SETTINGS, dispatch=LPT)
    with running(World(("a",)), how) as run:
        monkeypatch.setattr(ARRANGE, broken)
        run.controller.submit(job_of(0, count=2, predicted=[1.0, 2.0]))
        with pytest.raises(ZeroDivisionError, match="in the plan"):
            list(run.controller.samples("train/0", 60))
