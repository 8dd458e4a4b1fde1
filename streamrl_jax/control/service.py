"""The controller's answers to trainer processes: `RunControl` over the core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import grpc

from streamrl_jax.control.codec import (
    PIECE_BYTES,
    JobPieces,
    error_from_proto,
    error_to_proto,
    sample_to_proto,
    size_of,
    step_from_proto,
    view_to_proto,
)
from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.dispatched_codec import dispatched_to_proto
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.hub import Hub
from streamrl_jax.control.outbox import Batch, Delivery, End, Failed, Reading
from streamrl_jax.control.shelf import Publication
from streamrl_jax.control.usage import Usage
from streamrl_jax.gen import codec
from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.host import host_id
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.proto import control_pb2_grpc as rpc
from streamrl_jax.types import UpdateReport, WeightSource

R = TypeVar("R")

WINDOW: Final = 256
"""Samples under way to a reader that it has not taken yet."""

_LOOK_S: Final = 0.1
_SHORTEST_BEAT_S: Final = 0.01
_LONGEST_BEAT_S: Final = 3600.0


class RunControlService(rpc.RunControlServicer):
    """Answers trainer processes. Every call runs on the controller's loop.

    Args:
        core: the controller.
        hub: keeps what a reader is to be told.
        close: called when the leader is done with the controller; returns at once.
    """

    def __init__(self, core: ControllerCore, hub: Hub, close: Callable[[], None]) -> None:
        self._core = core
        self._hub = hub
        self._close = close
        self._usage = Usage()
        self._host = host_id()
        core.when_failed(hub.failed)

    # ---------------------------------------------------------------- liveness

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AttachReply]:
        """Tells a reader what happens, and hears that it lives."""
        if (first := await anext(request_iterator, None)) is None:
            return
        try:
            self._check(first)
            interval_s = wire.finite("attach.interval_s", first.interval_s, _SHORTEST_BEAT_S, _LONGEST_BEAT_S)
        except Exception as error:
            yield pb.AttachReply(failure=error_to_proto(error))
            return
        reader, mailbox = first.reader, self._hub.mailboxes[first.reader]
        self._core.readers.beat(reader)
        hearing = asyncio.create_task(self._hear(reader, request_iterator))
        sent = first.seen
        try:
            yield pb.AttachReply(beat=self._beat())
            while not hearing.done():
                for message in mailbox.after(sent):
                    message.beat.CopyFrom(self._beat())
                    yield message
                    sent = message.sequence
                await mailbox.wait(interval_s)
                yield pb.AttachReply(beat=self._beat())
        finally:
            await _ended(hearing)

    def _check(self, message: pb.AttachRequest) -> None:
        world = self._core.settings.readers
        if message.world != world:
            raise ControlError(
                f"trainer process {message.reader} of {message.world} connects to a controller of {world} trainer "
                "processes; start all of them with the same configuration"
            )
        self._core.readers.known(message.reader)

    async def _hear(self, reader: int, requests: AsyncIterator[pb.AttachRequest]) -> None:
        async for request in requests:
            self._core.readers.beat(reader)
            self._hub.mailboxes[reader].seen(request.seen)
        # The stream of a killed process ends as one that was closed does: who leaves in good order calls `Close`.

    def _beat(self) -> pb.Beat:
        used = self._usage.now()
        return pb.Beat(
            clock_s=time.monotonic(), host_id=self._host, rss_bytes=used.rss_bytes, cpu_s=used.cpu_s
        )

    # ---------------------------------------------------------------- jobs and samples

    async def Submit(
        self, request_iterator: AsyncIterator[pb.SubmitRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Done:
        """Queues a job."""

        async def submit() -> pb.Done:
            pieces = await _pieces(request_iterator)
            self._core.readers.known(pieces.reader)
            job, into = pieces.job()
            while not self._core.follows(job, pieces.reader):
                await asyncio.sleep(_LOOK_S)
            self._core.submit(job, into, pieces.reader, pieces.digest())
            return pb.Done()

        return await _answer(submit(), pb.Done)

    async def Probe(
        self, request_iterator: AsyncIterator[pb.SubmitRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ProbeReply:
        """Asks every instance that serves a version the same prompts, when the leader has asked for it."""

        async def probe() -> pb.ProbeReply:
            pieces = await _pieces(request_iterator)
            self._core.readers.known(pieces.reader)
            job, _ = pieces.job()
            while pieces.reader != 0 and not self._core.probed(job.min_version):
                await asyncio.sleep(_LOOK_S)
            found = self._core.probe(
                job.min_version, job.prompts, job.sampling, pieces.reader, pieces.digest()
            )
            return pb.ProbeReply(job_ids=found)

        return await _answer(probe(), pb.ProbeReply)

    async def Samples(
        self, request_iterator: AsyncIterator[pb.SamplesRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SamplesReply]:
        """Sends a job's samples."""
        if (first := await anext(request_iterator, None)) is None:
            return
        found: asyncio.Queue[Delivery] = asyncio.Queue()
        try:
            self._core.readers.known(first.reader)
            job_id = wire.name("samples.job_id", first.job_id)
            reading = self._core.read(job_id, first.reader, first.taken, WINDOW, found.put_nowait)
            reading.taken(first.taken, first.waits)
        except (ControlError, ValueError) as error:
            yield pb.SamplesReply(error=error_to_proto(error))
            return
        hearing = asyncio.create_task(_hear(request_iterator, reading, found))
        try:
            while True:
                delivery = await found.get()
                for reply in self._replies(delivery):
                    yield reply
                if not isinstance(delivery, Batch):
                    return
        except Exception as error:  # a sample that cannot be sent would fail on every further stream too
            self._core.fail(error)
            yield pb.SamplesReply(error=error_to_proto(error))
        finally:
            reading.close()
            await _ended(hearing)

    def _replies(self, delivery: Delivery) -> Iterator[pb.SamplesReply]:
        if isinstance(delivery, End):
            yield pb.SamplesReply(end=True)
        elif isinstance(delivery, Failed):
            yield pb.SamplesReply(error=error_to_proto(delivery.error))
        elif isinstance(delivery, Batch):
            reply, size = pb.SamplesReply(position=delivery.position), 0
            for place, sample in enumerate(delivery.samples, delivery.position):
                if size and size + size_of(sample) > PIECE_BYTES:
                    reply.next = place
                    yield reply
                    reply, size = pb.SamplesReply(position=place), 0
                reply.samples.append(sample_to_proto(self._core.fence, sample))
                size += size_of(sample)
            reply.next = delivery.next
            yield reply
        else:
            yield pb.SamplesReply(stop=delivery.reason)

    # ---------------------------------------------------------------- versions, plan, end

    async def Publish(
        self, request: pb.PublishRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Done:
        """Brings a version to every instance."""

        async def publish() -> pb.Done:
            manifest = codec.manifest_from_proto(request.manifest)
            version = manifest.version
            done: Future[list[UpdateReport]] = Future()
            publication = Publication(
                manifest,
                WeightSource(request.path, request.address),
                lambda: self._hub.released(version),
                time.monotonic(),
            )
            self._core.publish(publication, done)
            done.add_done_callback(lambda done: self._published(version, done))
            return pb.Done()

        return await _answer(publish(), pb.Done)

    def _published(self, version: int, done: Future[list[UpdateReport]]) -> None:
        error = done.exception()
        if error is not None:
            self._hub.not_updated(version, error)
        else:
            self._hub.updated(version, done.result())

    async def WaitReady(
        self, request: pb.WaitReadyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Done:
        """Returns when the instances are loaded."""

        async def wait() -> pb.Done:
            end = time.monotonic() + wire.seconds("wait_ready.timeout_s", request.timeout_s)
            at_least = wire.count("wait_ready.at_least", request.at_least, low=-1)
            while not self._core.ready(None if at_least < 0 else at_least):
                if time.monotonic() > end:
                    raise ControlError(self._core.not_ready(request.timeout_s))
                await asyncio.sleep(_LOOK_S)
            return pb.Done()

        return await _answer(wait(), pb.Done)

    async def Acknowledge(
        self, request: pb.AcknowledgeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AcknowledgeReply:
        """Returns when every reader is about to enter the same step."""

        async def acknowledge() -> pb.AcknowledgeReply:
            await self._core.acknowledge(request.reader, step_from_proto(request))
            return pb.AcknowledgeReply()

        return await _answer(acknowledge(), pb.AcknowledgeReply)

    async def StopAll(self, request: pb.TextRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.Done:
        """Ends the order of samples for all readers at one place."""
        self._core.stop(request.text or "a trainer process asked for it")
        return pb.Done()

    async def Fail(self, request: pb.FailRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.Done:
        """Ends the run."""
        self._core.fail(error_from_proto(request.failure))
        return pb.Done()

    async def Close(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.Done:
        """Ends the controller, if the leader asks."""
        self._core.readers.left(request.reader)
        if request.reader == 0:
            self._close()
        return pb.Done()

    # ---------------------------------------------------------------- books

    async def Pool(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.PoolReply:
        """How each instance stands."""
        return pb.PoolReply(instances=[view_to_proto(view) for view in self._core.views()])

    async def Counters(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NumbersReply:
        """Totals since the start."""
        return pb.NumbersReply(numbers=self._core.counters())

    async def Sizes(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NumbersReply:
        """Entries held in memory."""
        return pb.NumbersReply(numbers=self._core.work.sizes())

    async def Dispatched(
        self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DispatchedReply:
        """What became of the last jobs."""
        return pb.DispatchedReply(
            jobs=[dispatched_to_proto(job) for job in self._core.work.accounts.finished]
        )

    async def Situation(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TextReply:
        """One sentence per instance."""
        return pb.TextReply(text=self._core.pool.situation())


async def _hear(
    requests: AsyncIterator[pb.SamplesRequest], reading: Reading, found: asyncio.Queue[Delivery]
) -> None:
    """Hears what a reader has taken; a claim that cannot be ends its stream."""
    try:
        async for request in requests:
            reading.taken(request.taken, request.waits)
    except ControlError as error:
        found.put_nowait(Failed(error))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _pieces(requests: AsyncIterator[pb.SubmitRequest]) -> JobPieces:
    pieces = JobPieces()
    async for piece in requests:
        pieces.add(piece)
    return pieces


async def _answer(call: Awaitable[R], make: Callable[..., R]) -> R:
    """The call's reply, or one that holds its exception."""
    try:
        return await call
    except Exception as error:
        return make(error=error_to_proto(error))
