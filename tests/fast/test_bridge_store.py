"""A version crosses the wire whole or not at all, also over streams that break, stall or lie."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from streamrl_jax.bridge import store as store_module
from streamrl_jax.bridge.blob import BlobWriter
from streamrl_jax.bridge.manifest import manifest_digest, pack
from streamrl_jax.bridge.pull import Patience, PullError, fetch_manifest, pull
from streamrl_jax.bridge.store import StoreServer, WeightStore
from streamrl_jax.errors import UserError
from streamrl_jax.gen import codec, net
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Fence, Manifest

FENCE = Fence("store-test", 3)
TOKEN = "secret"
QUICK = Patience(stall_s=60.0, attempts=3, pause_s=0.01)
HASTY = Patience(stall_s=2.0, attempts=30, pause_s=0.01)
"""For a stream that stalls; of one that is merely late, it asks again."""


@dataclass(frozen=True)
class Ready:
    """A version that lies ready, as a publisher holds it."""

    manifest: Manifest
    path: Path


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ready:
    """A version of many chunks."""
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1000)
    rng = np.random.default_rng(0)
    arrays = {str(i): rng.standard_normal((37, i + 1)).astype(np.float32) for i in range(8)}
    manifest, blob = pack(FENCE, 5, "Qwen2ForCausalLM", arrays)
    directory = tmp_path / "publisher"
    directory.mkdir()
    with BlobWriter(directory, FENCE, 5, manifest.total_bytes) as writer:
        writer.write(0, memoryview(blob))
        return Ready(manifest, writer.seal())


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    """Where pulled blobs go."""
    directory = tmp_path / "puller"
    directory.mkdir()
    return directory


@pytest.fixture
def address(ready: Ready) -> Iterator[str]:
    """A store that serves ``ready``."""
    store = WeightStore(lambda: FENCE, lambda: {5: ready})
    with StoreServer(store, "127.0.0.1:0", net.Access(TOKEN)) as server:
        yield server.address


def _pull(
    address: str, manifest: Manifest, landing: Path, timeout_s: float = 60.0, token: str = TOKEN
) -> Path:
    return asyncio.run(
        pull(address, manifest, timeout_s, access=net.Access(token), directories=[landing], patience=QUICK)
    )


def test_a_version_is_pulled_whole(ready: Ready, address: str, landing: Path) -> None:
    manifest = asyncio.run(fetch_manifest(address, FENCE, 5, access=net.Access(TOKEN), timeout_s=60))
    assert manifest == ready.manifest
    path = _pull(address, manifest, landing)
    assert path.read_bytes() == ready.path.read_bytes()
    assert list(landing.iterdir()) == [path]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (1, 0), (1000, 999), (2500, 3000), (5536, 0)])
def test_any_range_is_served(ready: Ready, address: str, offset: int, nbytes: int) -> None:
    data = ready.path.read_bytes()
    with grpc.insecure_channel(address) as channel:
        request = pb.FetchRequest(fence=codec.fence_to_proto(FENCE), version=5, offset=offset, nbytes=nbytes)
        chunks = list(rpc.WeightStoreStub(channel).Fetch(request, metadata=net.bearer(TOKEN), timeout=60))
    assert b"".join(chunk.data for chunk in chunks) == data[offset : offset + nbytes if nbytes else None]
    at = offset
    for chunk in chunks:
        assert chunk.offset == at and 0 < len(chunk.data) <= 1000
        at += len(chunk.data)


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "token": ({}, "UNAUTHENTICATED", "wrong"),
    "no token": ({}, "UNAUTHENTICATED", ""),
    "incarnation": ({"fence": pb.Fence(run_id="store-test", incarnation=2)}, "FAILED_PRECONDITION", TOKEN),
    "run": ({"fence": pb.Fence(run_id="other", incarnation=3)}, "FAILED_PRECONDITION", TOKEN),
    "version": ({"version": 4}, "NOT_FOUND", TOKEN),
    "offset": ({"offset": 1 << 40}, "OUT_OF_RANGE", TOKEN),
    "range": ({"offset": 10, "nbytes": (1 << 64) - 1}, "OUT_OF_RANGE", TOKEN),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_request_that_does_not_belong_here_gets_its_status(address: str, kind: str) -> None:
    changes, status, token = REFUSALS[kind]
    fields: dict[str, Any] = {"fence": codec.fence_to_proto(FENCE), "version": 5}
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        request = pb.FetchRequest(**(fields | changes))
        list(rpc.WeightStoreStub(channel).Fetch(request, metadata=net.bearer(token), timeout=60))
    assert isinstance(caught.value, grpc.Call) and caught.value.code().name == status


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fence": Fence("store-test", 2)}, r"FAILED_PRECONDITION: asked for .*2.*belongs to .*3"),
        ({"version": 6}, r"NOT_FOUND: version 6 is not held; held are \[5\]"),
    ],
)
def test_a_refusal_ends_a_pull_at_once_and_leaves_nothing(
    ready: Ready, address: str, landing: Path, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(PullError, match=told):
        _pull(address, replace(ready.manifest, **change), landing)
    assert not list(landing.iterdir())


def test_a_version_removed_from_disk_is_not_held(ready: Ready, address: str, landing: Path) -> None:
    ready.path.unlink()
    with pytest.raises(PullError, match="NOT_FOUND"):
        _pull(address, ready.manifest, landing)


def test_bytes_of_another_version_are_named_and_not_kept(ready: Ready, address: str, landing: Path) -> None:
    first, *rest = ready.manifest.tensors
    other = replace(ready.manifest, tensors=(replace(first, digest=bytes(32)), *rest))
    other = replace(other, digest=manifest_digest(other))
    with pytest.raises(PullError, match=r"version 5 from .*: 0: its 148 bytes do not match digest"):
        _pull(address, other, landing)
    assert not list(landing.iterdir())


def test_a_store_that_is_gone_is_given_up_within_the_bound(ready: Ready, landing: Path) -> None:
    store = WeightStore(lambda: FENCE, lambda: {5: ready})
    with StoreServer(store, "127.0.0.1:0", net.Access(TOKEN)) as server:
        address = server.address
    with pytest.raises(
        PullError, match=r"3 streams in a row brought nothing, 0 of 5536 bytes came.*UNAVAILABLE"
    ):
        _pull(address, ready.manifest, landing)
    assert not list(landing.iterdir())


def test_no_room_names_what_is_needed(ready: Ready, landing: Path) -> None:
    huge = replace(ready.manifest, total_bytes=1 << 60)
    with pytest.raises(UserError, match=f"needs {1 << 60} bytes"):
        _pull("127.0.0.1:1", huge, landing)
    assert not list(landing.iterdir())


@dataclass
class FaultyStore(rpc.WeightStoreServicer):
    """Gives the bytes as the script of each call says; records the offsets that were asked for."""

    data: bytes
    script: Callable[[int, int, bytes], AsyncIterator[pb.Chunk]]  # (call, offset, data)
    asked: list[int] = field(default_factory=list)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        self.asked.append(request.offset)
        async for chunk in self.script(len(self.asked) - 1, request.offset, self.data):
            if not chunk.data:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield chunk


async def _pull_from(
    faulty: FaultyStore,
    manifest: Manifest,
    landing: Path,
    patience: Patience = QUICK,
    timeout_s: float = 60.0,
) -> Path:
    server = grpc.aio.server()
    rpc.add_WeightStoreServicer_to_server(faulty, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        return await pull(
            address, manifest, timeout_s, access=net.OPEN, directories=[landing], patience=patience
        )
    finally:
        await server.stop(grace=None)


async def _cut_every_300(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=offset, data=data[offset : offset + 300])
    if offset + 300 < len(data):
        yield pb.Chunk()


async def _ends_early(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=offset, data=data[offset : offset + 2000])


async def _stalls_early(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=offset, data=data[offset : offset + 700])
    if offset == 0:
        await asyncio.sleep(600)
    yield pb.Chunk(offset=offset + 700, data=data[offset + 700 :])


@pytest.mark.parametrize(
    ("script", "patience", "asked"),
    [
        (_cut_every_300, QUICK, list(range(0, 5536, 300))),
        (_ends_early, QUICK, [0, 2000, 4000]),
        (_stalls_early, HASTY, [0, 700]),
    ],
    ids=["cut", "ended", "stalled"],
)
def test_a_broken_stream_is_resumed_where_it_broke(
    ready: Ready,
    landing: Path,
    script: Callable[..., AsyncIterator[pb.Chunk]],
    patience: Patience,
    asked: list[int],
) -> None:
    faulty = FaultyStore(ready.path.read_bytes(), script)
    path = asyncio.run(_pull_from(faulty, ready.manifest, landing, patience))
    assert path.read_bytes() == ready.path.read_bytes()
    assert (faulty.asked if patience is QUICK else list(dict.fromkeys(faulty.asked))) == asked


async def _cuts_at_once(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    if call == 0:
        yield pb.Chunk(offset=0, data=data[:100])
    yield pb.Chunk()


async def _wrong_place(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=offset + 1, data=data[offset + 1 : offset + 100])


async def _too_much(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=offset, data=data + b"x")


async def _never(call: int, offset: int, data: bytes) -> AsyncIterator[pb.Chunk]:
    while True:
        await asyncio.sleep(0.05)
        yield pb.Chunk(offset=offset, data=data[offset : offset + 1])
        offset += 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            _cuts_at_once,
            "3 streams in a row brought nothing, 100 of 5536 bytes came; the last: UNAVAILABLE: cut",
        ),
        (_wrong_place, "99 bytes for offset 1, expected those from 0"),
        (_too_much, "sent 5537 bytes for offset 0"),
        (_never, r"not whole after 1 s; \d+ of 5536 bytes came"),
    ],
    ids=["cut", "misplaced", "too much", "too slow"],
)
def test_a_transfer_without_prospect_ends_with_its_reason_and_leaves_nothing(
    ready: Ready, landing: Path, script: Callable[..., AsyncIterator[pb.Chunk]], told: str
) -> None:
    faulty = FaultyStore(ready.path.read_bytes(), script)
    with pytest.raises(PullError, match=told):
        timeout_s = 1.0 if script is _never else 60.0
        asyncio.run(_pull_from(faulty, ready.manifest, landing, timeout_s=timeout_s))
    assert not list(landing.iterdir())


def test_a_version_is_sent_to_its_end_when_it_is_removed_meanwhile(ready: Ready, address: str) -> None:
    data = ready.path.read_bytes()
    with grpc.insecure_channel(address) as channel:
        request = pb.FetchRequest(fence=codec.fence_to_proto(FENCE), version=5)
        stream = rpc.WeightStoreStub(channel).Fetch(request, metadata=net.bearer(TOKEN), timeout=60)
        first = next(stream)
        ready.path.unlink()
        assert first.data + b"".join(chunk.data for chunk in stream) == data


def test_several_pull_at_once(ready: Ready, address: str, landing: Path) -> None:
    async def all_of_them() -> tuple[Path, Path]:
        one = pull(
            address, ready.manifest, 60.0, access=net.Access(TOKEN), directories=[landing], patience=QUICK
        )
        two = pull(
            address, ready.manifest, 60.0, access=net.Access(TOKEN), directories=[landing], patience=QUICK
        )
        return await asyncio.gather(one, two)

    paths = asyncio.run(all_of_them())
    assert len(set(paths)) == 2
    assert {path.read_bytes() for path in paths} == {ready.path.read_bytes()}


def test_a_server_that_cannot_start_leaves_no_thread(ready: Ready, address: str) -> None:
    store = WeightStore(lambda: FENCE, lambda: {5: ready})
    with pytest.raises(UserError, match=f"cannot listen on {address}"):
        StoreServer(store, address, net.Access(TOKEN)).start()
    with pytest.raises(UserError, match=r"security\.insecure"):
        StoreServer(store, "0.0.0.0:0", net.Access(TOKEN)).start()
    assert [thread.name for thread in threading.enumerate()].count("weight-store") == 1  # the one that serves
