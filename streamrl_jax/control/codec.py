"""Records <-> messages of `control.proto`, and exceptions across it."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamrl_jax.config_ranker import POLICIES, Policy
from streamrl_jax.control.columns import columns_from_json, columns_to_json
from streamrl_jax.control.events import Activity, ControlEvent, EventKind, InstanceView
from streamrl_jax.control.faults import ControlError, ControllerFault, RewardError
from streamrl_jax.control.jobs import LONGEST, Job
from streamrl_jax.control.plan import Step
from streamrl_jax.control.usage import Used
from streamrl_jax.errors import UserError
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.codec import wire
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.types import Fence, InstanceState, Prompt, Sample, Sampling

PIECE_BYTES: Final = 1 << 20
"""Prompts, or samples, of one message; a single larger one is a message of its own."""

_LARGEST: Final = net.MAX_MESSAGE_BYTES - (1 << 16)
_LONGEST_DIGEST: Final = 64  # bytes
_PRIORITIES: Final = (1 << 31) - 1  # folded with the iteration into 64 bits
_PER_SAMPLE: Final = 400  # bytes beside the arrays, about


# ---------------------------------------------------------------- exceptions


def error_to_proto(error: BaseException) -> pb.Error:
    """An exception for the wire."""
    message = str(error.args[0]) if error.args else ""
    if isinstance(error, ControlError | RewardError):
        return pb.Error(type=type(error).__name__, message=message, details=error.details)
    if isinstance(error, UserError):
        return pb.Error(type="UserError", message=message)
    if isinstance(error, StopRequested):
        return pb.Error(type="StopRequested", message=message)
    details = "".join(traceback.format_exception(error)).rstrip()
    if type(error) is ValueError:
        return pb.Error(type="ValueError", message=message, details=details)
    return pb.Error(type="", message=f"{type(error).__name__}: {error}", details=details)


def error_from_proto(message: pb.Error) -> BaseException:
    """The exception to raise."""
    if message.type == "ControlError":
        return ControlError(message.message, message.details)
    if message.type == "RewardError":
        return RewardError(message.message, details=message.details)
    if message.type == "UserError":
        return UserError(message.message)
    if message.type == "StopRequested":
        return StopRequested(message.message)
    if message.type == "ValueError":
        return ValueError(message.message)
    return ControllerFault(message.message, message.details)


# ---------------------------------------------------------------- jobs


def prompts_digest(prompts: Iterable[Prompt]) -> bytes:
    """Of ids and tokens; columns belong to the id."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{len(prompt.token_ids)}\0".encode())
        digest.update(wire.ids_to_bytes(prompt.token_ids))
    return digest.digest()


def job_digest(job: Job, into: str = "") -> bytes:
    """Of all that a job holds, but for its predictions: equal submissions have equal ones."""
    rest = (
        job.job_id, into, job.n, job.sampling, job.iteration, job.min_version, job.priority, job.evaluation,
        job.probe, job.pinned, job.policy, None if job.forced is None else tuple(map(int, job.forced)),
    )  # fmt: skip
    return hashlib.blake2b(repr(rest).encode() + prompts_digest(job.prompts), digest_size=16).digest()


def probe_digest(version: int, prompts: Sequence[Prompt], sampling: Sampling) -> bytes:
    """Of what a probe asks."""
    asked = repr((version, sampling)).encode() + prompts_digest(prompts)
    return hashlib.blake2b(asked, digest_size=16).digest()


def job_to_proto(reader: int, job: Job, into: str, *, digest: bytes = b"") -> Iterator[pb.SubmitRequest]:
    """A job for the wire, in pieces of about `PIECE_BYTES`.

    Raises:
        UserError: a prompt cannot travel, or is larger than a message may be.
    """
    head = pb.JobHead(
        job_id=job.job_id,
        into=into,
        n=job.n,
        sampling=codec.sampling_to_proto(job.sampling),
        iteration=job.iteration,
        min_version=job.min_version,
        priority=job.priority,
        evaluation=job.evaluation,
        probe=job.probe,
        pinned=job.pinned,
        digest=digest or job_digest(job, into),
        policy=job.policy or "",
    )
    piece = pb.SubmitRequest(reader=reader, job=head)
    size = 0
    for position, prompt in enumerate(job.prompts):
        row = pb.PromptRow(
            prompt_id=prompt.prompt_id,
            token_ids=wire.ids_to_bytes(prompt.token_ids),
            columns=columns_to_json(prompt.columns, prompt.prompt_id),
            predicted=None if job.predicted is None else float(job.predicted[position]),
            forced=[]
            if job.forced is None
            else map(int, job.forced[position * job.n : (position + 1) * job.n]),
        )
        if (of_row := row.ByteSize()) > _LARGEST:
            raise UserError(
                f"prompt {prompt.prompt_id} has {of_row} bytes with its columns, and {_LARGEST} can travel to the "
                "controller; leave columns out that no reward needs"
            )
        if size and size + of_row > PIECE_BYTES:
            yield piece
            piece, size = pb.SubmitRequest(reader=reader), 0
        piece.prompts.append(row)
        size += of_row
    piece.last = True
    yield piece


@dataclass(eq=False)
class JobPieces:
    """Puts a job together again.

    Call order: ``add`` for each piece, until it is ``whole``; then ``job``.
    """

    head: pb.JobHead | None = None
    reader: int = 0
    whole: bool = False
    prompts: list[Prompt] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    def add(self, message: pb.SubmitRequest) -> None:
        """Takes a piece.

        Raises:
            ValueError: names the field.
        """
        if self.head is None:
            if not message.HasField("job"):
                raise ValueError("submit.job is missing in the first piece")
            self.head, self.reader = message.job, message.reader
        elif message.HasField("job") or self.whole:
            raise ValueError("submit: a piece follows the last one, or names a second job")
        wire.count("submit.prompts", len(self.prompts) + len(message.prompts))
        for row in message.prompts:
            ids = wire.ids_from_bytes("prompt.token_ids", row.token_ids)
            columns = columns_from_json(row.columns)
            self.prompts.append(Prompt(wire.name("prompt.prompt_id", row.prompt_id), ids, columns))
            if row.HasField("predicted"):
                self.predicted.append(wire.finite("prompt.predicted", row.predicted, 1.0, LONGEST))
            if row.forced and len(row.forced) != self.head.n:
                raise ValueError(
                    f"prompt.forced has {len(row.forced)} lengths; the job has n = {self.head.n}"
                )
            self.forced += [
                wire.count("prompt.forced", tokens, wire.MAX_TOKENS, low=1) for tokens in row.forced
            ]
        self.whole = message.last

    def job(self) -> tuple[Job, str]:
        """The job, and the one that it is added to.

        Raises:
            ValueError: pieces are missing, or a field is out of range.
        """
        head = self.head
        if head is None or not self.whole:
            raise ValueError("submit: the last piece is missing")
        job = Job(
            job_id=wire.name("submit.job.job_id", head.job_id),
            prompts=self.prompts,
            n=wire.count("submit.job.n", head.n, low=1),
            sampling=codec.sampling_from_proto(head.sampling),
            iteration=wire.version("submit.job.iteration", head.iteration),
            min_version=wire.version("submit.job.min_version", head.min_version),
            priority=wire.count("submit.job.priority", head.priority, _PRIORITIES, low=-_PRIORITIES),
            evaluation=head.evaluation,
            probe=head.probe,
            pinned=wire.name("submit.job.pinned", head.pinned, empty=True),
            predicted=self.predicted or None,
            forced=self.forced or None,
            policy=wire.lookup("submit.job.policy", _POLICIES, head.policy),
        )
        return job, wire.name("submit.job.into", head.into, empty=True)

    def digest(self) -> bytes:
        """What the sender says that the job's contents come to.

        Raises:
            ValueError: pieces are missing, or it is none.
        """
        if self.head is None:
            raise ValueError("submit: there is no piece")
        return _digest("submit.job.digest", self.head.digest)


# ---------------------------------------------------------------- samples


def sample_to_proto(fence: Fence, sample: Sample) -> pb.RunSample:
    """A sample for the wire, without its prompt, which the reader has."""
    return pb.RunSample(
        prompt_id=sample.prompt.prompt_id,
        iteration=sample.iteration,
        group_index=sample.group_index,
        reward=sample.reward,
        reward_extras=sample.reward_extras,
        arrived_s=sample.arrived_s,
        rewarded_s=sample.rewarded_s,
        generation=codec.generation_to_proto(fence, sample.generation),
    )


def sample_from_proto(message: pb.RunSample, prompts: Mapping[str, Prompt], shift_s: float) -> Sample:
    """Reads a sample.

    Args:
        message: as it came.
        prompts: of the job, by id.
        shift_s: what brings the controller's clock to this process's.

    Raises:
        ValueError: names the field.
    """
    generation = codec.generation_from_proto(message.generation)
    return Sample(
        sample_id=generation.sample_id,
        iteration=wire.version("sample.iteration", message.iteration),
        prompt=wire.lookup("sample.prompt_id", prompts, message.prompt_id),
        group_index=wire.count("sample.group_index", message.group_index),
        generation=generation,
        reward=message.reward,
        reward_extras=dict(message.reward_extras),
        arrived_s=wire.seconds("sample.arrived_s", message.arrived_s) + shift_s,
        rewarded_s=wire.seconds("sample.rewarded_s", message.rewarded_s) + shift_s,
    )


def size_of(sample: Sample) -> int:
    """About how many bytes a sample takes on the wire."""
    return 8 * len(sample.generation.token_ids) + _PER_SAMPLE


# ---------------------------------------------------------------- events, views, steps


def event_to_proto(event: ControlEvent) -> pb.ControlEvent:
    """An event for the wire."""
    return pb.ControlEvent(
        kind=event.kind,
        instance=event.instance,
        text=wire.cut(event.text),
        version=event.version,
        count=event.count,
        seconds=event.seconds,
    )


def event_from_proto(message: pb.ControlEvent) -> ControlEvent:
    """Reads an event.

    Raises:
        ValueError: names the field.
    """
    return ControlEvent(
        wire.lookup("event.kind", _KINDS, message.kind),
        wire.name("event.instance", message.instance, empty=True),
        wire.text("event.text", message.text),
        wire.version("event.version", message.version),
        wire.count("event.count", message.count, wire.MAX_TOTAL),
        wire.seconds("event.seconds", message.seconds),
    )


def used_from_proto(message: pb.Beat) -> Used:
    """Reads what the controller's process has used.

    Raises:
        ValueError: names the field.
    """
    return Used(
        wire.seconds("beat.clock_s", message.clock_s),
        wire.seconds("beat.cpu_s", message.cpu_s),
        wire.count("beat.rss_bytes", message.rss_bytes, wire.MAX_BYTES),
    )


def view_to_proto(view: InstanceView) -> pb.InstanceRow:
    """A view of an instance for the wire."""
    return pb.InstanceRow(
        name=view.name,
        address=view.address,
        state=view.state,
        version=view.version,
        held=view.held,
        running=view.running,
        waiting=view.waiting,
        tokens_per_s=view.tokens_per_s,
        tokens=view.tokens,
        restarts=view.restarts,
        seconds={str(activity): seconds for activity, seconds in view.seconds.items()},
        slots=view.slots,
        kv_tokens=view.kv_tokens,
        steps_total=view.steps_total,
    )


def view_from_proto(message: pb.InstanceRow) -> InstanceView:
    """Reads a view of an instance.

    Raises:
        ValueError: names the field.
    """
    return InstanceView(
        name=wire.name("instance.name", message.name),
        address=wire.name("instance.address", message.address, empty=True),
        state=wire.lookup("instance.state", _STATES, message.state),
        version=wire.version("instance.version", message.version),
        held=wire.count("instance.held", message.held, wire.MAX_TOTAL),
        running=wire.count("instance.running", message.running),
        waiting=wire.count("instance.waiting", message.waiting),
        tokens_per_s=wire.finite("instance.tokens_per_s", message.tokens_per_s, 0.0),
        tokens=wire.count("instance.tokens", message.tokens, wire.MAX_TOTAL),
        restarts=wire.count("instance.restarts", message.restarts),
        seconds={
            wire.lookup("instance.seconds", _ACTIVITIES, name): wire.seconds(
                f"instance.seconds[{name}]", spent
            )
            for name, spent in message.seconds.items()
        },
        slots=wire.count("instance.slots", message.slots),
        kv_tokens=wire.count("instance.kv_tokens", message.kv_tokens, wire.MAX_TOTAL),
        steps_total=wire.count("instance.steps_total", message.steps_total, wire.MAX_TOTAL),
    )


def step_to_proto(reader: int, step: Step) -> pb.AcknowledgeRequest:
    """A step of the plan for the wire."""
    return pb.AcknowledgeRequest(
        reader=reader, sequence=step.sequence, kind=step.kind, shape=step.shape, digest=step.digest
    )


def step_from_proto(message: pb.AcknowledgeRequest) -> Step:
    """Reads a step of the plan.

    Raises:
        ValueError: names the field.
    """
    return Step(
        wire.count("step.sequence", message.sequence, wire.MAX_TOTAL),
        wire.name("step.kind", message.kind),
        wire.text("step.shape", message.shape),
        _digest("step.digest", message.digest),
    )


def _digest(field: str, value: bytes) -> bytes:
    if len(value) > _LONGEST_DIGEST:
        raise ValueError(f"{field} has {len(value)} bytes; at most {_LONGEST_DIGEST} are taken")
    return value


_KINDS: Final = {kind.value: kind for kind in EventKind}
_STATES: Final = {state.value: state for state in InstanceState}
_ACTIVITIES: Final = {activity.value: activity for activity in Activity}
_POLICIES: Final[Mapping[str, Policy | None]] = {"": None, **{policy: policy for policy in POLICIES}}
