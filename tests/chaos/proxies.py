"""What lies between controller and instance and breaks: a wire, and a service that repeats and swaps answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from streamrl_jax.gen import net
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from tests.fakes import FaultyStream

T = TypeVar("T")
_PIECE = 4096
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST


class LoopThread:
    """An event loop in a thread of its own, as long as the ``with`` block."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there, within two minutes."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Wire:
    """A TCP proxy in front of one address; faults are switched on and off while connections last.

    Call order: ``open`` once, then any fault, each ended by ``mend``; what was cut stays cut.

    Args:
        thread: whose loop carries the bytes.
        target: ``host:port`` behind it; may change when the process behind it is another.
    """

    def __init__(self, thread: LoopThread, target: str) -> None:
        self.target = target
        self.address = ""
        self._thread = thread
        self._flows = asyncio.Event()
        self._refuses = False
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    def open(self) -> Wire:
        """Starts to listen."""
        self._thread.call(self._listen())
        return self

    def cut(self) -> None:
        """Resets every connection and refuses new ones."""
        self._thread.call(self._set(refuses=True))

    def reset(self) -> None:
        """Resets every connection; new ones are taken."""
        self._thread.call(self._reset_all())

    def half_open(self) -> None:
        """Connections stay, and new ones are taken; nothing comes through."""
        self._thread.call(self._set(flows=False))

    def delay(self, seconds: float) -> None:
        """Every piece takes so long."""
        self._thread.call(self._set(delay_s=seconds))

    def throttle(self, bytes_per_s: float) -> None:
        """So many bytes a second, each way."""
        self._thread.call(self._set(bytes_per_s=bytes_per_s))

    def mend(self) -> None:
        """Everything comes through again, in order."""
        self._thread.call(self._set())

    async def _listen(self) -> None:
        self._flows.set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _set(
        self, *, flows: bool = True, refuses: bool = False, delay_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        self._flows.set() if flows else self._flows.clear()
        self._refuses, self._delay_s, self._bytes_per_s = refuses, delay_s, bytes_per_s
        if refuses:
            await self._reset_all()

    async def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if self._refuses:
                _reset(writer)
                return
            host, _, port = self.target.rpartition(":")
            behind, onward = await asyncio.open_connection(host, int(port))
            ends.append(onward)
            self._writers.update(ends)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, onward))
                both.create_task(self._carry(behind, writer))
        except* (OSError, _Ended):
            pass  # either side hung up; so does the other
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            await self._flows.wait()
            pause = self._delay_s + (len(piece) / self._bytes_per_s if self._bytes_per_s else 0.0)
            if pause:
                await asyncio.sleep(pause)
            writer.write(piece)
            await writer.drain()
        raise _Ended


class _Ended(Exception):
    """One side has closed its connection."""


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class _Onward(rpc.StreamGenerationServicer):
    """Hands every call to the service behind a stub."""

    def __init__(self, stub: rpc.StreamGenerationStub) -> None:
        self._stub = stub

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        async for message in self._stub.Generate(request_iterator):
            yield message

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        return await self._stub.UpdateWeights(request)

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return await self._stub.GetStatus(request)


@contextmanager
def repeating(thread: LoopThread, target: str, **faults: bool) -> Iterator[str]:
    """Serves what is at ``target`` with answers repeated or swapped (`FaultyStream`); yields its address."""

    async def start() -> tuple[grpc.aio.Server, grpc.aio.Channel, str]:
        server, channel = net.make_server(net.OPEN), net.open_channel(target, net.OPEN)
        onward = _Onward(rpc.StreamGenerationStub(channel))
        rpc.add_StreamGenerationServicer_to_server(FaultyStream(onward, **faults), server)
        address = net.bind(server, "127.0.0.1:0", net.OPEN)
        await server.start()
        return server, channel, address

    async def stop(server: grpc.aio.Server, channel: grpc.aio.Channel) -> None:
        await server.stop(None)
        await channel.close()

    server, channel, address = thread.call(start())
    try:
        yield address
    finally:
        thread.call(stop(server, channel))
