"""Fetches a version from a store: resumed where a stream broke, checked in full before its blob is seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from streamrl_jax.bridge.blob import BlobWriter, open_blob
from streamrl_jax.bridge.manifest import check, summarise
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.handshake import refusal
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Fence, Manifest

log = logging.getLogger(__name__)

_FINAL: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Asking again would not help."""


class PullError(Exception):
    """A version could not be fetched, or what came is not that version; nothing was kept."""


@dataclass(frozen=True)
class Patience:
    """How long a transfer is tried."""

    stall_s: float = 20.0  # a stream that gives nothing for so long is broken off and resumed
    attempts: int = 5  # broken streams in a row that brought no byte
    pause_s: float = 0.2  # before the first new try; doubled each time


async def fetch_manifest(
    address: str, fence: Fence, version: int, *, access: net.Access, timeout_s: float
) -> Manifest:
    """Asks a store what a version consists of.

    Args:
        address: ``host:port`` of the store.
        fence: the life of the run.
        version: its number.
        access: token and TLS of the run.
        timeout_s: bound on the call.

    Returns:
        The manifest.

    Raises:
        PullError: the store refused or cannot be reached.
    """
    request = pb.ManifestRequest(fence=codec.fence_to_proto(fence), version=version)
    async with net.open_channel(address, access) as channel:
        try:
            reply = await rpc.WeightStoreStub(channel).GetManifest(
                request, timeout=timeout_s, metadata=access.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise PullError(f"manifest of version {version} from {address}: {_told(error)}") from error
    try:
        if reply is None:  # what grpc.aio makes of bytes that it cannot parse
            raise ValueError("it cannot be parsed")
        return codec.manifest_from_proto(reply)
    except ValueError as error:
        raise PullError(f"manifest of version {version} from {address}: {error}") from error


async def pull(
    address: str,
    manifest: Manifest,
    timeout_s: float,
    *,
    access: net.Access,
    directories: Sequence[Path],
    patience: Patience = Patience(),
) -> Path:
    """Fetches the bytes of a version and checks them against its manifest.

    Args:
        address: ``host:port`` of the store.
        manifest: as its publisher announced it.
        timeout_s: bound on the whole.
        access: token and TLS of the run.
        directories: where the blob may lie, the best first.
        patience: bounds within it.

    Returns:
        The sealed blob, which the caller removes when it has been applied.

    Raises:
        PullError: refused, broken off too often, too slow, or not what the manifest says. Nothing is left
            behind.
        UserError: no room.
    """
    what = f"version {manifest.version} from {address}"
    with open_blob(directories, manifest.fence, manifest.version, manifest.total_bytes) as writer:
        transfer = _Transfer(manifest, writer, access)
        try:
            async with asyncio.timeout(timeout_s):
                await _until_whole(transfer, address, patience)
                faults = await asyncio.to_thread(check, manifest, writer.mapped())
        except TimeoutError as error:
            raise PullError(
                f"{what}: not whole after {timeout_s:.0f} s; "
                f"{transfer.held} of {manifest.total_bytes} bytes came"
            ) from error
        except grpc.aio.AioRpcError as error:
            raise PullError(f"{what}: {_told(error)}") from error
        if faults:
            raise PullError(f"{what}: {summarise(faults)}")
        return writer.seal()


class _Transfer:
    """Bytes of one version on their way; ``held`` of them, from the start, have been written."""

    def __init__(self, manifest: Manifest, writer: BlobWriter, access: net.Access) -> None:
        self.held = 0
        self.total = manifest.total_bytes
        self.access = access
        self._manifest, self._writer = manifest, writer

    async def advance(self, address: str, stall_s: float) -> None:
        """Opens a stream at ``held`` and writes what it brings until it ends.

        Raises:
            grpc.aio.AioRpcError: it broke.
            TimeoutError: it brought nothing for ``stall_s``.
            PullError: it brought bytes that belong elsewhere.
        """
        request = pb.FetchRequest(
            fence=codec.fence_to_proto(self._manifest.fence), version=self._manifest.version, offset=self.held
        )
        async with net.open_channel(address, self.access) as channel:
            stream = rpc.WeightStoreStub(channel).Fetch(request, metadata=self.access.metadata)
            async with asyncio.timeout(stall_s) as bound:
                async for chunk in stream:
                    bound.reschedule(asyncio.get_running_loop().time() + stall_s)
                    self._take(chunk, address)

    def _take(self, chunk: pb.Chunk | None, address: str) -> None:
        if chunk is None:  # what grpc.aio makes of bytes that it cannot parse
            raise PullError(f"{address} sent a message that is no Chunk")
        if chunk.offset != self.held or len(chunk.data) > self.total - self.held:
            raise PullError(
                f"{address} sent {len(chunk.data)} bytes for offset {chunk.offset}, "
                f"expected those from {self.held} to at most {self.total}"
            )
        self._writer.write(self.held, chunk.data)
        self.held += len(chunk.data)


async def _until_whole(transfer: _Transfer, address: str, patience: Patience) -> None:
    """Resumes broken streams while they bring something."""
    fruitless = 0
    while transfer.held < transfer.total:
        before = transfer.held
        try:
            await transfer.advance(address, patience.stall_s)
            reason = "the stream ended early"
        except TimeoutError:
            reason = f"nothing came for {patience.stall_s:.0f} s"
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise
            reason = _told(error)
            if not transfer.held and (unfit := await refusal(address, transfer.access)):
                raise PullError(f"{address}: {unfit}") from error
        if transfer.held == transfer.total:
            return
        fruitless = 0 if transfer.held > before else fruitless + 1
        if fruitless == patience.attempts:
            raise PullError(
                f"{address}: {fruitless} streams in a row brought nothing, "
                f"{transfer.held} of {transfer.total} bytes came; the last: {reason}"
            )
        log.warning(
            "weights from %s: %s at %d of %d bytes; resuming", address, reason, transfer.held, transfer.total
        )
        await asyncio.sleep(patience.pause_s * 2**fruitless)


def _told(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
