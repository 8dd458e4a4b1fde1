"""One instance as its controller sees it: the unary calls, and how its stream is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import grpc

from streamrl_jax.gen import codec, net
from streamrl_jax.gen.handshake import refusal
from streamrl_jax.gen.stream import (
    Drained,
    Granted,
    InstanceError,
    InstanceStream,
    StreamEvent,
    instance_error,
)
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    Fence,
    Hello,
    InstanceInfo,
    InstanceStatus,
    Manifest,
    UpdateReport,
    WeightSource,
)

__all__ = ["Drained", "Granted", "InstanceClient", "InstanceError", "InstanceStream", "StreamEvent"]

M = TypeVar("M")
T = TypeVar("T")

_SLACK_S: Final = 10.0
"""An instance keeps the bound of an update itself; its answer, which says why, should come first."""


class InstanceClient:
    """Calls to one instance; nothing is sent before the first call.

    Call order: `status`, `update`, `pause`, `resume`, `drain` and `open` in any order; `close` once, which
    also ends the stream.

    Args:
        address: ``host:port``.
        access: token and TLS of the run.
    """

    def __init__(self, address: str, access: net.Access = net.OPEN) -> None:
        self.address = address
        self._access = access
        self._metadata = access.metadata
        self._reached = False
        self._channel = net.open_channel(address, access)
        self._stub = rpc.StreamGenerationStub(self._channel)

    async def status(self, timeout_s: float = 5.0) -> tuple[InstanceStatus, InstanceInfo]:
        """Asks what the instance is doing, in every state.

        Raises:
            InstanceError: it did not answer in time, or refused.
        """
        call = self._stub.GetStatus(pb.StatusRequest(), timeout=timeout_s, metadata=self._metadata)
        return await self._finish("GetStatus", call, _status)

    async def update(
        self, manifest: Manifest, source: WeightSource, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        """Gives the instance a version.

        Args:
            manifest: what the version consists of.
            source: where its bytes lie; the path is used if there is one, else the address.
            in_flight: keep what runs (its KV is recomputed), else it finishes first.
            timeout_s: bound on the whole.

        Returns:
            What became of it, also when it was refused.

        Raises:
            InstanceError: no answer in time, or another fence holds the instance. Whether the update took
                place is then unknown: ask again with the same manifest, which is idempotent.
        """
        request = pb.UpdateWeightsRequest(
            manifest=codec.manifest_to_proto(manifest), keep_running=in_flight, deadline_s=timeout_s
        )
        if source.path:
            request.same_host.path = source.path
        else:
            request.store.address = source.address
        call = self._stub.UpdateWeights(request, timeout=timeout_s + _SLACK_S, metadata=self._metadata)
        return await self._finish("UpdateWeights", call, partial(codec.report_from_proto, self.address))

    async def pause(self, fence: Fence, *, keep: bool, timeout_s: float) -> InstanceStatus:
        """Stops sampling: at once if ``keep``, else when what runs has finished.

        Raises:
            InstanceError: not in time, or refused.
        """
        request = pb.PauseRequest(fence=codec.fence_to_proto(fence), keep=keep)
        call = self._stub.Pause(request, timeout=timeout_s, metadata=self._metadata)
        return (await self._finish("Pause", call, _status))[0]

    async def resume(self, fence: Fence, timeout_s: float = 30.0) -> InstanceStatus:
        """Takes back `pause` and `drain`.

        Raises:
            InstanceError: not in time, or refused.
        """
        request = pb.ResumeRequest(fence=codec.fence_to_proto(fence))
        call = self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return (await self._finish("Resume", call, _status))[0]

    async def drain(self, fence: Fence, timeout_s: float = 5.0) -> InstanceStatus:
        """The instance takes nothing new; `Drained` follows on the stream after its last answer.

        Raises:
            InstanceError: not in time, or refused.
        """
        request = pb.DrainRequest(fence=codec.fence_to_proto(fence))
        call = self._stub.Drain(request, timeout=timeout_s, metadata=self._metadata)
        return (await self._finish("Drain", call, _status))[0]

    async def open(self, hello: Hello, timeout_s: float = 10.0) -> InstanceStream:
        """Opens the stream.

        Args:
            hello: the fence and the intervals.
            timeout_s: bound on the Welcome.

        Returns:
            The open stream.

        Raises:
            InstanceError: not in time, or refused (``FAILED_PRECONDITION``: another fence holds the
            instance).
        """
        call = self._stub.Generate(metadata=self._metadata)
        stream = InstanceStream(self.address, hello, call)
        try:
            async with asyncio.timeout(timeout_s):
                await stream.greet()
        except TimeoutError:
            await stream.close()
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise InstanceError(self.address, "Generate", code, f"no Welcome within {timeout_s} s") from None
        except InstanceError as error:
            await stream.close()
            if error.code is grpc.StatusCode.UNAVAILABLE:
                await self._check_tls("Generate")
            if error.code is grpc.StatusCode.INTERNAL:
                # Refused while the Hello was still being written, grpc.aio forgets the reason. A plain call is refused
                # for the same one.
                await self.status()
            raise
        self._reached = True
        return stream

    async def close(self) -> None:
        """Ends the stream and the connection."""
        await self._channel.close()

    async def _finish(self, name: str, call: Awaitable[M], read: Callable[[M], T]) -> T:
        try:
            message = await call
            if message is None:  # what grpc.aio makes of bytes that it cannot parse
                raise ValueError(f"the answer to {name} cannot be parsed")
            self._reached = True
            return read(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self._check_tls(name)
            raise instance_error(self.address, name, error) from error
        except ValueError as error:
            raise InstanceError(self.address, name, grpc.StatusCode.DATA_LOSS, str(error)) from error

    async def _check_tls(self, name: str) -> None:
        """Tells a server that is down, and may come back, from one that will never be understood.

        Raises:
            InstanceError: the two ends' TLS does not fit.
        """
        if not self._reached and (reason := await refusal(self.address, self._access)):
            raise InstanceError(self.address, name, grpc.StatusCode.UNAUTHENTICATED, reason)


def _status(reply: pb.StatusReply) -> tuple[InstanceStatus, InstanceInfo]:
    return codec.status_from_proto(reply), codec.info_from_proto(reply.welcome)
