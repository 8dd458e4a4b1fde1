"""Rules of the service, over real gRPC on loopback with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.bridge.store import WeightStore
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.client import Drained, Granted, InstanceClient, InstanceError, InstanceStream
from streamrl_jax.gen.health import CHECK, add_health
from streamrl_jax.gen.protocol import EngineFailed
from streamrl_jax.gen.pulse import Pulse
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.gen.sources import Sources
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Hello,
    InstanceState,
    InstanceStatus,
    Manifest,
    Partial,
    Progress,
    Rejection,
    RejectReason,
    Sampling,
    UpdateReport,
    VersionRun,
    WeightSource,
)
from tests.fakes import FakeEngine, FaultyStream, fake_logprob, fake_token
from tests.fast.control_world import LoadingEngine

FENCE = Fence("run", 0)
HELLO = Hello(FENCE, 0.05)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=16, stop_token_ids=(0,))


def manifest(version: int, fence: Fence = FENCE) -> Manifest:
    """Enough of a manifest for a fake engine."""
    return Manifest(fence, version, (), 0, bytes(32), "Fake")


def assignment(index: int, **change: Any) -> Assignment:
    """Sample ``s<index>``."""
    return replace(Assignment(f"s{index}", 0, np.array([index + 1], np.int32), SAMPLING), **change)


def expected_ids(given: Assignment, length: int) -> list[int]:
    """What the fake engine writes."""
    return [fake_token(given.prompt_ids, index) for index in range(length)]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario on a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


async def until(happened: Callable[[], object]) -> None:
    """Waits for what the engine or the service does by itself."""
    while not happened():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine,
    *,
    token: str = "",
    wrap: Callable[[GenerationService], rpc.StreamGenerationServicer] = lambda service: service,
    ready: bool = True,
    fence: Fence | None = None,
    fetch: Sources | None = None,
    lookahead: int = 100,
) -> AsyncIterator[tuple[GenerationService, str]]:
    """A running service and its address."""
    service = GenerationService(engine, Identity("instance-0", lookahead, "host", fence=fence), fetch)
    access = net.Access(token)
    server = net.make_server(access)
    add_health(server, lambda: service.serving)
    rpc.add_StreamGenerationServicer_to_server(wrap(service), server)
    address = net.bind(server, "127.0.0.1:0", access)
    await server.start()
    life = asyncio.create_task(service.run())
    try:
        if ready:
            await until(lambda: service.status.state is not InstanceState.LOADING)
        yield service, address
    finally:
        await server.stop(None)
        life.cancel()
        with pytest.raises((asyncio.CancelledError, EngineFailed)):
            await life


@contextlib.asynccontextmanager
async def stream_to(
    address: str, hello: Hello = HELLO, token: str = ""
) -> AsyncIterator[tuple[InstanceClient, InstanceStream]]:
    """A client with an open stream."""
    client = InstanceClient(address, net.Access(token))
    try:
        yield client, await client.open(hello)
    finally:
        await client.close()


async def answers(stream: InstanceStream, count: int, acknowledge: bool = True) -> list[Generation]:
    """The next ``count`` answers."""
    found: list[Generation] = []
    async for event in stream.events():
        if isinstance(event, Generation):
            found.append(event)
            if acknowledge:
                await stream.acknowledge(event.sample_id, event.attempt)
            if len(found) == count:
                break
    return found


async def next_of(stream: InstanceStream, kind: type[Any]) -> Any:
    """The next event of a kind."""
    async for event in stream.events():
        if isinstance(event, kind):
            return event
    raise AssertionError(f"the stream ended without {kind}")


async def quiet(stream: InstanceStream, seconds: float) -> list[Generation | Rejection]:
    """Answers and refusals that come within a time in which none should. Ends the stream."""
    found: list[Generation | Rejection] = []

    async def collect() -> None:
        async for event in stream.events():
            if isinstance(event, Generation | Rejection):
                found.append(event)

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(collect(), seconds)
    return found


def test_each_assignment_is_answered_exactly_once() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine(slots=4)) as (_, address), stream_to(address) as (_, stream):
            assert (stream.info.name, stream.info.slots, stream.info.version) == ("instance-0", 4, -1)
            given = [assignment(index) for index in range(20)]
            for each in given:
                await stream.hand_over([each, each], [])  # repeated while it is at work: harmless
            found = {answer.sample_id: answer for answer in await answers(stream, 20)}
            assert sorted(found) == sorted(each.sample_id for each in given)
            for each in given:
                answer, ids = found[each.sample_id], expected_ids(each, 5)
                assert answer.token_ids.tolist() == ids
                np.testing.assert_array_equal(
                    answer.logprobs, np.array([fake_logprob(i) for i in ids], np.float32)
                )
                assert answer.versions == (VersionRun(-1, 5),)
                assert (answer.finish_reason, answer.instance) == (FinishReason.STOP, "instance-0")
            assert await quiet(stream, 0.1) == []

    run(scenario)


def test_lower_priority_runs_first() -> None:
    async def scenario() -> None:
        engine = FakeEngine(slots=1)
        async with serving(engine) as (_, address), stream_to(address) as (_, stream):
            # As one message: all wait before the first one has ended.
            await stream.hand_over([assignment(index, priority=-index) for index in range(6)], [])
            order = [answer.sample_id for answer in await answers(stream, 6)]
            assert order == ["s0", "s5", "s4", "s3", "s2", "s1"]

    run(scenario)


def test_what_was_not_acknowledged_comes_again_on_a_new_stream() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (service, address):
            async with stream_to(address) as (_, stream):
                for index in range(3):
                    await stream.assign(assignment(index))
                first = await answers(stream, 3, acknowledge=False)
                await stream.acknowledge(first[0].sample_id, 0)
                await until(lambda: len(service._answers.unacknowledged()) == 2)
            async with stream_to(address) as (_, stream):
                again = await answers(stream, 2)
                assert [a.sample_id for a in again] == [a.sample_id for a in first[1:]]
                assert [a.token_ids.tolist() for a in again] == [a.token_ids.tolist() for a in first[1:]]
                assert await quiet(stream, 0.1) == []

    run(scenario)


def test_work_survives_a_cut_and_is_not_done_twice() -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokens_per_s=50)

        def cut(service: GenerationService) -> FaultyStream:
            return FaultyStream(service, cut_after=1)

        async with serving(engine, wrap=cut) as (_, address):
            given = [assignment(index) for index in range(4)]
            async with stream_to(address) as (_, stream):
                await stream.hand_over(given, [])
                with pytest.raises(InstanceError, match="cut by the test"):
                    await answers(stream, 9, acknowledge=False)
            async with stream_to(address) as (_, stream):
                await stream.hand_over(given, [])
                missing = {each.sample_id for each in given}
                while missing:  # what was finished by now may come twice
                    missing -= {answer.sample_id for answer in await answers(stream, 1)}
            assert sorted(line for line in engine.log if line.startswith("start")) == sorted(
                f"start {each.sample_id}/0" for each in given
            )

    run(scenario)


def test_duplicates_and_swaps_on_the_way_lose_nothing() -> None:
    async def scenario() -> None:
        def faulty(service: GenerationService) -> FaultyStream:
            return FaultyStream(service, duplicate=True, reorder=True)

        async with serving(FakeEngine(), wrap=faulty) as (_, address), stream_to(address) as (_, stream):
            for index in range(7):
                await stream.assign(assignment(index))
            seen: set[str] = set()
            async for event in stream.events():
                if isinstance(event, Generation):
                    seen.add(event.sample_id)
                    if len(seen) == 7:
                        break

    run(scenario)


def test_a_newer_hello_ends_the_older_stream() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with serving(engine) as (_, address), stream_to(address) as (_, older):
            engine.hang()  # so that the answer is still at work when the newer one comes
            await older.assign(assignment(0))
            await until(lambda: "start s0/0" in engine.log)
            async with stream_to(address) as (_, newer):
                with pytest.raises(InstanceError, match="took over") as error:
                    await answers(older, 1)
                assert error.value.code is grpc.StatusCode.ABORTED
                engine.thaw()
                assert (await answers(newer, 1))[0].sample_id == "s0"  # of the same fence: the work goes on

    run(scenario)


def test_a_later_life_of_the_run_takes_over_and_sees_nothing_of_the_earlier() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with serving(engine) as (_, address), stream_to(address) as (client, older):
            assert (
                await client.update(manifest(4), WeightSource("/dev/shm/x"), in_flight=False, timeout_s=60)
            ).accepted
            engine.hang()  # so that the answer is still at work when the later one comes
            await older.assign(assignment(0))
            await until(lambda: "start s0/0" in engine.log)
            later = Fence("run", 1)
            async with stream_to(address, Hello(later, 0.05)) as (_, newer):
                with pytest.raises(InstanceError, match="took over"):
                    await answers(older, 1)
                engine.thaw()
                assert newer.info.version == -1  # version 4 was another life's
                await newer.assign(assignment(1, min_version=0))
                assert (await next_of(newer, Rejection)).reason is RejectReason.WRONG_VERSION
                await newer.assign(assignment(2))
                assert [a.versions for a in await answers(newer, 1)] == [(VersionRun(-1, 5),)]
            with pytest.raises(InstanceError, match="earlier life") as error:
                await client.open(Hello(FENCE))
            assert error.value.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "finish s0/0" not in engine.log

    run(scenario)


def test_another_run_is_refused_while_a_stream_is_open_or_the_instance_is_owned() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address), stream_to(address) as (client, _):
            with pytest.raises(InstanceError, match="belongs to run 'run'"):
                await client.open(Hello(Fence("other", 0)))
        async with serving(FakeEngine(), fence=FENCE) as (_, address):
            client = InstanceClient(address)
            with pytest.raises(InstanceError, match="belongs to run 'run'"):
                await client.open(Hello(Fence("other", 0)))
            await client.close()

    run(scenario)


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        ({"sampling": replace(SAMPLING, top_k=5)}, RejectReason.SAMPLING_NOT_ALLOWED, "top_k = 5"),
        ({"sampling": replace(SAMPLING, top_p=0.5)}, RejectReason.SAMPLING_NOT_ALLOWED, "top_p = 0.5"),
        ({"sampling": replace(SAMPLING, min_p=0.5)}, RejectReason.SAMPLING_NOT_ALLOWED, "min_p = 0.5"),
        (
            {"sampling": replace(SAMPLING, temperature=0.0)},
            RejectReason.SAMPLING_NOT_ALLOWED,
            "temperature = 0",
        ),
        (
            {"sampling": replace(SAMPLING, temperature=1e-3)},
            RejectReason.SAMPLING_NOT_ALLOWED,
            "raised to 0.01",
        ),
        (
            {"sampling": replace(SAMPLING, forced_length=3)},
            RejectReason.SAMPLING_NOT_ALLOWED,
            "forced_length = 3",
        ),
        ({"sampling": replace(SAMPLING, max_new_tokens=512)}, RejectReason.TOO_LONG, "max_model_len = 512"),
        ({"min_version": 3}, RejectReason.WRONG_VERSION, "min_version = 3"),
        ({"prompt_ids": np.array([], np.int32)}, RejectReason.INVALID, "prompt_ids is empty"),
    ],
)
def test_what_training_may_not_sample_is_rejected(
    change: dict[str, Any], reason: RejectReason, named: str
) -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address), stream_to(address) as (_, stream):
            await stream.assign(assignment(0, **change))
            rejection = await next_of(stream, Rejection)
            assert (rejection.sample_id, rejection.reason) == ("s0", reason)
            assert named in rejection.message

    run(scenario)


def test_evaluation_is_free() -> None:
    async def scenario() -> None:
        free = replace(SAMPLING, temperature=0.0, top_k=5, top_p=0.5, evaluation=True, forced_length=7)
        async with serving(FakeEngine()) as (_, address), stream_to(address) as (_, stream):
            await stream.assign(assignment(0, sampling=free))
            assert len((await answers(stream, 1))[0].token_ids) == 7

    run(scenario)


def test_a_partial_answer_goes_on_and_keeps_its_own_versions() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address), stream_to(address) as (client, stream):
            source = WeightSource("/dev/shm/blob")
            assert (await client.update(manifest(3), source, in_flight=False, timeout_s=60)).accepted
            ids = np.array([7, 8], np.int32)
            partial = Partial(ids, np.array([-1, -2], np.float32), (VersionRun(2, 2),))
            given = assignment(0, resumed=partial, attempt=1)
            await stream.assign(given)
            answer = (await answers(stream, 1))[0]
            assert answer.token_ids.tolist() == [7, 8, *expected_ids(given, 5)[2:]]
            assert answer.logprobs[:2].tolist() == [-1, -2]
            assert answer.versions == (VersionRun(2, 2), VersionRun(3, 3))

    run(scenario)


def test_progress_adds_up_to_the_answer() -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokens_per_s=100, length=lambda _: 12)
        hello = Hello(FENCE, 0.05, progress_interval_s=0.02)
        async with serving(engine) as (_, address), stream_to(address, hello) as (_, stream):
            await stream.assign(assignment(0))
            told: list[int] = []
            async for event in stream.events():
                if isinstance(event, Progress):
                    assert event.offset == len(told)
                    told += event.token_ids.tolist()
                if isinstance(event, Generation):
                    assert told
                    assert told == event.token_ids.tolist()[: len(told)]
                    break

    run(scenario)


def test_an_aborted_answer_returns_what_it_has() -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokens_per_s=100, length=lambda _: 16)
        async with serving(engine) as (_, address), stream_to(address) as (_, stream):
            await stream.assign(assignment(0))
            await until(lambda: engine.tokens_total)
            engine.hang()
            await stream.abort("s0", 0)
            await stream.abort("nobody", 3)
            await until(lambda: engine._aborted)
            engine.thaw()
            answer = (await answers(stream, 1))[0]
            assert answer.finish_reason is FinishReason.ABORT
            assert 0 < len(answer.token_ids) < 16

    run(scenario)


def test_a_newer_attempt_ends_the_older() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with serving(engine) as (_, address), stream_to(address) as (_, stream):
            engine.hang()
            await stream.assign(assignment(0))
            await until(lambda: "start s0/0" in engine.log)
            await stream.assign(assignment(0, attempt=1))
            await until(lambda: "start s0/1" in engine.log)
            engine.thaw()
            found = await answers(stream, 1)
            assert [(a.sample_id, a.attempt) for a in found] == [("s0", 1)]
            assert await quiet(stream, 0.15) == []

    run(scenario)


def test_answers_wait_for_credit_once_it_is_used() -> None:
    async def scenario() -> None:
        engine = FakeEngine(slots=8)
        async with serving(engine) as (_, address), stream_to(address) as (_, stream):
            await stream.grant(2)
            for index in range(5):
                await stream.assign(assignment(index))
            assert len(await answers(stream, 2, acknowledge=False)) == 2
            await until(lambda: len([line for line in engine.log if line.startswith("finish")]) == 5)
            assert await quiet(stream, 0.3) == []

    run(scenario)


def test_an_instance_grants_what_it_holds_and_ends_a_stream_that_brings_more() -> None:
    async def scenario() -> None:
        engine = FakeEngine(slots=3)
        async with serving(engine, lookahead=1) as (_, address), stream_to(address) as (_, stream):
            assert await next_of(stream, Granted) == Granted(4)  # slots and look-ahead
            await stream.assign(assignment(0))
            assert await next_of(stream, Granted) == Granted(1)
            engine.hang()
            for index in range(1, 5):
                await stream.assign(assignment(index))
            await stream.assign(assignment(1))  # again
            with pytest.raises(
                InstanceError, match=r"4 assignments are unanswered .*s1.* is too many"
            ) as ended:
                await next_of(stream, Generation)
            assert ended.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            engine.thaw()

    run(scenario)


def test_an_answer_that_is_not_taken_keeps_its_place_in_the_instance() -> None:
    """A controller that grants no more answers is granted no more assignments: memory ends where the credit does."""

    async def scenario() -> None:
        engine = FakeEngine(slots=3)
        hello = replace(HELLO, answers=2)
        async with serving(engine, lookahead=1) as (_, address), stream_to(address, hello) as (_, stream):
            given = [assignment(index) for index in range(5)]
            assert await next_of(stream, Granted) == Granted(4)
            await stream.hand_over(given[:4], [])
            found = [await next_of(stream, Generation) for _ in range(2)]
            assert (await next_of(stream, Granted)).count + 2 <= 4
            assert {one.sample_id for one in found} < {"s0", "s1", "s2", "s3"}
            await stream.grant(1)
            await next_of(stream, Generation)
            await stream.grant(1)
            await next_of(stream, Generation)
            await stream.hand_over(given[4:], [(one.sample_id, one.attempt) for one in given[:4]])
            await stream.grant(1)
            assert (await next_of(stream, Generation)).sample_id == "s4"

    run(scenario)


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokens_per_s=50)
        async with serving(engine) as (_, address), stream_to(address) as (client, stream):
            await stream.assign(assignment(0))
            await until(lambda: engine.tokens_total)
            engine.hang()
            assert (await client.drain(FENCE)).state is InstanceState.DRAINING
            await stream.assign(assignment(1))
            kinds: list[str] = []
            async for event in stream.events():
                if isinstance(event, Generation | Rejection | Drained):
                    kinds.append(type(event).__name__)
                if isinstance(event, Rejection):
                    engine.thaw()
                if isinstance(event, Drained):
                    break
            assert kinds == ["Rejection", "Generation", "Drained"]
            assert (await client.resume(FENCE)).state is InstanceState.IDLE
            await stream.assign(assignment(2))
            assert (await answers(stream, 1))[0].sample_id == "s2"

    run(scenario)


def test_heartbeats_count_tokens_and_show_a_stopped_engine() -> None:
    async def scenario() -> None:
        engine = FakeEngine(slots=2, tokens_per_s=100, length=lambda _: 10)
        async with serving(engine) as (service, address), stream_to(address) as (client, stream):
            await stream.hand_over([assignment(index) for index in range(3)], [])
            await until(lambda: service.status.running == 2)
            engine.hang()  # until a beat has shown how two run and one waits
            beats: list[InstanceStatus] = []
            done = 0
            async for event in stream.events():
                if isinstance(event, InstanceStatus):
                    beats.append(event)
                    if (event.running, event.waiting) == (2, 1):
                        assert event.state is InstanceState.GENERATING
                        engine.thaw()
                done += isinstance(event, Generation)
                if done == 3 and isinstance(event, InstanceStatus):
                    break
            assert sum(beat.tokens_since_last for beat in beats) == 30
            steps = [beat.steps_total for beat in beats]
            assert steps == sorted(steps)
            assert 20 <= steps[-1] == engine.steps_total <= 30, (
                "two rounds of 10, of which the first is of two answers"
            )
            status, info = await client.status()
            assert (status.steps_total, info.kv_tokens) == (steps[-1], engine.kv_tokens)
            pinged = time.monotonic()
            while (
                time.monotonic() < pinged + 1.2 or beats[-1].engine_age_s > 0.6
            ):  # it is asked again and again
                beats.append(await next_of(stream, InstanceStatus))
            engine.hang()
            await stream.assign(assignment(9))
            while (await client.status())[0].engine_age_s < 0.6:
                await asyncio.sleep(0.05)
            while (await next_of(stream, InstanceStatus)).engine_age_s < 0.6:
                pass
            engine.thaw()

    run(scenario)


def test_an_engine_that_stood_still_together_with_its_process_is_not_taken_for_silent() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        pulse = Pulse(engine, interval_s=60.0)
        asking = asyncio.create_task(pulse.run())
        await asyncio.sleep(0)  # it asks, and is answered at once
        time.sleep(0.3)  # the machine is suspended
        assert pulse.age_s == 0.0
        asking.cancel()
        engine.hang()
        pulse = Pulse(engine, interval_s=0.0)
        asking = asyncio.create_task(pulse.run())
        await asyncio.sleep(0)
        time.sleep(0.3)
        assert pulse.age_s >= 0.3, "an answer has been missing meanwhile"
        asking.cancel()

    run(scenario)


def test_an_engine_owes_no_answer_while_it_applies_weights_or_is_paused() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with serving(engine) as (_, address), stream_to(address) as (client, _):
            await client.pause(FENCE, keep=True, timeout_s=60)
            await asyncio.sleep(1.2)
            while (await client.status())[0].engine_age_s > 0.6:  # a busy machine may be late, and catches up
                await asyncio.sleep(0.05)
            engine.hang()
            engine.excused_until_s = excused = time.monotonic() + 0.8
            while (age := (await client.status())[0].engine_age_s) <= 0.2:
                await asyncio.sleep(0.05)
            assert age < time.monotonic() - excused + 0.1, "counted from the end of the excuse"
            engine.thaw()

    run(scenario)


def test_a_dead_engine_rejects_its_work_and_says_why() -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokens_per_s=50)
        async with serving(engine) as (_, address), stream_to(address) as (client, stream):
            await stream.assign(assignment(0))
            await until(lambda: engine.tokens_total)
            engine.crash("the core was killed")
            rejection = await next_of(stream, Rejection)
            assert (rejection.sample_id, rejection.reason) == ("s0", RejectReason.ENGINE_FAILED)
            status, _ = await client.status()
            assert (status.state, status.message) == (InstanceState.FAILED, "the core was killed")
            await stream.assign(assignment(1))
            assert (await next_of(stream, Rejection)).reason is RejectReason.ENGINE_FAILED

    run(scenario)


def test_a_loading_instance_answers_and_says_what_it_does() -> None:
    async def scenario() -> None:
        engine = LoadingEngine()
        async with serving(engine, ready=False) as (service, address):
            client = InstanceClient(address)
            await until(lambda: service.status.phase == "counting to start")
            status, info = await client.status()
            assert (status.state, status.phase, info.version) == (
                InstanceState.LOADING,
                "counting to start",
                -1,
            )
            report = await client.update(
                manifest(0), WeightSource("/dev/shm/x"), in_flight=False, timeout_s=60
            )
            assert not report.accepted
            assert "counting to start" in report.reason
            engine.thaw()
            while (await client.status())[0].state is not InstanceState.IDLE:
                await asyncio.sleep(0.02)
            await client.close()
        async with serving(FakeEngine(start_failure="no memory"), ready=False) as (_, address):
            client = InstanceClient(address)
            while (found := (await client.status())[0]).state is InstanceState.LOADING:
                await asyncio.sleep(0.01)
            assert (found.state, found.message) == (InstanceState.FAILED, "no memory")
            await client.close()

    run(scenario)


def test_updates_go_in_order_and_are_idempotent() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        source = WeightSource("/dev/shm/blob")
        async with serving(engine) as (_, address), stream_to(address) as (client, stream):
            first = await client.update(manifest(1), source, in_flight=True, timeout_s=60)
            assert (first.accepted, first.version) == (True, 1)
            assert (await client.update(manifest(1), source, in_flight=True, timeout_s=60)).accepted
            assert [(m.version, path, kept) for m, path, kept in engine.updates] == [
                (1, Path("/dev/shm/blob"), True)
            ]
            older = await client.update(manifest(0), source, in_flight=True, timeout_s=60)
            assert (older.accepted, older.version) == (False, 1)
            assert "not newer than 1" in older.reason
            with pytest.raises(InstanceError, match="belongs to run"):
                await client.update(manifest(2, Fence("other", 0)), source, in_flight=True, timeout_s=60)
            await stream.assign(assignment(0, min_version=1))
            assert (await answers(stream, 1))[0].versions == (VersionRun(1, 5),)
            engine.reject_update = "a.weight: missing; b.weight: missing"
            refused = await client.update(manifest(2), source, in_flight=False, timeout_s=60)
            assert (refused.accepted, refused.version, refused.quarantined) == (False, 1, False)
            assert refused.reason == engine.reject_update
            await stream.assign(assignment(1, min_version=1))
            assert (await answers(stream, 1))[0].versions == (VersionRun(1, 5),)

    run(scenario)


def test_an_update_that_failed_after_it_began_quarantines() -> None:
    async def scenario() -> None:
        engine = FakeEngine(quarantine_update="rank 1 ran out of memory")
        async with serving(engine) as (_, address):
            client = InstanceClient(address)
            report = await client.update(
                manifest(1), WeightSource("/dev/shm/b"), in_flight=False, timeout_s=60
            )
            assert (report.accepted, report.quarantined) == (False, True)
            status, _ = await client.status()
            assert status.state is InstanceState.FAILED
            assert "quarantined" in status.message
            await client.close()

    run(scenario)


def test_pause_holds_and_resume_goes_on() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address), stream_to(address) as (client, stream):
            assert (await client.pause(FENCE, keep=True, timeout_s=60)).state is InstanceState.PAUSED
            await stream.assign(assignment(0))
            for _ in range(3):
                assert (await next_of(stream, InstanceStatus)).tokens_since_last == 0
            await client.resume(FENCE)
            assert len(await answers(stream, 1)) == 1

    run(scenario)


def test_every_call_needs_the_token() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine(), token="secret") as (_, address):
            for wrong in ("", "secre", "secret2"):
                client = InstanceClient(address, net.Access(wrong))
                calls: list[Coroutine[Any, Any, Any]] = [
                    client.status(),
                    client.open(Hello(FENCE)),
                    client.drain(FENCE),
                ]
                for call in calls:
                    with pytest.raises(InstanceError) as error:
                        await call
                    assert error.value.code is grpc.StatusCode.UNAUTHENTICATED
                await client.close()
            async with stream_to(address, token="secret") as (_, stream):
                await stream.assign(assignment(0))
                assert len(await answers(stream, 1)) == 1

    run(scenario)


def test_health_needs_no_token_and_follows_the_state() -> None:
    async def scenario() -> None:
        engine = LoadingEngine()
        async with serving(engine, token="secret", ready=False) as (service, address):
            async with grpc.aio.insecure_channel(address, options=net.CHANNEL_OPTIONS) as channel:
                check = channel.unary_unary(CHECK)
                assert await check(b"") == b"\x08\x02"
                engine.thaw()
                await until(lambda: service.status.state is not InstanceState.LOADING)
                assert await check(b"") == b"\x08\x01"
            client = InstanceClient(address, net.Access("secret"))
            await client.drain(FENCE)
            await client.close()
            assert not service.serving

    run(scenario)


def test_an_update_that_another_life_overtook_is_not_served() -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        class Held(FakeEngine):
            async def update_weights(self, manifest: Manifest, blob: Path, **bounds: Any) -> UpdateReport:
                begun.set()
                await go_on.wait()
                return await super().update_weights(manifest, blob, **bounds)

        source = WeightSource("/dev/shm/blob")
        async with serving(Held()) as (_, address):
            client = InstanceClient(address)
            update = asyncio.create_task(client.update(manifest(7), source, in_flight=True, timeout_s=60))
            await begun.wait()
            async with stream_to(address, Hello(Fence("run", 1), 0.05)):
                go_on.set()
                report = await update
                assert (report.accepted, report.version) == (False, -1)
                assert "superseded" in report.reason
                status, _ = await client.status()
                assert status.version == -1
            await client.close()

    run(scenario)


@dataclass(frozen=True)
class Held:
    """What a store holds of a version."""

    manifest: Manifest
    path: Path


@pytest.mark.parametrize("token", ["", "secret"])
def test_an_instance_elsewhere_fetches_from_the_store(tmp_path: Path, token: str) -> None:
    blob_manifest, blob = pack(FENCE, 0, "Fake", {"w": np.arange(100_000, dtype=np.float32)})
    stored = tmp_path / "blob.bin"
    stored.write_bytes(blob)
    seen: list[bytes] = []
    access = net.Access(token)

    class Reading(FakeEngine):
        async def update_weights(self, manifest: Manifest, blob: Path, **bounds: Any) -> UpdateReport:
            seen.append(blob.read_bytes())
            return await super().update_weights(manifest, blob, **bounds)

    async def scenario() -> None:
        fetched = tmp_path / "fetched"
        fetched.mkdir()
        fetch = Sources(access, (), (fetched,))
        held = {0: Held(blob_manifest, stored)}
        store = net.make_server(access)
        rpc.add_WeightStoreServicer_to_server(WeightStore(lambda: FENCE, lambda: held), store)
        source = WeightSource(address=net.bind(store, "127.0.0.1:0", access))
        await store.start()
        async with serving(Reading(), token=token, fetch=fetch) as (_, instance):
            client = InstanceClient(instance, access)
            report = await client.update(blob_manifest, source, in_flight=False, timeout_s=60)
            assert report.accepted, report.reason
            missing = replace(blob_manifest, version=1)
            refused = await client.update(missing, source, in_flight=False, timeout_s=60)
            assert (refused.accepted, refused.version) == (False, 0)
            assert "version 1" in refused.reason
            await client.close()
        await store.stop(None)
        assert not list(fetched.iterdir())

    run(scenario)
    assert seen == [bytes(blob)]


def test_a_stream_without_hello_is_refused() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address):
            client = InstanceClient(address)
            with pytest.raises(InstanceError, match="heartbeat_interval_s") as error:
                await client.open(Hello(FENCE, heartbeat_interval_s=0.0))
            assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
            await client.close()

    run(scenario)


def test_nothing_listens_beyond_loopback_by_accident(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0\.0\.0\.0:0.*security\.insecure"):
        net.check_listen("0.0.0.0:0", net.Access("t"))
    with pytest.raises(UserError, match=r"token_file"):
        net.check_listen("10.0.0.1:5", net.Access(insecure=True))
    net.check_listen("10.0.0.1:5", net.Access("t", insecure=True))
    for loopback in ("127.0.0.1:0", "localhost:0", "[::1]:0", "127.8.8.8:1"):
        net.check_listen(loopback, net.OPEN)
    for bad in ("", "localhost", ":5", "host:port", "host:70000"):
        with pytest.raises(UserError, match="HOST:PORT"):
            net.split_address(bad)
    with pytest.raises(UserError, match=r"nowhere"):
        net.read_token(str(tmp_path / "nowhere"))
    (tmp_path / "token").write_text("  s3cret\n")
    assert net.read_token(str(tmp_path / "token")) == "s3cret"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", ""),
        ("[::1]:1", ""),
        ("localhost:1", ""),
        ("node-b:1", "plain text"),
        ("10.0.0.2:1", "plain text"),
    ],
)
def test_no_other_machine_is_called_in_plain_text_by_accident(address: str, reason: str) -> None:
    net.check_call(address, net.Access(insecure=True))
    if not reason:
        net.check_call(address, net.OPEN)
        return
    with pytest.raises(UserError, match=rf"{address} is on another machine.*{reason}.*security.insecure"):
        net.check_call(address, net.OPEN)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async def scenario() -> None:
        async with serving(FakeEngine()) as (_, address):
            other = net.make_server(net.OPEN)
            with pytest.raises(UserError, match=address):
                net.bind(other, address, net.OPEN)

    run(scenario)
