"""`Dispatched` <-> messages of `control.proto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streamrl_jax.config_ranker import POLICIES, Policy
from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.gen.codec import wire
from streamrl_jax.proto import control_pb2 as pb


def dispatched_to_proto(job: Dispatched) -> pb.DispatchedRow:
    """What became of a job, for the wire."""
    return pb.DispatchedRow(
        job_id=job.job_id,
        policy=job.policy,
        samples=job.samples,
        planned_s=job.planned_s,
        actual_s=job.actual_s,
        in_lines=job.in_lines,
        steals=job.steals,
        as_planned=job.as_planned,
    )


def dispatched_from_proto(message: pb.DispatchedRow) -> Dispatched:
    """Reads what became of a job.

    Raises:
        ValueError: names the field.
    """
    samples = wire.count("dispatched.samples", message.samples, wire.MAX_TOTAL, low=1)
    return Dispatched(
        job_id=wire.name("dispatched.job_id", message.job_id),
        policy=wire.lookup("dispatched.policy", _POLICIES, message.policy),
        samples=samples,
        planned_s=wire.finite("dispatched.planned_s", message.planned_s, 0.0),
        actual_s=wire.seconds("dispatched.actual_s", message.actual_s),
        in_lines=message.in_lines,
        steals=wire.count("dispatched.steals", message.steals, wire.MAX_TOTAL),
        as_planned=wire.count("dispatched.as_planned", message.as_planned, samples),
    )


_POLICIES: Final[Mapping[str, Policy]] = {policy: policy for policy in POLICIES}
