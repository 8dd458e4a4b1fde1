"""Instances, streams and rewards fail: every sample still arrives once, or the run says why not."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.faults import ControlError, RewardError
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.client import InstanceClient
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Fence, Generation, Prompt, Sample, expand_runs
from tests.fakes import FakeEngine
from tests.fast.control_world import (
    FENCE,
    HASTY,
    SETTINGS,
    HeldEngine,
    LoadingEngine,
    Run,
    World,
    check_answer,
    decode,
    job,
    manifest,
    prompts,
    reward_by_length,
    running,
    source,
)

BUSY_S = 20.0  # on top of a bound, for a machine that does other things too


def slow(name: str, life: int) -> FakeEngine:
    """Answers take 60 ms: enough to be hit in the middle of them."""
    return FakeEngine(slots=8, tokens_per_s=200, length=lambda a: 12)


STOP_AFTER = 100
"""Tokens: some answers are finished then, and others begun."""


def stopping(**lives: int) -> Callable[[str, int], FakeEngine]:
    """As `slow`, but so many lives of an instance hang by themselves."""

    def engine(name: str, life: int) -> FakeEngine:
        hang_at = STOP_AFTER if life < lives.get(name, 0) else 0
        return FakeEngine(slots=8, tokens_per_s=200, length=lambda a: 12, hang_at=hang_at)

    return engine


def wait_until_stopped(run: Run, name: str, life: int = 0) -> None:
    lives = run.world.lives[name]
    run.wait_for(lambda: len(lives) > life and lives[life].engine.tokens_total == STOP_AFTER)


def take_all(
    run: Run, job_id: str, disturb_at: Mapping[int, Callable[[], object]] | None = None
) -> list[Sample]:
    """Takes a job's samples, disturbs after so many of them, checks that each came once, and right."""
    samples: list[Sample] = []
    for sample in run.controller.samples(job_id, 60):
        samples.append(sample)
        if disturb_at and (disturb := disturb_at.get(len(samples))):
            disturb()
    assert max(Counter(s.sample_id for s in samples).values()) == 1
    for sample in samples:
        check_answer(sample.prompt, sample.generation)
    return samples


def test_killed_instance() -> None:
    """kill -9 in mid-batch: it is restarted with the current version, what it held gets attempt 1."""
    world = World(("a", "b"), stopping(a=1))
    with running(world) as run:
        run.controller.submit(job(0, count=25, n=4))
        wait_until_stopped(run, "a")
        world.now("a").kill()
        samples = take_all(run, "train/0")
        assert len(samples) == 100
        run.wait_for(lambda: len(run.seen(EventKind.READY, "a")) == 2)
        attempts = Counter(s.generation.attempt for s in samples)
        counts = run.controller.counters()
        assert attempts[1] == counts["redispatched"] > 0
        assert counts["dispatched"] == 100 + counts["redispatched"]
        assert counts["restarts"] == 1
        assert [e.text for e in run.seen(EventKind.LOST)] == ["its process ended (exit code -9)"]
        assert run.seen(EventKind.REDISPATCH, "a")[0].count == counts["redispatched"]
        run.wait_for(lambda: [view.version for view in run.controller.pool()] == [0, 0])
        log = world.now("a").engine.log
        assert next(line for line in log if line != "forget") == "update 0", "weights come before samples"


def test_killed_again_and_again() -> None:
    """Each life of both instances ends after a few samples; the third life is left alone."""
    world = World(("a", "b"), stopping(a=2, b=2))
    with running(world) as run:
        run.controller.submit(job(0, count=50, n=4))
        for name, life in (("a", 0), ("b", 0), ("a", 1), ("b", 1)):
            wait_until_stopped(run, name, life)
            world.now(name).kill()
        assert len(take_all(run, "train/0")) == 200
        run.wait_for(lambda: run.controller.counters()["restarts"] == 4)


def test_dead_engine_behind_a_living_process() -> None:
    world = World(("a", "b"), stopping(a=1))
    with running(world) as run:
        run.controller.submit(job(0, count=25, n=4))
        wait_until_stopped(run, "a")
        world.now("a").crash("CUDA error: an illegal access")
        assert len(take_all(run, "train/0")) == 100
        assert "CUDA error: an illegal access" in run.seen(EventKind.LOST, "a")[0].text


def test_hung_engine_is_noticed_within_the_stated_bound() -> None:
    """Heartbeats go on, tokens and pings do not: within lease_s and two ticks (1.5 s) it is dead."""
    world = World(("a", "b"), stopping(a=1))
    with running(world, HASTY) as run:
        engine = world.now("a").engine
        run.controller.submit(job(0, count=25, n=4))
        run.wait_for(lambda: run.seen(EventKind.LOST))
        assert HASTY.lease_s < time.monotonic() - engine.hung_s < 1.5 + BUSY_S
        assert len(take_all(run, "train/0")) == 100
        assert any(why in run.seen(EventKind.LOST, "a")[0].text for why in ("no token", "did not answer"))


def test_an_instance_that_was_idle_for_long_gets_the_whole_lease_for_its_first_token() -> None:
    """The trainer compiles for longer than gen.lease_s; then work comes, and a busy machine answers late."""
    with running(World(("a",)), HASTY) as run:
        time.sleep(1.2 * HASTY.lease_s)
        run.world.loop.call_soon_threadsafe(time.sleep, 0.4 * HASTY.lease_s)
        run.controller.submit(job(0, count=1, n=4))
        assert len(list(run.controller.samples("train/0", 60))) == 4
        assert not run.seen(EventKind.LOST)


def test_hung_idle_engine_is_noticed_too() -> None:
    with running(World(("a",), slow), HASTY) as run:
        run.world.now("a").hang()
        run.wait_for(lambda: run.seen(EventKind.LOST))
        assert "its engine did not answer" in run.seen(EventKind.LOST)[0].text


def test_stream_that_breaks_while_the_instance_lives() -> None:
    """The same fence again: what runs goes on, nothing is handed out twice, nothing is lost."""
    world = World(("a", "b"), slow, lambda name, life: {"cut_after": 7})
    with running(world) as run:
        run.controller.submit(job(0, count=25, n=4))
        samples = take_all(run, "train/0")
        assert len(samples) == 100
        assert {s.generation.attempt for s in samples} == {0}
        counts = run.controller.counters()
        assert counts["redispatched"] == counts["restarts"] == 0
        assert {e.instance for e in run.seen(EventKind.RECONNECTED)} == {"a", "b"}


@pytest.mark.parametrize(
    "faults", [{"duplicate": True}, {"reorder": True}, {"duplicate": True, "reorder": True}]
)
def test_repeated_and_reordered_answers(faults: dict[str, Any]) -> None:
    world = World(("a", "b"), slow, lambda name, life: faults)
    with running(world) as run:
        run.controller.submit(job(0, count=20, n=4))
        assert len(take_all(run, "train/0")) == 80
        counts = run.controller.counters()
        if faults.get("duplicate"):
            run.wait_for(lambda: sum(n for k, n in run.controller.counters().items() if "dropped" in k) >= 30)
        assert counts["finished"] == 80


def test_a_partial_answer_survives_its_instance() -> None:
    """With progress on, the next attempt goes on where the last one was; its tokens keep their versions."""

    def engine(name: str, life: int) -> FakeEngine:
        stop = 0 if life else 8
        return HeldEngine(slots=8, tokens_per_s=100, length=lambda a: 30, held_at=lambda a: stop)

    world = World(("a",), engine)
    with running(world, replace(SETTINGS, progress_interval_s=0.01)) as run:
        run.controller.submit(job(0, count=8, n=1))
        run.wait_for(lambda: world.now("a").engine.tokens_total == 8 * 8)
        run.wait_for(lambda: run.controller.sizes()["partials"] == 8)
        run.publish(1)  # of no effect before the samples are finished, or their instance is
        world.now("a").kill()
        samples = take_all(run, "train/0")
        assert [len(s.generation.token_ids) for s in samples] == [30] * 8
        assert all([r.version for r in s.generation.versions] == [0, 1] for s in samples)
        known = sum(s.generation.versions[0].length for s in samples)
        assert 8 <= known <= 8 * 8
        assert world.now("a").engine.tokens_total == 8 * 30 - known, "what was there was not made again"
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})


# ---------------------------------------------------------------- past the bounds


def test_too_many_deaths_stop_the_run_with_name_reason_and_log() -> None:
    world = World(("a", "b"), slow)
    with running(world, replace(SETTINGS, max_restarts=1)) as run:
        run.controller.submit(job(0, count=25, n=4))
        world.now("a").kill()
        run.wait_for(lambda: len(run.seen(EventKind.UPDATED, "a")) == 2)
        world.now("a").kill()
        with pytest.raises(ControlError) as caught:
            run.controller.wait_ready(60, at_least=3)
        message = str(caught.value)
        assert "instance a (127.0.0.1:" in message
        assert "was lost after 1 restarts: its process ended (exit code -9)" in message
        assert "(gen.max_restarts)" in message
        assert message.endswith("\nthe last lines of its log:\na: the last line of the log")
        assert isinstance(caught.value, UserError), "it is told as a paragraph, without a traceback"


def test_an_instance_that_never_comes_up_is_not_tried_for_long() -> None:
    world = World(("a",), lambda name, life: FakeEngine(start_failure="no such model"))
    with (
        running(world, version=None) as run,
        pytest.raises(ControlError, match=r"was lost after 1 restarts: .*no such model"),
    ):
        run.controller.wait_ready(60)


def test_start_is_bounded() -> None:
    world = World(("a",), lambda name, life: LoadingEngine())
    with (
        running(world, replace(SETTINGS, start_timeout_s=3.0, max_restarts=0), version=None) as run,
        pytest.raises(
            ControlError, match=r"not loaded within 3 s \(gen.start_timeout_s\).*counting to start"
        ),
    ):
        run.controller.wait_ready(60)


def test_other_endpoints_go_on_when_one_is_given_up() -> None:
    world = World(("a", "b"), slow, managed=False)
    settings = replace(SETTINGS, lease_s=2.0, start_timeout_s=3.0, max_restarts=1)
    with running(world, settings) as run:
        jobs = run.controller.probe(0, prompts(2), job(0).sampling)
        for name in jobs:
            list(run.controller.samples(name, 60))
        run.controller.submit(job(0, count=50, n=4))
        assert len(take_all(run, "train/0", {20: world.now("a").kill})) == 200
        run.wait_for(lambda: run.seen(EventKind.GONE, "a"))
        assert [view.name for view in run.controller.pool()] == ["b"]
        assert run.controller.counters()["restarts"] == 1
        world.now("b").hang()  # it answers none of what follows
        run.controller.submit(job(1, min_version=0))
        world.now("b").kill()
        with pytest.raises(ControlError, match=r"no instance is left: instance a .* instance b"):
            list(run.controller.samples("train/1", 60))


def test_probes_of_an_endpoint_that_is_given_up_end_early() -> None:

    def engine(name: str, life: int) -> FakeEngine:
        return HeldEngine(slots=8, held_at=lambda a: int(name == "a"))

    world = World(("a", "b"), engine, managed=False)
    with running(world, replace(SETTINGS, lease_s=2.0, max_restarts=0)) as run:
        first, second = run.controller.probe(0, prompts(30), job(0).sampling)
        world.now("a").kill()
        assert list(run.controller.samples(first, 60)) == []
        assert len(list(run.controller.samples(second, 60))) == 30
        assert run.controller.counters()["cancelled"] > 0
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})


def test_a_failed_endpoint_is_waited_for() -> None:
    """Whoever started it may replace it: its status says FAILED until then."""
    world = World(("a", "b"), slow, managed=False)
    with running(world) as run:
        process = world.now("a")
        run.controller.submit(job(0, count=25, n=4))

        def crash() -> None:
            process.crash("out of memory")
            run.wait_for(lambda: run.seen(EventKind.LOST, "a"))
            world.call(process.end(1))
            world.lives["a"].append(world.call(world.launch("a", 1, process.address)))

        assert len(take_all(run, "train/0", {20: crash})) == 100
        run.wait_for(lambda: len(run.seen(EventKind.UPDATED, "a")) == 2)
        assert "out of memory" in run.seen(EventKind.LOST, "a")[0].text


def test_a_draining_endpoint_is_left_alone_until_it_resumes() -> None:
    world = World(("a", "b"), slow, managed=False)
    with running(world) as run:

        async def drain(then: bool) -> None:
            client = InstanceClient(world.now("a").address)
            await (client.drain(FENCE) if then else client.resume(FENCE))
            await client.close()

        world.call(drain(True))
        run.controller.submit(job(0, count=5, n=4))
        assert {s.generation.instance for s in take_all(run, "train/0")} == {"b"}
        world.call(drain(False))
        run.wait_for(lambda: run.controller.pool()[0].state == "idle")
        run.controller.submit(job(1, min_version=0))
        assert {s.generation.instance for s in take_all(run, "train/1")} == {"a", "b"}


def test_an_endpoint_that_comes_back_is_used_again() -> None:
    """Somebody restarts it at the same address: it has no weights and gets them before its first sample."""
    world = World(("a", "b"), slow, managed=False)
    with running(world) as run:
        address = world.now("a").address
        world.now("b").hang()  # all but what it holds is a's to do, before and after

        def restart() -> None:
            world.now("a").kill()
            world.lives["a"].append(world.call(world.launch("a", 1, address)))
            run.wait_for(lambda: len(run.seen(EventKind.UPDATED, "a")) == 2)
            world.now("b").thaw()

        run.controller.submit(job(0, count=100, n=4))
        samples = take_all(run, "train/0", {20: restart})
        assert len(samples) == 400
        assert world.now("a").engine.tokens_total > 0
        assert next(line for line in world.now("a").engine.log if line != "forget") == "update 0"


def test_what_an_earlier_life_left_on_an_endpoint_is_not_taken() -> None:
    """The same sample ids, other weights: the resumed run gets only what it asked for itself."""
    world = World(("a",), slow, managed=False)
    first: list[ControlEvent] = []
    controller = Controller(SETTINGS, FENCE, world, reward_by_length, decode, first.append)
    controller.start()
    controller.wait_ready(60)
    controller.publish(manifest(0), source(0)).result(60)
    controller.submit(job(0))
    next(controller.samples("train/0", 60))
    controller.close()
    resumed = Fence(FENCE.run_id, FENCE.incarnation + 1)
    with running(world, fence=resumed, version=None) as run:
        run.controller.wait_ready(60)
        run.controller.submit(job(0, min_version=3))
        with pytest.raises(ControlError, match="arrived"):
            next(run.controller.samples("train/0", 0.3))
        run.controller.publish(manifest(3, resumed), source(3)).result(60)
        samples = take_all(run, "train/0")
        assert {int(v) for s in samples for v in expand_runs(s.generation.versions)} == {3}
        assert run.controller.counters()["dispatched"] == 32


def test_wrong_token_is_the_users_to_mend() -> None:
    world = World(("a",), slow, access=net.Access("right"))
    with (
        running(world, version=None, access=net.Access("wrong")) as run,
        pytest.raises(UserError, match=r"instance a: .*security.token_file"),
    ):
        run.controller.wait_ready(60)


def test_another_loop_of_the_process_that_ends_disturbs_nothing() -> None:
    """gRPC has one poller for all loops; events of a loop that was closed surface in the others."""
    world = World(("a",), slow)

    async def ask_and_leave() -> None:
        client = InstanceClient(world.now("a").address)
        calls = [asyncio.ensure_future(client.status()) for _ in range(8)]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)

    def other_loop() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(ask_and_leave())
        loop.close()

    with running(world) as run:
        run.controller.submit(job(0, count=25, n=4))
        assert len(take_all(run, "train/0", dict.fromkeys(range(10, 90, 10), other_loop))) == 100


# ---------------------------------------------------------------- rewards and the trainer's thread


def failing_at(bad: int, do: Callable[[], float]) -> Callable[[Prompt, str, Generation], RewardResult]:
    def reward(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        return RewardResult(do() if prompt.prompt_id == str(bad) else 1.0, {})

    return reward


def raise_key_error() -> float:
    raise KeyError("answer")


def test_a_reward_that_fails_reaches_the_trainer() -> None:
    expected = r"(?s)reward function raised KeyError: 'answer' for sample train/0/3/\d .*in raise_key_error"
    with running(World(("a",)), reward=failing_at(3, raise_key_error)) as run:
        run.controller.submit(job(0))
        with pytest.raises(RewardError, match=expected):
            list(run.controller.samples("train/0", 60))


def test_a_score_that_is_not_finite_reaches_the_trainer_as_any_other() -> None:
    """Which samples to blame, and whether the run goes on, is the trainer's to say."""
    with running(World(("a",)), reward=failing_at(3, lambda: math.nan)) as run:
        run.controller.submit(job(0))
        samples = list(run.controller.samples("train/0", 60))
    assert len(samples) == 32
    assert {s.prompt.prompt_id for s in samples if math.isnan(s.reward)} == {"3"}


def test_a_reward_that_hangs_ends_the_run_within_its_bound() -> None:
    release = threading.Event()
    settings = replace(SETTINGS, reward_timeout_s=0.3)
    try:
        with running(World(("a",)), settings, failing_at(3, lambda: float(release.wait()))) as run:
            run.controller.submit(job(0))
            began = time.monotonic()
            with pytest.raises(RewardError, match=r"did not return within 0.3 s .* sample train/0/3"):
                list(run.controller.samples("train/0", 60))
            assert time.monotonic() - began < 0.3 + BUSY_S
    finally:
        release.set()


def test_an_error_from_outside_reaches_whoever_waits() -> None:
    """A version that could not be written: the samples that wait for it would never come."""
    with running(World(("a",))) as run:
        run.controller.submit(job(1))
        threading.Timer(0.1, run.controller.fail, [OSError("no space left on /dev/shm")]).start()
        with pytest.raises(OSError, match="no space left"):
            next(run.controller.samples("train/1", 60))


def test_an_exception_of_any_task_reaches_the_trainer_with_its_traceback() -> None:
    """Here: the display's callback raises on the controller's thread."""
    world = World(("a",))

    def broken(event: ControlEvent) -> None:
        if event.kind is EventKind.UPDATED:
            raise ZeroDivisionError("in the display")

    controller = Controller(SETTINGS, FENCE, world, reward_by_length, decode, broken)
    try:
        controller.start()
        controller.wait_ready(60)
        with pytest.raises(ZeroDivisionError) as caught:
            controller.publish(manifest(0), source(0)).result(60)
        assert "broken" in [entry.name for entry in caught.traceback]
        with pytest.raises(ZeroDivisionError):
            controller.submit(job(0))
        assert controller.counters()["dispatched"] == 0, "the books stay open"
    finally:
        controller.close()
        world.close()
