"""Manifests, requests for a version, and what became of an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.codec.fences import fence_from_proto, fence_to_proto
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Fence,
    Manifest,
    TensorSpec,
    UpdateReport,
    WeightSource,
)

MAX_TENSORS: Final = 1 << 18
"""Most tensors of a version; the message's own bound lets no more through anyway."""

_MAX_DIMENSIONS: Final = 8
_DIGEST_BYTES: Final = 32
_LONGEST_UPDATE_S: Final = 86_400.0


@dataclass(frozen=True)
class UpdateRequest:
    """What a controller asks of an instance, beside the manifest."""

    source: WeightSource
    in_flight: bool  # keep what runs
    timeout_s: float  # 0: the instance's own bound


@dataclass(frozen=True)
class FetchRequest:
    """Which bytes of which version a store is asked for."""

    fence: Fence
    version: int
    offset: int = 0
    nbytes: int = 0  # 0: to the end


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    """What a version consists of, for the wire."""
    return pb.Manifest(
        fence=fence_to_proto(manifest.fence),
        version=manifest.version,
        tensors=[
            pb.TensorEntry(
                name=spec.name,
                shape=spec.shape,
                dtype=spec.dtype,
                offset=spec.offset,
                nbytes=spec.nbytes,
                digest=spec.digest,
            )
            for spec in manifest.tensors
        ],
        total_bytes=manifest.total_bytes,
        digest=manifest.digest,
        base_version=manifest.base_version,
        architecture=manifest.architecture,
    )


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """Reads a manifest. Whether it fits its blob and the model is checked where it is staged.

    Raises:
        ValueError: names the field: a missing fence, a tensor without a name, one outside the version's bytes.
    """
    version = _version("manifest.version", message.version)
    total = wire.count("manifest.total_bytes", message.total_bytes, wire.MAX_BYTES)
    wire.count("number of manifest.tensors", len(message.tensors), MAX_TENSORS)
    return Manifest(
        fence=fence_from_proto(message.fence),
        version=version,
        tensors=tuple(
            _tensor(f"manifest.tensors[{index}]", entry, total) for index, entry in enumerate(message.tensors)
        ),
        total_bytes=total,
        digest=_digest("manifest.digest", message.digest),
        architecture=wire.name("manifest.architecture", message.architecture),
        base_version=wire.version("manifest.base_version", message.base_version),
    )


def _tensor(field: str, entry: pb.TensorEntry, total: int) -> TensorSpec:
    name = wire.name(f"{field}.name", entry.name)
    wire.count(f"dimensions of {field}.shape", len(entry.shape), _MAX_DIMENSIONS)
    shape = tuple(entry.shape)
    if math.prod(shape) > wire.MAX_BYTES:
        raise ValueError(f"{field}.shape = {list(shape)} has more than {wire.MAX_BYTES} elements")
    nbytes = wire.count(f"{field}.nbytes", entry.nbytes, total)
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=wire.name(f"{field}.dtype", entry.dtype),
        offset=wire.count(f"{field}.offset", entry.offset, total - nbytes),
        nbytes=nbytes,
        digest=_digest(f"{field}.digest", entry.digest),
    )


def _version(field: str, value: int) -> int:
    """The number of a version that exists."""
    return wire.count(field, value, wire.MAX_VERSION)


def _digest(field: str, value: bytes) -> bytes:
    if len(value) != _DIGEST_BYTES:
        raise ValueError(f"{field} has {len(value)} bytes; a digest has {_DIGEST_BYTES}")
    return value


def update_from_proto(message: pb.UpdateWeightsRequest) -> UpdateRequest:
    """Reads a request for an update, all but its manifest.

    Raises:
        ValueError: names the field: no source, or a bound that is none.
    """
    match message.WhichOneof("source"):
        case "same_host":
            source = WeightSource(path=wire.name("same_host.path", message.same_host.path))
        case "store":
            source = WeightSource(address=wire.name("store.address", message.store.address))
        case _:
            raise ValueError("update.source is neither same_host nor store")
    timeout_s = wire.seconds("update.deadline_s", message.deadline_s, _LONGEST_UPDATE_S)
    return UpdateRequest(source, message.keep_running, timeout_s)


def fetch_from_proto(message: pb.ManifestRequest | pb.FetchRequest) -> FetchRequest:
    """Reads which version, and which of its bytes, are asked for.

    Raises:
        ValueError: names the field.
    """
    fence, version = fence_from_proto(message.fence), _version("fetch.version", message.version)
    if isinstance(message, pb.ManifestRequest):
        return FetchRequest(fence, version)
    return FetchRequest(fence, version, message.offset, message.nbytes)


def report_to_proto(report: UpdateReport) -> pb.UpdateWeightsResponse:
    """What became of an update, for the wire."""
    return pb.UpdateWeightsResponse(
        accepted=report.accepted,
        version=report.version,
        reason=wire.cut(report.reason),
        quarantined=report.quarantined,
        staged_s=report.staged_s,
        paused_s=report.paused_s,
        applied_s=report.applied_s,
    )


def report_from_proto(instance: str, message: pb.UpdateWeightsResponse) -> UpdateReport:
    """Reads what became of the update of ``instance``.

    Raises:
        ValueError: names the field.
    """
    return UpdateReport(
        instance=instance,
        accepted=message.accepted,
        version=wire.version("update.version", message.version),
        reason=wire.text("update.reason", message.reason),
        quarantined=message.quarantined,
        staged_s=wire.seconds("update.staged_s", message.staged_s),
        paused_s=wire.seconds("update.paused_s", message.paused_s),
        applied_s=wire.seconds("update.applied_s", message.applied_s),
    )
