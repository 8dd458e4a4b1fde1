"""The open stream of one instance, as its controller sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from streamrl_jax.gen import codec
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Assignment,
    Generation,
    Hello,
    InstanceInfo,
    InstanceStatus,
    Progress,
    Rejection,
)


@dataclass(frozen=True)
class Granted:
    """The instance takes so many more assignments."""

    count: int


@dataclass(frozen=True)
class Drained:
    """The instance that was told to drain has nothing left."""


StreamEvent = Generation | Progress | Rejection | InstanceStatus | Granted | Drained
"""What comes out of a stream; an `InstanceStatus` is a heartbeat."""


class InstanceError(Exception):
    """A call to an instance failed.

    Args:
        address: of the instance.
        call: what was asked.
        code: gRPC's status; ``UNAVAILABLE`` and ``DEADLINE_EXCEEDED`` may pass, the others will not.
        detail: the reason.
    """

    def __init__(self, address: str, call: str, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(f"{call} at {address} failed: {code.name}: {detail}")
        self.code = code

    @property
    def transient(self) -> bool:
        """Whether trying again later makes sense."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class InstanceStream:
    """The open stream of one instance.

    Call order: made by `InstanceClient.open`; one consumer iterates over `events`; `assign`, `abort`,
    `acknowledge` and `grant` meanwhile, from the same event loop; `close` once. Cancelling the consumer
    ends the stream too (grpc.aio).

    Invariant: `events` yields nothing of another fence; what comes from one is counted in
    `other_fence_dropped`. The same answer may come twice (again on a new stream, until it is acknowledged):
    the receiver is idempotent.
    """

    def __init__(self, address: str, hello: Hello, call: grpc.aio.StreamStreamCall) -> None:
        self._address = address
        self._hello = hello
        self._call = call
        self._sending = asyncio.Lock()
        self._info: InstanceInfo | None = None
        self._arrived: deque[pb.GenerateResponse] = (
            deque()
        )  # of the last message, what `events` has still to yield
        self._closed = False
        self.other_fence_dropped = 0

    @property
    def info(self) -> InstanceInfo:
        """What the instance said of itself."""
        if self._info is None:
            raise RuntimeError("the stream was not greeted")
        return self._info

    async def greet(self) -> None:
        """Hello and Welcome.

        Raises:
            InstanceError: the instance refused.
        """
        await self._send(pb.GenerateRequest(hello=codec.hello_to_proto(self._hello)))
        message = await self._read()
        if message is None or message.WhichOneof("kind") != "welcome":
            raise self._broken("the first message was no Welcome")
        try:
            self._info = codec.info_from_proto(message.welcome)
        except ValueError as error:
            raise self._broken(str(error)) from error

    async def assign(self, assignment: Assignment) -> None:
        """Hands out a sample. Repeating one that the instance has is harmless.

        Raises:
            InstanceError: the stream has ended.
        """
        await self._send(pb.GenerateRequest(assign=codec.assignment_to_proto(assignment)))

    async def hand_over(
        self, assignments: Sequence[Assignment], acknowledged: Sequence[tuple[str, int]]
    ) -> None:
        """Several assignments and acknowledgements of (sample, attempt), as one message.

        Raises:
            InstanceError: the stream has ended.
        """
        requests = [
            pb.GenerateRequest(acknowledge=pb.Acknowledge(sample_id=sample_id, attempt=attempt))
            for sample_id, attempt in acknowledged
        ]
        requests += [pb.GenerateRequest(assign=codec.assignment_to_proto(one)) for one in assignments]
        several = pb.GenerateRequest(several=pb.GenerateRequests(requests=requests))
        await self._send(requests[0] if len(requests) == 1 else several)

    async def abort(self, sample_id: str, attempt: int) -> None:
        """Cuts a sample short; its answer so far comes with ``FinishReason.ABORT``.

        Raises:
            InstanceError: the stream has ended.
        """
        await self._send(pb.GenerateRequest(abort=pb.Abort(sample_id=sample_id, attempt=attempt)))

    async def acknowledge(self, sample_id: str, attempt: int) -> None:
        """The answer is in safe keeping: the instance may forget it.

        Raises:
            InstanceError: the stream has ended.
        """
        await self._send(pb.GenerateRequest(acknowledge=pb.Acknowledge(sample_id=sample_id, attempt=attempt)))

    async def grant(self, count: int) -> None:
        """Takes ``count`` more answers. Without any grant they come as they finish.

        Raises:
            InstanceError: the stream has ended.
        """
        await self._send(pb.GenerateRequest(credit=pb.Credit(count=count)))

    async def events(self) -> AsyncIterator[StreamEvent]:
        """What the instance sends, until the stream ends in good order.

        Raises:
            InstanceError: the stream broke, was taken over (``ABORTED``) or carried something malformed.
        """
        while self._arrived or await self._arrive():
            try:
                event = self._event(self._arrived.popleft())
            except ValueError as error:
                self._call.cancel()
                raise self._broken(str(error)) from error
            if event is not None:
                yield event

    async def close(self) -> None:
        """Ends the stream, and `events` with it; the instance keeps what was not acknowledged."""
        self._closed = True
        self._call.cancel()

    async def _arrive(self) -> bool:
        """Reads the next message into ``_arrived``; False: the stream has ended."""
        message = await self._read()
        if message is None:
            return False
        together = message.WhichOneof("kind") == "several"
        try:
            several = (
                codec.together("response.several", message.several.responses) if together else (message,)
            )
        except ValueError as error:
            self._call.cancel()
            raise self._broken(str(error)) from error
        self._arrived.extend(several)
        return True

    def _event(self, message: pb.GenerateResponse) -> StreamEvent | None:
        kind = message.WhichOneof("kind")
        if kind == "credit":
            return Granted(codec.credit_from_proto(message.credit))
        if kind is None or kind in ("welcome", "several"):
            raise ValueError(f"{kind or 'an unknown message'} has no place in an open stream")
        body = getattr(message, kind)
        if codec.fence_from_proto(body.fence) != self._hello.fence:
            self.other_fence_dropped += 1
            return None
        match kind:
            case "finished":
                return codec.generation_from_proto(body)
            case "progress":
                return codec.progress_from_proto(body)
            case "rejected":
                return codec.rejection_from_proto(body)
            case "heartbeat":
                return codec.heartbeat_from_proto(body)
            case _:
                return Drained()

    async def _send(self, message: pb.GenerateRequest) -> None:
        # grpc.aio takes one write at a time.
        async with self._sending:
            try:
                await self._call.write(message)
            except grpc.aio.AioRpcError as error:
                raise instance_error(self._address, "Generate", error) from error
            except asyncio.InvalidStateError as error:
                raise self._broken("the stream has ended") from error

    async def _read(self) -> pb.GenerateResponse | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise instance_error(self._address, "Generate", error) from error
        except asyncio.CancelledError:
            # `close` makes grpc.aio raise this in the reader, whose task nobody has cancelled.
            if self._closed and not _being_cancelled():
                return None
            raise
        if isinstance(message, pb.GenerateResponse):
            return message
        if message is None:  # what grpc.aio makes of bytes that it cannot parse
            self._call.cancel()
            raise self._broken("a message is no GenerateResponse")
        code, detail = await self._call.code(), await self._call.details()
        if code is not grpc.StatusCode.OK:
            raise InstanceError(self._address, "Generate", code, detail)
        return None

    def _broken(self, detail: str) -> InstanceError:
        return InstanceError(self._address, "Generate", grpc.StatusCode.DATA_LOSS, detail)


def instance_error(address: str, call: str, error: grpc.aio.AioRpcError) -> InstanceError:
    """What a failed call becomes."""
    return InstanceError(address, call, error.code(), error.details() or "no details")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
