"""Fences, the mark of one life of one run."""

from __future__ import annotations

from streamrl_jax.gen.codec import wire
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import Fence


def fence_to_proto(fence: Fence) -> pb.Fence:
    """A fence for the wire."""
    return pb.Fence(run_id=fence.run_id, incarnation=fence.incarnation)


def fence_from_proto(message: pb.Fence) -> Fence:
    """Reads a fence.

    Raises:
        ValueError: no run id.
    """
    return Fence(wire.name("fence.run_id", message.run_id), message.incarnation)
