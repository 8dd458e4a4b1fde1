"""A full disk names the file that did not fit."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl_jax.files import naming, write_atomically
from streamrl_jax.metrics import JsonlSink, record
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.types import Fence


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process grows: fails as a quota does, and needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("before")
    with pytest.raises(OSError, match=r"run\.json") as caught, no_room():
        write_atomically(path, b"after")
    assert caught.value.filename == str(path) and caught.value.errno == errno.EFBIG
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_metrics(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"metrics\.jsonl"), no_room():
        sink.write(record(1, 0.0, {"a": 1.0}))
    sink.close()


def test_samples(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, Fence("run", 0), str)
    with pytest.raises(OSError, match=r"iteration_000003\.parquet") as caught, no_room():
        log.write(3, [], 3)
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "iteration_000003.parquet").exists()


def test_a_name_that_is_there_already_is_kept() -> None:
    with pytest.raises(OSError, match="inner"), naming(Path("outer")):
        raise OSError(errno.ENOSPC, "full", "inner")
