"""What a stranger, or a caller that says nothing, can hold of a server is bounded; others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from streamrl_jax.gen import codec, net, service, tls
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Fence, Hello
from tests.fakes import FakeEngine

ACCESS = net.Access("secret")
GENERATE = "/streamrl.v1.StreamGeneration/Generate"
UPDATE = "/streamrl.v1.StreamGeneration/UpdateWeights"
HELLO = pb.GenerateRequest(hello=codec.hello_to_proto(Hello(Fence("run", 0), 0.05))).SerializeToString()


@asynccontextmanager
async def served(access: net.Access = ACCESS) -> AsyncIterator[str]:
    """An instance, and its address."""
    instance = GenerationService(FakeEngine(), Identity("a", 2, "host"))
    server = net.make_server(access)
    rpc.add_StreamGenerationServicer_to_server(instance, server)
    address = net.bind(server, "127.0.0.1:0", access)
    await server.start()
    life = asyncio.create_task(instance.run())
    try:
        yield address
    finally:
        await server.stop(None)
        life.cancel()


async def is_served(address: str, access: net.Access = ACCESS) -> None:
    """A normal caller gets what it asks for."""
    client = InstanceClient(address, access)
    async with asyncio.timeout(60):
        await client.status(timeout_s=60)
        stream = await client.open(Hello(Fence("normal", 0), 0.05), timeout_s=60)
        await stream.close()
    await client.close()


def test_streams_that_say_nothing_are_ended_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Within it the normal caller says Hello, though it be late.
    monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 5.0)

    async def scenario() -> None:
        async with served() as address, net.open_channel(address, ACCESS) as channel:
            calls = [channel.stream_stream(GENERATE)(metadata=ACCESS.metadata) for _ in range(100)]
            await is_served(address)
            codes = await asyncio.gather(*(call.code() for call in calls))
            assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
            assert "no Hello within 5.0 s" in await calls[0].details()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_more_calls_than_a_connection_may_have_wait_or_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with served() as address, net.open_channel(address, ACCESS) as channel:
            calls = [
                channel.stream_stream(GENERATE)(metadata=ACCESS.metadata) for _ in range(net.MAX_STREAMS + 20)
            ]
            codes = Counter([await call.code() for call in calls])
            # Those that were sent before the caller knew the bound are turned away, and may come again.
            assert set(codes) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
            assert codes[grpc.StatusCode.INVALID_ARGUMENT] >= net.MAX_STREAMS
            monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 60.0)
            await is_served(address)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_more_calls_than_the_server_works_on_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "MAX_CALLS", 5)

    async def scenario() -> None:
        async with served() as address, net.open_channel(address, ACCESS) as channel:
            calls = [channel.stream_stream(GENERATE)(metadata=ACCESS.metadata) for _ in range(8)]
            codes = [asyncio.ensure_future(call.code()) for call in calls]
            for _, code in zip(range(3), asyncio.as_completed(codes), strict=False):
                assert await code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert sum(code.done() for code in codes) == 3, "the five others are worked on"
            for call in calls:
                call.cancel()
            while True:  # until the server has heard of it
                try:
                    await is_served(address)
                    break
                except InstanceError as error:
                    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_strangers_messages_are_not_even_read() -> None:
    async def scenario() -> None:
        async with served() as address, net.open_channel(address, ACCESS) as channel:
            ask = channel.unary_unary(UPDATE)
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"\xff" * (net.MAX_MESSAGE_BYTES - 100), metadata=metadata, timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await is_served(address)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_messages_and_metadata_beyond_the_bounds_are_refused() -> None:
    async def scenario() -> None:
        async with served() as address:
            large = (("grpc.max_send_message_length", -1),)
            async with grpc.aio.insecure_channel(address, options=large) as channel:
                ask = channel.unary_unary(UPDATE)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(bytes(net.MAX_MESSAGE_BYTES + 1), metadata=ACCESS.metadata, timeout=60)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"", metadata=(*ACCESS.metadata, ("x", "y" * 20_000)), timeout=60)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await is_served(address)

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.parametrize("encrypted", [False, True])
def test_connections_that_say_nothing_or_nonsense_hold_nobody_up(encrypted: bool) -> None:
    material = tls.make("streamrl-limits")
    secure = net.Access(
        "secret", material.ca, material.certificate, material.key, material.name, everywhere=True
    )
    access = secure if encrypted else replace(secure, everywhere=False)

    async def scenario() -> None:
        async with served(access) as address:
            host, port = net.split_address(address)
            sockets = [socket.create_connection((host, port)) for _ in range(100)]
            for index, one in enumerate(sockets):
                if index % 2:
                    one.sendall(b"GET / HTTP/1.1\r\n\r\n" if index % 4 == 1 else b"\x16\x03\x01\xff\xff" * 9)
            await is_served(address, access)
            for one in sockets:
                one.close()
            await is_served(address, access)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_hello_again_on_an_open_stream_ends_it_and_nothing_else() -> None:
    async def scenario() -> None:
        async with served() as address, net.open_channel(address, ACCESS) as channel:
            call = channel.stream_stream(GENERATE)(metadata=ACCESS.metadata, timeout=60)
            await call.write(HELLO)
            await call.read()
            await call.write(HELLO)
            with pytest.raises(grpc.aio.AioRpcError, match="hello has no place") as caught:
                while await call.read():
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await is_served(address)

    asyncio.run(asyncio.wait_for(scenario(), 120))
