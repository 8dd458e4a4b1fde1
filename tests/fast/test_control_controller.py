"""The controller over real gRPC: the good way, versions, updates, probes, evaluation, and the end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import Activity, EventKind
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.updates import pick_source
from streamrl_jax.errors import UserError
from streamrl_jax.gen.host import host_id
from streamrl_jax.types import NO_VERSION, InstanceInfo, Sampling, WeightSource, expand_runs
from tests.fakes import FakeEngine
from tests.fast.control_world import (
    FACADE,
    FACADES,
    FENCE,
    SAMPLING,
    SETTINGS,
    HeldEngine,
    LoadingEngine,
    World,
    check_answer,
    decode,
    job,
    prompts,
    reward_by_length,
    running,
)


@pytest.fixture(params=FACADES, autouse=True)
def _face(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule here holds whichever process the controller is in."""
    monkeypatch.setitem(FACADE, "now", request.param)


def test_five_hundred_samples_from_two_instances() -> None:
    """Each once, right contents, rewarded; both instances took part; nothing is kept afterwards."""
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=8))
    with running(world) as run:
        run.controller.submit(job(0, count=125, n=4))
        samples = list(run.controller.samples("train/0", 60))
        assert len({s.sample_id for s in samples}) == len(samples) == 500
        for sample in samples:
            check_answer(sample.prompt, sample.generation)
            assert sample.reward == len(sample.generation.token_ids)
            assert sample.iteration == 0
            assert sample.rewarded_s >= sample.arrived_s > 0
        groups = Counter(s.prompt.prompt_id for s in samples)
        assert set(groups.values()) == {4}
        assert {s.generation.instance for s in samples} == {"a", "b"}
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})
        counts = run.controller.counters()
        assert counts["dispatched"] == counts["finished"] == counts["delivered"] == 500
        assert not any(n for name, n in counts.items() if name.endswith("_dropped"))


def test_samples_stream_while_others_still_run() -> None:
    """A short answer is here before a long one is finished: nothing waits for its batch."""
    world = World(("a",), lambda name, life: HeldEngine(held_at=lambda a: int(a.prompt_ids[1] == 0)))
    with running(world) as run:
        run.controller.submit(Job("j", prompts(3), 1, SAMPLING, 0, 0))
        stream = run.controller.samples("j", 60)
        assert {next(stream).prompt.prompt_id, next(stream).prompt.prompt_id} == {"1", "2"}
        assert run.controller.counters()["finished"] == 2
        world.now("a").thaw()
        assert [sample.prompt.prompt_id for sample in stream] == ["0"]


def test_no_instance_is_given_more_than_its_slots_and_lookahead() -> None:
    """While nothing is answered each is given just so many, and no more later on."""
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=4, tokens_per_s=200))
    with running(world) as run:
        for name in world.names:
            world.now(name).hang()
        run.controller.submit(job(0, count=30))
        run.wait_for(lambda: [v.running + v.waiting for v in run.controller.pool()] == [4 + 2] * 2)
        for name in world.names:
            world.now(name).thaw()
        most, stream = 0, run.controller.samples("train/0", 60)
        for _ in stream:
            views = run.controller.pool()
            most = max(most, *(view.held for view in views), *(view.running + view.waiting for view in views))
            assert run.controller.sizes()["open"] <= 120
        assert most <= 4 + 2


def test_memory_follows_the_open_jobs() -> None:
    world = World(("a",), lambda name, life: FakeEngine(slots=16, tokens_per_s=5000))
    with running(world) as run:
        for iteration in range(15):
            run.controller.submit(job(iteration, min_version=0))
            assert len(list(run.controller.samples(f"train/{iteration}", 60))) == 32
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})
        with pytest.raises(ControlError, match="train/3 was not submitted, or all its samples were taken"):
            next(run.controller.samples("train/3", 1))


# ---------------------------------------------------------------- versions


def test_nothing_is_answered_before_the_first_weights() -> None:
    world = World(("a",))
    with running(world, version=NO_VERSION) as run:
        run.controller.submit(job(0))
        with pytest.raises(
            ControlError, match=r"no sample of train/0 arrived .* 32 samples wait for version 0"
        ):
            next(run.controller.samples("train/0", 0.3))
        assert world.now("a").engine.tokens_total == 0
        run.publish(0)
        assert len(list(run.controller.samples("train/0", 60))) == 32


def test_synchronous_schedule_has_no_staleness() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(tokens_per_s=3000))
    with running(world) as run:
        for iteration in range(5):
            run.controller.submit(job(iteration))
            samples = list(run.controller.samples(f"train/{iteration}", 60))
            assert {int(v) for s in samples for v in expand_runs(s.generation.versions)} == {iteration}
            run.publish(iteration + 1)


def test_one_step_asynchronous_schedule_is_never_staler() -> None:
    """Iteration i + 1 is submitted before i is consumed; each token lags behind its consumer by at most 1."""
    world = World(("a", "b"), lambda name, life: FakeEngine(tokens_per_s=500, update_s=0.02))
    with running(world) as run:
        lags: Counter[int] = Counter()
        run.controller.submit(job(0, min_version=0))
        for version in range(6):
            run.controller.submit(job(version + 1, min_version=version))
            for sample in run.controller.samples(f"train/{version}", 60):
                lags.update(version - int(v) for v in expand_runs(sample.generation.versions))
            run.publish(version + 1)
        assert set(lags) == {0, 1}


def test_an_update_waits_for_what_runs_and_holds_back_the_rest() -> None:
    world = World(("a",), lambda name, life: FakeEngine(slots=4, tokens_per_s=200, length=lambda a: 20))
    with running(world) as run:
        world.now("a").hang()  # what it has been given runs, and does not end before the update is asked for
        run.controller.submit(job(0, count=4, n=4))
        run.wait_for(lambda: [v.running + v.waiting for v in run.controller.pool()] == [4 + 2])
        update = run.publish(1)
        run.wait_for(lambda: [view.state for view in run.controller.pool()] == ["updating"])
        world.now("a").thaw()
        assert [(r.instance, r.accepted, r.version) for r in update.result(60)] == [("a", True, 1)]
        versions = [s.generation.versions for s in run.controller.samples("train/0", 60)]
        assert all(len(runs) == 1 for runs in versions), "no answer mixes versions"
        assert Counter(runs[0].version for runs in versions) == {0: 4 + 2, 1: 10}
        assert world.now("a").engine.updates[-1][2] is False


def test_an_update_in_flight_mixes_versions_and_says_so() -> None:
    world = World(("a",), lambda name, life: HeldEngine(slots=16, length=lambda a: 30, held_at=lambda a: 1))
    with running(world, replace(SETTINGS, in_flight=True)) as run:
        run.controller.submit(job(0, count=4, n=4))
        run.wait_for(lambda: world.now("a").engine.tokens_total == 16)
        run.publish(1).result(60)
        world.now("a").thaw()
        samples = list(run.controller.samples("train/0", 60))
        assert [[r.version for r in s.generation.versions] for s in samples] == [[0, 1]] * 16


def test_a_source_is_released_when_nobody_needs_it() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(update_s=0.1 if name == "b" else 0.0))
    released: list[int] = []
    with running(world, version=None) as run:
        run.controller.wait_ready(60)
        for version in range(3):
            run.publish(version, release=lambda version=version: released.append(version)).result(60)
            assert released == list(range(version)), "the newest is kept for restarts"
        assert [e.version for e in run.seen(EventKind.RELEASED)] == [0, 1]
    assert released == [0, 1, 2]


def test_a_refused_version_stops_the_run_with_every_fault() -> None:
    world = World(("a", "b"))
    with running(world) as run:
        world.now("b").engine.reject_update = "digest of model.norm.weight differs; lm_head.weight is missing"
        done = run.publish(1)
        message = (
            "instance b refused version 1 and goes on serving 0: digest of model.norm.weight differs; lm_head"
        )
        with pytest.raises(ControlError, match=message):
            done.result(60)
        with pytest.raises(ControlError, match=message):
            run.controller.submit(job(1))


def test_a_quarantined_instance_is_restarted_and_gets_the_version_first() -> None:
    def engine(name: str, life: int) -> FakeEngine:
        return FakeEngine(quarantine_update="layer 3 was loaded half" if life == 0 else "")

    world = World(("a",), engine)
    with running(world, version=NO_VERSION) as run:
        (report,) = run.publish(0).result(60)
        assert not report.accepted
        assert "layer 3 was loaded half" in report.reason
        run.controller.submit(job(0))
        assert len(list(run.controller.samples("train/0", 60))) == 32
        assert next(line for line in world.now("a").engine.log if line != "forget") == "update 0"
        assert run.controller.counters()["restarts"] == 1


def test_two_publications_at_once_end_with_the_newest() -> None:
    world = World(("a",), lambda name, life: FakeEngine(update_s=0.1))
    with running(world) as run:
        first, second = run.publish(1), run.publish(2)
        assert [r.version for r in first.result(60)] in ([1], [2])
        assert [r.version for r in second.result(60)] == [2]
        with pytest.raises(ValueError, match="version 2 is published after version 2"):
            run.publish(2)


@pytest.mark.parametrize(
    ("transport", "same_host", "expected"),
    [
        ("auto", True, WeightSource(path="p")),
        ("auto", False, WeightSource(address="h:1")),
        ("grpc", True, WeightSource(address="h:1")),
        ("shm", True, WeightSource(path="p")),
    ],
)
def test_source_of_weights(transport: str, same_host: bool, expected: WeightSource) -> None:
    info = InstanceInfo("a", 1, 1, 9, 0, True, host_id() if same_host else "elsewhere", "fake")
    assert pick_source(WeightSource("p", "h:1"), info, transport) == expected  # pyright: ignore[reportArgumentType]


def test_source_of_weights_that_does_not_exist() -> None:
    info = InstanceInfo("a", 1, 1, 9, 0, True, "elsewhere", "fake")
    with pytest.raises(UserError, match=r"bridge.transport = 'shm', but instance a does not share"):
        pick_source(WeightSource("p", "h:1"), info, "shm")
    with pytest.raises(UserError, match=r"no weight store is open; set bridge.listen"):
        pick_source(WeightSource("p"), info, "auto")


# ---------------------------------------------------------------- probes and evaluation


def test_probes_reach_every_instance_before_its_next_version() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=2, tokens_per_s=400, length=lambda a: 10))
    with running(world) as run:
        for name in world.names:
            world.now(name).hang()
        run.controller.submit(job(0, count=8, n=4))
        run.wait_for(lambda: [view.held for view in run.controller.pool()] == [2 + 2] * 2)
        jobs = run.controller.probe(0, prompts(3), replace(SAMPLING, max_new_tokens=4))
        assert jobs == ("probe/0/a", "probe/0/b")
        run.publish(1)
        for name in world.names:
            world.now(name).thaw()
        for name, probe in zip("ab", jobs, strict=True):
            answers = list(run.controller.samples(probe, 60))
            assert [s.generation.instance for s in answers] == [name] * 3
            assert all(len(s.generation.token_ids) == 4 for s in answers)
            assert {int(v) for s in answers for v in expand_runs(s.generation.versions)} == {0}
            assert {s.reward for s in answers} == {0.0}, "probes are not rewarded"
        assert len(list(run.controller.samples("train/0", 60))) == 32
        for name in world.names:
            begun = [line for line in world.now(name).engine.log if line.startswith("start ")]
            assert sum(line.startswith("start probe/") for line in begun[: 2 + 2 + 3]) == 3, (
                "only what was there before them went before them"
            )
        assert run.controller.probe(0, prompts(1), SAMPLING) == ()


def test_evaluation_may_bend_the_distribution_and_training_may_not() -> None:
    greedy = Sampling(0.0, 8, (0,), evaluation=True, top_p=0.5)
    with running(World(("a",))) as run:
        run.controller.submit(Job("eval/0", prompts(5), 1, greedy, 0, 0, evaluation=True))
        assert len(list(run.controller.samples("eval/0", 60))) == 5
        run.controller.submit(replace(job(0), sampling=replace(greedy, evaluation=False)))
        with pytest.raises(
            UserError, match=r"instance a refuses sample train/0/0/0 .*top_p = 0.5 changes the density"
        ):
            list(run.controller.samples("train/0", 60))


def test_an_answer_that_cannot_fit_is_the_users_to_mend() -> None:
    with running(World(("a",), lambda name, life: FakeEngine(max_model_len=16))) as run:
        run.controller.submit(job(0))
        with pytest.raises(UserError, match=r"raise gen.max_model_len"):
            list(run.controller.samples("train/0", 60))


# ---------------------------------------------------------------- accounts, start and end


def test_busy_and_idle_seconds() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=2, tokens_per_s=100, length=lambda a: 10))
    with running(world) as run:
        before, began = {view.name: view.seconds for view in run.controller.pool()}, time.monotonic()
        run.controller.submit(job(0, count=1, n=2))
        assert len(list(run.controller.samples("train/0", 60))) == 2
        run.wait_for(lambda: sum(view.tokens for view in run.controller.pool()) == 20)
        spent = {
            view.name: {what: view.seconds[what] - before[view.name][what] for what in Activity}
            for view in run.controller.pool()
        }
        taken_s = time.monotonic() - began
        assert 0.05 < spent["a"][Activity.BUSY] <= taken_s, (
            "ten tokens at 100 a second; the group stayed together"
        )
        assert spent["b"][Activity.BUSY] == 0.0
        assert spent["b"][Activity.IDLE] > 0.09
        assert spent["a"][Activity.DOWN] == spent["b"][Activity.DOWN] == 0.0
        assert run.controller.pool()[0].tokens_per_s > 0


def test_the_start_tells_its_phases() -> None:
    world = World(("a",), lambda name, life: LoadingEngine())
    with running(world, version=None) as run:
        run.wait_for(
            lambda: any(
                "counting to start" in e.text and e.seconds > 0.1 for e in run.seen(EventKind.PHASE, "a")
            )
        )
        assert not run.seen(EventKind.READY)
        world.now("a").thaw()
        run.wait_for(lambda: [e.text for e in run.seen(EventKind.READY)] == ["fake"])


def test_waiting_for_the_start_is_bounded_and_says_for_what() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine() if name == "a" else LoadingEngine())
    with running(world, version=None) as run:
        run.controller.wait_ready(60, at_least=1)
        with pytest.raises(ControlError, match=r"1 of 2 instances were ready within 0.2 s: .*b is loading"):
            run.controller.wait_ready(0.2)


def test_close_leaves_no_thread_and_no_instance() -> None:
    """While one answer has come, others stand still, and an update waits for them."""
    before = set(threading.enumerate())
    world = World(("a", "b"), lambda name, life: HeldEngine(held_at=lambda a: int(a.prompt_ids[1] > 0)))
    with running(world) as run:
        run.controller.submit(job(0))
        next(run.controller.samples("train/0", 60))
        pending = run.publish(1)
        run.controller.close()
        assert all(process.stopped for lives in world.lives.values() for process in lives)
        with pytest.raises(ControlError, match="the controller was closed"):
            pending.result(1)
        assert run.controller.counters()["dispatched"] > 0, "the books stay open"
        run.controller.close()
    assert set(threading.enumerate()) <= before


def test_close_while_instances_start() -> None:
    began = time.monotonic()
    with running(World(("a",), lambda name, life: LoadingEngine()), version=None) as run:
        run.wait_for(lambda: run.seen(EventKind.PHASE))
    assert time.monotonic() - began < 40


def test_close_without_start() -> None:
    world = World(("a",))
    try:
        controller = Controller(SETTINGS, FENCE, world, reward_by_length, decode, lambda event: None)
        controller.close()
    finally:
        world.close()
    with pytest.raises(ControlError, match="job train/0 was not submitted"):
        next(controller.samples("train/0", 1))
