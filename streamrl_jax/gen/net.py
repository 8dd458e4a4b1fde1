"""Who may listen and who may call (DESIGN rule 9), for every gRPC server of the system."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from streamrl_jax.errors import UserError
from streamrl_jax.gen import health

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
SERVER_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
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


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6]:port``.

    Raises:
        UserError: neither form, or no port number.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"address = {address!r} is no HOST:PORT; write for example 127.0.0.1:50051 (port 0: any)"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """What a process of a run shows to those it calls, and asks of those who call it.

    Whether a connection is encrypted follows from the address alone, so that both ends come to the same answer:
    loopback is plain, everything else is TLS, unless ``everywhere`` asks for TLS on loopback too.

    Attributes:
        token: Shared secret; empty: none.
        ca: PEM of the authority that signed the run's certificates; empty: no TLS.
        certificate: PEM of this process's own certificate, for servers and, with ``mutual``, for clients.
        key: PEM of its private key.
        name: What the certificates of the run's servers are made out to; empty: the host that is called.
        everywhere: TLS on loopback too.
        mutual: Servers ask callers for a certificate of ``ca``.
        insecure: ``security.insecure``, the consent to plain text beyond loopback.
    """

    token: str = field(default="", repr=False)
    ca: bytes = field(default=b"", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    name: str = ""
    everywhere: bool = False
    mutual: bool = False
    insecure: bool = False

    @classmethod
    def from_files(cls, token_file: str = "", *, insecure: bool = False) -> Access:
        """Reads what the files hold.

        Args:
            token_file: With the shared secret; empty: none.
            insecure: ``security.insecure``.

        Raises:
            UserError: a file cannot be read, or holds nothing usable.
        """
        return cls(read_token(token_file), insecure=insecure)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call: the token, if there is one."""
        return bearer(self.token)

    def encrypts(self, address: str) -> bool:
        """Whether connections to and at ``host:port`` are TLS."""
        return bool(self.ca) and (self.everywhere or not is_loopback(split_address(address)[0]))


OPEN: Final = Access()
"""Neither token nor TLS, on loopback."""


def check_listen(address: str, access: Access) -> None:
    """Refuses to listen beyond loopback by accident.

    Args:
        address: ``host:port`` to bind.
        access: its token, its TLS material and its consent count.

    Raises:
        UserError: a host beyond loopback without TLS or consent, or without a token.
    """
    host, _ = split_address(address)
    if is_loopback(host):
        return
    if not access.encrypts(address) and not access.insecure:
        raise UserError(
            f"listening on {address} is reachable from other machines, in plain text; set "
            "security.insecure = true if the network is trusted, or listen on 127.0.0.1"
        )
    if not access.token:
        raise UserError(
            f"listening on {address} needs a token: set security.token_file to a file with a shared secret"
        )


def check_call(address: str, access: Access) -> None:
    """Refuses to send token and samples to another machine in plain text by accident.

    Args:
        address: ``host:port`` to call.
        access: its TLS material and its consent count.

    Raises:
        UserError: a host beyond loopback without TLS or consent.
    """
    if access.insecure or access.encrypts(address) or is_loopback(split_address(address)[0]):
        return
    raise UserError(
        f"gen.endpoints names {address}, which is another machine: token, samples and weights would travel in "
        "plain text; set security.insecure = true if the network is trusted, or go through an ssh tunnel"
    )


def read_token(path: str) -> str:
    """Reads a shared secret.

    Args:
        path: file that holds it; empty: no token.

    Returns:
        The secret without surrounding white space.

    Raises:
        UserError: the file cannot be read, or holds none.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"security.token_file = {path!r} cannot be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(
            f"security.token_file = {path!r} holds no token: one line of printable ASCII is needed"
        )
    return token


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the token; empty without one."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call that does not carry the token, but for the question whether the instance is up."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Lets the call pass or replaces its handler by one that refuses."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method == health.CHECK:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        if handler is None or hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return _refusing(handler)


async def _unauthenticated(request: Any, context: grpc.aio.ServicerContext) -> Any:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call carries no valid token; give both sides the same security.token_file",
    )


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same kind that only refuses."""
    streamed_in, streamed_out = bool(handler.request_streaming), bool(handler.response_streaming)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streamed_in, streamed_out]
    return make(_unauthenticated)


def make_server(access: Access) -> grpc.aio.Server:
    """A server with bounded messages that asks for the token, if there is one."""
    interceptors = (TokenInterceptor(access.token),) if access.token else ()
    return grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)


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
