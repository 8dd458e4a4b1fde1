"""Why two ends do not come together: gRPC says "Socket closed", the user must read which side is to be changed."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Final

from streamrl_jax.gen.access import Access, split_address

_BOUND_S: Final = 1.5
"""Bound on one look; a server that is up answers a handshake within milliseconds."""

_SAME_FILES: Final = (
    "give both sides the same security.ca_file, security.cert_file and security.key_file (RUN_DIR/tls of the run, or "
    "what streamrl certs made)"
)
_SPEAKS_TLS: Final = (
    "the server speaks TLS and this side called in plain text; set security.tls, security.ca_file and "
    "security.insecure alike on both sides"
)
_SPEAKS_PLAIN: Final = (
    "the server speaks plain text and this side called with TLS; set security.tls, security.ca_file and "
    "security.insecure alike on both sides"
)

_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""What OpenSSL makes of an answer that is no TLS."""


async def refusal(address: str, access: Access) -> str:
    """Looks, by a handshake of its own, whether TLS keeps two ends apart.

    Args:
        address: ``host:port`` of a server that a call did not reach.
        access: what the call was made with.

    Returns:
        What does not fit, with the remedy; empty if TLS is not what keeps them apart, or nobody answers.
    """
    try:
        async with asyncio.timeout(_BOUND_S):
            look = _with_tls if access.encrypts(address) else _in_plain_text
            # Twice: a server that ends just now closes connections too.
            return await look(address, access) and await look(address, access)
    except (OSError, TimeoutError):
        return ""  # not reached: whoever called knows as much


async def _in_plain_text(address: str, access: Access) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        await _first_byte(address, context, "")
    except ssl.SSLError as error:
        return _SPEAKS_TLS if _is_alert(error) else ""
    return _SPEAKS_TLS


async def _with_tls(address: str, access: Access) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=access.ca.decode("ascii", "ignore"))
    context.set_alpn_protocols(["h2"])
    if access.certificate:
        _load_certificate(context, access)
    try:
        closed = not await _first_byte(address, context, access.name)
    except ssl.SSLCertVerificationError as error:
        return _of_the_servers(error, access.name)
    except ssl.SSLError as error:
        if _is_alert(error):
            return _of_ours(error.reason or str(error), access)
        return _SPEAKS_PLAIN if error.reason in _NO_TLS else ""
    return _of_ours("it closed the connection", access) if closed else ""


async def _first_byte(address: str, context: ssl.SSLContext, name: str) -> bytes:
    """What the server sends first after the handshake: HTTP/2's settings, unless it refuses our certificate."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
    try:
        return await reader.read(1)
    finally:
        writer.transport.abort()


def _load_certificate(context: ssl.SSLContext, access: Access) -> None:
    """Gives the context the certificate, which Python takes from a file only: here one in memory."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(access.certificate + b"\n" + access.key)
        stream.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")


def _is_alert(error: ssl.SSLError) -> bool:
    """Whether the server itself complains, in TLS."""
    return "ALERT" in (error.reason or "")


def _of_the_servers(error: ssl.SSLCertVerificationError, name: str) -> str:
    why = error.verify_message
    if error.verify_code in (9, 10):  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
        return f"the server's certificate is not valid now ({why}); make new ones (streamrl certs), or set the clock"
    if error.verify_code == 62:  # X509_V_ERR_HOSTNAME_MISMATCH
        return f"the server's certificate is made out to another name than {name!r} ({why}); {_SAME_FILES}"
    return f"the server's certificate was signed by another authority than security.ca_file ({why}); {_SAME_FILES}"


def _of_ours(why: str, access: Access) -> str:
    if not access.certificate:
        return f"the server asks for a certificate and this side has none ({why}); set security.cert_file and key_file"
    return (
        f"the server refused this side's certificate ({why}): another authority signed it, or it has expired; "
        f"{_SAME_FILES}"
    )
