"""The command line of `streamrl rank …`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamrl_jax.errors import UserError

if TYPE_CHECKING:
    from streamrl_jax.config import Config

Row = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int], str]
"""Of a command: summary, its options, what runs it, what its configuration files are called (empty: it takes none)."""


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of them; give 1 or more")
    return int(text)


def load(arguments: Namespace) -> Config:
    """The configuration of a command that needs one."""
    from streamrl_jax.config_io import load_config

    if not arguments.files:
        raise UserError(
            "A configuration file is needed, as in configs/demo_tail.toml; configs/ holds examples."
        )
    return load_config(arguments.files, arguments.overrides)


def _collect_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="file to write")
    parser.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="what this run has recorded, instead of new answers"
    )
    parser.add_argument("--prompts", type=count, default=0, metavar="N", help="how many; default: all")
    parser.add_argument("--n", type=count, default=0, metavar="K", help="answers to each; default: rollout.n")
    parser.add_argument("--split", choices=("train", "test"), help="which prompts; default: train")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="of the sampling; default: run.seed; the prompts stay the same"
    )


def _collect(arguments: Namespace) -> int:
    from streamrl_jax.commands import rank

    if arguments.run is None:
        wanted = rank.Wanted(arguments.split or "train", arguments.prompts, arguments.n, arguments.seed)
        rank.collect(load(arguments), arguments.out, wanted)
        return 0
    given = {"--prompts": arguments.prompts, "--n": arguments.n, "--split": arguments.split}
    given |= {"--seed": arguments.seed is not None, "a configuration": arguments.files + arguments.overrides}
    if refused := [name for name, value in given.items() if value]:
        raise UserError(
            f"--run {arguments.run} reads what the run has recorded; {', '.join(refused)} cannot be given beside it"
        )
    rank.collect_run(arguments.run, arguments.out)
    return 0


TABLE: Final[Mapping[str, Row]] = {
    "collect": (
        "how long a checkpoint's answers are, prompt by prompt, or those of a run: a file of lengths",
        _collect_options,
        _collect,
        "CONFIG",
    ),
}
"""By the second word of the command."""
