"""Serves the bytes of versions to instances on other hosts (``WeightStore`` of ``streamrl.proto``).

The trainer has a store over what its publisher holds; an instance that has a version may be a store to its
neighbours.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc

from streamrl_jax.bridge.blob import map_blob
from streamrl_jax.gen import codec, net
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Fence, Manifest

CHUNK_BYTES: Final = 4 << 20
"""Bytes of one message of a transfer."""

T = TypeVar("T")


class StoredVersion(Protocol):
    """A version that lies ready on this host."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def path(self) -> Path: ...


class WeightStore(rpc.WeightStoreServicer):
    """The service, to be added to a ``grpc.aio`` server.

    Invariant: what it sends belongs to the asked life of the run and to the asked version, or the call fails.
    A version that is removed while it is being sent is still sent to its end.

    Args:
        fence: gives the life of the run that this process belongs to, None before it is known.
        versions: gives what lies ready, by version.
    """

    def __init__(
        self, fence: Callable[[], Fence | None], versions: Callable[[], Mapping[int, StoredVersion]]
    ) -> None:
        self._fence = fence
        self._versions = versions

    async def GetManifest(self, request: pb.ManifestRequest, context: Any) -> pb.Manifest:
        """What a version consists of."""
        return codec.manifest_to_proto((await self._find(request, context)).manifest)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        """The bytes of a version from ``offset`` on, in order and without a gap."""
        stored = await self._find(request, context)
        total = stored.manifest.total_bytes
        if request.offset > total or request.nbytes > total - request.offset:
            asked = f"{request.nbytes or 'all'} bytes from offset {request.offset}"
            reason = f"{asked} lie outside version {request.version}, which has {total}"
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, reason)
        try:
            view = map_blob(stored.path, total)
        except FileNotFoundError:
            await self._not_held(request.version, context)
        end = request.offset + request.nbytes if request.nbytes else total
        for offset in range(request.offset, end, CHUNK_BYTES):
            yield pb.Chunk(offset=offset, data=bytes(view[offset : min(offset + CHUNK_BYTES, end)]))

    async def _find(self, request: pb.ManifestRequest | pb.FetchRequest, context: Any) -> StoredVersion:
        try:
            asked = codec.fetch_from_proto(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort does not return") from error
        mine = self._fence()
        if asked.fence != mine:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"asked for {asked.fence}, this store belongs to {mine}"
            )
        stored = self._versions().get(asked.version)
        if stored is None:
            await self._not_held(asked.version, context)
        return stored

    async def _not_held(self, version: int, context: Any) -> NoReturn:
        held = sorted(self._versions())
        await context.abort(grpc.StatusCode.NOT_FOUND, f"version {version} is not held; held are {held}")
        raise AssertionError("abort does not return")


class StoreServer:
    """Runs a store in a thread of its own. Call order: ``start`` (or a ``with`` block), ``close``.

    Args:
        store: what to serve.
        listen: ``host:port``; port 0 takes a free one.
        access: what callers must show.
        timeout_s: bound on starting and on closing.
    """

    def __init__(
        self, store: WeightStore, listen: str, access: net.Access, *, timeout_s: float = 10.0
    ) -> None:
        self._store, self._listen, self._access = store, listen, access
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-store", daemon=True)
        self._server: grpc.aio.Server | None = None

    def __enter__(self) -> StoreServer:
        self.address = self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> str:
        """Begins to serve.

        Returns:
            ``host:port`` with the port that was taken.

        Raises:
            UserError: the address cannot be bound, or is reachable from other hosts without consent.
        """
        self._thread.start()
        try:
            return self._call(self._serve())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends running transfers and stops."""
        if self._server is not None:
            self._call(self._server.stop(grace=None))
            self._server = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        self._loop.close()

    async def _serve(self) -> str:
        server = net.make_server(self._access)
        rpc.add_WeightStoreServicer_to_server(self._store, server)
        address = net.bind(server, self._listen, self._access)
        await server.start()
        self._server = server
        return address

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(self._timeout_s)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not net.is_pollers(context.get("exception")):
        loop.default_exception_handler(context)
