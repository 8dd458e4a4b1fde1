"""The configuration of who may talk to whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamrl_jax.config_section import Section


class SecuritySection(Section):
    """Who may talk to whom."""

    tls: Literal["auto", "on", "off"] = "auto"
    """``auto``: loopback is plain text, everything else TLS (unless ``insecure``); ``on``: TLS on loopback too;
    ``off``: never."""
    mutual_tls: bool = False
    """Servers ask whoever calls for a certificate of ``ca_file`` too, beside the token."""
    insecure: bool = False
    """Permits plain text beyond loopback, and makes ``auto`` use it. A token is still needed."""
    token_file: str = ""
    """Shared secret of a run and its instances; empty: made per run."""
    ca_file: str = ""
    """Certificates (PEM) of the authorities that peers' certificates are checked against; empty: an authority made for
    the run, in its directory under ``tls/``. ``streamrl certs`` makes the three files before a run."""
    cert_file: str = ""
    """This side's certificate (PEM), for servers, and for clients with ``mutual_tls``; given with ``ca_file``."""
    key_file: str = ""
    """Its private key (PEM, no password)."""
    stores: list[str] = Field(default_factory=list)
    """Hosts, as patterns with ``*`` and ``?``, that an instance fetches weights from; empty: any that shows the run's
    certificate, or plain text's consent."""
