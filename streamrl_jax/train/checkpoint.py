"""Checkpoints of a run: written behind the training by Orbax, chosen only when whole.

::

    checkpoints/step_N/state/            the train state, an Orbax pytree (any mesh can read it)
                      meta/              ``Meta`` as JSON
                      checksums.json     the seal, written last

Orbax's ``CheckpointManager`` is not used: it counts damaged checkpoints among those it keeps, and skips in
silence a save below the newest step, which a resume from an older one needs. What it writes is the same and
it can read this.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp

from streamrl_jax.errors import UserError
from streamrl_jax.train import seal
from streamrl_jax.train.checkpoint_meta import Frontier, Meta, meta_from_json, outdated
from streamrl_jax.train.processes import barrier

__all__ = ["Checkpointer", "Frontier", "Meta"]

log = logging.getLogger(__name__)

_STEP: Final = re.compile(r"step_(\d+)")
_LEFTOVER: Final = re.compile(r"(step_\d+)\.(orbax-checkpoint-tmp.*|deleting)")
_NO_SPACE: Final = ("No space left on device", "Disk quota exceeded", "File too large")
_LISTED: Final = 8


class Checkpointer:
    """Writes, lists, chooses and reads the checkpoints of one directory.

    Call order: ``save`` any number of times, each of which first waits for the one before; ``wait`` or
    ``close`` at the end, which raise what went wrong in the background (so does the next ``save``). Reading
    changes nothing in the directory, so that an export may read what a run is still writing.

    Several trainer processes share the directory, and call ``save``, ``wait``, ``restore`` and ``restore_part`` alike:
    each writes and reads what its devices hold. The first one tidies up, seals and removes; the others ``trust`` it.

    Invariants: what ``latest`` and ``restore`` choose is whole, byte for byte. A state may be donated as soon
    as ``save`` has returned. A save that fails leaves the older checkpoints as they were.

    Args:
        directory: ``RUN_DIR/checkpoints``; created by the first save. An attribute too.
        keep: how many of the newest stay.
        best_metric_name: metric by which the best one stays too, larger is better; None: only the newest.
        timeout_s: bound on writing one.
    """

    def __init__(
        self, directory: Path, keep: int, best_metric_name: str | None = None, *, timeout_s: float = 1800.0
    ) -> None:
        self.directory = directory.absolute()
        self._keep = keep
        self._best_metric_name = best_metric_name
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: tuple[Path, Future[None]] | None = None
        self._prepared = False
        self._examined: dict[int, list[str]] = {}
        self._metrics: dict[int, Mapping[str, float]] = {}

    @cached_property
    def _orbax(self) -> ocp.AsyncCheckpointer:
        """Made when it is first used: it touches JAX's devices, and before that processes must have met."""
        state, meta = ocp.PyTreeCheckpointHandler(), ocp.JsonCheckpointHandler()
        handler = ocp.CompositeCheckpointHandler(state=state, meta=meta)
        return ocp.AsyncCheckpointer(handler, timeout_secs=math.ceil(self._timeout_s))

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None or jax.process_count() == 1:
            self.close()
        else:  # a save that needs the other processes may never end
            self._thread.shutdown(wait=False)

    def save(self, step: int, state: Any, meta: Meta, metrics: Mapping[str, float] | None = None) -> None:
        """Takes a snapshot and returns; the bytes are written behind the caller's back.

        Args:
            step: its number.
            state: pytree of arrays.
            meta: what goes with it.
            metrics: added to ``meta.metrics``.

        Raises:
            UserError: a whole checkpoint of this number exists, or the disk was full (now, or at the last
                save).
        """
        self.wait()
        path = self._path(step)
        if jax.process_index() == 0:
            if not self._prepared:
                self._prepare()
            if path.exists():
                self._make_way(step)
        barrier(f"the room for checkpoint {step}")
        meta = replace(meta, metrics={**meta.metrics, **(metrics or {})})
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(asdict(meta)))
        with self._disk_full_explained(step):
            self._orbax.save(path, args=items)
        self._metrics[step] = meta.metrics
        self._running = path, self._thread.submit(self._complete, step, self._scores())

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            UserError: the disk was full.
            TimeoutError: it takes longer than ``timeout_s``.
        """
        if self._running is None:
            return
        path, running = self._running
        try:
            running.result(self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{path} was not written within {self._timeout_s:.0f} s") from error
        finally:
            if running.done():
                self._running = None

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            if "_orbax" in self.__dict__:
                self._orbax.close()

    def steps(self) -> tuple[int, ...]:
        """Numbers of the completed checkpoints, oldest first; their bytes are not read."""
        return tuple(step for step in self._found() if seal.is_sealed(self._path(step)))

    def latest(self) -> int | None:
        """The newest checkpoint that is whole, each byte compared; None if there is none.

        One that is not is passed over with a warning that names it.
        """
        for step in reversed(self._found()):
            wrong = self._examine(step)
            if not wrong:
                return step
            log.warning("%s is passed over: %s", self._path(step), _listed(wrong))
        return None

    def trust(self, step: int) -> None:
        """Takes a checkpoint for whole, as another process of this run has found it."""
        self._examined[step] = []

    def read_meta(self, step: int | None = None) -> Meta:
        """What goes with a checkpoint.

        Args:
            step: its number; None: the latest.

        Raises:
            UserError: there is none, or it is damaged.
        """
        return self._read_meta(self._chosen(step))

    def restore(self, step: int | None, abstract_state: Any) -> tuple[Any, Meta]:
        """Reads a checkpoint.

        Args:
            step: its number; None: the latest that is whole.
            abstract_state: the state's structure with ``jax.ShapeDtypeStruct`` leaves. A leaf with a sharding
                becomes an array that lies so, on whatever mesh; one without becomes a NumPy array.

        Returns:
            The state, bitwise as it was saved, and what goes with it.

        Raises:
            UserError: there is none, it is damaged, or it holds another model; names every difference.
        """
        chosen = self._chosen(step)
        return self._restore(chosen, abstract_state, ()), self._read_meta(chosen)

    def restore_part(self, step: int | None, path: Sequence[str], abstract_part: Any) -> Any:
        """Reads one subtree, such as the policy's parameters without optimizer and critic.

        Args:
            step: as for ``restore``.
            path: names from the root of the state to the subtree, e.g. ``("actor", "params")``.
            abstract_part: its structure, as for ``restore``.

        Returns:
            The subtree.

        Raises:
            UserError: as for ``restore``.
        """
        return self._restore(self._chosen(step), abstract_part, tuple(path))

    def holds(self, step: int, path: Sequence[str]) -> bool:
        """Whether a checkpoint has arrays below ``path``, such as ``("critic",)``.

        Raises:
            UserError: there is no such checkpoint, or it is damaged.
        """
        items = self._orbax.metadata(self._path(self._chosen(step))).item_metadata
        assert items is not None  # as in `_restore`
        return any(names[: len(path)] == tuple(path) for names in _leaves(items["state"].tree))

    def set_aside(self, after: int) -> list[Path]:
        """Moves the checkpoints newer than ``after`` to ``superseded/``, for a resume from an older one.

        Args:
            after: the step that the run goes on from.

        Returns:
            Where they lie now.
        """
        self.wait()
        moved: list[Path] = []
        for step in self._found():
            if step > after:
                target = self.directory / "superseded" / f"step_{step}"
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                moved.append(self._path(step).rename(target))
                self._examined.pop(step, None)
        return moved

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def _found(self) -> list[int]:
        """Numbers of all that looks like a checkpoint."""
        if not self.directory.is_dir():
            return []
        matches = [_STEP.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def _examine(self, step: int) -> list[str]:
        """Faults of a checkpoint; read once, for one that is sealed does not change."""
        if step in self._examined:
            return self._examined[step]
        found = seal.faults(self._path(step))
        if seal.is_sealed(self._path(step)):
            self._examined[step] = found
        return found

    def _chosen(self, step: int | None) -> int:
        if step is None:
            step = self.latest()
            if step is None:
                raise UserError(
                    f"{self.directory} holds no whole checkpoint: there is nothing to go on from."
                )
            return step
        others = f"there are the steps {list(self.steps())}"
        if step not in self._found():
            raise UserError(f"{self._path(step)} does not exist; {others}.")
        if wrong := self._examine(step):
            raise UserError(f"{self._path(step)} is damaged: {_listed(wrong)}. Besides, {others}.")
        return step

    def _read_meta(self, step: int) -> Meta:
        path = self._path(step) / "meta" / "metadata"  # as `JsonCheckpointHandler` names it
        return meta_from_json(json.loads(path.read_bytes()), str(path))

    def _restore(self, step: int, abstract: Any, path: tuple[str, ...]) -> Any:
        items = self._orbax.metadata(self._path(step)).item_metadata
        assert items is not None  # None of a handler that knows no items; this one does
        differences = _differences(items["state"].tree, abstract, path)
        if differences:
            raise UserError(
                f"{self._path(step)} was written by another model or optimizer: {_listed(differences)}. "
                "Resume with the configuration of the run that wrote it, or start anew from exported weights."
            )
        tree = abstract
        for key in reversed(path):
            tree = {key: tree}
        how = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=bool(path))
        restored = self._orbax.restore(self._path(step), args=ocp.args.Composite(state=args)).state
        for key in path:
            restored = restored[key]
        return restored

    def _prepare(self) -> None:
        """Before the first save: removes what a killed process left half done, and reads the metrics."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                log.warning("%s was left half done and is removed", path)
                shutil.rmtree(path)
        for step in self.steps():
            try:
                self._metrics[step] = self._read_meta(step).metrics
            except (OSError, ValueError, UserError) as error:
                log.warning("%s is not compared with others: %s", self._path(step), error)
        self._prepared = True

    def _scores(self) -> dict[int, float]:
        """The metric that checkpoints are compared by, where it is known."""
        name = self._best_metric_name
        if name is None:
            return {}
        return {step: metrics[name] for step, metrics in self._metrics.items() if name in metrics}

    def _make_way(self, step: int) -> None:
        """For a save of a step whose directory exists."""
        wrong = self._examine(step)
        if not wrong:
            raise UserError(
                f"{self._path(step)} exists and is whole; it is not overwritten. Resume from it, set the "
                "newer checkpoints aside, or use another run directory."
            )
        log.warning("%s is replaced: %s", self._path(step), _listed(wrong))
        self._remove(step)

    def _remove(self, step: int) -> None:
        """Takes a checkpoint's name away before its files, so that half of one is never seen under it."""
        doomed = self._path(step).rename(self.directory / f"step_{step}.deleting")
        shutil.rmtree(doomed)
        self._examined.pop(step, None)
        self._metrics.pop(step, None)

    def _complete(self, step: int, scores: Mapping[int, float]) -> None:
        """In the background: waits for Orbax, seals, removes what is outdated."""
        with self._disk_full_explained(step):
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                seal.write_seal(self._path(step))
        if jax.process_index() == 0:
            for old in outdated(self.steps(), scores, self._keep):
                self._remove(old)

    @contextmanager
    def _disk_full_explained(self, step: int) -> Iterator[None]:
        """Says what a full disk means, and gives back what the failed save took of it."""
        try:
            yield
        except Exception as error:
            if not any(sign in str(error) for sign in _NO_SPACE):
                raise
            for leftover in self.directory.glob(f"step_{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free
            older = ", ".join(f"step_{kept}" for kept in self.steps())
            whole = f"What is whole: {older}" if older else "There is no older one"
            raise UserError(
                f"{self._path(step)} could not be written: the disk is full ({free} bytes free without it). "
                f"{whole}. Free some space, or lower "
                "trainer.max_ckpt_to_keep."
            ) from error


def _differences(stored: Any, abstract: Any, root: tuple[str, ...]) -> list[str]:
    """Compares names, shapes and dtypes below ``root``; one line a difference."""
    wanted = {root + names: leaf for names, leaf in _leaves(abstract).items()}
    held = {names: leaf for names, leaf in _leaves(stored).items() if names[: len(root)] == root}
    found: list[str] = []
    for names in sorted({*wanted, *held}):
        what = "/".join(names)
        if names not in held:
            found.append(f"{what} is missing in the checkpoint (expected {_form(wanted[names])})")
        elif names not in wanted:
            found.append(f"{what} is in the checkpoint ({_form(held[names])}) and not expected")
        elif _form(held[names]) != _form(wanted[names]):
            found.append(f"{what} is {_form(held[names])} in the checkpoint, expected {_form(wanted[names])}")
    return found


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf for path, leaf in pairs}


def _form(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def _listed(lines: Sequence[str]) -> str:
    rest = len(lines) - _LISTED
    return "; ".join(lines[:_LISTED]) + (f"; and {rest} more" if rest > 0 else "")
