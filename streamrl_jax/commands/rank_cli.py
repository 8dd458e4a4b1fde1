"""The command line of `streamrl rank …`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamrl_jax.errors import UserError

LOSSES: Final = ("plackett_luce", "shortest_first", "pairwise", "regression")
"""The names of `ranker.loss.LOSSES`, which loads JAX."""

if TYPE_CHECKING:
    from streamrl_jax.config import Config

Row = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int], str]
"""Of a command: summary, its options, what runs it, what its configuration files are called (empty: it takes none)."""


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of them; give 1 or more")
    return int(text)


def seed(text: str) -> int:
    """A whole number from 0 on, of 63 bits: what every generator of random numbers takes."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise ArgumentTypeError(f"{text!r} is no seed; give a whole number from 0 up")
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
        "--seed", type=seed, metavar="S", help="of the sampling; default: run.seed; the prompts stay the same"
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


def _fit_options(parser: ArgumentParser) -> None:
    parser.add_argument("lengths", type=Path, nargs="+", metavar="LENGTHS.jsonl", help="observed lengths")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--model", type=Path, metavar="CHECKPOINT", help="checkpoint to start from")
    start.add_argument(
        "--size", choices=("tiny", "small"), default="tiny", help="of a ranker from scratch; default: tiny"
    )
    parser.add_argument(
        "--vocabulary",
        type=count,
        default=0,
        metavar="N",
        help="of one from scratch; default: what the file needs",
    )
    parser.add_argument("--loss", choices=LOSSES, help="default: pairwise, which did best (docs/results.md)")
    parser.add_argument("--steps", type=count, metavar="N", help="at most so many")
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="of everything that is drawn")
    parser.add_argument("--validation", type=float, metavar="SHARE", help="of the prompts that are held back")
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help="the highest of the schedule")
    parser.add_argument(
        "--seconds", type=float, metavar="T", help="end after so long, with the best until then"
    )


def _fit(arguments: Namespace) -> int:
    from streamrl_jax.commands import rank_fit
    from streamrl_jax.ranker.fit import FitOptions

    given = {
        name: getattr(arguments, name)
        for name in ("loss", "steps", "validation", "learning_rate", "seconds")
        if getattr(arguments, name) is not None
    }
    options = FitOptions(size=arguments.size, vocab_size=arguments.vocabulary, seed=arguments.seed, **given)
    rank_fit.fit(arguments.lengths, arguments.out, options, arguments.model)
    return 0


def _eval_options(parser: ArgumentParser) -> None:
    parser.add_argument("ranker", type=Path, metavar="RANKER", help="directory that streamrl rank fit wrote")
    parser.add_argument("lengths", type=Path, metavar="LENGTHS.jsonl", help="of prompts it was not fitted to")
    parser.add_argument(
        "--second", type=Path, metavar="FILE.jsonl", help="a second sampling of the same prompts: the ceiling"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE.jsonl", help="earlier lengths of the same prompts"
    )
    parser.add_argument(
        "--cost", type=Path, metavar="FILE.json", help="from streamrl plan profile, for the makespan"
    )
    parser.add_argument(
        "--slots", type=count, default=0, metavar="N", help="answers at once of an instance there"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="S", help="of the bootstrap and the random order"
    )


def _eval(arguments: Namespace) -> int:
    from streamrl_jax.commands import rank_fit

    against = rank_fit.Against(
        arguments.second, arguments.history, arguments.cost, arguments.slots, arguments.seed
    )
    rank_fit.evaluate(arguments.ranker, arguments.lengths, against)
    return 0


TABLE: Final[Mapping[str, Row]] = {
    "collect": (
        "how long a checkpoint's answers are, prompt by prompt, or those of a run: a file of lengths",
        _collect_options,
        _collect,
        "CONFIG",
    ),
    "fit": ("trains a length ranker on files of observed lengths", _fit_options, _fit, ""),
    "eval": (
        "how well a ranker orders held-out prompts, beside a second sampling, history and chance",
        _eval_options,
        _eval,
        "",
    ),
}
"""By the second word of the command."""
