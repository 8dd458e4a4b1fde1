"""Assignments in, answers out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.codec.fences import fence_to_proto
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Partial,
    Progress,
    Rejection,
    RejectReason,
    Sampling,
    Timings,
    VersionRun,
)

_MAX_STOPS: Final = 1024
"""Stop ids of one sampling; a model has a handful."""

_FINISH: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_REASON: Final = {
    RejectReason.TOO_LONG: pb.Rejected.TOO_LONG,
    RejectReason.SAMPLING_NOT_ALLOWED: pb.Rejected.SAMPLING_NOT_ALLOWED,
    RejectReason.WRONG_VERSION: pb.Rejected.WRONG_VERSION,
    RejectReason.DRAINING: pb.Rejected.DRAINING,
    RejectReason.INVALID: pb.Rejected.INVALID,
    RejectReason.ENGINE_FAILED: pb.Rejected.ENGINE_FAILED,
}
_FINISH_BACK: Final = {number: reason for reason, number in _FINISH.items()}
_REASON_BACK: Final = {number: reason for reason, number in _REASON.items()}


def runs_to_proto(runs: Iterable[VersionRun]) -> list[pb.VersionRun]:
    """Run-length coded versions, for a repeated field."""
    return [pb.VersionRun(version=run.version, length=run.length) for run in runs]


def runs_from_proto(field: str, runs: Iterable[pb.VersionRun], tokens: int) -> tuple[VersionRun, ...]:
    """Reads run-length coded versions that must cover ``tokens`` tokens.

    Raises:
        ValueError: an empty run, a version outside its range, or another total.
    """
    runs = tuple(runs)
    if len(runs) > tokens:
        raise ValueError(f"{field} holds {len(runs)} runs for {tokens} tokens")
    found = tuple(VersionRun(wire.version(f"{field}.version", run.version), run.length) for run in runs)
    if any(run.length < 1 for run in found):
        raise ValueError(f"{field} holds an empty run")
    if (total := sum(run.length for run in found)) != tokens:
        raise ValueError(f"{field} covers {total} tokens of {tokens}")
    return found


def sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    """A distribution for the wire; what is off becomes 0."""
    return pb.Sampling(
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        seed=-1 if sampling.seed is None else sampling.seed,
        evaluation=sampling.evaluation,
        top_p=sampling.top_p or 0.0,
        top_k=max(sampling.top_k or 0, 0),  # vLLM's and the configuration's -1 is off too
        min_p=sampling.min_p or 0.0,
        forced_length=sampling.forced_length or 0,
    )


def sampling_from_proto(message: pb.Sampling) -> Sampling:
    """Reads a distribution. Whether it is allowed in training is `admission.py`'s question.

    Raises:
        ValueError: a value outside its range.
    """
    wire.count("sampling.max_new_tokens", message.max_new_tokens, wire.MAX_TOKENS, low=1)
    if message.forced_length > message.max_new_tokens:
        raise ValueError(
            f"sampling.forced_length = {message.forced_length} is over "
            f"sampling.max_new_tokens = {message.max_new_tokens}"
        )
    if message.top_k < 0:
        raise ValueError(f"sampling.top_k = {message.top_k} is negative; 0 is off")
    wire.count("number of sampling.stop_token_ids", len(message.stop_token_ids), _MAX_STOPS)
    stops = tuple(message.stop_token_ids)
    if any(stop < 0 for stop in stops):
        raise ValueError(f"sampling.stop_token_ids = {stops} holds a negative id")
    return Sampling(
        temperature=wire.finite("sampling.temperature", message.temperature, 0.0, 1e6),
        max_new_tokens=message.max_new_tokens,
        stop_token_ids=stops,
        seed=None if message.seed < 0 else message.seed,
        evaluation=message.evaluation,
        top_p=wire.finite("sampling.top_p", message.top_p, 0.0, 1.0) or None,
        top_k=message.top_k or None,
        min_p=wire.finite("sampling.min_p", message.min_p, 0.0, 1.0) or None,
        forced_length=message.forced_length or None,
    )


def assignment_to_proto(assignment: Assignment) -> pb.Assign:
    """A sample to produce, for the wire."""
    resumed = assignment.resumed
    return pb.Assign(
        sample_id=assignment.sample_id,
        attempt=assignment.attempt,
        prompt_ids=wire.ids_to_bytes(assignment.prompt_ids),
        sampling=sampling_to_proto(assignment.sampling),
        priority=assignment.priority,
        min_version=assignment.min_version,
        resumed_ids=wire.ids_to_bytes(resumed.token_ids) if resumed else b"",
        resumed_logprobs=wire.logprobs_to_bytes(resumed.logprobs) if resumed else b"",
        resumed_versions=runs_to_proto(resumed.versions) if resumed else (),
        probe=assignment.probe,
    )


def assignment_from_proto(message: pb.Assign) -> Assignment:
    """Reads an assignment.

    Raises:
        ValueError: names the field: empty prompt, resumed arrays of unequal length, no room left.
    """
    prompt = wire.ids_from_bytes("assign.prompt_ids", message.prompt_ids)
    if not prompt.size:
        raise ValueError("assign.prompt_ids is empty")
    sampling = sampling_from_proto(message.sampling)
    resumed = _resumed(message)
    if resumed is not None and len(resumed.token_ids) >= sampling.longest:
        raise ValueError(
            f"assign.resumed_ids holds {len(resumed.token_ids)} tokens, which leaves none of the answer's "
            f"{sampling.longest}"
        )
    return Assignment(
        sample_id=wire.name("assign.sample_id", message.sample_id),
        attempt=message.attempt,
        prompt_ids=prompt,
        sampling=sampling,
        priority=message.priority,
        min_version=wire.version("assign.min_version", message.min_version),
        resumed=resumed,
        probe=message.probe,
    )


def _resumed(message: pb.Assign) -> Partial | None:
    ids = wire.ids_from_bytes("assign.resumed_ids", message.resumed_ids)
    logprobs = wire.logprobs_from_bytes("assign.resumed_logprobs", message.resumed_logprobs, ids.size)
    versions = runs_from_proto("assign.resumed_versions", message.resumed_versions, ids.size)
    return Partial(ids, logprobs, versions) if ids.size else None


def generation_to_proto(fence: Fence, generation: Generation, sequence: int = 0) -> pb.Finished:
    """A finished answer for the wire; ``sequence`` counts the messages of the stream."""
    timings = generation.timings
    return pb.Finished(
        fence=fence_to_proto(fence),
        sample_id=generation.sample_id,
        attempt=generation.attempt,
        token_ids=wire.ids_to_bytes(generation.token_ids),
        logprobs=wire.logprobs_to_bytes(generation.logprobs),
        versions=runs_to_proto(generation.versions),
        finish_reason=_FINISH[generation.finish_reason],
        instance=generation.instance,
        timings=pb.Timings(queued_s=timings.queued_s, prefill_s=timings.prefill_s, decode_s=timings.decode_s),
        sequence=sequence,
    )


def generation_from_proto(message: pb.Finished) -> Generation:
    """Reads a finished answer.

    Raises:
        ValueError: names the field: arrays of unequal length, no log-probs, an unknown finish reason.
    """
    ids = wire.ids_from_bytes("finished.token_ids", message.token_ids)
    timings = message.timings
    return Generation(
        sample_id=wire.name("finished.sample_id", message.sample_id),
        attempt=message.attempt,
        token_ids=ids,
        logprobs=wire.logprobs_from_bytes("finished.logprobs", message.logprobs, ids.size),
        versions=runs_from_proto("finished.versions", message.versions, ids.size),
        finish_reason=wire.lookup("finished.finish_reason", _FINISH_BACK, message.finish_reason),
        instance=wire.name("finished.instance", message.instance),
        timings=Timings(
            wire.seconds("finished.timings.queued_s", timings.queued_s),
            wire.seconds("finished.timings.prefill_s", timings.prefill_s),
            wire.seconds("finished.timings.decode_s", timings.decode_s),
        ),
    )


def progress_to_proto(fence: Fence, progress: Progress) -> pb.Progress:
    """New tokens of a running answer, for the wire."""
    return pb.Progress(
        fence=fence_to_proto(fence),
        sample_id=progress.sample_id,
        attempt=progress.attempt,
        offset=progress.offset,
        token_ids=wire.ids_to_bytes(progress.token_ids),
        logprobs=wire.logprobs_to_bytes(progress.logprobs),
        versions=runs_to_proto(progress.versions),
    )


def progress_from_proto(message: pb.Progress) -> Progress:
    """Reads new tokens of a running answer.

    Raises:
        ValueError: names the field.
    """
    ids = wire.ids_from_bytes("progress.token_ids", message.token_ids)
    return Progress(
        sample_id=wire.name("progress.sample_id", message.sample_id),
        attempt=message.attempt,
        offset=wire.count("progress.offset", message.offset, wire.MAX_TOKENS - ids.size),
        token_ids=ids,
        logprobs=wire.logprobs_from_bytes("progress.logprobs", message.logprobs, ids.size),
        versions=runs_from_proto("progress.versions", message.versions, ids.size),
    )


def rejection_to_proto(fence: Fence, rejection: Rejection) -> pb.Rejected:
    """A refusal for the wire."""
    return pb.Rejected(
        fence=fence_to_proto(fence),
        sample_id=rejection.sample_id,
        attempt=rejection.attempt,
        reason=_REASON[rejection.reason],
        message=wire.cut(rejection.message),
    )


def rejection_from_proto(message: pb.Rejected) -> Rejection:
    """Reads a refusal.

    Raises:
        ValueError: an unknown reason.
    """
    # What was refused may have had no usable id; the message then says so.
    return Rejection(
        sample_id=wire.name("rejected.sample_id", message.sample_id, empty=True),
        attempt=message.attempt,
        reason=wire.lookup("rejected.reason", _REASON_BACK, message.reason),
        message=wire.text("rejected.message", message.message),
    )


def key_from_proto(message: pb.Abort | pb.Acknowledge) -> tuple[str, int]:
    """Reads which attempt of which sample is meant.

    Raises:
        ValueError: no usable sample id.
    """
    field = f"{message.DESCRIPTOR.name.lower()}.sample_id"
    return wire.name(field, message.sample_id), message.attempt
