"""`streamrl bench tls`: what encryption costs, for samples and for weights, over loopback.

Server and client are in one process and share its cores and its interpreter lock, so the figures are lower than those
of two processes; what is compared is the same path with plain text, with TLS, and with TLS both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from streamrl_jax.bench.counting_engine import CountingEngine, Pace
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.bridge.pull import pull
from streamrl_jax.bridge.store import StoreServer, WeightStore
from streamrl_jax.gen import net, tls
from streamrl_jax.gen.client import InstanceClient
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Assignment, Fence, Generation, Hello, InstanceState, Manifest, Sampling

_FENCE = Fence("bench", 0)
_SLOTS = 64


def add_options(parser: ArgumentParser) -> None:
    """Those of `streamrl bench tls`."""
    parser.add_argument(
        "--samples", type=int, default=4000, metavar="N", help="answers a round; default: 4000"
    )
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each answer; default: 512")
    parser.add_argument("--mib", type=int, default=512, metavar="N", help="of weights a round; default: 512")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each way; default: 3")


@dataclass(frozen=True)
class _Stored:
    """The version that is pulled."""

    manifest: Manifest
    path: Path


def run(arguments: Namespace) -> int:
    """Prints the table."""
    material = tls.make("streamrl-bench")
    plain = net.Access("bench")
    encrypted = net.Access(
        "bench", material.ca, material.certificate, material.key, material.name, everywhere=True
    )
    ways = {"plain text": plain, "TLS": encrypted, "TLS, mutual": replace(encrypted, mutual=True)}
    print(
        f"{arguments.samples} samples of {arguments.tokens} tokens, {arguments.mib} MiB of weights; median of "
        f"{arguments.rounds} rounds (least to most)"
    )
    with tempfile.TemporaryDirectory() as directory:
        stored = _store(Path(directory), arguments.mib)
        samples: dict[str, list[float]] = {way: [] for way in ways}
        weights: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):  # in turns: what else the machine does meets all alike
            for way, access in ways.items():
                samples[way].append(asyncio.run(_samples(access, arguments.samples, arguments.tokens)))
                weights[way].append(_weights(access, stored, Path(directory)))
    for way in ways:
        print(
            f"{way:12} samples/s {_spread(samples[way], '7.0f')}   weights GB/s {_spread(weights[way], '5.2f')}"
        )
    return 0


def _spread(values: list[float], form: str) -> str:
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


async def _samples(access: net.Access, count: int, tokens: int) -> float:
    """Answers a second through one stream."""
    async with _instance(access, tokens) as address:
        client = InstanceClient(address, access)
        stream = await client.open(Hello(_FENCE, 1.0))
        prompt = np.arange(1, 129, dtype=np.int32)
        sampling = Sampling(1.0, tokens, ())
        began, sent, taken = time.monotonic(), 0, 0
        while sent < min(count, _SLOTS):
            await stream.assign(Assignment(f"s{sent}", 0, prompt, sampling))
            sent += 1
        async for event in stream.events():
            if isinstance(event, Generation):
                taken += 1
                await stream.acknowledge(event.sample_id, event.attempt)
                if sent < count:
                    await stream.assign(Assignment(f"s{sent}", 0, prompt, sampling))
                    sent += 1
            if taken == count:
                break
        elapsed = time.monotonic() - began
        await client.close()
    return count / elapsed


@contextlib.asynccontextmanager
async def _instance(access: net.Access, tokens: int) -> AsyncIterator[str]:
    service = GenerationService(CountingEngine(Pace(tokens), _SLOTS), Identity("bench", _SLOTS, "host"))
    server = net.make_server(access)
    rpc.add_StreamGenerationServicer_to_server(service, server)
    address = net.bind(server, "127.0.0.1:0", access)
    await server.start()
    life = asyncio.create_task(service.run())
    while service.status.state is InstanceState.LOADING:
        await asyncio.sleep(0.01)
    try:
        yield address
    finally:
        await server.stop(None)
        life.cancel()


def _store(directory: Path, mib: int) -> _Stored:
    array = np.random.default_rng(0).integers(0, 1 << 16, (mib, 1 << 18), dtype=np.uint32).view(np.float32)
    manifest, blob = pack(_FENCE, 1, "Bench", {"w": array})
    path = directory / "version.bin"
    path.write_bytes(blob)
    return _Stored(manifest, path)


def _weights(access: net.Access, stored: _Stored, directory: Path) -> float:
    """Gigabytes a second from a store into a checked file."""
    store = WeightStore(lambda: _FENCE, lambda: {1: stored})
    with StoreServer(store, "127.0.0.1:0", access) as server:
        began = time.monotonic()
        fetched = asyncio.run(
            pull(server.address, stored.manifest, 600.0, access=access, directories=[directory])
        )
        elapsed = time.monotonic() - began
        fetched.unlink()
    return stored.manifest.total_bytes / elapsed / 1e9
