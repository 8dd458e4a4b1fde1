"""What controller and instance say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.codec.fences import fence_from_proto, fence_to_proto
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Fence,
    Hello,
    InstanceInfo,
    InstanceState,
    InstanceStatus,
)

M = TypeVar("M")

PROTOCOL: Final = 1
"""Version of the wire that `Hello` announces."""

_MOST_TOGETHER: Final = 1 << 14
"""Messages that may travel as one; senders stay far below."""

_MAX_MODEL_LEN: Final = (1 << 31) - 1

_MAX_BEAT_TOKENS: Final = 1 << 32
"""Tokens of one heartbeat: a million a second for an hour, the longest interval."""

_STATE: Final = {
    InstanceState.LOADING: pb.LOADING,
    InstanceState.UPDATING: pb.UPDATING,
    InstanceState.PAUSED: pb.PAUSED,
    InstanceState.IDLE: pb.IDLE,
    InstanceState.GENERATING: pb.GENERATING,
    InstanceState.DRAINING: pb.DRAINING_STATE,
    InstanceState.FAILED: pb.FAILED,
}
_STATE_BACK: Final = {number: state for state, number in _STATE.items()}


def hello_to_proto(hello: Hello) -> pb.Hello:
    """A controller's greeting for the wire."""
    return pb.Hello(
        fence=fence_to_proto(hello.fence),
        protocol=PROTOCOL,
        heartbeat_interval_s=hello.heartbeat_interval_s,
        progress_interval_s=hello.progress_interval_s,
        answers=hello.answers,
    )


def hello_from_proto(message: pb.Hello) -> Hello:
    """Reads a controller's greeting.

    Raises:
        ValueError: another protocol, or an interval outside its range.
    """
    if message.protocol != PROTOCOL:
        raise ValueError(f"hello.protocol = {message.protocol}; this side speaks {PROTOCOL}")
    return Hello(
        fence=fence_from_proto(message.fence),
        heartbeat_interval_s=wire.finite(
            "hello.heartbeat_interval_s", message.heartbeat_interval_s, 0.01, 3600
        ),
        progress_interval_s=wire.finite("hello.progress_interval_s", message.progress_interval_s, 0.0, 3600),
        answers=wire.count("hello.answers", message.answers),
    )


def info_to_proto(info: InstanceInfo) -> pb.Welcome:
    """What an instance says of itself, for the wire."""
    return pb.Welcome(
        instance=info.name,
        slots=info.slots,
        lookahead=info.lookahead,
        max_model_len=info.max_model_len,
        version=info.version,
        accepts_same_host_weights=info.same_host_weights,
        host_id=info.host_id,
        engine=info.engine,
        kv_tokens=info.kv_tokens,
    )


def info_from_proto(message: pb.Welcome) -> InstanceInfo:
    """Reads what an instance says of itself.

    Raises:
        ValueError: names the field, as in no name, or no slots.
    """
    max_model_len = wire.count("welcome.max_model_len", message.max_model_len, _MAX_MODEL_LEN)
    kv_tokens = wire.count("welcome.kv_tokens", message.kv_tokens, wire.MAX_TOTAL)
    if 0 < kv_tokens < max_model_len:  # no engine starts so
        raise ValueError(
            f"welcome.kv_tokens = {kv_tokens} is less than welcome.max_model_len = {max_model_len}: an answer of that "
            "length would never end"
        )
    return InstanceInfo(
        name=wire.name("welcome.instance", message.instance),
        slots=wire.count("welcome.slots", message.slots, low=1),
        lookahead=wire.count("welcome.lookahead", message.lookahead),
        max_model_len=max_model_len,
        version=wire.version("welcome.version", message.version),
        same_host_weights=message.accepts_same_host_weights,
        host_id=wire.name("welcome.host_id", message.host_id, empty=True),
        engine=wire.name("welcome.engine", message.engine, empty=True),
        kv_tokens=kv_tokens,
    )


def heartbeat_to_proto(fence: Fence, status: InstanceStatus) -> pb.Heartbeat:
    """A heartbeat for the wire."""
    return pb.Heartbeat(
        fence=fence_to_proto(fence),
        state=_STATE[status.state],
        tokens_since_last=status.tokens_since_last,
        running=status.running,
        waiting=status.waiting,
        version=status.version,
        engine_age_s=status.engine_age_s,
        steps_total=status.steps_total,
    )


def heartbeat_from_proto(message: pb.Heartbeat) -> InstanceStatus:
    """Reads a heartbeat.

    Raises:
        ValueError: names the field.
    """
    return InstanceStatus(
        state=wire.lookup("heartbeat.state", _STATE_BACK, message.state),
        version=wire.version("heartbeat.version", message.version),
        running=wire.count("heartbeat.running", message.running),
        waiting=wire.count("heartbeat.waiting", message.waiting),
        tokens_since_last=wire.count(
            "heartbeat.tokens_since_last", message.tokens_since_last, _MAX_BEAT_TOKENS
        ),
        engine_age_s=wire.seconds("heartbeat.engine_age_s", message.engine_age_s),
        steps_total=wire.count("heartbeat.steps_total", message.steps_total, wire.MAX_TOTAL),
    )


def status_to_proto(status: InstanceStatus, info: InstanceInfo) -> pb.StatusReply:
    """The reply to GetStatus, for the wire."""
    return pb.StatusReply(
        state=_STATE[status.state],
        instance=info.name,
        version=status.version,
        running=status.running,
        waiting=status.waiting,
        tokens_total=status.tokens_total,
        message=wire.cut(status.message),
        engine_age_s=status.engine_age_s,
        welcome=info_to_proto(info),
        start_seconds=status.uptime_s,
        phase=wire.cut(status.phase),
        steps_total=status.steps_total,
    )


def status_from_proto(message: pb.StatusReply) -> InstanceStatus:
    """Reads the reply to GetStatus.

    Raises:
        ValueError: names the field.
    """
    return InstanceStatus(
        state=wire.lookup("status.state", _STATE_BACK, message.state),
        version=wire.version("status.version", message.version),
        running=wire.count("status.running", message.running),
        waiting=wire.count("status.waiting", message.waiting),
        engine_age_s=wire.seconds("status.engine_age_s", message.engine_age_s),
        message=wire.text("status.message", message.message),
        phase=wire.text("status.phase", message.phase),
        tokens_total=wire.count("status.tokens_total", message.tokens_total, wire.MAX_TOTAL),
        uptime_s=wire.seconds("status.start_seconds", message.start_seconds),
        steps_total=wire.count("status.steps_total", message.steps_total, wire.MAX_TOTAL),
    )


def credit_from_proto(message: pb.Credit) -> int:
    """Reads how many more messages the other side takes.

    Raises:
        ValueError: more than anybody would ask for.
    """
    return wire.count("credit.count", message.count)


def together(field: str, messages: Sequence[M]) -> Sequence[M]:
    """Looks at messages that came as one: they are handled without a pause between them.

    Raises:
        ValueError: none, or more than anybody sends together.
    """
    wire.count(f"number of {field}", len(messages), _MOST_TOGETHER, low=1)
    return messages
