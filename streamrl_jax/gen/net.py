"""Opens every gRPC server and every channel of the system, as an `Access` says (DESIGN rule 9)."""

from __future__ import annotations

from typing import Final

import grpc

from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import (
    OPEN,
    Access,
    AccessFiles,
    bearer,
    check_call,
    check_listen,
    is_loopback,
    read_token,
    split_address,
)
from streamrl_jax.gen.gate import TokenInterceptor

__all__ = [
    "CHANNEL_OPTIONS",
    "MAX_CALLS",
    "MAX_MESSAGE_BYTES",
    "MAX_STREAMS",
    "OPEN",
    "SERVER_OPTIONS",
    "Access",
    "AccessFiles",
    "bearer",
    "bind",
    "check_call",
    "check_listen",
    "is_loopback",
    "is_pollers",
    "make_server",
    "open_blocking_channel",
    "open_channel",
    "read_token",
    "split_address",
]

MAX_MESSAGE_BYTES: Final = 32 << 20
"""Bound on one message, both ways."""

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose host vanished is noticed although no TCP reset comes.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A proxy for the web has no business between the parts of a run.
    ("grpc.enable_http_proxy", 0),
)
MAX_CALLS: Final = 1024
"""Calls that a server works on at once, of all callers; further ones are told RESOURCE_EXHAUSTED."""

MAX_STREAMS: Final = 128
"""Calls at once over one connection; further ones wait at the caller."""

SERVER_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # What goes with a call: a token and little else.
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # One that connects and says nothing, in plain text or in TLS, is put out; so is one that asks for nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Otherwise a second server on the same port would share its calls in silence.
    ("grpc.so_reuseport", 0),
)


def is_pollers(error: object) -> bool:
    """Whether an error on an event loop is one that gRPC's poller makes and that harms nobody.

    One poller serves all loops of a process: it stumbles over events of a loop that was closed, and over
    wake-ups that another loop was quicker to read.

    Args:
        error: what the loop's exception handler was given.
    """
    trace = error.__traceback__ if isinstance(error, BaseException) else None
    while trace is not None:
        if "completion_queue.pyx" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def make_server(access: Access, *further: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """A server with bounded messages, metadata and calls that asks for the token, if there is one, then ``further``."""
    interceptors = ((TokenInterceptor(access.token),) if access.token else ()) + further
    return grpc.aio.server(
        interceptors=interceptors, options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
    )


def bind(server: grpc.aio.Server, address: str, access: Access) -> str:
    """Binds a server.

    Args:
        server: not yet started.
        address: ``host:port``; port 0 takes a free one.
        access: what callers must show, and whether plain text is consented to.

    Returns:
        ``host:port`` with the port that was taken.

    Raises:
        UserError: not permitted, or the address cannot be bound.
    """
    check_listen(address, access)
    host, _ = split_address(address)
    try:
        if access.encrypts(address):
            port = server.add_secure_port(address, _server_credentials(access))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UserError(
            f"cannot listen on {address}: the port is in use, or the address is not one of this machine. "
            "Choose another port (0 takes a free one), or end what holds it"
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_channel(address: str, access: Access) -> grpc.aio.Channel:
    """A channel to a server of the run, for an event loop. Calls take ``metadata=access.metadata``.

    Args:
        address: ``host:port``.
        access: what the server asks for.

    Raises:
        UserError: another machine, without TLS or consent.
    """
    check_call(address, access)
    if not access.encrypts(address):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _channel_credentials(access), options=_secure_options(access))


def open_blocking_channel(address: str, access: Access) -> grpc.Channel:
    """The same for calls that block their thread."""
    check_call(address, access)
    if not access.encrypts(address):
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _channel_credentials(access), options=_secure_options(access))


def _server_credentials(access: Access) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(access.key, access.certificate)],
        root_certificates=access.ca if access.mutual else None,
        require_client_auth=access.mutual,
    )


def _channel_credentials(access: Access) -> grpc.ChannelCredentials:
    shown = (access.key, access.certificate) if access.certificate else (None, None)
    return grpc.ssl_channel_credentials(access.ca, *shown)


def _secure_options(access: Access) -> tuple[tuple[str, str | int], ...]:
    named = (("grpc.ssl_target_name_override", access.name),) if access.name else ()
    return (*CHANNEL_OPTIONS, *named)
