"""Time in which a process was stopped itself: it is held against nobody, and no time beside it is forgiven."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from streamrl_jax.control.client import ControlClient, Peer
from streamrl_jax.control.core import TICK_S, ControllerCore
from streamrl_jax.control.faults import ControlError, RewardError
from streamrl_jax.control.plan import Step
from streamrl_jax.control.readers import Readers
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.usage import Meter
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import StaticLauncher
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import FinishReason, Generation, Prompt, VersionRun

from .control_world import FENCE, SETTINGS, decode, prompts

STEP = Step(0, "actor", "4 x 128", b"\x01" * 16)
ANSWER = Generation(
    "x", 0, np.asarray([5], np.int32), np.zeros(1, np.float32), (VersionRun(0, 1),), FinishReason.STOP, "a"
)


@dataclass
class Clock:
    """The time as a module is told it."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_nobody_is_blamed_for_the_time_in_which_the_controller_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("streamrl_jax.control.readers.time", clock)

    async def scene() -> None:
        readers = Readers(2, lease_s=10, plan_timeout_s=0.05)
        waiting = asyncio.create_task(readers.acknowledge(0, STEP))
        await asyncio.sleep(0)
        clock.now_s += 0.1
        readers.forgive(0.08)
        readers.check()
        clock.now_s += 0.1
        with pytest.raises(ControlError, match="trainer process 1 has not been at any step"):
            readers.check()
        waiting.cancel()

    asyncio.run(scene())


def test_a_controller_that_stands_still_now_and_then_misses_a_silent_process_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time is left out; the silence between them adds up."""
    clock = Clock()
    monkeypatch.setattr("streamrl_jax.control.readers.time", clock)
    readers = Readers(2, lease_s=10, plan_timeout_s=60)
    readers.beat(1)
    for _ in range(9):
        clock.now_s += 1.0 + 5.0
        readers.forgive(5.0)
        readers.check()
    clock.now_s += 1.5
    with pytest.raises(ControlError, match="trainer process 1 gave no sign of life for 10 s"):
        readers.check()


def test_a_beat_after_such_a_time_is_not_shifted_into_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("streamrl_jax.control.readers.time", clock)
    readers = Readers(2, lease_s=10, plan_timeout_s=60)
    clock.now_s += 60.0
    readers.beat(1)
    readers.forgive(60.0)
    clock.now_s += 10.5
    with pytest.raises(ControlError, match="trainer process 1 gave no sign of life"):
        readers.check()


def while_a_reward_hangs(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, judge: Callable[[RewardWorkers], None]
) -> None:
    """Judges a call that has begun by this clock, does not return, and may take 0.2 s."""
    monkeypatch.setattr("streamrl_jax.control.rewards.time", clock)
    entered, release = threading.Event(), threading.Event()

    def waits(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        entered.set()
        release.wait(60)
        return RewardResult(0.0)

    async def scene() -> None:
        rewards = RewardWorkers(waits, decode, 0.2, 1)
        rewards.start()
        rewards.attach()
        rewards.order(prompts(1)[0], ANSWER, lambda outcome: None)
        assert entered.wait(60)
        judge(rewards)
        release.set()
        rewards.close(60)

    asyncio.run(scene())


def test_a_reward_is_not_blamed_for_that_time_either(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def judge(rewards: RewardWorkers) -> None:
        clock.now_s += 0.3
        rewards.forgive(0.3)
        rewards.check()
        clock.now_s += 0.3
        with pytest.raises(RewardError, match="did not return within"):
            rewards.check()

    while_a_reward_hangs(clock, monkeypatch, judge)


def test_a_reward_that_begins_after_such_a_time_has_its_bound_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workers may be awake before the loop is."""
    clock = Clock(60.0)

    def judge(rewards: RewardWorkers) -> None:
        rewards.forgive(60.0)
        clock.now_s += 0.3
        with pytest.raises(RewardError, match="did not return within"):
            rewards.check()

    while_a_reward_hangs(clock, monkeypatch, judge)


@dataclass
class Stumbling(Clock):
    """Whoever looks at it was stopped for five seconds since the last time."""

    looks: int = 0

    def monotonic(self) -> float:
        self.looks += 1
        self.now_s += 5.0
        return self.now_s


def test_a_trainer_that_stands_still_again_and_again_misses_its_controller_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each time only the tick between is the controller's silence."""
    clock = Stumbling()
    monkeypatch.setattr("streamrl_jax.control.client.time", clock)
    lost: list[BaseException] = []

    async def scene() -> None:
        peer = Peer("127.0.0.1:1", net.OPEN, FENCE, lease_s=6.0)
        client = ControlClient(peer, lambda event: None, lost.append, lost.append, Meter())
        await asyncio.wait_for(client._watch(), 60)
        await client.end()

    asyncio.run(scene())
    (error,) = lost
    assert "the controller gave no sign of life for" in str(error)
    assert clock.looks > 4, "five seconds before it began to watch, and the last one of the lease in ticks"


@dataclass
class Judge:
    """Notes what the controller's tick asks of its readers, or of its rewards; the third look is the last."""

    asked: list[str] = field(default_factory=list)

    def forgive(self, seconds: float) -> None:
        self.asked.append(f"forgive {seconds:g}")

    def check(self) -> None:
        self.asked.append("check")
        if self.asked.count("check") == 3:
            raise ControlError("enough")


def test_the_controller_looks_at_every_tick_and_leaves_out_by_how_much_it_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers, rewards = Judge(), Judge()
    monkeypatch.setattr("streamrl_jax.control.core.time", Stumbling())

    async def scene() -> None:
        core = ControllerCore(SETTINGS, FENCE, StaticLauncher({}), cast(Any, rewards), lambda event: None)
        core.readers = cast(Any, readers)
        with pytest.raises(ControlError, match="enough"):
            await asyncio.wait_for(core._tick(), 60)

    asyncio.run(scene())
    late = 5.0 - TICK_S
    assert rewards.asked == [f"forgive {late:g}", "check"] * 3
    assert readers.asked[:4] == [f"forgive {late:g}", "check"] * 2
