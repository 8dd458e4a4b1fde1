"""The controller's gRPC edge: `RunControl` for the trainer processes, and whatever else serves over the same core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from streamrl_jax.control.admin import add_pool_admin
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
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.hub import Hub
from streamrl_jax.control.outbox import Batch, Delivery, End, Failed
from streamrl_jax.control.shelf import Publication
from streamrl_jax.control.usage import Usage
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.host import host_id
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.proto import control_pb2_grpc as rpc
from streamrl_jax.types import Fence, UpdateReport, WeightSource

R = TypeVar("R")

WINDOW: Final = 256
"""Samples under way to a reader that it has not taken yet."""
_LOOK_S: Final = 0.1
_LAST_EVENTS_S: Final = 0.05  # gRPC still ends its handlers

Added = Callable[[ControllerCore, grpc.aio.Server], Callable[[], None]]
"""Adds a servicer to a server that is not started yet; what it returns is called when the server ends."""

SERVICES: Final[tuple[Added, ...]] = (add_pool_admin,)
"""What is served over the core beside `RunControl`."""


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
        first = await anext(request_iterator)
        try:
            self._check(first)
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
                await mailbox.wait(first.interval_s)
                yield pb.AttachReply(beat=self._beat())
        finally:
            await _ended(hearing)

    def _check(self, message: pb.AttachRequest) -> None:
        world = self._core.settings.readers
        if message.world != world or message.reader >= world:
            raise ControlError(
                f"trainer process {message.reader} of {message.world} connects to a controller of {world} trainer "
                "processes; start all of them with the same configuration"
            )
        fence = codec.fence_from_proto(message.fence)
        if fence != self._core.fence:
            raise ControlError(
                f"trainer process {message.reader} belongs to {fence}, and this controller to {self._core.fence}"
            )

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
            job, into = pieces.job()
            assert pieces.head is not None
            self._core.submit(job, into, pieces.reader, pieces.head.digest)
            return pb.Done()

        return await _answer(submit(), pb.Done)

    async def Probe(
        self, request_iterator: AsyncIterator[pb.SubmitRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ProbeReply:
        """Asks every instance that serves a version the same prompts."""

        async def probe() -> pb.ProbeReply:
            pieces = await _pieces(request_iterator)
            job, _ = pieces.job()
            assert pieces.head is not None
            found = self._core.probe(
                job.min_version, job.prompts, job.sampling, pieces.reader, pieces.head.digest
            )
            return pb.ProbeReply(job_ids=found)

        return await _answer(probe(), pb.ProbeReply)

    async def Samples(
        self, request_iterator: AsyncIterator[pb.SamplesRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SamplesReply]:
        """Sends a job's samples."""
        first = await anext(request_iterator)
        found: asyncio.Queue[Delivery] = asyncio.Queue()
        try:
            reading = self._core.read(first.job_id, first.reader, first.taken, WINDOW, found.put_nowait)
        except ControlError as error:
            yield pb.SamplesReply(error=error_to_proto(error))
            return
        reading.taken(first.taken, first.waits)

        async def hear() -> None:
            async for request in request_iterator:
                reading.taken(request.taken, request.waits)

        hearing = asyncio.create_task(hear())
        try:
            while True:
                delivery = await found.get()
                for reply in self._replies(delivery):
                    yield reply
                if not isinstance(delivery, Batch):
                    return
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
            end = time.monotonic() + request.timeout_s
            while not self._core.ready(None if request.at_least < 0 else request.at_least):
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
        self._core.stop(request.text)
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

    async def Situation(self, request: pb.Ask, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TextReply:
        """One sentence per instance."""
        return pb.TextReply(text=self._core.pool.situation())


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


@dataclass(frozen=True)
class Serving:
    """Where a controller serves.

    Attributes:
        access: Token and TLS.
        listen: ``host:port``; port 0 takes a free one.
        file: Where the address is written for those who look for it; None: nowhere.
    """

    access: net.Access
    listen: str = "127.0.0.1:0"
    file: Path | None = None


@contextlib.asynccontextmanager
async def serve(service: RunControlService, core: ControllerCore, serving: Serving) -> AsyncIterator[str]:
    """Serves on the loop that runs now, for as long as the context lasts.

    Args:
        service: for trainer processes.
        core: for the other `SERVICES`.
        serving: where.

    Yields:
        ``host:port`` that was bound.

    Raises:
        UserError: the address cannot be bound.
    """
    server = net.make_server(serving.access)
    rpc.add_RunControlServicer_to_server(service, server)
    closing = [add(core, server) for add in SERVICES]
    address = net.bind(server, serving.listen, serving.access)
    await server.start()
    try:
        if serving.file is not None:
            write_control_file(serving.file, address, core.fence)
        yield address
    finally:
        if serving.file is not None:
            serving.file.unlink(missing_ok=True)
        for close in closing:
            close()
        await server.stop(0.5)
        await asyncio.sleep(_LAST_EVENTS_S)


def write_control_file(path: Path, address: str, fence: Fence) -> None:
    """Writes where the controller is found, whole or not at all, readable by its owner only."""
    text = json.dumps(
        {
            "address": address,
            "pid": os.getpid(),
            "run_id": fence.run_id,
            "incarnation": fence.incarnation,
        }
    )
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    part.rename(path)
