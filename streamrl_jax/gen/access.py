"""What the processes of a run show each other, and where plain text is permitted (DESIGN rule 9). No gRPC."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamrl_jax.errors import UserError
from streamrl_jax.gen import tls


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
class AccessFiles:
    """Where an `Access` is read from; travels in an instance's spec, on whose host the files must lie too."""

    token: str = ""  # empty: no token
    ca: str = ""  # empty: no TLS
    certificate: str = ""
    key: str = ""
    everywhere: bool = False
    mutual: bool = False
    insecure: bool = False


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
    def from_files(cls, files: AccessFiles) -> Access:
        """Reads what the files hold.

        Raises:
            UserError: one cannot be read, or holds nothing usable.
        """
        token = read_token(files.token)
        if not files.ca:
            return cls(token, insecure=files.insecure)
        found = tls.read(files.ca, files.certificate, files.key)
        return cls(
            token,
            found.ca,
            found.certificate,
            found.key,
            found.name,
            everywhere=files.everywhere,
            mutual=files.mutual,
            insecure=files.insecure,
        )

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
    if is_loopback(host) and not access.encrypts(address):
        return
    if not access.encrypts(address) and not access.insecure:
        raise UserError(
            f"listening on {address} is reachable from other machines, in plain text; give security.ca_file, "
            "security.cert_file and security.key_file (streamrl certs makes them), set security.insecure = true if the "
            "network is trusted, or listen on 127.0.0.1"
        )
    if not access.token and not is_loopback(host):
        raise UserError(
            f"listening on {address} needs a token: set security.token_file to a file with a shared secret"
        )
    if access.encrypts(address) and not access.certificate:
        raise UserError(
            f"listening on {address} with TLS needs a certificate and its key: set security.cert_file and "
            "security.key_file (streamrl certs makes them)"
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
        f"{address} is on another machine: token, samples and weights would travel in plain text; use TLS "
        "(security.tls), set security.insecure = true if the network is trusted, or go through an ssh tunnel"
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
