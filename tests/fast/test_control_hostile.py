"""An endpoint that speaks nonsense is lost, by name, and nothing else: the others answer what it was given."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from streamrl_jax.control.codec import view_from_proto, view_to_proto
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.link import ANSWERS
from streamrl_jax.control.meter import TokenRate
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.host import host_id
from streamrl_jax.gen.launch import StaticLauncher
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    FinishReason,
    Generation,
    Hello,
    InstanceInfo,
    InstanceState,
    InstanceStatus,
    Progress,
    UpdateReport,
    VersionRun,
)
from tests.fakes import FakeEngine, fake_logprob

from .control_world import (
    FENCE,
    SETTINGS,
    JoinedLauncher,
    Run,
    World,
    decode,
    job,
    manifest,
    reward_by_length,
    source,
)

INFO = InstanceInfo("hostile", 4, 2, 512, 0, True, host_id(), "none")
IDLE = InstanceStatus(InstanceState.IDLE, 0)

Reply = Callable[[pb.GenerateRequest], list[bytes]]
"""What it sends for a message on the stream."""


def welcome(request: pb.GenerateRequest, slots: int = 4, kv_tokens: int = 0) -> list[bytes]:
    greeting = pb.GenerateResponse(
        welcome=codec.info_to_proto(replace(INFO, slots=slots, kv_tokens=kv_tokens))
    )
    beat = pb.GenerateResponse(heartbeat=codec.heartbeat_to_proto(FENCE, IDLE))
    credit = pb.GenerateResponse(credit=pb.Credit(count=1000))
    return [message.SerializeToString() for message in (greeting, beat, credit)]


def answering(make: Callable[[pb.Assign], pb.GenerateResponse | bytes]) -> Reply:
    """Greets, and sends something for each assignment."""

    def reply(request: pb.GenerateRequest) -> list[bytes]:
        if request.WhichOneof("kind") == "hello":
            return welcome(request)
        together = request.WhichOneof("kind") == "several"
        requests = request.several.requests if together else (request,)
        made = [make(one.assign) for one in requests if one.WhichOneof("kind") == "assign"]
        return [one if isinstance(one, bytes) else one.SerializeToString() for one in made]

    return reply


def of_length(length: int) -> Callable[[pb.Assign], pb.GenerateResponse]:
    """An answer of so many tokens."""

    def make(assign: pb.Assign) -> pb.GenerateResponse:
        runs = (VersionRun(0, length),) if length else ()
        ids, logprobs = [7] * length, [fake_logprob(7)] * length
        answer = Generation(
            assign.sample_id, assign.attempt, ids, logprobs, runs, FinishReason.STOP, "hostile"  # type: ignore[arg-type]
        )  # fmt: skip
        return pb.GenerateResponse(finished=codec.generation_to_proto(FENCE, answer))

    return make


def endless(assign: pb.Assign) -> pb.GenerateResponse:
    """The beginning of an answer that is longer than any that was asked for."""
    ids, logprobs = [7] * 1000, [fake_logprob(7)] * 1000
    progress = Progress(assign.sample_id, assign.attempt, 0, ids, logprobs, (VersionRun(0, 1000),))  # type: ignore[arg-type]
    return pb.GenerateResponse(progress=codec.progress_to_proto(FENCE, progress))


def beyond_its_credit(request: pb.GenerateRequest) -> list[bytes]:
    """One answer more than it was granted at first, all of a sample that nobody asked for."""
    if request.WhichOneof("kind") == "hello":
        return welcome(request)
    return [of_length(4)(pb.Assign(sample_id="nobody's")).SerializeToString()] * (ANSWERS + 1)


def boasting(request: pb.GenerateRequest) -> list[bytes]:
    """It holds nothing, and has made more tokens than a total of them may be."""
    beat = codec.heartbeat_to_proto(FENCE, replace(IDLE, tokens_since_last=wire.MAX_TOTAL))
    return [*welcome(request), *[pb.GenerateResponse(heartbeat=beat).SerializeToString()] * 2]


class Hostile:
    """A gRPC server that answers with bytes of its own. Used on the world's loop."""

    def __init__(self, status: bytes, stream: Reply) -> None:
        self._status, self._stream = status, stream
        self.streams = 0

    async def start(self) -> str:
        self.server = net.make_server(net.OPEN)
        handlers = {
            "GetStatus": grpc.unary_unary_rpc_method_handler(self._get_status),
            "UpdateWeights": grpc.unary_unary_rpc_method_handler(self._update),
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, request_deserializer=pb.GenerateRequest.FromString
            ),
        }
        name = "streamrl.v1.StreamGeneration"
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        address = net.bind(self.server, "127.0.0.1:0", net.OPEN)
        await self.server.start()
        return address

    async def _get_status(self, request: bytes, context: Any) -> bytes:
        return self._status

    async def _update(self, request: bytes, context: Any) -> bytes:
        """One that is well otherwise says that it serves version 0, as asked."""
        if self._status != GOOD_STATUS:
            return self._status
        return codec.report_to_proto(UpdateReport("hostile", True, 0)).SerializeToString()

    async def _generate(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        self.streams += 1
        async for request in requests:
            for message in self._stream(request):
                yield message


GOOD_STATUS = codec.status_to_proto(IDLE, INFO).SerializeToString()
GARBAGE = b"\xff" * 40
NESTED = pb.GenerateResponse(several=pb.GenerateResponses())
RANDOM = random.Random(1).randbytes(200)

CASES: dict[str, tuple[bytes, Reply]] = {
    "its status is garbage": (GARBAGE, welcome),
    "its status is empty": (b"", welcome),
    "its status is of no known state": (pb.StatusReply(instance="x").SerializeToString(), welcome),
    "its greeting is garbage": (GOOD_STATUS, lambda request: [GARBAGE]),
    "its greeting is random": (GOOD_STATUS, lambda request: [RANDOM]),
    "its greeting names no slots": (GOOD_STATUS, lambda request: welcome(request, slots=0)),
    "its KV cache holds no answer": (GOOD_STATUS, lambda request: welcome(request, kv_tokens=1)),
    "it reports tokens beyond all measure": (GOOD_STATUS, boasting),
    "it greets with something else": (
        GOOD_STATUS,
        lambda request: [pb.GenerateResponse(credit=pb.Credit(count=1)).SerializeToString()],
    ),
    "it answers with garbage": (GOOD_STATUS, answering(lambda assign: GARBAGE)),
    "it answers with random bytes": (GOOD_STATUS, answering(lambda assign: RANDOM)),
    "its answer is empty": (GOOD_STATUS, answering(of_length(0))),
    "its answer is too long": (GOOD_STATUS, answering(of_length(33))),
    "its answer does not end": (GOOD_STATUS, answering(endless)),
    "it sends more than its credit": (GOOD_STATUS, beyond_its_credit),
    "it nests messages": (
        GOOD_STATUS,
        answering(lambda assign: pb.GenerateResponse(several=pb.GenerateResponses(responses=[NESTED]))),
    ),
    "it sends several, which are none": (
        GOOD_STATUS,
        answering(lambda assign: pb.GenerateResponse(several=pb.GenerateResponses())),
    ),
}


def held(name: str, life: int) -> FakeEngine:
    """In its first life, it answers nothing until it is told to."""
    engine = FakeEngine()
    if not life:
        engine.hang()
    return engine


@pytest.mark.parametrize("case", CASES)
def test_nonsense_costs_an_endpoint_its_place_and_the_run_nothing(case: str) -> None:
    world = World(("good",), held)
    hostile = Hostile(*CASES[case])
    address = world.call(hostile.start())
    launcher = JoinedLauncher([world, StaticLauncher({"hostile": address})])
    events: list[ControlEvent] = []
    settings = replace(SETTINGS, max_restarts=1)
    controller = Controller(settings, FENCE, launcher, reward_by_length, decode, events.append)
    run = Run(world, controller, events)
    try:
        controller.start()
        controller.publish(manifest(0), source(0))
        controller.submit(job(0, count=10, n=4))
        run.wait_for(lambda: run.seen(EventKind.GONE, "hostile"))  # there is work for each of its lives
        world.loop.call_soon_threadsafe(world.now("good").engine.thaw)
        samples = list(controller.samples("train/0", 60))
        assert len({sample.sample_id for sample in samples}) == len(samples) == 40
        assert {sample.generation.instance for sample in samples} == {"good"}
        assert [view.name for view in controller.pool()] == ["good"]
    finally:
        controller.close()
        world.call(hostile.server.stop(0))
        world.close()


def test_what_is_reported_again_and_again_adds_up_to_what_can_be_told_on() -> None:
    rate = TokenRate()
    for second in range(3):
        rate.add(wire.MAX_TOTAL, float(second))
    view = InstanceView("a", "", InstanceState.IDLE, 0, 0, 0, 0, rate.per_s(3.0), rate.total, 0)
    assert view_from_proto(view_to_proto(view)).tokens == wire.MAX_TOTAL
    assert view_from_proto(view_to_proto(replace(view, held=2 * wire.MAX_COUNT))).held == 2 * wire.MAX_COUNT


def test_one_that_greets_and_breaks_off_again_and_again_is_not_spun_around() -> None:
    world = World(("good",))
    hostile = Hostile(GOOD_STATUS, welcome)
    ending = hostile._generate

    async def short(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for message in ending(requests, context):
            yield message
            if hostile.streams and message != welcome(pb.GenerateRequest())[0]:
                return

    hostile._generate = short  # type: ignore[method-assign]
    address = world.call(hostile.start())
    launcher = JoinedLauncher([world, StaticLauncher({"hostile": address})])
    controller = Controller(SETTINGS, FENCE, launcher, reward_by_length, decode, lambda event: None)
    try:
        controller.start()
        Run(world, controller, []).wait_for(lambda: hostile.streams > 2)
        began, before = time.monotonic(), hostile.streams
        world.call(asyncio.sleep(0.5))
        assert hostile.streams - before <= (time.monotonic() - began) / 0.05 + 1
    finally:
        controller.close()
        world.call(hostile.server.stop(0))
        world.close()


@pytest.mark.parametrize("status", [GARBAGE, RANDOM])
def test_a_call_whose_answer_cannot_be_read_names_the_instance(status: bytes) -> None:
    async def scenario() -> None:
        hostile = Hostile(status, lambda request: [GARBAGE])
        client = InstanceClient(await hostile.start())
        try:
            for call in (
                client.status(),
                client.resume(FENCE),
                client.update(manifest(0), source(0), in_flight=False, timeout_s=5),
                client.open(Hello(FENCE, 1.0, 0.0)),
            ):
                with pytest.raises(InstanceError, match=client.address) as caught:
                    await call
                assert not caught.value.transient
        finally:
            await client.close()
            await hostile.server.stop(0)

    asyncio.run(scenario())


def test_what_comes_after_a_failure_is_told_of_it() -> None:
    """A job or a version that is handed over at the moment of the failure must not be waited for."""
    world = World(("a",))
    controller = Controller(SETTINGS, FENCE, world, reward_by_length, decode, lambda event: None)
    try:
        controller.start()
        controller.wait_ready(60)
        controller._loop.call_soon_threadsafe(controller._core.fail, ControlError("on purpose"))
        with pytest.raises(ControlError, match="on purpose"):
            controller.submit(job(0))
        with pytest.raises(ControlError, match="on purpose"):
            controller.publish(manifest(0), source(0))
    finally:
        controller.close()
        world.close()
    with pytest.raises(ControlError, match="on purpose"):
        controller.publish(manifest(0), source(0))
