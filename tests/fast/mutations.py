"""Serialised messages and what a bad line, a bug or an enemy makes of them. Seeded: a case can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from streamrl_jax.gen.codec import wire
from streamrl_jax.proto import streamrl_pb2 as pb

HUGE_VARINT: Final = b"\xff" * 9 + b"\x01"

_EXTREMES: Final[dict[int, Sequence[Any]]] = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**20, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**53, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, -1, 2**31, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_FLOAT: (0.0, -1.0, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")),
    FieldDescriptor.TYPE_DOUBLE: (0.0, -1.0, 1e300, float("inf"), float("nan")),
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_ENUM: (0, 1, 99, -1, 2**31 - 1),
    FieldDescriptor.TYPE_STRING: ("", "s0", "x" * 2000, "\x00\x1b[31m", "…" * 50, "../../etc/passwd"),
    FieldDescriptor.TYPE_BYTES: (b"", b"\x00", b"abc", wire.ids_to_bytes([1, 2]), b"\xff" * 400),
}


def set_extreme(message: Any, rng: random.Random) -> None:
    """Gives one field, anywhere in a message, a value at or beyond the edge of what it may hold."""
    field: FieldDescriptor = rng.choice(message.DESCRIPTOR.fields)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if field.is_repeated:
            values = getattr(message, field.name)
            if not values or rng.random() < 0.2:
                values.add()
            set_extreme(rng.choice(values), rng)
        else:
            child = getattr(message, field.name)
            child.SetInParent()
            set_extreme(child, rng)
        return
    value = rng.choice(_EXTREMES[field.type])
    if field.is_repeated:
        getattr(message, field.name).extend([value] * rng.choice((1, 1, 3, 2000)))
    else:
        setattr(message, field.name, value)


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _huge_varint(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + 1] = HUGE_VARINT


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 64)))


def _repeat(data: bytearray, rng: random.Random) -> None:
    first = rng.randrange(len(data))
    last = rng.randrange(first, len(data)) + 1
    data[last:last] = bytes(data[first:last]) * rng.choice((1, 3, 50))


def _unknown_field(data: bytearray, rng: random.Random) -> None:
    # Field 1000: a varint, eight bytes, a string, or four bytes.
    data += rng.choice((b"\xc0\x3e\x01", b"\xc1\x3e" + bytes(8), b"\xc2\x3e\x03abc", b"\xc5\x3e" + bytes(4)))


def _other_kind(data: bytearray, rng: random.Random) -> None:
    data[0] = rng.randrange(1, 12) << 3 | 2  # the body is taken for that of another member of the oneof


def _nest(data: bytearray, rng: random.Random) -> None:
    """Wraps the message again and again into field 6, and that into field 1, as `several` is."""
    for _ in range(rng.choice((1, 2, 60))):
        for tag in (0x0A, 0x32):
            size, length = len(data), bytearray()
            while size > 127:
                length.append(size & 127 | 128)
                size >>= 7
            length.append(size)
            data[:0] = bytes((tag, *length))


BYTE_MUTATIONS: Final[tuple[Callable[[bytearray, random.Random], None], ...]] = (
    _flip, _truncate, _huge_varint, _insert, _repeat, _unknown_field, _other_kind, _nest,
)  # fmt: skip


def mutate(message: Any, rng: random.Random) -> bytes:
    """A message as it is, with a field at its edge, or with its bytes damaged; most often one of the latter two."""
    kind = rng.random()
    if kind < 0.15:
        return message.SerializeToString()
    changed = type(message).FromString(message.SerializeToString())
    if kind < 0.6:
        for _ in range(rng.choice((1, 1, 2))):
            set_extreme(changed, rng)
        return changed.SerializeToString()
    data = bytearray(changed.SerializeToString() or b"\x00")
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(BYTE_MUTATIONS)(data, rng)
        data = data or bytearray(b"\x00")
    return bytes(data)


RUN: Final = pb.Fence(run_id="fuzz", incarnation=0)


def assign(index: int) -> pb.GenerateRequest:
    """A valid assignment."""
    sampling = pb.Sampling(temperature=1.0, max_new_tokens=8, seed=-1)
    ids = wire.ids_to_bytes([1, index])
    return pb.GenerateRequest(
        assign=pb.Assign(sample_id=f"s{index}", prompt_ids=ids, sampling=sampling, min_version=-1)
    )


def requests() -> list[pb.GenerateRequest]:
    """Valid messages of a controller, one of each kind and more."""
    resumed = assign(7)
    resumed.assign.resumed_ids = wire.ids_to_bytes([3])
    resumed.assign.resumed_logprobs = wire.logprobs_to_bytes([-1.0])
    resumed.assign.resumed_versions.add(version=0, length=1)
    singles = [
        assign(0),
        assign(1),
        resumed,
        pb.GenerateRequest(abort=pb.Abort(sample_id="s0")),
        pb.GenerateRequest(acknowledge=pb.Acknowledge(sample_id="s0")),
        pb.GenerateRequest(credit=pb.Credit(count=2)),
        pb.GenerateRequest(
            hello=pb.Hello(fence=RUN, protocol=1, heartbeat_interval_s=0.05, progress_interval_s=1e-4)
        ),
    ]
    return [*singles, pb.GenerateRequest(several=pb.GenerateRequests(requests=singles[:5]))]


def responses(sample_id: str) -> list[pb.GenerateResponse]:
    """Valid messages of an instance, one of each kind."""
    ids, logprobs = wire.ids_to_bytes([7, 8]), wire.logprobs_to_bytes([-0.5, -0.25])
    runs = [pb.VersionRun(version=0, length=2)]
    finished = pb.Finished(
        fence=RUN, sample_id=sample_id, token_ids=ids, logprobs=logprobs, versions=runs,
        finish_reason=pb.FINISH_REASON_STOP, instance="hostile",
    )  # fmt: skip
    progress = pb.Progress(fence=RUN, sample_id=sample_id, token_ids=ids, logprobs=logprobs, versions=runs)
    rejected = pb.Rejected(fence=RUN, sample_id=sample_id, reason=pb.Rejected.DRAINING, message="not now")
    singles = [
        pb.GenerateResponse(finished=finished),
        pb.GenerateResponse(progress=progress),
        pb.GenerateResponse(rejected=rejected),
        pb.GenerateResponse(credit=pb.Credit(count=1)),
        pb.GenerateResponse(heartbeat=pb.Heartbeat(fence=RUN, state=pb.IDLE, steps_total=1)),
        pb.GenerateResponse(drained=pb.Drained(fence=RUN)),
    ]
    return [*singles, pb.GenerateResponse(several=pb.GenerateResponses(responses=singles[:3]))]


def manifest() -> pb.Manifest:
    """A valid manifest of one tensor."""
    tensor = pb.TensorEntry(name="w", shape=[4], dtype="float32", nbytes=16, digest=bytes(32))
    return pb.Manifest(
        fence=RUN, version=1, tensors=[tensor], total_bytes=16, digest=bytes(32), architecture="Fake",
        base_version=-1,
    )  # fmt: skip
