"""What an answer must be for its sample. Pure."""

from __future__ import annotations

from streamrl_jax.control.faults import ControlError, InstanceLost
from streamrl_jax.control.jobs import Job
from streamrl_jax.types import Generation, Partial, Sampling


def check_length(limits: Sampling, generation: Generation) -> None:
    """An answer that nobody asked for would break the trainer's shapes: whoever sends one is not trusted.

    Args:
        limits: that it was asked for with.
        generation: the whole answer, with what earlier attempts wrote of it.

    Raises:
        InstanceLost: it is empty or too long, or not as long as it was forced to be.
    """
    length, least = len(generation.token_ids), limits.forced_length or 1
    if not least <= length <= limits.longest:
        asked = f"{least}" if least == limits.longest else f"{least} to {limits.longest}"
        raise InstanceLost(
            f"its answer to sample {generation.sample_id} has {length} tokens; {asked} were asked for"
        )


def check_beginning(limits: Sampling, sample_id: str, known: Partial) -> None:
    """An answer that does not end where it should never will.

    Args:
        limits: that it was asked for with.
        sample_id: of the answer.
        known: its beginning.

    Raises:
        InstanceLost: it is longer than the answer may be.
    """
    if len(known.token_ids) > limits.longest:
        raise InstanceLost(
            f"its answer to sample {sample_id} has passed the {limits.longest} tokens that were asked for"
        )


def check_versions(job: Job, generation: Generation, instance: str) -> None:
    """Admission bounds staleness (DESIGN rule 5): an answer that breaks it is a fault of the program.

    Args:
        job: of the sample.
        generation: the answer.
        instance: whose it is.

    Raises:
        ControlError: it holds tokens of too old a version.
    """
    oldest = min((run.version for run in generation.versions), default=None)
    if oldest is not None and oldest < job.min_version:
        raise ControlError(
            f"instance {instance} answered sample {generation.sample_id} with tokens of version "
            f"{oldest}; version {job.min_version} or newer was asked for"
        )
