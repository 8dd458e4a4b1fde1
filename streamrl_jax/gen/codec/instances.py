"""What controller and instance say of themselves."""

from __future__ import annotations

from typing import Final

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

PROTOCOL: Final = 1
"""Version of the wire that `Hello` announces."""

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
    )


def info_from_proto(message: pb.Welcome) -> InstanceInfo:
    """Reads what an instance says of itself.

    Raises:
        ValueError: no name, or no slots.
    """
    if message.slots < 1:
        raise ValueError(f"welcome.slots = {message.slots}: an instance runs at least one sequence")
    return InstanceInfo(
        name=wire.name("welcome.instance", message.instance),
        slots=message.slots,
        lookahead=message.lookahead,
        max_model_len=message.max_model_len,
        version=wire.version("welcome.version", message.version),
        same_host_weights=message.accepts_same_host_weights,
        host_id=wire.name("welcome.host_id", message.host_id, empty=True),
        engine=wire.name("welcome.engine", message.engine, empty=True),
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
    )


def heartbeat_from_proto(message: pb.Heartbeat) -> InstanceStatus:
    """Reads a heartbeat.

    Raises:
        ValueError: names the field.
    """
    return InstanceStatus(
        state=wire.lookup("heartbeat.state", _STATE_BACK, message.state),
        version=wire.version("heartbeat.version", message.version),
        running=message.running,
        waiting=message.waiting,
        tokens_since_last=message.tokens_since_last,
        engine_age_s=wire.finite("heartbeat.engine_age_s", message.engine_age_s, 0.0),
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
        message=status.message,
        engine_age_s=status.engine_age_s,
        welcome=info_to_proto(info),
        start_seconds=status.uptime_s,
        phase=status.phase,
    )


def status_from_proto(message: pb.StatusReply) -> InstanceStatus:
    """Reads the reply to GetStatus.

    Raises:
        ValueError: names the field.
    """
    return InstanceStatus(
        state=wire.lookup("status.state", _STATE_BACK, message.state),
        version=wire.version("status.version", message.version),
        running=message.running,
        waiting=message.waiting,
        engine_age_s=wire.finite("status.engine_age_s", message.engine_age_s, 0.0),
        message=message.message,
        phase=message.phase,
        tokens_total=message.tokens_total,
        uptime_s=wire.finite("status.start_seconds", message.start_seconds, 0.0),
    )
