"""No message, however broken, ends a service or a client; afterwards it serves as before (DESIGN rule 9).

Everything goes over real gRPC to the real service, client and store; only the engine counts instead of sampling.
``STREAMRL_FUZZ_CASES`` asks for more cases of each kind, ``STREAMRL_FUZZ_SEED`` for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.bridge.pull import Patience, PullError, fetch_manifest, pull
from streamrl_jax.bridge.store import WeightStore
from streamrl_jax.control.controller import Controller
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.launch import StaticLauncher
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    Assignment,
    Fence,
    Generation,
    Hello,
    InstanceInfo,
    InstanceState,
    InstanceStatus,
    Manifest,
    Sampling,
    WeightSource,
)
from tests.fakes import FakeEngine, fake_token

from .control_world import FENCE, SETTINGS, JoinedLauncher, World, decode, job, reward_by_length, source
from .control_world import manifest as control_manifest
from .mutations import RUN, manifest, mutate, requests, responses

CASES = int(os.environ.get("STREAMRL_FUZZ_CASES", "400"))
SEED = int(os.environ.get("STREAMRL_FUZZ_SEED", "20260727"))
MOST_GROWTH_MIB = 150
ACCESS = net.Access("fuzz-token")
SERVICE, STORE = "/streamrl.v1.StreamGeneration", "/streamrl.v1.WeightStore"


def resident_mib() -> float:
    """Memory that this process occupies."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def engine() -> FakeEngine:
    """Quick, so that what a case leaves behind has soon ended."""
    return FakeEngine(tokens_per_s=10_000)


@contextlib.asynccontextmanager
async def served(
    service: GenerationService, **stores: WeightStore
) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """A service, and a channel to it that carries bytes as they are."""
    server = net.make_server(ACCESS)
    rpc.add_StreamGenerationServicer_to_server(service, server)
    for store in stores.values():
        rpc.add_WeightStoreServicer_to_server(store, server)
    address = net.bind(server, "127.0.0.1:0", ACCESS)
    await server.start()
    life = asyncio.create_task(service.run())
    while service.status.state is InstanceState.LOADING:
        await asyncio.sleep(0.005)
    try:
        async with net.open_channel(address, ACCESS) as channel:
            yield address, channel
        assert not life.done(), "the service has ended"
    finally:
        await server.stop(None)
        life.cancel()


def outcome(error: grpc.aio.AioRpcError) -> str:
    """The status of a call, and of a refusal the field that it names."""
    field = (error.details() or "").split(" ")[0]
    return f"{error.code().name} {field}"


async def one_stream(
    channel: grpc.aio.Channel,
    messages: list[bytes],
    seen: Counter[str],
    rest_s: float = 0.0,
    awaited: tuple[str, ...] = (),
) -> None:
    """Sends messages over a stream, rests until such ones have come, and reads until the service ends it."""
    call = channel.stream_stream(f"{SERVICE}/Generate")(metadata=ACCESS.metadata, timeout=60)

    async def read() -> bool:
        if not isinstance(data := await call.read(), bytes):
            return False
        reply = pb.GenerateResponse.FromString(data)
        for one in reply.several.responses or (reply,):
            seen[str(one.WhichOneof("kind"))] += 1
        return True

    try:
        for message in messages:
            await call.write(message)
        await asyncio.sleep(rest_s)
        while not all(seen[kind] for kind in awaited) and await read():
            pass
        await call.done_writing()
        while await read():
            pass
        seen["OK"] += await call.code() is grpc.StatusCode.OK
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        seen["ended while written to"] += 1
    except grpc.aio.AioRpcError as error:
        # Refused while it still writes, grpc.aio says "Internal error from Core" and forgets the reason.
        lost = "from Core" in (error.details() or "")
        seen["ended while written to" if lost else outcome(error)] += 1


async def serves_a_normal_client(address: str) -> None:
    """Another run greets the instance, is answered, and takes a version to it."""
    fence = Fence("normal", 0)
    client = InstanceClient(address, ACCESS)
    stream = await client.open(Hello(fence, 0.05))
    report = await client.update(
        Manifest(fence, 9, (), 0, bytes(32), "Fake"), source(9), in_flight=False, timeout_s=60
    )
    assert report.accepted, report.reason
    for index in range(6):
        ids = np.array([1, index], np.int32)
        await stream.assign(Assignment(f"n{index}", 0, ids, Sampling(1.0, 8, ()), min_version=9))
    answers: dict[str, Generation] = {}
    async for event in stream.events():
        if isinstance(event, Generation):
            answers[event.sample_id] = event
        if len(answers) == 6:
            break
    for index in range(6):
        expected = [fake_token(np.array([1, index]), at) for at in range(5)]
        assert answers[f"n{index}"].token_ids.tolist() == expected
    await client.close()


def bounded(coroutine: Any, cases: int) -> Any:
    """Runs a scenario; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(coroutine, 30 + cases))


def test_no_sequence_of_messages_ends_an_instance() -> None:
    rng = random.Random(SEED)
    seen: Counter[str] = Counter()
    valid = requests()
    hello = valid[6].SerializeToString()

    async def scenario() -> None:
        service = GenerationService(engine(), Identity("a", 2, "host"))
        async with served(service) as (address, channel):
            first = [hello, *(one.SerializeToString() for one in valid[:2])]
            await one_stream(channel, first, seen, awaited=("progress", "finished"))
            before = resident_mib()
            for case in range(CASES):
                greeting = hello if rng.random() < 0.85 else mutate(valid[6], rng)
                messages = [mutate(rng.choice(valid), rng) for _ in range(rng.choice((1, 2, 8)))]
                await one_stream(channel, [greeting, *messages], seen, rng.choice((0.0, 0.0, 0.0, 0.01)))
                if case % 50 == 49:
                    assert (await InstanceClient(address, ACCESS).status())[1].name == "a"
            assert resident_mib() - before < MOST_GROWTH_MIB
            held = service._answers
            assert held.active + len(held.unacknowledged()) <= 64 * (4 + 2)
            await serves_a_normal_client(address)

    bounded(scenario(), CASES)
    # The cases reached what they were meant for: answers, refusals of one assignment, and ends of the stream.
    for kind in ("welcome", "finished", "rejected", "heartbeat", "OK", "INVALID_ARGUMENT Error"):
        assert seen[kind] > CASES / 50, (kind, seen)
    assert seen["progress"], seen
    refused = {kind.partition(" ")[2] for kind in seen if kind.startswith("INVALID_ARGUMENT")}
    assert "hello.protocol" in refused and len(refused) >= 5, seen
    assert not [kind for kind in seen if kind.startswith(("INTERNAL", "UNKNOWN", "UNAVAILABLE"))], seen


UNARY: dict[str, Any] = {
    "UpdateWeights": pb.UpdateWeightsRequest(
        manifest=manifest(), same_host=pb.SameHostSource(path="/dev/shm/x"), deadline_s=0.2
    ),
    "Pause": pb.PauseRequest(fence=RUN),
    "Resume": pb.ResumeRequest(fence=RUN),
    "Drain": pb.DrainRequest(fence=RUN),
    "GetStatus": pb.StatusRequest(fence=RUN),
}


def test_no_call_ends_an_instance_whatever_stream_is_open_beside_it() -> None:
    rng = random.Random(SEED + 1)
    seen: Counter[str] = Counter()
    valid = requests()

    async def call(channel: grpc.aio.Channel, name: str) -> None:
        ask = channel.unary_unary(f"{SERVICE}/{name}")
        try:
            reply = await ask(mutate(UNARY[name], rng), metadata=ACCESS.metadata, timeout=0.5)
            if name == "UpdateWeights":
                seen[f"accepted {pb.UpdateWeightsResponse.FromString(reply).accepted}"] += 1
            else:
                seen[f"{name} OK"] += 1
        except grpc.aio.AioRpcError as error:
            seen[outcome(error)] += 1

    async def scenario() -> None:
        service = GenerationService(engine(), Identity("a", 2, "host"))
        async with served(service) as (address, channel):
            for _ in range(CASES // 4):
                stream = [valid[6].SerializeToString(), *(mutate(rng.choice(valid), rng) for _ in range(3))]
                names = rng.choices([*UNARY, "Resume", "UpdateWeights"], k=4)
                await asyncio.gather(
                    one_stream(channel, stream, Counter()), *(call(channel, name) for name in names)
                )
            await serves_a_normal_client(address)

    bounded(scenario(), CASES)
    for kind in ("accepted True", "accepted False", "Pause OK", "Resume OK", "Drain OK", "GetStatus OK"):
        assert seen[kind], (kind, seen)
    assert any(kind.startswith("INVALID_ARGUMENT fence.run_id") for kind in seen), seen
    assert any(kind.startswith("FAILED_PRECONDITION") for kind in seen), seen


# --- a store ----------------------------------------------------------------------------------------------


class Held:
    """What a store holds of a version."""

    def __init__(self, directory: Path) -> None:
        arrays = {"w": np.arange(3_000_000, dtype=np.float32)}
        self.manifest, blob = pack(Fence("fuzz", 0), 1, "Fake", arrays)
        self.path = directory / "blob.bin"
        self.path.write_bytes(blob)


def test_no_request_ends_a_store(tmp_path: Path) -> None:
    rng = random.Random(SEED + 2)
    seen: Counter[str] = Counter()
    held = Held(tmp_path)
    whole = {
        "GetManifest": pb.ManifestRequest(fence=RUN, version=1),
        "Fetch": pb.FetchRequest(fence=RUN, version=1),
    }

    async def ask(channel: grpc.aio.Channel, name: str) -> None:
        request = mutate(whole[name], rng)
        try:
            if name == "GetManifest":
                await channel.unary_unary(f"{STORE}/{name}")(request, metadata=ACCESS.metadata, timeout=60)
            else:
                stream = channel.unary_stream(f"{STORE}/{name}")(
                    request, metadata=ACCESS.metadata, timeout=60
                )
                if rng.random() < 0.8:  # else broken off after the first chunk
                    async for _ in stream:
                        pass
                else:
                    await stream.read()
                    stream.cancel()
            seen[f"{name} OK"] += 1
        except grpc.aio.AioRpcError as error:
            seen[outcome(error)] += 1

    async def scenario() -> None:
        store = WeightStore(lambda: Fence("fuzz", 0), lambda: {1: held})
        service = GenerationService(engine(), Identity("a", 2, "host"))
        async with served(service, store=store) as (address, channel):
            before = resident_mib()
            for _ in range(CASES):
                await ask(channel, rng.choice(("GetManifest", "Fetch")))
            assert resident_mib() - before < MOST_GROWTH_MIB
            told = await fetch_manifest(address, Fence("fuzz", 0), 1, access=ACCESS, timeout_s=60)
            landing = tmp_path / "landing"
            landing.mkdir()
            path = await pull(address, told, 60, access=ACCESS, directories=[landing])
            assert path.read_bytes() == held.path.read_bytes()

    bounded(scenario(), CASES)
    for kind in (
        "GetManifest OK",
        "Fetch OK",
        "INVALID_ARGUMENT fence.run_id",
        "INVALID_ARGUMENT fetch.version",
    ):
        assert seen[kind], (kind, seen)
    for status in ("FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"):
        assert any(kind.startswith(status) for kind in seen), seen


# --- the other direction: hostile servers -----------------------------------------------------------------


class Hostile:
    """A server whose answers are mutations of valid ones."""

    def __init__(self, rng: random.Random, fence: pb.Fence = RUN) -> None:
        self.rng = rng
        self.fence = fence
        info = InstanceInfo("hostile", 4, 2, 512, 0, False, "elsewhere", "none")
        self.status = codec.status_to_proto(InstanceStatus(InstanceState.IDLE, 0), info)
        self.welcome = pb.GenerateResponse(welcome=codec.info_to_proto(info))
        self.honest = 0.8  # share of greetings and of statuses that are not mutated

    async def start(self, access: net.Access) -> str:
        self.server = net.make_server(access)
        unary, streamed = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        instance = {name: unary(self._answer(reply)) for name, reply in self._replies().items()}
        instance["Generate"] = grpc.stream_stream_rpc_method_handler(
            self._generate, request_deserializer=pb.GenerateRequest.FromString
        )
        store = {"GetManifest": unary(self._answer(manifest())), "Fetch": streamed(self._fetch)}
        for name, handlers in (("StreamGeneration", instance), ("WeightStore", store)):
            generic = grpc.method_handlers_generic_handler(f"streamrl.v1.{name}", handlers)
            self.server.add_generic_rpc_handlers((generic,))
        address = net.bind(self.server, "127.0.0.1:0", access)
        await self.server.start()
        return address

    def _replies(self) -> dict[str, Any]:
        update = pb.UpdateWeightsResponse(accepted=True, version=0, reason="")
        return {"GetStatus": self.status, "UpdateWeights": update, "Resume": self.status}

    def _answer(self, reply: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return self._perhaps(reply)

        return answer

    def _perhaps(self, message: Any, share: float = 1.0) -> bytes:
        honest = self.rng.random() < self.honest * share
        return message.SerializeToString() if honest else mutate(message, self.rng)

    async def _fetch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for offset in (0, 8):
            yield self._perhaps(pb.Chunk(offset=offset, data=bytes(8)))

    async def _generate(self, incoming: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for request in incoming:
            for one in request.several.requests or (request,):
                kind = one.WhichOneof("kind")
                if kind == "hello":
                    yield self._perhaps(self.welcome)
                if kind in ("hello", "assign"):
                    for message in self._stream(one.assign.sample_id or "s0", one.assign.attempt):
                        yield message

    def _stream(self, sample_id: str, attempt: int) -> list[bytes]:
        chosen = self.rng.choices(responses(sample_id), k=self.rng.choice((1, 2, 4)))
        for message in chosen:
            kind = str(message.WhichOneof("kind"))
            body = getattr(message, kind)
            if kind not in ("credit", "several"):
                body.fence.CopyFrom(self.fence)
            if kind in ("finished", "progress", "rejected"):
                body.attempt = attempt
        return [self._perhaps(message, 0.5) for message in chosen]


def test_no_answer_breaks_a_client(tmp_path: Path) -> None:
    rng = random.Random(SEED + 3)
    seen: Counter[str] = Counter()
    fence = Fence("fuzz", 0)
    update = Manifest(fence, 0, (), 0, bytes(32), "Fake")
    wanted = codec.manifest_from_proto(manifest())

    async def talk(client: InstanceClient) -> None:
        stream = await client.open(Hello(fence, 0.05))
        with contextlib.suppress(InstanceError):  # the stream may have broken by now
            for index in range(3):
                await stream.assign(Assignment(f"s{index}", 0, np.array([1], np.int32), Sampling(1.0, 8, ())))
        async with asyncio.timeout(0.03):
            async for event in stream.events():
                seen[type(event).__name__] += 1
        await stream.close()

    async def one_case(address: str) -> None:
        client = InstanceClient(address, ACCESS)
        patience = Patience(stall_s=0.2, attempts=1, pause_s=0.001)
        for call in (
            client.status(),
            client.update(update, source(0), in_flight=False, timeout_s=60),
            talk(client),
            fetch_manifest(address, fence, 1, access=ACCESS, timeout_s=60),
            pull(address, wanted, 60, access=ACCESS, directories=[tmp_path], patience=patience),
        ):
            try:
                await call
                seen[f"{call.__name__} OK"] += 1
            except (InstanceError, PullError) as error:
                seen[f"{call.__name__} {type(error).__name__}"] += 1
            except TimeoutError:
                seen["the stream stays open"] += 1
        await client.close()

    async def scenario() -> None:
        hostile = Hostile(rng)
        address = await hostile.start(ACCESS)
        before = resident_mib()
        for _ in range(CASES // 4):
            await one_case(address)
        assert resident_mib() - before < MOST_GROWTH_MIB
        await hostile.server.stop(None)

    bounded(scenario(), CASES)
    for kind in ("Generation", "Progress", "Rejection", "InstanceStatus", "Granted", "Drained"):
        assert seen[kind], (kind, seen)
    for kind in (
        "status OK",
        "status InstanceError",
        "update OK",
        "update InstanceError",
        "talk InstanceError",
    ):
        assert seen[kind], (kind, seen)
    assert seen["fetch_manifest OK"] and seen["fetch_manifest PullError"] and seen["pull PullError"], seen
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(max(3, CASES // 200)))
def test_a_hostile_instance_costs_a_run_nothing_but_itself(seed: int) -> None:
    world = World(("good",))
    hostile = Hostile(random.Random(SEED + 10 + seed), codec.fence_to_proto(FENCE))
    hostile.honest = 0.95
    address = world.call(hostile.start(net.OPEN))
    launcher = JoinedLauncher([world, StaticLauncher({"hostile": address})])
    settings = replace(SETTINGS, max_restarts=2, lease_s=5.0, max_attempts=1000)
    controller = Controller(settings, FENCE, launcher, reward_by_length, decode, lambda event: None)
    try:
        controller.start()
        controller.publish(control_manifest(0), WeightSource(source(0).path, "127.0.0.1:1"))
        for iteration in range(2):
            controller.submit(job(iteration, count=10, n=4, min_version=0))
            samples = list(controller.samples(f"train/{iteration}", 60))
            assert len({sample.sample_id for sample in samples}) == len(samples) == 40
        assert "good" in [view.name for view in controller.pool()]
    finally:
        controller.close()
        world.call(hostile.server.stop(0))
        world.close()
