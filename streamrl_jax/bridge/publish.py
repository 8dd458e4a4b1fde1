"""The trainer's side of a weight push: sharded parameters become a blob and its manifest.

::

    trainer thread   publish(params, v): convert bucket 0, 1, … on the devices ──▶ returns, trains on
                                             │ (fresh arrays; copies to the host begin at once)
    writer thread                            └──▶ digest, write ──▶ … ──▶ manifest, seal ──▶ future

The parameters are float32 masters; what is shipped has the checkpoint's names and layout in the generator's
dtype. The only module of the bridge that imports JAX.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from streamrl_jax.bridge import names
from streamrl_jax.bridge.manifest import DTYPES, Target, lay_out
from streamrl_jax.bridge.writer import VersionWriter, WriteSeconds
from streamrl_jax.types import NO_VERSION, Fence, Manifest

BUCKET_BYTES: Final = 256 << 20
"""Tensors that are converted together come to so much at most; the same in every trainer process."""


class Architecture(names.Dimensions, Protocol):
    """The part of `streamrl_jax.train.models.Arch` that a push depends on."""

    @property
    def architecture(self) -> str: ...


@dataclass(frozen=True)
class PublishStats:
    """What one publication cost."""

    nbytes: int  # of the blob
    blocked_s: float  # how long `publish` kept its caller
    total_s: float  # from the call to the sealed blob
    seconds: WriteSeconds  # of the writer thread


@dataclass(frozen=True)
class Published:
    """A version that lies ready."""

    manifest: Manifest
    path: Path
    stats: PublishStats


@dataclass(frozen=True)
class Publication:
    """A version under way."""

    version: int
    future: Future[Published]  # fails with UserError when there is no room


@dataclass(frozen=True)
class Piece:
    """What is converted as one: a checkpoint tensor, or those of all experts of a layer."""

    names: tuple[str, ...]  # one, or one for each expert
    entry: names.Entry
    layer: int | None  # index into a parameter that is stacked over layers

    def nbytes(self, dtype: str) -> int:
        """Bytes in the given dtype."""
        return len(self.names) * Target(self.entry.checkpoint_shape, dtype).nbytes


def list_pieces(arch: names.Dimensions) -> tuple[Piece, ...]:
    """Everything that a push is made of, in the table's order.

    A tied model ships its head explicitly: vLLM's head would keep the old values otherwise.

    Args:
        arch: the architecture.

    Returns:
        Pieces; each checkpoint name is in one.
    """
    pieces: list[Piece] = []
    for entry in names.entries(arch):
        if not entry.stacked:
            pieces.append(Piece(entry.names, entry, None))
        else:
            layers, experts = entry.stacked[0], math.prod(entry.stacked[1:])
            pieces += [
                Piece(entry.names[layer * experts : (layer + 1) * experts], entry, layer)
                for layer in range(layers)
            ]
        if arch.tied and entry.pattern == names.EMBEDDING_NAME:
            pieces.append(Piece((names.HEAD_NAME,), entry, None))
    return tuple(pieces)


def make_buckets(pieces: Sequence[Piece], dtype: str, bucket_bytes: int) -> list[tuple[Piece, ...]]:
    """Cuts the pieces, in order, into buckets of at most ``bucket_bytes`` (or of one larger piece).

    Args:
        pieces: as from ``list_pieces``.
        dtype: what they are shipped in.
        bucket_bytes: upper bound.

    Returns:
        The buckets; each piece is in one.
    """
    buckets: list[list[Piece]] = []
    held = 0
    for piece in pieces:
        nbytes = piece.nbytes(dtype)
        if not buckets or held + nbytes > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(piece)
        held += nbytes
    return [tuple(bucket) for bucket in buckets]


def convert(params: Any, pieces: Sequence[Piece], dtype: str) -> list[jax.Array]:
    """Brings pieces of a parameter tree into the checkpoint's layout.

    What is compiled depends on the pieces' entries alone: buckets that differ in the layers share a program.

    Args:
        params: nested dictionary of arrays, as `streamrl_jax.bridge.names` knows it.
        pieces: which tensors.
        dtype: the generator's; rounding is to the nearest, ties to even.

    Returns:
        One new array a piece; of experts, stacked. None shares a buffer with the parameters, which may be donated
        afterwards: what `jit` returns is its own, also where nothing had to be computed (float32 masters shipped as
        float32). Where the mesh spans several processes, which then all call this, each device holds them whole.
    """
    layers = np.array([piece.layer or 0 for piece in pieces], np.int32)
    program = _converter(_gathered(names.leaf_at(params, pieces[0].entry.path)))
    return program(params, layers, tuple(piece.entry for piece in pieces), dtype)


def _gathered(leaf: jax.Array) -> NamedSharding | None:
    """Where converted pieces lie: whole on each device, if a parameter is spread over several processes."""
    if leaf.is_fully_addressable:
        return None
    assert isinstance(leaf.sharding, NamedSharding)
    return NamedSharding(leaf.sharding.mesh, PartitionSpec())


@cache
def _converter(gathered: NamedSharding | None) -> Callable[..., list[jax.Array]]:
    return jax.jit(_convert, static_argnames=("entries", "dtype"), out_shardings=gathered)


def _convert(params: Any, layers: jax.Array, entries: tuple[names.Entry, ...], dtype: str) -> list[jax.Array]:
    converted: list[jax.Array] = []
    for index, entry in enumerate(entries):
        array = names.leaf_at(params, entry.path)
        lay_out_anew = entry.to_checkpoint
        if entry.stacked:
            array = jax.lax.dynamic_index_in_dim(array, layers[index], keepdims=False)
        for _ in entry.stacked[1:]:
            lay_out_anew = jax.vmap(lay_out_anew)
        converted.append(lay_out_anew(array).astype(DTYPES[dtype]))
    return converted


def bytes_per_device(params: Any, pieces: Sequence[Piece], dtype: str) -> int:
    """Bytes that converted pieces take on one device: they are spread as the parameters are, over one process.

    Args:
        params: as for ``convert``.
        pieces: which tensors.
        dtype: what they are shipped in.

    Returns:
        Bytes, those of one replica where parameters are replicated.
    """
    total = 0
    for piece in pieces:
        leaf: jax.Array = names.leaf_at(params, piece.entry.path)
        shards = leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
        total += -(-piece.nbytes(dtype) // (1 if _gathered(leaf) else shards))
    return total


class ByteBudget:
    """Bounds the bytes that are held at a time; one request is always let in, whatever its size.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    def acquire(self, nbytes: int, timeout_s: float) -> None:
        """Waits until ``nbytes`` more fit.

        Raises:
            TimeoutError: they did not within ``timeout_s``.
        """
        with self._changed:
            fits = self._changed.wait_for(
                lambda: not self._held or self._held + nbytes <= self._limit, timeout_s
            )
            if not fits:
                raise TimeoutError(
                    f"waited {timeout_s:.0f} s for {nbytes} bytes of device memory: {self._held} of "
                    f"{self._limit} are still being copied to the host"
                )
            self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Gives back what was acquired."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()


class Publisher:
    """Turns parameters into published versions: ``publish`` once a version, in rising order; then ``close``.

    Invariants: a version is a snapshot of the parameters at the moment of the call, also when they are
    donated to the next step right after it. Beside the parameters the devices hold at most ``device_bytes``
    each of converted tensors; a model that needs more makes ``publish`` wait for the copies. A version lies
    ready until it is released: however far the trainer is ahead, nothing is taken from an instance that loads it.

    Args:
        arch: the architecture.
        dtype: what is shipped (``gen.dtype``).
        fence: the life of this run.
        directories: where blobs may lie, the best first (``/dev/shm``, then one on disk).
        bucket_bytes: tensors converted together; all experts of a layer are, whatever their size.
        device_bytes: bound on the converted tensors of one device.
        timeout_s: bound on waiting for the copies of earlier buckets.
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: str,
        fence: Fence,
        directories: Sequence[Path],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        device_bytes: int = 2 << 30,
        timeout_s: float = 600.0,
    ) -> None:
        pieces = list_pieces(arch)
        self.targets: Mapping[str, Target] = {
            name: Target(piece.entry.checkpoint_shape, dtype) for piece in pieces for name in piece.names
        }
        self._dtype = dtype
        self._buckets = make_buckets(pieces, dtype, bucket_bytes)
        layout = {spec.name: spec for spec in lay_out(self.targets)}
        self._new_writer = partial(
            VersionWriter, fence, architecture=arch.architecture, layout=layout, directories=directories
        )
        self._budget = ByteBudget(device_bytes)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._newest = NO_VERSION
        self._held: dict[int, Published] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> Mapping[int, Published]:
        """The versions that lie ready."""
        with self._lock:
            return dict(self._held)

    def publish(self, params: Any, version: int) -> Publication:
        """Takes a snapshot and returns; digests and bytes are written behind the caller's back.

        Args:
            params: the policy's parameter tree.
            version: its number.

        Returns:
            The publication; its future gives the manifest, the blob's path and what it cost.

        Raises:
            TimeoutError: earlier copies did not end in time.
            ValueError: not newer than the last one.
        """
        begun = time.monotonic()
        if version <= self._newest:
            raise ValueError(f"version {version} is published after version {self._newest}")
        self._newest = version
        writer = self._new_writer(version=version)
        tasks = [self._thread.submit(writer.open)]
        try:
            tasks += [self._snapshot(params, bucket, writer) for bucket in self._buckets]
        except BaseException:
            self._thread.submit(writer.discard)
            raise
        blocked_s = time.monotonic() - begun
        finished = self._thread.submit(self._finish, writer, tasks, begun, blocked_s)
        return Publication(version, finished)

    def release(self, version: int) -> None:
        """Removes a version's blob; a reader that has it mapped keeps its bytes.

        Args:
            version: one that is held, or not (any more).
        """
        with self._lock:
            published = self._held.pop(version, None)
        if published is not None:
            published.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Waits for what is being written and removes all versions."""
        self._thread.shutdown(wait=True)
        for version in self.held:
            self.release(version)

    def _snapshot(self, params: Any, bucket: tuple[Piece, ...], writer: VersionWriter) -> Future[None]:
        """Converts a bucket and hands it to the writer thread."""
        nbytes = bytes_per_device(params, bucket, self._dtype)
        self._budget.acquire(nbytes, self._timeout_s)
        try:
            arrays = convert(params, bucket, self._dtype)
            for array in arrays:
                array.copy_to_host_async()
        except BaseException:
            self._budget.release(nbytes)
            raise
        return self._thread.submit(self._write, writer, bucket, arrays, nbytes)

    def _write(
        self, writer: VersionWriter, bucket: tuple[Piece, ...], arrays: list[jax.Array], nbytes: int
    ) -> None:
        try:
            writer.add(_tensors(bucket, arrays))
        finally:
            arrays.clear()  # the devices have the memory back before the next bucket is let in
            self._budget.release(nbytes)

    def _finish(
        self, writer: VersionWriter, tasks: Sequence[Future[None]], begun: float, blocked_s: float
    ) -> Published:
        try:
            for task in tasks:
                task.result()  # has ended: one thread runs them in order
            manifest, path = writer.finish()
        except BaseException:
            writer.discard()
            raise
        stats = PublishStats(manifest.total_bytes, blocked_s, time.monotonic() - begun, writer.seconds)
        published = Published(manifest, path, stats)
        with self._lock:
            self._held[manifest.version] = published
        return published


def _tensors(bucket: Sequence[Piece], arrays: Sequence[jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
    """Each checkpoint tensor under its name; waits for the copies to the host."""
    for piece, array in zip(bucket, arrays, strict=True):
        host = np.asarray(array)
        yield from zip(piece.names, host if piece.entry.stacked[1:] else host[None], strict=True)
