"""Manifests and what became of an update."""

from __future__ import annotations

from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.codec.fences import fence_from_proto, fence_to_proto
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Manifest,
    TensorSpec,
    UpdateReport,
)


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
        ValueError: a missing fence, a version under 0 or a tensor without a name.
    """
    if message.version < 0:
        raise ValueError(f"manifest.version = {message.version} is under 0")
    return Manifest(
        fence=fence_from_proto(message.fence),
        version=message.version,
        tensors=tuple(
            TensorSpec(
                name=wire.name(f"manifest.tensors[{index}].name", entry.name),
                shape=tuple(entry.shape),
                dtype=entry.dtype,
                offset=entry.offset,
                nbytes=entry.nbytes,
                digest=entry.digest,
            )
            for index, entry in enumerate(message.tensors)
        ),
        total_bytes=message.total_bytes,
        digest=message.digest,
        architecture=message.architecture,
        base_version=wire.version("manifest.base_version", message.base_version),
    )


def report_to_proto(report: UpdateReport) -> pb.UpdateWeightsResponse:
    """What became of an update, for the wire."""
    return pb.UpdateWeightsResponse(
        accepted=report.accepted,
        version=report.version,
        reason=report.reason,
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
        reason=message.reason,
        quarantined=message.quarantined,
        staged_s=wire.finite("update.staged_s", message.staged_s, 0.0),
        paused_s=wire.finite("update.paused_s", message.paused_s, 0.0),
        applied_s=wire.finite("update.applied_s", message.applied_s, 0.0),
    )
