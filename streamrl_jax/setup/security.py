"""From the configuration to what the processes of a run show each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from streamrl_jax.config import Config
from streamrl_jax.config_security import SecuritySection
from streamrl_jax.errors import UserError
from streamrl_jax.gen import tls
from streamrl_jax.gen.access import AccessFiles, read_token
from streamrl_jax.rundir import RunDir

_TOKEN_FILE = "token"
_TLS_DIRECTORY = "tls"


def run_access(cfg: Config, home: RunDir, *, starts: bool = False) -> AccessFiles:
    """The files with what run and instances share: the configuration's, or ones made for the run.

    Args:
        cfg: ``security`` counts.
        home: The run directory, in which new ones are made, readable by their owner only.
        starts: The run starts now: certificates that end soon are replaced.

    Raises:
        UserError: They cannot be read or written.
    """
    security = cfg.security
    token = Path(security.token_file) if security.token_file else made_token(home.path / _TOKEN_FILE)
    ca, certificate, key = security.ca_file, security.cert_file, security.key_file
    if uses_tls(security) and not ca:
        directory = home.path / _TLS_DIRECTORY
        try:
            tls.for_run(f"streamrl-{home.fence.run_id}", directory, renew=starts)
        except PermissionError as error:
            raise UserError(
                f"{directory} is readable by the run's owner only; call this as the user who started the run"
            ) from error
        ca, certificate, key = (str(directory / name) for name in (tls.CA_FILE, tls.CERT_FILE, tls.KEY_FILE))
    return _files(security, str(token), ca, certificate, key)


def standalone_access(
    security: SecuritySection,
    listen: str,
    *,
    token: Path | None = None,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> AccessFiles:
    """The files of an instance that is started by hand.

    Args:
        security: Of the configuration.
        listen: ``host:port`` that it serves on.
        token: In the place of ``security.token_file``.
        ca: In the place of ``security.ca_file``.
        certificate: In the place of ``security.cert_file``.
        key: In the place of ``security.key_file``.

    Raises:
        UserError: TLS is asked for, and there is nothing to do it with.
    """
    found = _files(
        security,
        str(token or security.token_file),
        str(ca or security.ca_file),
        str(certificate or security.cert_file),
        str(key or security.key_file),
    )
    if found.everywhere and not found.ca:
        raise UserError(
            f"security.tls = 'on', and the instance at {listen} has no certificates: give it the run's with --ca, "
            "--cert and --key; streamrl certs DIR makes them before the run"
        )
    return found


def made_token(path: Path) -> Path:
    """Makes a file with a secret, readable by its owner only, unless it is there."""
    if not path.exists() or not path.stat().st_size:  # empty: the life that made it was killed just then
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
    return path


def uses_tls(security: SecuritySection) -> bool:
    """Whether anything is encrypted: ``auto`` with consent to plain text is plain."""
    return security.tls == "on" or (security.tls == "auto" and not security.insecure)


def check_files(security: SecuritySection) -> None:
    """Reads what the configuration names, for a dry run.

    Raises:
        UserError: A file cannot be read, or holds nothing usable.
    """
    read_token(security.token_file)
    if uses_tls(security) and security.ca_file:
        tls.read(security.ca_file, security.cert_file, security.key_file)


def _files(security: SecuritySection, token: str, ca: str, certificate: str, key: str) -> AccessFiles:
    """Paths are made absolute: an instance may run in another directory."""
    if not uses_tls(security):
        ca = certificate = key = ""
    absolute = [os.path.abspath(path) if path else "" for path in (token, ca, certificate, key)]
    return AccessFiles(
        *absolute, everywhere=security.tls == "on", mutual=security.mutual_tls, insecure=security.insecure
    )
