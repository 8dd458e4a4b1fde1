"""The directory of a run: made whole, held by one process at a time, reopened under a new incarnation.

Layout::

    run.json         run id, incarnation, when it was made, what it was forked from
    run.lock         held (flock) while a process runs here; names that process
    config.toml      the resolved configuration; config-0.toml and so on before a resume changed it
    provenance.json  what ran; provenance-1.json and so on after a resume
    metrics.jsonl    one line a step
    samples/         one file of consumed samples an iteration
    checkpoints/     step_N/
    ranker/          step_N/: what was known of answers' lengths at a checkpoint (`dispatch.policy`)
    logs/            <process>.log
    trace.json       timeline
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamrl_jax.errors import UserError
from streamrl_jax.files import sync_directory, write_atomically
from streamrl_jax.types import Fence

_RECORD: Final = "run.json"
_LOCK: Final = "run.lock"
_FOLDERS: Final = ("samples", "checkpoints", "logs")


@dataclass(frozen=True)
class RunDir:
    """An open run directory.

    Attributes:
        path: The directory.
        fence: Run id and incarnation; what this life of the run puts on the wire.
        forked_from: Run directory and step that the run started from; empty: none.
    """

    path: Path
    fence: Fence
    forked_from: str = ""

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def provenance(self) -> Path:
        """What ran in this incarnation."""
        incarnation = self.fence.incarnation
        return self.path / (f"provenance-{incarnation}.json" if incarnation else "provenance.json")

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Consumed samples, a file an iteration."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Holds `step_N/`."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Holds `<process>.log`."""
        return self.path / "logs"

    @property
    def trace(self) -> Path:
        """Chrome/Perfetto timeline."""
        return self.path / "trace.json"

    @property
    def has_progress(self) -> bool:
        """Whether a step was recorded or a checkpoint begun."""
        recorded = self.metrics.exists() and self.metrics.stat().st_size > 0
        return recorded or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))


@contextlib.contextmanager
def create(path: Path, config_toml: str, forked_from: str = "") -> Iterator[RunDir]:
    """Makes a run directory and holds it.

    It appears under its name complete and locked, or not at all. When the body ends in a `UserError` before
    there is progress or a log, the directory is removed again, so that the corrected command finds the name
    free.

    Args:
        path: Where; nothing may be there but an empty directory.
        config_toml: The resolved configuration.
        forked_from: Run directory and step that the run starts from; empty: none.

    Yields:
        The run directory, at incarnation 0.

    Raises:
        UserError: Something is there already, or the place cannot be written.
    """
    _refuse_existing(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.making")
    with contextlib.ExitStack() as held:
        try:
            _fill(draft, path.name, config_toml, forked_from)
            held.enter_context(_locked(draft))
            draft.rename(path)  # onto an empty directory at most; the lock moves along
            sync_directory(path.parent)
        except OSError as error:
            raise UserError(
                f"Run directory {path} cannot be made: {error.strerror}. Set run.dir, or --run-dir, to "
                "a place that can be written."
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        run = look(path)
        try:
            with _full_disk_named(path):
                yield run
        except UserError:
            if not run.has_progress and not any(run.logs.iterdir()):
                shutil.rmtree(path)
            raise


@contextlib.contextmanager
def reopen(path: Path, config_toml: str = "") -> Iterator[RunDir]:
    """Opens a run directory for a resume and holds it.

    Args:
        path: The run directory.
        config_toml: What the run goes on with, so that the next resume finds it; the one before stays as
            `config-N.toml`, N being the last incarnation that ran with it. Empty: it is unchanged.

    Yields:
        The run directory, one incarnation further; that is on disk before this returns.

    Raises:
        UserError: It is no run directory, or another process runs in it.
    """
    check_is_run(path)
    with _locked(path):
        record = _read_record(path)
        before = path / "config.toml"
        if config_toml and before.read_text(encoding="utf-8") != config_toml:
            write_atomically(path / f"config-{record['incarnation']}.toml", before.read_bytes())
            write_atomically(before, config_toml.encode())
        record["incarnation"] += 1
        write_atomically(path / _RECORD, _encoded(record))
        with _full_disk_named(path):
            yield _opened(path, record)


def look(path: Path) -> RunDir:
    """Opens a run directory for reading, also while it runs.

    Args:
        path: The run directory.

    Returns:
        It, at its present incarnation.

    Raises:
        UserError: It is no run directory.
    """
    check_is_run(path)
    return _opened(path, _read_record(path))


def check_is_run(path: Path) -> None:
    """Raises a `UserError`, with near names, when there is no run directory at `path`."""
    if (path / _RECORD).is_file():
        return
    if path.exists():
        within = sorted(str(entry.parent) for entry in path.glob(f"*/{_RECORD}"))[:5]
        remedy = f"Did you mean {' or '.join(within)}?" if within else "Name one that `streamrl train` made."
        raise UserError(f"{path} is not a run directory: it holds no {_RECORD}. {remedy}")
    runs = {entry.parent.name: entry.parent for entry in path.parent.glob(f"*/{_RECORD}")}
    near = difflib.get_close_matches(path.name, runs, n=3, cutoff=0.4) or sorted(runs)[:5]
    remedy = (
        f"there are {', '.join(str(runs[name]) for name in near)}" if near else f"no run is in {path.parent}"
    )
    raise UserError(f"Run directory {path} does not exist; {remedy}.")


def _refuse_existing(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not (path / _RECORD).is_file():
        raise UserError(
            f"{path} exists and is not a run directory; choose another run.name, or another --run-dir."
        )
    if look(path).has_progress:
        remedy = "continue it with --resume, choose another run.name, or remove it"
    else:
        remedy = "it never completed a step: remove it, choose another run.name, or go on with --resume"
    raise UserError(f"Run directory {path} exists; {remedy}.")


def _fill(draft: Path, name: str, config_toml: str, forked_from: str) -> None:
    draft.mkdir(parents=True)
    for folder in _FOLDERS:
        (draft / folder).mkdir()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
    record = {
        "run_id": f"{slug}-{uuid.uuid4().hex[:8]}",  # part of file names in shared memory
        "incarnation": 0,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "forked_from": forked_from,
    }
    write_atomically(draft / _RECORD, _encoded(record))
    write_atomically(draft / "config.toml", config_toml.encode())


@contextlib.contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Whatever of a run meets a full disk, its user reads which disk, not where in the program."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"{error.filename or path} could not be written: {error.strerror} ({shutil.disk_usage(path).free} bytes "
            f"are free in {path}). Free some, then go on with streamrl train --resume {path}."
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the directory; the kernel lets go of it when the process ends, however it ends."""
    with (path / _LOCK).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise UserError(
                f"Run directory {path} is in use by {stream.read().strip() or 'another process'}; wait "
                "until it ends, or stop it."
            ) from error
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)[:200]})\n")
        stream.flush()
        yield


def _read_record(path: Path) -> dict[str, Any]:
    file = path / _RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record["run_id"], str) and isinstance(record["incarnation"], int):
            return record
        raise TypeError("run_id or incarnation has a wrong type")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} does not hold run_id and incarnation ({error}); it was changed by hand. Restore it, "
            "or start a new run with --fork-from."
        ) from error


def _opened(path: Path, record: dict[str, Any]) -> RunDir:
    return RunDir(path, Fence(record["run_id"], record["incarnation"]), record.get("forked_from", ""))


def _encoded(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
