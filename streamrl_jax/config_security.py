"""The configuration of who may talk to whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

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

    @model_validator(mode="after")
    def _settings_fit(self) -> SecuritySection:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file are given together, or neither")
        if self.cert_file and not self.ca_file:
            raise ValueError(
                "cert_file is given without ca_file, against which the others are checked; give both"
            )
        if self.tls == "on" and self.insecure:
            raise ValueError(
                "tls = 'on' encrypts everything and insecure = true consents to plain text; choose one"
            )
        plain = "tls = 'off'" if self.tls == "off" else "insecure = true" if self.insecure else ""
        unused = [name for name in ("ca_file", "cert_file", "key_file", "mutual_tls") if getattr(self, name)]
        if plain and unused:
            raise ValueError(
                f"{', '.join(unused)} would not be used, since {plain} is plain text; remove either"
            )
        return self
