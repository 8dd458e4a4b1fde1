"""The command line of `streamrl plan …`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from streamrl_jax.commands.rank_cli import Row, count, load


def _counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, between commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r} is no list of numbers; give whole numbers from 1 on, as in 1,4,16")
    return tuple(int(part) for part in parts)


def _share(text: str) -> float:
    """A share, neither nothing nor all."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise ArgumentTypeError(f"{text!r} is no share; give a number above 0 and under 1")
    return share


def _seconds(text: str) -> float:
    """A time that ends."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no time in seconds; give 0 or more")
    return seconds


def _profile_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="file to write")
    parser.add_argument(
        "--batches",
        type=_counts,
        default=(),
        metavar="B,…",
        help="sequences at once; default: 1,2,4,… up to the slots",
    )
    parser.add_argument(
        "--contexts",
        type=_counts,
        default=(),
        metavar="C,…",
        help="tokens of prompt and answer; default: four",
    )
    parser.add_argument("--steps", type=count, default=32, metavar="N", help="timed each time; default: 32")
    parser.add_argument("--repeats", type=count, default=5, metavar="R", help="of every point; default: 5")
    parser.add_argument(
        "--holdout",
        type=_share,
        default=0.25,
        metavar="SHARE",
        help="of the points that the fit does not see; 0.25",
    )
    parser.add_argument(
        "--quantile",
        type=_share,
        default=0.5,
        metavar="Q",
        help="of the repeats, stands for a point; default: 0.5, the median; less beside other work on the machine",
    )
    parser.add_argument(
        "--instance",
        default="",
        metavar="NAME",
        help="this one, while the others idle; default: all at the same time",
    )
    parser.add_argument(
        "--limit-s",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="no further round after so long; default: 600",
    )


def _profile(arguments: Namespace) -> int:
    from streamrl_jax.commands import plan_profile

    wanted = plan_profile.Wanted(
        arguments.batches,
        arguments.contexts,
        arguments.steps,
        arguments.repeats,
        arguments.holdout,
        arguments.quantile,
        arguments.instance,
        arguments.limit_s,
    )
    plan_profile.run(load(arguments), arguments.out, wanted)
    return 0


TABLE: Final[Mapping[str, Row]] = {
    "profile": (
        "what a decode step costs by its batch and contexts, measured on real instances: a file of costs",
        _profile_options,
        _profile,
        "CONFIG",
    ),
}
"""By the second word of the command."""
