"""How a training run begins: anew, by resuming a run directory, or as a fork of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl_jax import rundir
from streamrl_jax.config import Config
from streamrl_jax.config_io import (
    Layer,
    config_from_layers,
    differences,
    load_config,
    parse_override,
    read_layer,
    with_absolute_paths,
)
from streamrl_jax.config_rules import ESTIMATOR_KEYS
from streamrl_jax.errors import UserError

_SHOWN_DIFFERENCES: Final = 6


@dataclass(frozen=True)
class Fork:
    """The checkpoint of another run that a run starts from.

    Attributes:
        run_dir: The other run.
        step: Which of its checkpoints; None: the newest.
    """

    run_dir: Path
    step: int | None = None

    def __str__(self) -> str:
        return str(self.run_dir) if self.step is None else f"{self.run_dir}@{self.step}"


@dataclass(frozen=True)
class Start:
    """What `streamrl train` is to do.

    Attributes:
        config: The resolved configuration, paths pinned.
        run_dir: Where the run lives.
        resume: Whether the directory exists and is gone on with.
        fork: Where a new run takes its state from; None: from the model's checkpoint.
        notes: What the user should know of how this came about.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    fork: Fork | None = None
    notes: tuple[str, ...] = ()


def plan_start(
    files: Sequence[Path],
    overrides: Sequence[str],
    resume: str | None = None,
    fork_from: str | None = None,
    run_dir: Path | None = None,
) -> Start:
    """Reads the configuration that fits the way a run begins.

    A new run takes the files and the overrides. A resumed run takes its own `config.toml` and the overrides;
    files, if given, only say where the run is. A fork takes the other run's `config.toml` (less what belongs
    to its advantage estimator, if that changes), then the files, then the overrides.

    Args:
        files: Configuration files.
        overrides: `section.key=value` each.
        resume: None: no resume; empty: of the run that the files name; else the run directory.
        fork_from: `RUN_DIR` or `RUN_DIR@STEP`.
        run_dir: Where the run lives; None: `run.dir/run.name`.

    Returns:
        The start. A bare `--resume` without anything to resume starts anew, with a note: a scheduler's script
        repeats one command.

    Raises:
        UserError: The arguments contradict each other, or a file, key or run directory is wrong.
    """
    if resume is not None and fork_from is not None:
        raise UserError(
            "--resume goes on with a run and --fork-from starts another from it; give one of the two."
        )
    if resume is not None:
        return _resumed(files, overrides, resume, run_dir)
    if fork_from is not None:
        return _forked(files, overrides, parse_fork(fork_from), run_dir)
    if not files:
        raise UserError(
            "streamrl train needs a configuration file, as in streamrl train configs/demo.toml, or --resume "
            "RUN_DIR."
        )
    return _new(load_config(files, overrides), run_dir)


def parse_fork(text: str) -> Fork:
    """Reads `RUN_DIR` or `RUN_DIR@STEP`.

    Args:
        text: The option's value.

    Returns:
        The fork; an `@` that no number follows belongs to the directory's name.

    Raises:
        UserError: There is no such run.
    """
    path, at, step = text.rpartition("@")
    fork = Fork(Path(path), int(step)) if at and step.isdecimal() else Fork(Path(text))
    rundir.check_is_run(fork.run_dir)
    return fork


def _new(
    config: Config, run_dir: Path | None, fork: Fork | None = None, notes: tuple[str, ...] = ()
) -> Start:
    pinned = with_absolute_paths(config)
    return Start(pinned, run_dir or Path(pinned.run.dir) / pinned.run.name, fork=fork, notes=notes)


def _resumed(files: Sequence[Path], overrides: Sequence[str], resume: str, run_dir: Path | None) -> Start:
    if resume and run_dir is not None and Path(resume) != run_dir:
        raise UserError(
            f"--resume {resume} and --run-dir {run_dir} name two run directories; give one of the two."
        )
    given = load_config(files, overrides) if files else None
    if not resume and run_dir is None and given is None:
        raise UserError("--resume needs a run directory, or a configuration file that names the run.")
    path = Path(resume) if resume else _new(given or Config(), run_dir).run_dir
    if given is not None and not resume and not path.exists():
        return _new(given, run_dir, notes=(f"there is no run in {path} to resume; it starts anew",))
    rundir.check_is_run(path)
    own = read_layer(path / "config.toml")
    before = config_from_layers([own])
    config = config_from_layers([own, *map(parse_override, overrides)])
    notes = []
    if changed := differences(before, config):
        notes.append(f"resumed with changes: {_listed(changed)}")
    if given is not None and (ignored := differences(config, with_absolute_paths(given))):
        notes.append(
            f"the run keeps its own settings where {', '.join(map(str, files))} now says otherwise "
            f"(a change is given as an override): {_listed(ignored)}"
        )
    return Start(with_absolute_paths(config), path, resume=True, notes=tuple(notes))


def _forked(files: Sequence[Path], overrides: Sequence[str], fork: Fork, run_dir: Path | None) -> Start:
    own = read_layer(fork.run_dir / "config.toml")
    # A name of its own, unless one is given: the other run's directory is taken.
    name = Layer("the fork", {"run": {"name": f"{fork.run_dir.absolute().name}-fork"}})
    changes = [*map(read_layer, files), *map(parse_override, overrides)]
    own = without_the_estimators(own, changes)
    config = config_from_layers([own, name, *changes])
    changed = differences(config_from_layers([own, name]), config)
    note = f"forks {fork}" + (f" with changes: {_listed(changed)}" if changed else " without changes")
    return _new(config, run_dir, fork, (note,))


def without_the_estimators(own: Layer, changes: Sequence[Layer]) -> Layer:
    """A run's own configuration, less what only its advantage estimator reads, where the changes name another one.

    Nobody asked for those settings beside the new estimator, which would refuse them.

    Args:
        own: The configuration that is forked.
        changes: What is laid over it.

    Returns:
        The layer to build on; what was taken out is at its default again.
    """

    def estimator(layer: Layer) -> str | None:
        return layer.table.get("algorithm", {}).get("adv_estimator")

    named = [estimator(layer) for layer in changes if estimator(layer) is not None]
    if not named or named[-1] == estimator(own):
        return own
    table = {section: dict(values) for section, values in own.table.items() if section != "critic"}
    for section, key in (name.split(".") for name in ESTIMATOR_KEYS):
        table.get(section, {}).pop(key, None)
    return Layer(own.origin, table)


def _listed(changes: Sequence[str]) -> str:
    more = len(changes) - _SHOWN_DIFFERENCES
    return "; ".join(changes[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
