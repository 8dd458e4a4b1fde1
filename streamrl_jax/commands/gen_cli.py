"""The command line of `streamrl gen`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from streamrl_jax.errors import UserError


def options(parser: ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help="address to serve on; port 0: any free one; with --join it may be left out",
    )
    parser.add_argument(
        "--join",
        default="",
        metavar="RUN_DIR|HOST:PORT",
        help="announce it to a run: its directory, or its controller's address; it ends with the run",
    )
    parser.add_argument(
        "--advertise", default="", metavar="HOST", help="with --join: host that the run reaches it by"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="with --join: it ends when the run's controller did not answer for so long (300)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="shared secret; default: security.token_file"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificate authority (PEM); default: security.ca_file"
    )
    parser.add_argument(
        "--cert", type=Path, metavar="FILE", help="certificate of this side; default: security.cert_file"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="its private key; default: security.key_file"
    )
    parser.add_argument("--name", default="", help="name of the instance; default: host name and port")


def run(arguments: Namespace) -> NoReturn:
    """Turns this process into the instance.

    Raises:
        UserError: Something given is wrong or missing.
    """
    from streamrl_jax.config_io import load_config
    from streamrl_jax.setup.instances import serve_standalone
    from streamrl_jax.setup.joining import Secrets, joining
    from streamrl_jax.setup.security import standalone_access

    secrets = Secrets(arguments.token_file, arguments.ca, arguments.cert, arguments.key)
    if arguments.join:
        found = joining(
            arguments.join,
            arguments.files,
            arguments.overrides,
            secrets,
            listen=arguments.listen,
            advertise=arguments.advertise,
            patience_s=arguments.patience,
        )
        serve_standalone(found.config, found.listen, found.access, arguments.name, found.join)
    if not arguments.files:
        raise UserError("A configuration file is needed, as in configs/demo.toml; configs/ holds examples.")
    if not arguments.listen:
        raise UserError("streamrl gen needs --listen HOST:PORT, or --join RUN_DIR to find a run by itself.")
    config = load_config(arguments.files, arguments.overrides)
    access = standalone_access(
        config.security,
        arguments.listen,
        token=secrets.token,
        ca=secrets.ca,
        certificate=secrets.certificate,
        key=secrets.key,
    )
    serve_standalone(config, arguments.listen, access, arguments.name)
