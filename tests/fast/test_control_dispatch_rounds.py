"""Dispatch over real gRPC: what a long-tailed job takes in rounds, by the policy, and that nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control.dispatching import DispatchSettings
from streamrl_jax.control.events import EventKind
from streamrl_jax.control.jobs import Job, members
from streamrl_jax.gen.protocol import Delta
from streamrl_jax.types import Assignment, Prompt, Sampling, Timings
from tests.fakes import FakeEngine

from .control_world import FACADE, FACADES, SETTINGS, Run, World, running
from .test_control_elastic import add, drain

SHORT, LONG = 8, 60
LENGTHS = [SHORT] * 48 + [LONG] * 2
"""In the order of arrival the long ones come last."""


@dataclass
class Clock:
    """Lets every running answer of all instances write one token a round.

    A round begins when the controller has heard of all that was finished in the one before, and what it has given out
    since is here: a slow machine makes rounds long, and next to none more.
    """

    rounds: int = 0
    asked: int = 0  # answers, in all
    finished: int = 0
    ready: int = 0  # answers that wait for the next round, and those that are in the present one
    writing: int = 0
    _next: asyncio.Event = field(default_factory=asyncio.Event)

    async def tick(self) -> None:
        """The next round."""
        self.ready += 1
        await self._next.wait()

    def run_until(self, run: Run, finished: int) -> None:
        """Begins one round after the other until so many answers are finished."""
        while self.finished < finished:
            run.wait_for(lambda: self._settled(run))
            run.world.call(self._round())

    def _settled(self, run: Run) -> bool:
        """Whether the controller has heard of all that is finished, and whatever it gave in its place is here."""
        counts = run.controller.counters()
        return self.ready > 0 and (counts["dispatched"], counts["finished"]) == (self.asked, self.finished)

    async def _round(self) -> None:
        self.rounds += 1
        self.writing, self.ready = self.ready, 0
        self._next.set()
        self._next = asyncio.Event()
        while self.writing:
            await asyncio.sleep(0)


@dataclass
class TickingEngine(FakeEngine):
    """Answers as `FakeEngine` does, a token a round of the clock; a prompt's last id is its answer's length."""

    clock: Clock = field(default_factory=Clock)

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        total = assignment.sampling.forced_length or int(assignment.prompt_ids[-1])
        self.clock.asked += 1
        await self._take_slot(assignment)
        try:
            for index in range(total):
                await self.clock.tick()
                yield self._delta(assignment, index, index + 1 == total, full=False, timings=Timings())
                self.clock.writing -= 1
            self.clock.finished += 1
        finally:
            self._free_slot()


def long_tailed(predicted: list[float] | None, number: int, policy: Policy | None = None) -> Job:
    rows = [
        Prompt(str(row), np.asarray([1, row, tokens], np.int32), {}) for row, tokens in enumerate(LENGTHS)
    ]
    sampling = Sampling(1.0, 64, (0,), seed=1)
    return Job(f"train/{number}", rows, 1, sampling, number, 0, number, predicted=predicted, policy=policy)


@pytest.mark.parametrize("face", FACADES)
def test_a_long_tail_takes_fewer_rounds_when_it_is_foreseen(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances of four slots: in the order of arrival the two long answers begin when all others are done."""
    monkeypatch.setitem(FACADE, "now", face)
    clock = Clock()
    world = World(("a", "b"), engine=lambda name, life: TickingEngine(clock=clock))
    foreseen = [float(tokens) for tokens in LENGTHS]
    rounds: dict[str, int] = {}
    with running(world, replace(SETTINGS, dispatch=DispatchSettings("lpt"))) as run:
        asked: list[tuple[str, list[float] | None, Policy | None]] = [
            ("nothing foreseen", None, None), ("arrival", foreseen, "arrival"), ("lpt", foreseen, None),
            ("paper", foreseen, "paper"), ("skewness", foreseen, "skewness"),
        ]  # fmt: skip
        for number, (name, predicted, policy) in enumerate(asked):
            job, before = long_tailed(predicted, number, policy), clock.rounds
            run.controller.submit(job)
            clock.run_until(run, (number + 1) * len(LENGTHS))
            rounds[name] = clock.rounds - before
            samples = list(run.controller.samples(job.job_id, 60))
            assert sorted(len(sample.generation.token_ids) for sample in samples) == sorted(LENGTHS)
        told = {one.job_id: one for one in run.controller.dispatched()}
    assert [told[f"train/{number}"].policy for number in range(5)] == [
        "arrival",
        "arrival",
        *list(rounds)[2:],
    ]
    assert told["train/3"].in_lines and not told["train/4"].in_lines, (
        "a step's cost is not known: nothing to gain"
    )
    best = max(LONG, sum(LENGTHS) / 8)
    print(f"{face}: {rounds}, at least {best:g}")
    for name in ("lpt", "paper", "skewness"):
        assert best <= rounds[name] < 0.8 * min(rounds["arrival"], rounds["nothing foreseen"])


def test_instances_join_and_leave_in_the_middle_of_a_plan() -> None:
    """One of two is drained, a third comes: the line of the first goes to the others, and every sample comes once."""
    clock = Clock()
    world = World(("a", "b"), engine=lambda name, life: TickingEngine(clock=clock))
    foreseen = [float(tokens) for tokens in LENGTHS]
    with running(world, replace(SETTINGS, dispatch=DispatchSettings("paper"))) as run:
        job = long_tailed(foreseen, 0)
        run.controller.submit(job)
        clock.run_until(run, 1)
        source = run.controller.samples(job.job_id, 60)
        first = next(source)
        add(run, "new")
        gone = first.generation.instance
        drain(run, gone)
        run.wait_for(lambda: run.seen(EventKind.UPDATED, "new"))
        clock.run_until(run, len(LENGTHS))
        samples = [first, *source]
        assert sorted(sample.sample_id for sample in samples) == sorted(one.sample_id for one in members(job))
        run.wait_for(lambda: run.seen(EventKind.GONE, gone))
        (told,) = run.controller.dispatched()
        assert told.in_lines and told.steals > 0
        assert {sample.generation.instance for sample in samples} >= {"a", "b", "new"}
