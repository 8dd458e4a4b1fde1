"""The command line of `streamrl pool list|add|drain`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path


def _count(text: str) -> int:
    """How many instances: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of instances; give 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    """A time to wait, which ends."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no time in seconds; give 0 or more")
    return seconds


def _run_dir(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run, which goes on")


def list_options(parser: ArgumentParser) -> None:
    """Adds the options of `streamrl pool list`."""
    _run_dir(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object in the place of a table")


def show(arguments: Namespace) -> int:
    """`streamrl pool list`."""
    from streamrl_jax.commands.pool import list_instances

    print(list_instances(arguments.run_dir, as_json=arguments.json))
    return 0


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of `streamrl pool add`."""
    _run_dir(parser)
    parser.add_argument("--count", type=_count, default=0, metavar="N", help="how many; default: 1")
    parser.add_argument(
        "--devices",
        action="append",
        default=[],
        metavar="ENTRY",
        help="devices of one, as in gen.devices; repeatable; default: what is free",
    )
    parser.add_argument("--pool", default="", metavar="NAME", help="of this pool; default: that of [gen]")
    parser.add_argument(
        "--endpoint", default="", metavar="HOST:PORT", help="one that was started elsewhere with streamrl gen"
    )


def add(arguments: Namespace) -> int:
    """`streamrl pool add`."""
    from streamrl_jax.commands.pool import add_instances

    names = add_instances(
        arguments.run_dir,
        pool=arguments.pool,
        count=arguments.count,
        devices=arguments.devices,
        endpoint=arguments.endpoint,
    )
    print(f"{', '.join(names)}: starting; streamrl pool list {arguments.run_dir} shows how far")
    return 0


def drain_options(parser: ArgumentParser) -> None:
    """Adds the options of `streamrl pool drain`."""
    _run_dir(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="instances that are not needed any more")
    parser.add_argument(
        "--now", action="store_true", help="hand out again what they hold, instead of waiting for it"
    )
    parser.add_argument(
        "--wait", type=_seconds, default=0.0, metavar="SECONDS", help="wait so long until they have left"
    )


def drain(arguments: Namespace) -> int:
    """`streamrl pool drain`."""
    from streamrl_jax.commands.pool import drain_instances

    remaining = drain_instances(
        arguments.run_dir, arguments.names, at_once=arguments.now, wait_s=arguments.wait
    )
    gone = [name for name in arguments.names if name not in remaining]
    if gone:
        print(f"{', '.join(gone)}: left")
    if remaining:
        print(f"{', '.join(remaining)}: answering what is left")
    return 1 if remaining and arguments.wait else 0
