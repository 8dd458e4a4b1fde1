"""`streamrl gen --join`: whom an instance announces itself to, and with what."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles, is_loopback, split_address
from streamrl_jax.gen.options import JoinSpec
from streamrl_jax.rundir import RunDir, look
from streamrl_jax.setup.security import run_access, standalone_access

PATIENCE_S: Final = 300.0
"""An instance that dials in ends by default when no controller answered for so long."""


_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class Secrets:
    """The files that are given on the command line, in the place of those of the run."""

    token: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Joining:
    """What an instance that dials in is set up with."""

    config: Config
    listen: str
    access: AccessFiles
    join: JoinSpec


def joining(
    target: str,
    files: Sequence[Path],
    overrides: Sequence[str],
    secrets: Secrets,
    *,
    listen: str = "",
    advertise: str = "",
    patience_s: float = PATIENCE_S,
) -> Joining:
    """Finds out how an instance is to join a run.

    Args:
        target: A run directory that both sides see, waited for; or ``host:port`` of the run's controller.
        files: Configuration files; none with a run directory: the run's own.
        overrides: ``section.key=value``; ``gen.devices`` is this instance's own.
        secrets: What is given in the place of the run's.
        listen: ``host:port``; empty: any port, of all addresses where the controller is beyond this machine.
        advertise: Host that the run reaches it by; empty: found out.
        patience_s: It ends when no controller answered for so long.

    Raises:
        UserError: There is no such run, or something is missing.
    """
    overrides = ["gen.devices=[]", *overrides]
    if Path(target).is_dir() or not _is_address(target):
        home = _found(Path(target), patience_s)
        config = load_config([*files] or [home.config], overrides)
        access = _over(run_access(config, home), secrets)
        local = is_loopback(split_address(config.control.listen)[0])
        join = JoinSpec(run_dir=str(home.path.absolute()), advertise=advertise, patience_s=patience_s)
    else:
        if not files:
            raise UserError(
                f"--join {target} needs the run's configuration file too: streamrl gen CONFIG.toml --join {target}"
            )
        config = load_config([*files], overrides)
        local = is_loopback(split_address(target)[0])
        access = standalone_access(
            config.security,
            target,
            token=secrets.token,
            ca=secrets.ca,
            certificate=secrets.certificate,
            key=secrets.key,
        )
        join = JoinSpec(address=target, advertise=advertise, patience_s=patience_s)
    return Joining(config, listen or ("127.0.0.1:0" if local else "0.0.0.0:0"), access, join)


def _found(path: Path, patience_s: float) -> RunDir:
    """The run directory, once it is there: a scheduler starts both sides at once.

    Raises:
        UserError: It was not made in time, or is something else.
    """
    end = time.monotonic() + patience_s
    if not path.exists():
        print(
            f"waiting for a run in {path}, at most {patience_s:g} s (--patience)", file=sys.stderr, flush=True
        )
    while not path.exists() and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return look(path)


def _is_address(target: str) -> bool:
    host, colon, port = target.rpartition(":")
    return bool(host and colon and port.isdecimal())


def _over(files: AccessFiles, secrets: Secrets) -> AccessFiles:
    given = {
        "token": secrets.token,
        "ca": secrets.ca,
        "certificate": secrets.certificate,
        "key": secrets.key,
    }
    return replace(files, **{name: str(path) for name, path in given.items() if path is not None})
