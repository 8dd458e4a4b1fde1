"""`streamrl certs`: what a run and instances on other hosts share, made before either starts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from streamrl_jax.errors import UserError
from streamrl_jax.gen import tls
from streamrl_jax.setup.security import made_token

TOKEN_FILE = "token"


def make_certs(directory: Path, name: str, hosts: Sequence[str], days: float) -> str:
    """Makes an authority's certificate, one of its certificates with the key, and a token.

    Args:
        directory: Where the four files go, readable by their owner only; none of them may be there.
        name: What the certificate is made out to.
        hosts: Names or addresses that it carries too.
        days: How long it is valid.

    Returns:
        What was made and how it is used.

    Raises:
        UserError: A file is there already, or cannot be written, or an argument is out of its range.
    """
    if not math.isfinite(days) or not 0 < days <= 3650:
        raise UserError(f"--days = {days:g} is not in (0, 3650]")
    for label, value in (("--name", name), *(("--host", host) for host in hosts)):
        if not value or not value.isascii() or not value.isprintable() or " " in value:
            raise UserError(f"{label} = {value!r} is no name of a host: letters, digits, dots and dashes are")
    there = [f for f in (tls.CA_FILE, tls.CERT_FILE, tls.KEY_FILE, TOKEN_FILE) if (directory / f).exists()]
    if there:
        raise UserError(
            f"{directory} holds {', '.join(there)} already; who uses them would be locked out. Give another directory, "
            "or remove them"
        )
    material = tls.make(name, hosts, days)
    tls.write(material, directory)
    made_token(directory / TOKEN_FILE)
    keys = {
        "ca_file": tls.CA_FILE,
        "cert_file": tls.CERT_FILE,
        "key_file": tls.KEY_FILE,
        "token_file": TOKEN_FILE,
    }
    settings = " ".join(shlex.quote(f"security.{key}={directory / file}") for key, file in keys.items())
    return (
        f"{directory} holds certificates made out to {material.name}, valid until "
        f"{material.ends:%Y-%m-%d %H:%M} UTC, and a token. Copy it to each host "
        f"by a way that you trust (scp), and start run and instances with\n  {settings}"
    )
