"""What a run knows of its answers' lengths, kept beside its checkpoints: `RUN_DIR/ranker/step_N/`.

A directory appears under its name whole and sealed, or not at all. It is small beside a checkpoint, and what it holds
can be made again from the run's samples, so that one that is missing or damaged costs time and never the run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from streamrl_jax.files import sync_directory
from streamrl_jax.train import seal

FOLDER: Final = "ranker"
"""Within the run directory."""

_STEP: Final = re.compile(r"step_(\d+)")
_LEFT: Final = re.compile(
    r"step_\d+(\.part)?(\.deleting)*"
)  # half of one, written or removed when a run was killed


def state_directory(run_dir: Path, step: int) -> Path:
    """Where the state is kept that goes with the checkpoint of ``step``."""
    return run_dir / FOLDER / f"step_{step}"


def write_state(run_dir: Path, step: int, fill: Callable[[Path], None], keep: Collection[int]) -> Path:
    """Writes the state of a step, and removes those that no checkpoint is there for any more.

    Of what lies beside it nothing is touched but directories of such names as this makes.

    Args:
        run_dir: The run directory.
        step: Of the checkpoint that it goes with; one of that number is replaced.
        fill: Writes the files into the directory that it is given.
        keep: Steps of the checkpoints that stay.

    Returns:
        The directory.
    """
    final = state_directory(run_dir, step)
    draft = final.with_name(f"{final.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    fill(draft)
    seal.write_seal(draft)
    _remove(final)
    draft.rename(final)
    sync_directory(final.parent)
    for path in final.parent.iterdir():
        if path.is_symlink() or not path.is_dir():
            continue
        if match := _STEP.fullmatch(path.name):
            if int(match[1]) != step and int(match[1]) not in keep:
                _remove(path)
        elif _LEFT.fullmatch(path.name):
            shutil.rmtree(path)
    return final


def state_faults(run_dir: Path, step: int) -> list[str]:
    """What is wrong with the state of a step, a line a fault; empty: it is whole, each byte of it."""
    directory = state_directory(run_dir, step)
    return seal.faults(directory) if directory.is_dir() else [f"{directory} does not exist"]


def _remove(directory: Path) -> None:
    """Takes its name away first, so that half of it is never seen under it."""
    if not directory.is_dir():
        return
    doomed = directory.with_name(f"{directory.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(directory.rename(doomed))
