"""What a version of the weights consists of, and how it is found whole (DESIGN rule 6).

A version travels as one *blob* (the tensors' bytes one after the other, each at an aligned offset) and one
``Manifest`` that says what lies where and what it must hash to. Whoever receives a version calls ``check`` on
the bytes and ``check_targets`` on the names before it applies the first tensor; both return every fault they
find, so that one refusal tells the whole story. NumPy and blake3 only: vLLM's workers import this module.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from blake3 import blake3

from streamrl_jax.types import NO_VERSION, Fence, Manifest, TensorSpec

ALIGNMENT = 64
"""Bytes; each tensor of a blob begins at a multiple of it, so that it can be mapped by any library."""

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""The dtypes that a version may hold, by the name that the manifest uses."""

DIGEST_BYTES = 32

Bytes = bytes | bytearray | memoryview | mmap.mmap
"""What a blob may lie in."""


@dataclass(frozen=True)
class Target:
    """A tensor as its receiver expects it."""

    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def lay_out(targets: Mapping[str, Target]) -> tuple[TensorSpec, ...]:
    """Gives each tensor its place in the blob, in the mapping's order.

    Args:
        targets: shape and dtype by checkpoint name.

    Returns:
        One spec a tensor, its offset a multiple of ``ALIGNMENT``, its digest still empty.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, target in targets.items():
        specs.append(TensorSpec(name, target.shape, target.dtype, offset, target.nbytes, b""))
        offset += -(-target.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs)


def blob_size(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the blob that holds ``specs``: where the last tensor ends."""
    return max((spec.offset + spec.nbytes for spec in specs), default=0)


def digest_bytes(data: Bytes) -> bytes:
    """Gives the blake3 digest (32 bytes) of a tensor's bytes. Lets other threads run meanwhile."""
    return blake3(memoryview(data).cast("B")).digest()


def manifest_digest(manifest: Manifest) -> bytes:
    """Digest over everything that a manifest says, its own digest left out.

    It covers names, shapes and offsets beside the tensors' digests: two tensors of one shape whose names were
    swapped have the same bytes and the same digests, and are still not the same version.
    """
    head = [
        manifest.fence.run_id,
        manifest.fence.incarnation,
        manifest.version,
        manifest.base_version,
        manifest.architecture,
        manifest.total_bytes,
    ]
    body = [[t.name, list(t.shape), t.dtype, t.offset, t.nbytes, t.digest.hex()] for t in manifest.tensors]
    return blake3(json.dumps([head, body], separators=(",", ":")).encode()).digest()


def build_manifest(
    fence: Fence,
    version: int,
    architecture: str,
    tensors: Sequence[TensorSpec],
    base_version: int = NO_VERSION,
) -> Manifest:
    """Makes the manifest of a version.

    Args:
        fence: the life of the run that publishes it.
        version: the policy version.
        architecture: as in the checkpoint's configuration, e.g. ``Qwen2ForCausalLM``.
        tensors: what ``lay_out`` gave, with digests filled in.
        base_version: of a delta; ``NO_VERSION`` for a full version.

    Returns:
        The manifest, its own digest included.
    """
    bare = Manifest(fence, version, tuple(tensors), blob_size(tensors), b"", architecture, base_version)
    return replace(bare, digest=manifest_digest(bare))


def pack(
    fence: Fence, version: int, architecture: str, arrays: Mapping[str, np.ndarray]
) -> tuple[Manifest, bytearray]:
    """Makes manifest and blob of tensors that lie in host memory.

    Args:
        fence: the life of the run that publishes it.
        version: the policy version.
        architecture: as in the checkpoint's configuration.
        arrays: tensors by checkpoint name, of a dtype in ``DTYPES``.

    Returns:
        The manifest and the bytes it describes.
    """
    specs = lay_out({name: Target(array.shape, array.dtype.name) for name, array in arrays.items()})
    blob = bytearray(blob_size(specs))
    for spec in specs:
        writable_tensor(blob, spec)[...] = arrays[spec.name]
    digests = [digest_bytes(tensor_bytes(blob, spec)) for spec in specs]
    tensors = [replace(spec, digest=digest) for spec, digest in zip(specs, digests, strict=True)]
    return build_manifest(fence, version, architecture, tensors), blob


def tensor_bytes(blob: Bytes, spec: TensorSpec) -> memoryview:
    """The bytes of one tensor within the blob, not copied."""
    return memoryview(blob).cast("B")[spec.offset : spec.offset + spec.nbytes]


def writable_tensor(blob: Bytes, spec: TensorSpec) -> np.ndarray:
    """One tensor within the blob as an array, not copied; writable where the blob is."""
    return np.frombuffer(tensor_bytes(blob, spec), DTYPES[spec.dtype]).reshape(spec.shape)


def read_tensor(blob: Bytes, spec: TensorSpec) -> np.ndarray:
    """One tensor within the blob as a read-only array, not copied (bfloat16 as ``ml_dtypes.bfloat16``)."""
    array = writable_tensor(blob, spec)
    array.flags.writeable = False
    return array


def check(manifest: Manifest, blob: Bytes) -> list[str]:
    """Finds every fault of a version: of the manifest in itself, and of the bytes against it.

    Args:
        manifest: as received.
        blob: all bytes of the version.

    Returns:
        One line a fault, naming the tensor; empty when the version is whole.
    """
    data = memoryview(blob).cast("B")
    faults = list(_header_faults(manifest, data.nbytes))
    sound: list[TensorSpec] = []
    for spec in manifest.tensors:
        found = list(_spec_faults(spec, data.nbytes))
        faults += found
        if not found:
            sound.append(spec)
    faults += _overlaps(sound)
    for spec in sound:
        if digest_bytes(tensor_bytes(data, spec)) != spec.digest:
            faults.append(f"{spec.name}: its {spec.nbytes} bytes do not match digest {_short(spec.digest)}")
    return faults


def check_targets(manifest: Manifest, expected: Mapping[str, Target]) -> list[str]:
    """Holds the names, shapes and dtypes of a version against what its receiver has places for.

    Args:
        manifest: as received.
        expected: each target of the receiver, by checkpoint name.

    Returns:
        One line a fault (missing, unexpected, other shape, other dtype); empty when each target is given.
    """
    given = {spec.name: spec for spec in manifest.tensors}
    missing = expected.keys() - given.keys()
    extra = given.keys() - expected.keys()
    faults = [
        f"{n}: missing (expected {_form(t.dtype, t.shape)})" for n, t in expected.items() if n in missing
    ]
    faults += [
        f"{n}: no tensor of this model ({_form(s.dtype, s.shape)})" for n, s in given.items() if n in extra
    ]
    for name, target in expected.items():
        spec = given.get(name)
        if spec is not None and (spec.shape, spec.dtype) != (target.shape, target.dtype):
            faults.append(
                f"{name}: is {_form(spec.dtype, spec.shape)}, expected {_form(target.dtype, target.shape)}"
            )
    return faults


def summarise(faults: Sequence[str], limit: int = 20) -> str:
    """Joins faults for a message; past ``limit`` only their number is told."""
    rest = len(faults) - limit
    return "; ".join(faults[:limit]) + (f"; and {rest} more" if rest > 0 else "")


def _header_faults(manifest: Manifest, held: int) -> Iterator[str]:
    if manifest.version < 0:
        yield f"version {manifest.version} is negative"
    if manifest.base_version != NO_VERSION:
        yield f"base_version {manifest.base_version}: a delta, and only full versions ({NO_VERSION}) are read"
    if not manifest.tensors:
        yield "the manifest lists no tensor"
    if manifest.digest != manifest_digest(manifest):
        yield f"the manifest does not match its own digest {_short(manifest.digest)}"
    end = blob_size(manifest.tensors)
    if manifest.total_bytes != end:
        yield f"total_bytes is {manifest.total_bytes}, but the tensors end at {end}"
    if manifest.total_bytes != held:
        yield f"total_bytes is {manifest.total_bytes}, but the blob has {held} bytes"
    yield from (f"{name}: listed more than once" for name in _duplicates(t.name for t in manifest.tensors))


def _spec_faults(spec: TensorSpec, held: int) -> Iterator[str]:
    if spec.dtype not in DTYPES:
        yield f"{spec.name}: unknown dtype {spec.dtype!r} (known: {', '.join(DTYPES)})"
        return
    if any(size < 1 for size in spec.shape):
        yield f"{spec.name}: shape {list(spec.shape)} has a size under 1"
        return
    nbytes = Target(spec.shape, spec.dtype).nbytes
    if spec.nbytes != nbytes:
        yield f"{spec.name}: has {spec.nbytes} bytes, but {_form(spec.dtype, spec.shape)} takes {nbytes}"
    if spec.offset < 0 or spec.offset % ALIGNMENT:
        yield f"{spec.name}: offset {spec.offset} is not a multiple of {ALIGNMENT}"
    if (end := spec.offset + spec.nbytes) > held:
        yield f"{spec.name}: bytes {spec.offset} to {end} lie outside the blob of {held} bytes"
    if len(spec.digest) != DIGEST_BYTES:
        yield f"{spec.name}: the digest has {len(spec.digest)} bytes, expected {DIGEST_BYTES}"


def _overlaps(specs: Sequence[TensorSpec]) -> Iterator[str]:
    reached, holder = 0, ""
    for spec in sorted(specs, key=lambda s: s.offset):
        if spec.offset < reached:
            yield f"{spec.name}: begins at byte {spec.offset}, inside {holder}, which ends at {reached}"
        if spec.offset + spec.nbytes > reached:
            reached, holder = spec.offset + spec.nbytes, spec.name


def _duplicates(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name in names:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)


def _short(digest: bytes) -> str:
    return f"{digest.hex()[:16]}…"


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
