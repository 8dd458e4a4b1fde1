"""Instances join and leave while the run goes on: every sample still comes once, and nobody waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import EventKind, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.pool import Pool
from streamrl_jax.control.tenure import Fate, Tenure
from streamrl_jax.errors import UserError
from streamrl_jax.types import Sample
from tests.fakes import FakeEngine

from .control_world import SETTINGS, LoadingEngine, Run, World, check_answer, job, prompts, running


def slow(name: str, life: int) -> FakeEngine:
    """Answers take 60 ms."""
    return FakeEngine(slots=8, tokens_per_s=200, length=lambda a: 12)


def ask(run: Run, question: Callable[[Pool], object]) -> object:
    """Calls the pool on the controller's loop."""
    controller = run.controller
    assert isinstance(controller, Controller), "it runs in this process"
    return controller._ask(lambda: question(controller._core.pool))


def add(run: Run, name: str) -> None:
    ask(run, lambda pool: pool.add(name, founding=False))


def drain(run: Run, name: str, *, at_once: bool = False) -> None:
    ask(run, lambda pool: pool.drain(name, at_once=at_once))


def loading_b(name: str, life: int) -> FakeEngine:
    return LoadingEngine() if name == "b" else FakeEngine()


def submit_held(run: Run, given: Job, *names: str) -> None:
    """Submits a job of which these instances hold as much as they can, and end none of it until they are thawed."""
    for name in names:
        run.world.now(name).hang()
    run.controller.submit(given)
    run.wait_for(lambda: all(v.running + v.waiting == v.slots + 2 for v in views_of(run, *names)))


def views_of(run: Run, *names: str) -> list[InstanceView]:
    return [view for view in run.controller.pool() if view.name in names]


def take_all(run: Run, job_id: str) -> list[Sample]:
    """Takes a job's samples, checks that each came once, and right."""
    samples = list(run.controller.samples(job_id, 60))
    assert max(Counter(s.sample_id for s in samples).values()) == 1
    for sample in samples:
        check_answer(sample.prompt, sample.generation)
    return samples


def test_a_job_for_an_instance_that_has_left_is_refused() -> None:
    with running(World(("a", "b"), slow)) as run:
        run.controller.submit(replace(job(0, 2), job_id="first", pinned="b"))
        assert {sample.generation.instance for sample in take_all(run, "first")} == {"b"}
        drain(run, "b", at_once=True)
        run.wait_for(lambda: [view.name for view in run.controller.pool()] == ["a"])
        with pytest.raises(ControlError, match="job second is for b alone, which is not in the pool"):
            run.controller.submit(replace(job(0, 2), job_id="second", pinned="b"))
        run.controller.submit(replace(job(0, 2), job_id="third", pinned="a"))
        assert {sample.generation.instance for sample in take_all(run, "third")} == {"a"}


def test_one_that_joins_gets_the_version_and_then_waiting_work_within_the_iteration() -> None:
    world = World(("a",), slow)
    with running(world) as run:
        run.publish(1).result(60)
        submit_held(run, job(1, count=50, n=4), "a")
        add(run, "b")
        run.wait_for(lambda: run.seen(EventKind.UPDATED, "b"))
        world.now("a").thaw()
        samples = take_all(run, "train/1")
        assert len(samples) == 200
        assert {s.generation.instance for s in samples} == {"a", "b"}
        log = world.now("b").engine.log
        assert next(line for line in log if line != "forget") == "update 1", (
            "the current version, and only it"
        )
        assert [e.instance for e in run.seen(EventKind.ADDED)] == ["b"]
        assert run.controller.counters()["redispatched"] == 0
        assert {view.name for view in run.controller.pool()} == {"a", "b"}


def test_a_publication_does_not_wait_for_one_that_still_loads() -> None:
    world = World(("a",), loading_b)
    with running(world) as run:
        add(run, "b")
        reports = run.publish(1).result(60)
        assert [report.instance for report in reports] == ["a"]
        run.controller.wait_ready(60)
        assert not run.seen(EventKind.READY, "b"), "it is ready without the one that joins"
        world.now("b").thaw()
        run.wait_for(lambda: [e.version for e in run.seen(EventKind.UPDATED, "b")] == [1])


def test_one_that_is_drained_answers_what_it_holds_and_is_ended() -> None:
    world = World(("a", "b"), slow)
    with running(world) as run:
        submit_held(run, job(0, count=50, n=4), "b")
        drain(run, "b")
        world.now("b").thaw()
        samples = take_all(run, "train/0")
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert [e.text for e in run.seen(EventKind.GONE, "b")] == ["it was drained"]
        counts = run.controller.counters()
        assert (counts["redispatched"], counts["restarts"]) == (0, 0)
        assert {s.generation.attempt for s in samples} == {0}
        assert not run.seen(EventKind.LOST)
        assert world.now("b").stopped
        assert len(world.lives["b"]) == 1
        assert [view.name for view in run.controller.pool()] == ["a"]
        assert [report.instance for report in run.publish(1).result(60)] == ["a"]


def test_nothing_new_is_handed_to_one_that_is_being_drained() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=2))
    with running(world) as run:
        submit_held(run, job(0, count=6, n=4), "a", "b")
        drain(run, "b")
        assert [view.state for view in views_of(run, "b")] == ["draining"]
        world.now("a").thaw()
        world.now("b").thaw()
        samples = take_all(run, "train/0")
        assert Counter(s.generation.instance for s in samples)["b"] == 2 + 2


def test_drained_at_once_its_work_goes_to_the_others() -> None:
    world = World(("a", "b"), slow)
    with running(world) as run:
        submit_held(run, job(0, count=50, n=4), "b")
        drain(run, "b", at_once=True)
        samples = take_all(run, "train/0")
        counts = run.controller.counters()
        assert counts["redispatched"] == sum(e.count for e in run.seen(EventKind.REDISPATCH, "b")) == 8 + 2
        assert Counter(s.generation.attempt for s in samples)[1] == counts["redispatched"]
        assert counts["restarts"] == 0
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert not run.seen(EventKind.LOST)


def test_a_drain_may_be_hastened() -> None:
    """Its answers would not end."""
    world = World(("a", "b"), slow)
    with running(world) as run:
        submit_held(run, job(0, count=10, n=4), "b")
        drain(run, "b")
        drain(run, "b")
        drain(run, "b", at_once=True)
        assert len(take_all(run, "train/0")) == 40


def test_one_that_dies_while_it_is_drained_is_not_started_again() -> None:
    world = World(("a", "b"), slow)
    with running(world) as run:
        submit_held(run, job(0, count=50, n=4), "b")
        drain(run, "b")
        world.now("b").kill()
        assert len(take_all(run, "train/0")) == 200
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert "drained" in run.seen(EventKind.GONE, "b")[0].text
        assert len(world.lives["b"]) == 1
        assert run.controller.counters()["restarts"] == 0


def test_a_publication_that_waits_for_one_goes_on_when_it_is_drained() -> None:
    """Its answers do not end before."""
    world = World(("a", "b"), slow)
    with running(world) as run:
        submit_held(run, job(0, count=10, n=4), "b")
        update = run.publish(1)
        run.wait_for(lambda: [e.version for e in run.seen(EventKind.UPDATED, "a")] == [0, 1])
        assert not update.done()
        drain(run, "b")
        reports = {report.instance: report for report in update.result(60)}
        assert reports["a"].accepted
        assert "drained" in reports["b"].reason
        drain(run, "b", at_once=True)
        assert len(take_all(run, "train/0")) == 40


def test_the_last_one_is_kept() -> None:
    with running(World(("a", "b"))) as run:
        drain(run, "a")
        with pytest.raises(UserError, match=r"b is the last instance.*streamrl pool add"):
            drain(run, "b")
        add(run, "c")
        drain(run, "b")
        run.wait_for(lambda: [view.name for view in run.controller.pool()] == ["c"])
        run.controller.submit(job(0))
        assert {s.generation.instance for s in take_all(run, "train/0")} == {"c"}


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with running(World(("instance-0", "instance-1"))) as run:
        with pytest.raises(
            UserError, match=r"no instance 'instance-2'.*did you mean instance-[01]\?.*It has inst"
        ):
            drain(run, "instance-2")
        drain(run, "instance-1")
        run.wait_for(lambda: run.seen(EventKind.GONE))
        with pytest.raises(UserError, match="It has left the pool: it was drained"):
            drain(run, "instance-1")


def test_one_that_is_drained_while_it_loads_is_ended() -> None:
    world = World(("a",), loading_b)
    with running(world) as run:
        add(run, "b")
        run.wait_for(lambda: run.seen(EventKind.PHASE, "b"))
        drain(run, "b")
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert world.now("b").stopped


def test_an_added_one_that_does_not_come_up_ends_nothing() -> None:
    def engine(name: str, life: int) -> FakeEngine:
        return FakeEngine(start_failure="no such device" if name == "b" else "")

    with running(World(("a",), engine)) as run:
        add(run, "b")
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert "no such device" in run.seen(EventKind.GONE, "b")[0].text
        run.controller.submit(job(0))
        assert len(take_all(run, "train/0")) == 32
        add(run, "b")  # mended meanwhile, say


def test_an_added_one_of_another_model_is_sent_away_at_once() -> None:
    def engine(name: str, life: int) -> FakeEngine:
        return FakeEngine(reject_update="wte.weight: shape [2, 2], expected [4, 4]" if name == "b" else "")

    with running(World(("a",), engine)) as run:
        add(run, "b")
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        assert "expected [4, 4]" in run.seen(EventKind.GONE, "b")[0].text
        assert not run.seen(EventKind.RESTART)
        run.controller.submit(job(0))
        assert {s.generation.instance for s in take_all(run, "train/0")} == {"a"}


def test_an_added_one_that_dies_too_often_leaves_and_a_founding_one_ends_the_run() -> None:
    world = World(("a",), slow)
    with running(world, replace(SETTINGS, max_restarts=0)) as run:
        add(run, "b")
        run.wait_for(lambda: run.seen(EventKind.UPDATED, "b"))
        world.now("b").kill()
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        submit_held(run, job(0), "a")
        world.now("a").kill()
        with pytest.raises(ControlError, match=r"instance a .*was lost after 0 restarts"):
            take_all(run, "train/0")


def test_an_endpoint_that_says_it_has_the_version_is_asked_before_it_serves() -> None:
    """The manifest is sent again; a service that took just this one answers without work, any other refuses."""
    world = World(("a", "b"), slow, managed=False)
    with running(world) as run:
        drain(run, "b")
        run.wait_for(lambda: run.seen(EventKind.GONE, "b"))
        before = world.now("b").engine.updates[:]
        add(run, "b")
        run.wait_for(lambda: len(run.seen(EventKind.UPDATED, "b")) == 2)
        assert world.now("b").engine.updates == before, "it had just this one"
        run.controller.submit(job(0, count=20, n=4))
        assert {s.generation.instance for s in take_all(run, "train/0")} == {"a", "b"}


def test_probes_go_to_those_who_stay() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=2))
    with running(world) as run:
        submit_held(run, job(0, count=4, n=4), "a", "b")
        first = run.controller.probe(0, prompts(20), job(0).sampling)
        drain(run, "b")
        world.now("a").thaw()
        world.now("b").thaw()
        assert len(list(run.controller.samples(first[0], 60))) == 20
        assert list(run.controller.samples(first[1], 60)) == [], "given up: nobody else may answer them"
        take_all(run, "train/0")
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"leaving": True, "loaded": True}, Fate.LEAVES),
        ({"misfit": True, "founding": False}, Fate.LEAVES),
        ({"loaded": True, "restarts": 4}, Fate.AGAIN),
        ({"loaded": False, "restarts": 1}, Fate.ENDS_RUN),
        ({"loaded": True, "restarts": 5}, Fate.ENDS_RUN),
        ({"loaded": True, "restarts": 5, "managed": False}, Fate.LEAVES),
        ({"loaded": True, "restarts": 5, "founding": False}, Fate.LEAVES),
    ],
)
def test_what_becomes_of_one_that_was_lost(state: dict[str, bool | int], expected: Fate) -> None:
    tenure = Tenure(founding=bool(state.get("founding", True)), max_restarts=5)
    tenure.managed = bool(state.get("managed", True))
    tenure.loaded, tenure.misfit = bool(state.get("loaded")), bool(state.get("misfit"))
    tenure.restarts = int(state.get("restarts", 0))
    if state.get("leaving"):
        tenure.leave("it was drained", at_once=False)
    before = tenure.restarts
    assert tenure.fate("it died") is expected
    assert tenure.restarts - before == (expected is Fate.AGAIN)
    if state.get("leaving"):
        assert tenure.farewell == "it was drained; it died"
