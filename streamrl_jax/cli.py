"""`streamrl …`: parses and wires, nothing else.

JAX, vLLM and their like are imported by the command that needs them: help and dry runs answer at once.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from streamrl_jax import __version__
from streamrl_jax.commands import bench_cli, gen_cli, plan_cli, pool_cli, rank_cli
from streamrl_jax.errors import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from streamrl_jax.interrupt import StopRequested, parted_badly

if TYPE_CHECKING:
    from streamrl_jax.config import Config

INTERRUPTED_EXIT_CODE: Final = 130

_OVERRIDE_OPTION: Final = re.compile(r"--(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)+)(?P<value>=.*)?", re.DOTALL)
_OVERRIDE_WORD: Final = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*", re.DOTALL)
_VALUE_MAY_BE_LEFT_OUT: Final = ("--resume",)


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        summary: What it does, in a line.
        options: Adds its options to a parser.
        run: Does it; gives the exit code.
        settings: What its configuration files are called in the usage; empty: it takes none.
    """

    summary: str
    options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    settings: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        Exit code: 2 for what the user can put right, which is printed as one paragraph; 75 when a
        signal ended it, a run after a checkpoint; 130 after Ctrl-C. Faults of the program keep their traceback.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"streamrl: error: {error}", file=sys.stderr)
        if not parted_badly():
            return USER_ERROR_EXIT_CODE
        code = USER_ERROR_EXIT_CODE
    except StopRequested as request:
        print(f"streamrl: stopped by {request}", file=sys.stderr)
        code = STOPPED_EXIT_CODE
    except KeyboardInterrupt:
        print("streamrl: interrupted", file=sys.stderr)
        code = INTERRUPTED_EXIT_CODE
    except Exception:
        if not parted_badly():
            raise
        traceback.print_exc()
        code = 1
    if argv is None:
        _end_process(code)
    return code


def _end_process(code: int) -> NoReturn:
    """Ends a stopped process at once, or one of several whose run has failed.

    All that it opened is closed by now. What is left are native threads, such as those of a compilation that was broken
    off, and the interpreter's orderly end would take from under them what they still use: a segmentation fault in place
    of the exit code, now and then. Where others hang in a collective, it would wait for them.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else USER_ERROR_EXIT_CODE
    if argv[0] in ("-V", "--version"):
        print(f"streamrl {__version__}")
        return 0
    name, rest = split_command(argv)
    command = COMMANDS.get(name)
    if command is None:
        group = [full for full in COMMANDS if full.startswith(f"{name} ")]
        if group and rest and rest[0] in ("-h", "--help", "help"):
            print(_overview(f"{name} "))
            return 0
        if group and rest:
            name = f"{name} {rest[0]}"
        raise UserError(
            f"There is no command {name!r}; the commands are {', '.join(group or COMMANDS)} (streamrl --help)."
        )
    return command.run(_parse(name, command, rest))


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name, which may be two words (`bench packing`), and the arguments after it."""
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1
    return " ".join(argv[:words]), list(argv[words:])


def _overview(group: str = "") -> str:
    """What the commands do, or those of a group alone, named with the blank after it."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    return "\n".join(
        [
            f"streamrl {__version__}: disaggregated RL post-training of language models, JAX trainer, vLLM "
            "generation",
            "",
            f"usage: streamrl {group}COMMAND ... (streamrl {group}COMMAND --help tells more)",
            "",
            *lines,
        ]
    )


def _parse(name: str, command: Command, rest: Sequence[str]) -> Namespace:
    """Parses a command's arguments; `files` and `overrides` hold the configuration's."""
    parser = ArgumentParser(prog=f"streamrl {name}", description=command.summary, allow_abbrev=False)
    overrides: list[str] = []
    order: list[str] = []
    if command.settings:
        order = settings_in_order(rest)
        rest, overrides = split_overrides(rest)
        parser.epilog = (
            "Any key of the configuration can be given as section.key=value or --section.key value."
        )
        parser.add_argument(
            "settings", nargs="*", metavar=command.settings, help="TOML files, the later over the earlier"
        )
    command.options(parser)
    arguments, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        raise UserError(_unknown_option(name, unknown[0], bool(command.settings)))
    arguments.files, words = _told_apart(getattr(arguments, "settings", []))
    arguments.overrides = _only(order, overrides + words)
    return arguments


def _only(order: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The wanted words in this order; what looks like one and is not wanted was an option's value."""
    left = Counter(wanted)
    found: list[str] = []
    for word in order:
        if left[word]:
            left[word] -= 1
            found.append(word)
    return found


def _told_apart(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files and overrides among the words of a command line."""
    files = [Path(word) for word in words if not _OVERRIDE_WORD.fullmatch(word)]
    return files, [word for word in words if _OVERRIDE_WORD.fullmatch(word)]


def _is_setting(word: str) -> bool:
    return word.endswith(".toml") or _OVERRIDE_WORD.fullmatch(word) is not None


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--section.key value` and `--section.key=value` out of a command line.

    Args:
        arguments: The command's arguments.

    Returns:
        The other arguments, and the overrides as `section.key=value`. Among the others, an option whose value may be
        left out does not take a setting after it for its value.

    Raises:
        UserError: An option of that form has no value.
    """
    others: list[str] = []
    overrides: list[str] = []
    for word, is_option in _words(arguments):
        (overrides if is_option else others).append(word)
    return [
        f"{word}=" if word in _VALUE_MAY_BE_LEFT_OUT and _is_setting(after) else word
        for word, after in pairwise([*others, ""])
    ], overrides


def settings_in_order(arguments: Sequence[str]) -> list[str]:
    """All that may be an override, in either form, as it stands in a command line: of two of a key the later counts."""
    return [word for word, is_option in _words(arguments) if is_option or _OVERRIDE_WORD.fullmatch(word)]


def _words(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The words of a command line; an option that is an override is one of the form `section.key=value`, and marked."""
    pending = deque(arguments)
    while pending:
        argument = pending.popleft()
        match = _OVERRIDE_OPTION.fullmatch(argument)
        if match is None:
            yield argument, False
        elif match["value"] is not None:
            yield match["key"] + match["value"], True
        elif pending:
            yield f"{match['key']}={pending.popleft()}", True
        else:
            raise UserError(
                f"{argument} has no value; write {argument} VALUE, or {argument.removeprefix('--')}=VALUE."
            )


def _unknown_option(name: str, option: str, takes_config: bool) -> str:
    remedy = f"streamrl {name} --help lists the options"
    if takes_config and option.startswith("--"):
        from streamrl_jax.config_faults import did_you_mean

        key = option[2:].split("=")[0]
        remedy += f"; a key of the configuration is given with its section: {did_you_mean(key)}"
    return f"streamrl {name} does not know {option.removesuffix('=')}; {remedy}."


# --- commands -----------------------------------------------------------------------------------------------


def _train_options(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would run, start nothing")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN_DIR", help="go on from the newest checkpoint of a run"
    )
    parser.add_argument(
        "--fork-from",
        metavar="RUN_DIR[@STEP]",
        help="start a new run from a checkpoint of another, with its settings",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run directory; default: run.dir/run.name"
    )


def _train(arguments: Namespace) -> int:
    from streamrl_jax.commands.starts import plan_start

    start = plan_start(
        arguments.files, arguments.overrides, arguments.resume, arguments.fork_from, arguments.run_dir
    )
    for note in start.notes:
        print(f"streamrl: note: {note}", file=sys.stderr)
    if arguments.dry_run:
        from streamrl_jax.commands.dryrun import dry_run

        found = dry_run(start)
        print(found.text)
        if found.faults:
            raise UserError(f"the run would not start: {'; '.join(found.faults)}.")
        return 0
    from streamrl_jax.main_job import train

    result = train(start.config, start.run_dir, resume=start.resume, fork=start.fork)
    if not result.stopped_by:
        return 0
    print(
        f"streamrl: stopped by {result.stopped_by} after step {result.version}; go on with "
        f"streamrl train --resume {result.run_dir}",
        file=sys.stderr,
    )
    return STOPPED_EXIT_CODE


def _certs_options(parser: ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--name", default="streamrl", help="what the certificate is made out to")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a host that is named in it too; repeatable",
    )
    parser.add_argument("--days", type=float, default=90.0, metavar="N", help="days that it is valid (90)")


def _certs(arguments: Namespace) -> int:
    from streamrl_jax.commands.certs import make_certs

    print(make_certs(arguments.directory, arguments.name, arguments.host, arguments.days))
    return 0


def _sft_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the checkpoint goes")


def _sft(arguments: Namespace) -> int:
    from streamrl_jax.commands.warmstart import run

    run(_load(arguments), arguments.out)
    return 0


def _export_options(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    parser.add_argument(
        "--step", default="newest", metavar="N", help="a step, newest or best; default: newest"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: that of the engine, gen.dtype"
    )


def _export(arguments: Namespace) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # the run may hold the GPUs, and nothing is computed
    from streamrl_jax.commands.export import export

    written = export(arguments.run_dir, arguments.out, step=arguments.step, dtype=arguments.dtype)
    print(
        f"{written.path}: step {written.step} of {arguments.run_dir} in {written.dtype}, the rest from "
        f"{written.source}"
    )
    return 0


def _eval_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="what is evaluated; default: model.path"
    )


def _eval(arguments: Namespace) -> int:
    from streamrl_jax.commands.evaluate import run

    run(_load(arguments), arguments.checkpoint)
    return 0


def _demo_options(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="default: that of the configuration")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run directory; default: a new one under runs/"
    )


def _demo(arguments: Namespace) -> int:
    from streamrl_jax.commands.demo import run

    seed = [] if arguments.seed is None else [f"run.seed={arguments.seed}"]
    return run(arguments.files, [*seed, *arguments.overrides], arguments.run_dir)


def _doctor_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--gen-python", action="append", default=[], metavar="PYTHON", help="a generation environment's"
    )


def _doctor(arguments: Namespace) -> int:
    from streamrl_jax.commands import doctor

    return doctor.main(arguments.gen_python)


def _load(arguments: Namespace) -> Config:
    """The configuration of a command that needs one."""
    from streamrl_jax.config_io import load_config

    if not arguments.files:
        raise UserError("A configuration file is needed, as in configs/demo.toml; configs/ holds examples.")
    return load_config(arguments.files, arguments.overrides)


COMMANDS: Final[Mapping[str, Command]] = {
    "train": Command(
        "the main job: RL, with local generation instances or endpoints", _train_options, _train, "CONFIG"
    ),
    "gen": Command("one generation instance, for another host", gen_cli.options, gen_cli.run, "CONFIG"),
    "certs": Command("certificates and a token for a run on several hosts", _certs_options, _certs),
    "pool list": Command("the instances of a run that goes on", pool_cli.list_options, pool_cli.show),
    "pool add": Command("further instances for a run that goes on", pool_cli.add_options, pool_cli.add),
    "pool drain": Command(
        "lets instances of a run go; what they hold is answered first", pool_cli.drain_options, pool_cli.drain
    ),
    "sft": Command("a supervised warm start", _sft_options, _sft, "CONFIG"),
    "eval": Command(
        "accuracy and pass@k of a checkpoint on held-out prompts", _eval_options, _eval, "CONFIG"
    ),
    "export": Command("a Hugging Face checkpoint of a run", _export_options, _export),
    "demo": Command(
        "warm start, RL, evaluation and export on this machine, in minutes", _demo_options, _demo, "CONFIG"
    ),
    **{f"rank {name}": Command(*row) for name, row in rank_cli.TABLE.items()},
    **{f"plan {name}": Command(*row) for name, row in plan_cli.TABLE.items()},
    "doctor": Command("is this machine fit for a run, and if not, what to do", _doctor_options, _doctor),
    **{f"bench {name}": Command(*row) for name, row in bench_cli.TABLE.items()},
}
