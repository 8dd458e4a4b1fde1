"""Several trainer processes over the wire: one submission, one order, one stop, one plan, and who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from streamrl_jax.control.client import Peer
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.dispatching import ARRIVAL, DispatchSettings
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.plan import Step
from streamrl_jax.control.protocol import RunController
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.server import Serving
from streamrl_jax.control.watchdog import HUNG_EXIT_CODE, Watchdog
from streamrl_jax.gen import net
from streamrl_jax.interrupt import StopRequested
from tests.fakes import FakeEngine

from .control_world import (
    FENCE,
    SAMPLING,
    SETTINGS,
    World,
    decode,
    job,
    manifest,
    prompts,
    reward_by_length,
    source,
)

STEP = Step(0, "grad", "rows 4, length 128", b"\x01" * 16)


@contextmanager
def readers(
    world_size: int,
    plan_timeout_s: float = 60.0,
    dispatch: DispatchSettings = ARRIVAL,
    world: World | None = None,
    reward_workers: int = 2,
) -> Iterator[list[RunController]]:
    """The leader in this process, the others over gRPC, as over a network."""
    settings = replace(
        SETTINGS,
        readers=world_size,
        plan_timeout_s=plan_timeout_s,
        dispatch=dispatch,
        reward_workers=reward_workers,
    )
    world = world or World(("a", "b"), lambda name, life: FakeEngine(slots=8))
    leader = Controller(
        settings, FENCE, world, reward_by_length, decode, lambda event: None, serving=Serving(net.OPEN)
    )
    others: list[RemoteController] = []
    try:
        leader.start()
        leader.wait_ready(60)
        leader.publish(manifest(0), source(0)).result(60)
        for reader in range(1, world_size):
            peer = Peer(leader.address, net.OPEN, FENCE, reader, world_size)
            others.append(RemoteController(settings, peer, lambda event: None))
            others[-1].start()
        yield [leader, *others]
    finally:
        for other in others:
            other.close()
        leader.close()
        world.close()


def test_what_the_leader_predicts_counts_whoever_submits_first() -> None:
    """The others predict nothing, and their submission waits for the leader's."""
    world = World(("a",), lambda name, life: FakeEngine(slots=1, tokens_per_s=20_000))
    asked = job(0, count=40, n=1)
    with (
        # With two workers a reward could overtake the one before it.
        readers(2, dispatch=DispatchSettings("lpt"), world=world, reward_workers=1) as (leader, other),
        ThreadPoolExecutor() as threads,
    ):
        early = threads.submit(other.submit, asked)
        with pytest.raises(TimeoutError):
            early.result(0.3)
        leader.submit(replace(asked, predicted=[float(1 + place) for place in range(40)]))
        early.result(60)
        both = list(
            threads.map(lambda c: [s.prompt.prompt_id for s in c.samples("train/0", 60)], (leader, other))
        )
    assert both[0] == both[1] == [str(place) for place in reversed(range(40))]


def acknowledge(controller: RunController, step: Step) -> None:
    controller.acknowledge(step)


def test_all_get_the_same_samples_in_the_same_order() -> None:
    """Whoever submits first; a job that is added at the last sample too; nothing is kept when all have it."""

    def consume(controller: RunController) -> list[str]:
        controller.wait_ready(60)
        controller.submit(job(0, count=40))
        found: list[str] = []
        for sample in controller.samples("train/0", 60):
            found.append(sample.sample_id)
            if len(found) == 160:
                controller.submit(replace(job(1, count=1), job_id="train/0+0", min_version=0), into="train/0")
        return found

    with readers(3) as all_of_them, ThreadPoolExecutor(3) as threads:
        found = list(threads.map(consume, all_of_them))
        assert found[0] == found[1] == found[2]
        assert len(set(found[0])) == len(found[0]) == 164
        end = time.monotonic() + 60
        while set(all_of_them[0].sizes().values()) != {0}:
            assert time.monotonic() < end, all_of_them[0].sizes()
            time.sleep(0.01)
        assert all_of_them[1].counters() == all_of_them[0].counters()
        probes = list(threads.map(lambda c: c.probe(0, prompts(2), SAMPLING), all_of_them))
        assert probes == [("probe/0/a", "probe/0/b")] * 3
        answers = list(threads.map(lambda c: [s.sample_id for s in c.samples("probe/0/b", 60)], all_of_them))
        assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 2


def test_a_stop_is_at_one_place_for_all() -> None:
    """After the same samples, though one is told of it and the other one is ahead; the job itself does not end."""

    def consume(controller: RunController) -> tuple[list[str], str]:
        found: list[str] = []
        try:
            controller.submit(job(0, count=100))
            for sample in controller.samples("train/0", 60):
                found.append(sample.sample_id)
                if controller.reader == 1 and len(found) == 20:
                    controller.stop("SIGTERM")
                time.sleep(0.001 * controller.reader)
        except StopRequested as request:
            return found, str(request)
        return found, ""

    world = World(("a", "b"), lambda name, life: FakeEngine(slots=8, hang_at=100))
    with readers(2, world=world) as both, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(consume, both)
    assert first == second
    assert first[1] == "SIGTERM" and len(first[0]) >= 20


def test_submissions_that_differ_end_with_both_names() -> None:
    with readers(2) as (leader, other):
        leader.submit(job(0, count=4))
        with pytest.raises(ControlError, match="processes 0 and 1 ask for different things as job train/0"):
            other.submit(job(0, count=5))


def test_a_step_goes_when_all_said_the_same() -> None:
    with readers(2) as both, ThreadPoolExecutor(2) as threads:
        for number in range(50):
            step = replace(STEP, sequence=number)
            list(threads.map(acknowledge, both, [step, step]))
        waiting = threads.submit(both[0].acknowledge, replace(STEP, sequence=50))
        with pytest.raises(
            ControlError, match="0 and 1 are about to enter different things as step 50: kind"
        ):
            both[1].acknowledge(replace(STEP, sequence=50, kind="apply"))
        with pytest.raises(ControlError, match="about to enter different things"):
            waiting.result(60)
        with pytest.raises(ControlError, match="about to enter different things"):
            both[0].submit(job(0))


def test_who_does_not_come_is_named() -> None:
    with readers(2, plan_timeout_s=0.5) as (leader, other):
        with pytest.raises(
            ControlError, match=r"not acknowledged by all 2 .* 1 waited for it; trainer process 0"
        ):
            other.acknowledge(STEP)
        with pytest.raises(ControlError, match="not acknowledged by all 2"):
            leader.submit(job(0))


def test_one_process_asks_nobody() -> None:
    with readers(1) as (leader,):
        leader.close()  # whoever was asked now would not answer
        for number in range(3):
            leader.acknowledge(replace(STEP, sequence=number))


def test_another_number_of_processes_is_refused() -> None:
    with readers(2) as (leader, _):
        assert isinstance(leader, Controller)
        stranger = RemoteController(SETTINGS, Peer(leader.address, net.OPEN, FENCE, 2, 3), lambda event: None)
        try:
            stranger.start()
            with pytest.raises(ControlError, match="process 2 of 3 connects to a controller of 2"):
                for _ in range(100):
                    stranger.wait_ready(60)
                    time.sleep(0.05)
        finally:
            stranger.close()


def test_a_process_that_hangs_in_a_collective_ends_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """Only the main thread that comes back keeps it alive."""
    codes: list[int] = []
    others = set(threading.enumerate())

    def watched_to_its_end() -> None:
        for thread in set(threading.enumerate()) - others:
            thread.join(60)
            assert not thread.is_alive()

    heeded = Watchdog(600.0, codes.append)
    heeded.arm(ControlError("process 1 is gone"))
    heeded.heed()
    watched_to_its_end()
    assert codes == []
    hung = Watchdog(0.05, codes.append)
    hung.arm(ControlError("process 1 is gone"))
    watched_to_its_end()
    assert codes == [HUNG_EXIT_CODE]
    assert "process 1 is gone" in capfd.readouterr().err
