"""The wire between controller and trainer processes: fences, torn messages, and claims that cannot be true."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from streamrl_jax.control.client import Peer
from streamrl_jax.control.codec import sample_to_proto
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.events import ControlEvent
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.fencing import FenceInterceptor, fence_metadata
from streamrl_jax.control.plan import Step
from streamrl_jax.control.readers import Readers
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.server import Serving, write_control_file
from streamrl_jax.control.watchdog import HUNG_EXIT_CODE, Watchdog
from streamrl_jax.gen import net
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.proto import control_pb2_grpc as rpc
from streamrl_jax.proto import streamrl_pb2 as stream_pb
from streamrl_jax.types import Fence, FinishReason, Generation, InstanceState, Prompt, Sample, VersionRun
from tests.fakes import FakeEngine, FaultyStream, one_by_one

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
    running,
    source,
)

STEP = Step(0, "actor", "4 x 128", b"\x01" * 16)
TWO = replace(SETTINGS, readers=2)


@contextmanager
def leader_of_two() -> Iterator[Controller]:
    """A controller in this process that expects one more trainer process over gRPC."""
    world = World(("a",), lambda name, life: FakeEngine(slots=8))
    leader = Controller(
        TWO, FENCE, world, reward_by_length, decode, lambda event: None, serving=Serving(net.OPEN)
    )
    try:
        leader.start()
        leader.wait_ready(60)
        leader.publish(manifest(0), source(0)).result(60)
        yield leader
    finally:
        leader.close()
        world.close()


@contextmanager
def reached(
    address: str,
    fence: Fence = FENCE,
    reader: int = 1,
    world: int = 2,
    on_event: Callable[[ControlEvent], None] = lambda event: None,
) -> Iterator[RemoteController]:
    peer = Peer(address, net.OPEN, fence, reader, world, TWO.reader_lease_s)
    remote = RemoteController(replace(TWO, readers=world), peer, on_event)
    try:
        remote.start()
        yield remote
    finally:
        remote.close()


@contextmanager
def stub_of(address: str) -> Iterator[Callable[..., Any]]:
    """Calls as a trainer process that misbehaves may make them."""
    channel = net.open_blocking_channel(address, net.OPEN)
    stub = rpc.RunControlStub(channel)

    def call(name: str, *requests: Any) -> Any:
        metadata = fence_metadata(FENCE)
        if name in ("Submit", "Probe"):
            return getattr(stub, name)(iter(requests), metadata=metadata, timeout=60)
        if name in ("Samples", "Attach"):
            return next(getattr(stub, name)(iter(requests), metadata=metadata, timeout=60))
        return getattr(stub, name)(*requests, metadata=metadata, timeout=60)

    try:
        yield call
    finally:
        channel.close()


def test_another_life_neither_acknowledges_nor_takes_samples() -> None:
    """What an earlier life left alive asks at the same address; the run goes on with its own process."""
    with leader_of_two() as leader:
        leader.submit(job(0, count=4))
        asks: list[Callable[[RemoteController], object]] = [
            lambda stale: stale.acknowledge(STEP),
            lambda stale: stale.submit(job(0, count=4)),
        ]
        for ask in asks:  # the refusal may come before the question does, while it still connects
            with (
                pytest.raises(ControlError, match="a life of this one that is over"),
                reached(leader.address, Fence("run", 1)) as stale,
            ):
                ask(stale)
        with reached(leader.address) as own:
            own.submit(job(0, count=4))
            threads = [threading.Thread(target=c.acknowledge, args=(STEP,)) for c in (leader, own)]
            for thread in threads:
                thread.start()
            found = [[s.sample_id for s in c.samples("train/0", 60)] for c in (leader, own)]
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert found[0] == found[1] and len(set(found[0])) == 16


@contextmanager
def fenced() -> Iterator[str]:
    """A server of a run that a caller of another life finds at the address that it knows; its address."""
    with scripted(Scripted()) as remote:
        yield remote._peer.address


def stale_submission(address: str, *, ends: bool) -> float:
    """Writes one piece of a job, or all two, as an earlier life does, without the line that would tell it first.

    Returns:
        How long it took to be refused.
    """

    async def scene() -> float:
        channel = net.open_channel(address, net.OPEN)
        begun = time.monotonic()
        call = rpc.RunControlStub(channel).Submit(metadata=fence_metadata(Fence("run", 1)), timeout=120)
        try:
            await call.write(pb.SubmitRequest(reader=0))
            if ends:
                await asyncio.sleep(0.3)
                await call.write(pb.SubmitRequest(reader=0, last=True))
                await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match="a life of this one that is over") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            return time.monotonic() - begun
        finally:
            await channel.close()

    return asyncio.run(scene())


def test_a_refused_caller_that_still_writes_is_told_why() -> None:
    """A call that ended under its hands would report an error of its own in place of the refusal."""
    with fenced() as address:
        stale_submission(address, ends=True)


def test_a_refused_caller_that_never_ends_is_not_heard_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl_jax.control.fencing._WRITES_S", 0.5)
    with fenced() as address:
        assert 0.5 <= stale_submission(address, ends=False) < 60


def test_a_submission_that_ends_while_it_is_written_tells_why() -> None:
    class Refusing(Scripted):
        async def Submit(self, request_iterator: Any, context: Any) -> pb.Done:
            await anext(request_iterator)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "a piece too large")
            raise AssertionError("it was aborted")

    class Late:
        """A call whose second piece comes when the service has ended it."""

        def __init__(self, call: Any) -> None:
            self.call, self.pieces = call, 0

        async def write(self, piece: Any) -> None:
            while self.pieces and not self.call.done():
                await asyncio.sleep(0.01)
            self.pieces += 1
            await self.call.write(piece)

        async def done_writing(self) -> None:
            await self.call.done_writing()

        def __await__(self) -> Any:
            return self.call.__await__()

    with scripted(Refusing()) as remote:
        assert remote._client is not None
        submit = remote._client.stub.Submit
        remote._client.stub.Submit = lambda **rest: Late(submit(**rest))
        with pytest.raises(
            ControlError, match=r"did not take job train/0: RESOURCE_EXHAUSTED: a piece too large"
        ):
            ids = np.zeros(200_000, np.int32)  # in a piece each
            remote.submit(replace(job(0), prompts=[Prompt(str(row), ids, {}) for row in range(3)]))


TORN = {
    "no such process": ("Samples", pb.SamplesRequest(reader=7, job_id="train/0"), "no trainer process 7"),
    "samples of nothing": ("Samples", pb.SamplesRequest(reader=1), "samples.job_id is empty"),
    "more than there is": (
        "Samples", pb.SamplesRequest(reader=1, job_id="train/0", taken=999), "the samples of train/0 from 999 on"),
    "a beat of no length": ("Attach", pb.AttachRequest(reader=1, world=2), "attach.interval_s = 0.0"),
    "a beat that is no number": (
        "Attach", pb.AttachRequest(reader=1, world=2, interval_s=float("nan")), "attach.interval_s = nan"),
    "a stranger's attachment": ("Attach", pb.AttachRequest(reader=2, world=2, interval_s=1), "no trainer process 2"),
    "no end of the wait": (
        "WaitReady", pb.WaitReadyRequest(timeout_s=float("nan")), "wait_ready.timeout_s = nan"),
    "a job in no piece": ("Submit", pb.SubmitRequest(reader=1, last=True), "submit.job is missing"),
    "half a job": ("Submit", pb.SubmitRequest(reader=1, job=pb.JobHead(job_id="x", n=1)), "the last piece is missing"),
    "a job of nothing": (
        "Submit", pb.SubmitRequest(reader=1, job=pb.JobHead(job_id="x"), last=True), "submit.job.n = 0"),
    "a job beyond all measure": (
        "Submit", pb.SubmitRequest(reader=1, job=pb.JobHead(job_id="x", n=2**20, sampling=stream_pb.Sampling(
            temperature=1.0, max_new_tokens=8)), prompts=[pb.PromptRow(prompt_id=str(row), token_ids=bytes(4),
            columns=b"{}") for row in range(20)], last=True), "20 prompts with n = 1048576 are 20971520 samples"),
    "a step without a name": ("Acknowledge", pb.AcknowledgeRequest(reader=1), "step.kind is empty"),
    "a long digest": (
        "Acknowledge", pb.AcknowledgeRequest(reader=1, kind="x", digest=bytes(65)), "step.digest has 65 bytes"),
}  # fmt: skip


def test_a_torn_message_is_told_by_its_field_and_changes_nothing() -> None:
    with leader_of_two() as leader, stub_of(leader.address) as call:
        leader.submit(job(0, count=4))
        for what, (name, request, told) in TORN.items():
            reply = call(name, request)
            error = reply.failure if name == "Attach" else reply.error
            assert told in error.message, (what, error)
        with reached(leader.address) as own:
            own.submit(job(0, count=4))
            found = [[s.sample_id for s in c.samples("train/0", 60)] for c in (leader, own)]
        assert found[0] == found[1] and len(found[0]) == 16


def test_the_others_probe_what_the_leader_has_found_served() -> None:
    """The leader waits until the instances have a version; another process, which cannot know, is quicker to ask."""
    with leader_of_two() as leader, reached(leader.address) as other, ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(other.probe, 1, prompts(2), SAMPLING)
        time.sleep(0.2)
        assert not theirs.done()
        leader.publish(manifest(1), source(1)).result(60)
        assert leader.probe(1, prompts(2), SAMPLING) == theirs.result(60) == ("probe/1/a",)
        found = [[s.sample_id for s in c.samples("probe/1/a", 60)] for c in (leader, other)]
        assert found[0] == found[1] and len(found[0]) == 2


def test_nothing_is_taken_on_while_the_controller_ends() -> None:
    """An instance that is added then would be left behind."""
    world = World(("a",), lambda name, life: FakeEngine(slots=8))
    core = None

    async def scene() -> None:
        nonlocal core
        rewards = RewardWorkers(reward_by_length, decode, 5, 1)
        core = ControllerCore(SETTINGS, FENCE, world, rewards, lambda event: None)
        core.begin()
        while not core.ready(1):
            await asyncio.sleep(0.01)
        ending = asyncio.create_task(core.end())
        await asyncio.sleep(0)
        core.pool.add("late", founding=False)  # as one that dials in does
        with pytest.raises(ControlError, match="is being closed"):
            core.check()
        await ending

    try:
        asyncio.run(scene())
        assert all(life.stopped for lives in world.lives.values() for life in lives)
        assert "late" not in world.lives or world.now("late").stopped
    finally:
        world.close()


def test_only_the_main_thread_says_that_it_came_back() -> None:
    """The display's thread asks for the pool each second, and is told of the failure too."""
    codes: list[int] = []
    watchdog = Watchdog(0.05, codes.append)
    watchdog.arm(ControlError("the controller's process has ended"))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(watchdog.heed).result()
    watchdog.heed(StopRequested("SIGTERM"))  # it goes on to write a checkpoint, in a collective
    end = time.monotonic() + 60
    while not codes and time.monotonic() < end:
        time.sleep(0.01)
    assert codes == [HUNG_EXIT_CODE]


def test_a_process_that_has_left_is_not_missed_for_a_last_beat() -> None:
    readers = Readers(2, lease_s=0.0, plan_timeout_s=10)
    readers.beat(1)
    readers.left(1)
    readers.beat(1)  # was under way
    readers.check()


def test_the_file_of_a_later_life_stays(tmp_path: Any) -> None:
    file = tmp_path / "control.json"
    world = World(("a",))
    serving = Serving(net.OPEN, file=file)
    leader = Controller(SETTINGS, FENCE, world, reward_by_length, decode, lambda event: None, serving=serving)
    try:
        leader.start()
        write_control_file(file, "127.0.0.1:1", Fence("run", 1))
    finally:
        leader.close()
        world.close()
    assert "127.0.0.1:1" in file.read_text()


class Boaster(FaultyStream):
    """Says that it serves a version that nobody has published."""

    async def Generate(
        self, request_iterator: AsyncIterator[stream_pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[stream_pb.GenerateResponse]:
        async for response in one_by_one(self.inner.Generate(request_iterator, context)):
            if response.WhichOneof("kind") == "heartbeat":
                response.heartbeat.version = 9
            yield response


def test_an_instance_has_the_version_that_it_was_given_whatever_it_says() -> None:
    with running(World(("a",), stream=Boaster)) as run:
        run.wait_for(lambda: run.controller.pool()[0].state is InstanceState.IDLE)
        (report,) = run.publish(1).result(60)
        assert (report.accepted, report.version) == (True, 1)
        run.controller.submit(job(1, count=2))
        versions = {v.version for s in run.controller.samples("train/1", 60) for v in s.generation.versions}
        assert versions == {1}


# ---------------------------------------------------------------- a controller that is not to be trusted


def message(number: int, prompt: str = "0") -> pb.RunSample:
    ids, logprobs = np.asarray([5, 0], np.int32), np.asarray([-0.5, -1.0], np.float32)
    name = f"train/0/{prompt}/{number}"
    answer = Generation(name, 0, ids, logprobs, (VersionRun(0, 2),), FinishReason.STOP, "a")
    return sample_to_proto(FENCE, Sample(name, 0, prompts(1)[0], number, answer, 1.0))


class Scripted(rpc.RunControlServicer):
    """Says what it was told to: one list of replies for each stream of samples, an exception breaks it off."""

    def __init__(self, *streams: Sequence[Any], attached: Sequence[pb.AttachReply] = ()) -> None:
        self.streams = list(streams)
        self.attached = attached
        self.asked: list[int] = []

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.AttachReply]:
        await anext(request_iterator)
        for reply in self.attached:
            yield reply
        while True:
            yield pb.AttachReply(beat=pb.Beat(clock_s=1.0, host_id="here"))
            await asyncio.sleep(0.1)

    async def Submit(self, request_iterator: Any, context: Any) -> pb.Done:
        async for _ in request_iterator:
            pass
        return pb.Done()

    async def WaitReady(self, request: Any, context: Any) -> pb.Done:
        await asyncio.sleep(60)
        return pb.Done()

    async def Pool(self, request: Any, context: Any) -> pb.PoolReply:
        return pb.PoolReply()

    async def Counters(self, request: Any, context: Any) -> pb.NumbersReply:
        return pb.NumbersReply()

    async def Sizes(self, request: Any, context: Any) -> pb.NumbersReply:
        return pb.NumbersReply()

    async def Close(self, request: Any, context: Any) -> pb.Done:
        return pb.Done()

    async def Situation(self, request: Any, context: Any) -> pb.TextReply:
        return pb.TextReply(text="scripted")

    async def Samples(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        self.asked.append(first.taken)
        for reply in self.streams.pop(0):
            if isinstance(reply, grpc.StatusCode):
                await context.abort(reply, "as scripted")
            yield reply
        async for _ in request_iterator:
            pass


@contextmanager
def scripted(
    service: Scripted, on_event: Callable[[ControlEvent], None] = lambda event: None
) -> Iterator[RemoteController]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[Any, str]:
        server = net.make_server(net.OPEN, FenceInterceptor(FENCE))
        rpc.add_RunControlServicer_to_server(service, server)
        address = net.bind(server, "127.0.0.1:0", net.OPEN)
        await server.start()
        return server, address

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        with reached(address, reader=0, world=1, on_event=on_event) as remote:
            yield remote
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def batch(position: int, *numbers: int) -> pb.SamplesReply:
    return pb.SamplesReply(
        position=position, samples=[message(n) for n in numbers], next=position + len(numbers)
    )


END = pb.SamplesReply(end=True)


def test_a_stream_that_breaks_loses_and_doubles_nothing() -> None:
    """What was sent and not taken comes again; what the trainer has taken does not."""
    service = Scripted([batch(0, 0, 1), grpc.StatusCode.UNAVAILABLE], [batch(0, 0, 1), batch(2, 2, 3), END])
    with scripted(service) as remote:
        remote.submit(job(0, count=1))
        found = [sample.sample_id for sample in remote.samples("train/0", 60)]
    assert found == [f"train/0/0/{number}" for number in range(4)]


NONE = {
    "a gap": ([batch(0, 0), batch(2, 2)], "samples 2 to 3, 1 of them, follow sample 1"),
    "an end before the last": ([batch(0, 0, 1), END], "the end comes behind sample 2 of 4"),
    "fewer places than samples": (
        [pb.SamplesReply(position=0, samples=[message(0), message(1)], next=1)], "samples 0 to 1, 2 of them"),
    "a torn sample": (
        [pb.SamplesReply(position=0, samples=[pb.RunSample(prompt_id="0")], next=1)], "something else than samples"),
    "a refusal": ([grpc.StatusCode.PERMISSION_DENIED], "refuses to send samples of train/0: as scripted"),
}  # fmt: skip


@pytest.mark.parametrize("what", NONE)
def test_what_is_no_way_of_samples_ends_the_run_at_once(what: str) -> None:
    replies, told = NONE[what]
    with scripted(Scripted(replies)) as remote:
        remote.submit(job(0, count=1))
        begun = time.monotonic()
        with pytest.raises(ControlError, match=told):
            list(remote.samples("train/0", 60))
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (pb.AttachReply(event=pb.ControlEvent(kind="odd"), sequence=1), "event.kind = odd is unknown"),
        (pb.AttachReply(beat=pb.Beat(clock_s=float("nan"))), "beat.clock_s = nan"),
    ],
)
def test_a_torn_message_of_the_controller_ends_the_run(reply: pb.AttachReply, told: str) -> None:
    """It may come before the line counts as up, so that connecting fails, not the first question."""
    message = f"sent a message that is none: {told}"
    with pytest.raises(ControlError, match=message), scripted(Scripted(attached=[reply])) as remote:
        remote.wait_ready(30)


def test_an_error_where_events_are_shown_ends_the_run() -> None:
    """It is not swallowed with the line to the controller; it may happen while that connects."""
    event = pb.AttachReply(event=pb.ControlEvent(kind="ready", instance="a"), sequence=1)

    def broken(event: ControlEvent) -> None:
        raise RuntimeError("the screen is gone")

    service = Scripted(attached=[event])
    with pytest.raises(RuntimeError, match="the screen is gone"), scripted(service, broken) as remote:
        remote.wait_ready(30)


def test_a_sample_that_cannot_be_sent_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that broke for it would be opened again and again."""

    def unsendable(fence: Fence, sample: Sample) -> pb.RunSample:
        raise TypeError("extras cannot be sent")

    monkeypatch.setattr("streamrl_jax.control.service.sample_to_proto", unsendable)
    monkeypatch.setattr("tests.fast.control_world.FACADE", {"now": "in another one"})
    with running(World(("a",))) as run:
        run.controller.submit(job(0, count=1))
        with pytest.raises(Exception, match="extras cannot be sent"):
            list(run.controller.samples("train/0", 60))
        with pytest.raises(Exception, match="extras cannot be sent"):
            run.controller.submit(job(1, count=1))
