"""A blob is seen whole or not at all, and what a dead process left behind is swept, nothing else."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.bridge.blob import (
    SHARED_MEMORY,
    BlobWriter,
    Owner,
    choose_directory,
    free_bytes,
    map_blob,
    open_blob,
    sweep,
)
from streamrl_jax.errors import UserError
from streamrl_jax.types import Fence

FENCE = Fence("run", 0)


def _write(directory: Path, data: bytes = b"abcd", version: int = 0) -> Path:
    with BlobWriter(directory, FENCE, version, len(data)) as writer:
        writer.write(0, data)
        return writer.seal()


def test_nothing_carries_the_name_of_a_blob_before_it_is_sealed(tmp_path: Path) -> None:
    with BlobWriter(tmp_path, FENCE, 3, 8) as writer:
        writer.write(4, b"efgh")
        assert not writer.path.exists()
        assert not list(tmp_path.glob("*.bin"))
        writer.write(0, b"abcd")
        assert bytes(writer.mapped()) == b"abcdefgh"
        path = writer.seal()
    assert path == writer.path and list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"abcdefgh"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="conversion"), BlobWriter(tmp_path, FENCE, 0, 8) as writer:
        writer.write(0, b"abcd")
        raise RuntimeError("conversion")
    assert not list(tmp_path.iterdir())


def test_a_sealed_blob_takes_no_more_bytes(tmp_path: Path) -> None:
    with BlobWriter(tmp_path, FENCE, 0, 4) as writer:
        writer.seal()
        with pytest.raises(ValueError, match="sealed"):
            writer.write(0, b"abcd")


@pytest.mark.parametrize(("offset", "data"), [(-1, b"a"), (2, b"abc"), (4, b"a")])
def test_bytes_outside_the_blob_are_refused(tmp_path: Path, offset: int, data: bytes) -> None:
    with BlobWriter(tmp_path, FENCE, 0, 4) as writer, pytest.raises(ValueError, match="outside"):
        writer.write(offset, data)


def test_a_mapping_is_read_only_and_outlives_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, b"abcd")
    view = map_blob(path, 4)
    array = np.frombuffer(view, np.uint8)
    path.unlink()
    assert view.readonly and not array.flags.writeable
    assert array.tobytes() == b"abcd"


def test_a_blob_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 4 bytes, expected 5"):
        map_blob(_write(tmp_path, b"abcd"), 5)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.bin"
    link.symlink_to(_write(tmp_path))
    with pytest.raises(OSError):
        map_blob(link, 4)


def test_no_room_names_path_needed_and_free_and_leaves_nothing() -> None:
    fence = Fence(f"noroom-{os.getpid()}", 0)
    needed = free_bytes(SHARED_MEMORY) + (1 << 50)  # refused at once: more than the whole of it
    with pytest.raises(UserError) as caught:
        BlobWriter(SHARED_MEMORY, fence, 7, needed)
    message = str(caught.value)
    assert (
        str(needed) in message
        and f"/dev/shm/streamrl-noroom-{os.getpid()}-0-v7" in message
        and "free" in message
    )
    assert not [name for name in os.listdir(SHARED_MEMORY) if f"noroom-{os.getpid()}" in name]


def test_the_first_directory_with_room_is_chosen() -> None:
    room = {Path("/small"): 10, Path("/large"): 100}
    assert choose_directory(10, list(room), room.__getitem__) == Path("/small")
    assert choose_directory(11, list(room), room.__getitem__) == Path("/large")
    with pytest.raises(
        UserError, match=r"needs 101 bytes.*/small \(10 bytes free\), /large \(100 bytes free\)"
    ):
        choose_directory(101, list(room), room.__getitem__)


def test_where_another_was_quicker_the_next_directory_is_taken(tmp_path: Path) -> None:
    """Two runs may see the same free bytes; who comes second learns of it when it reserves them."""
    needed = free_bytes(SHARED_MEMORY) + (1 << 50)
    seen = {SHARED_MEMORY: needed, tmp_path: needed}
    with pytest.raises(UserError, match=f"{tmp_path}/streamrl-run-0-v0.*no room for the weights"):
        open_blob([SHARED_MEMORY, tmp_path], FENCE, 0, needed, seen.__getitem__)
    assert not list(tmp_path.iterdir())
    with open_blob([SHARED_MEMORY, tmp_path], FENCE, 0, 4) as writer:
        assert writer.path.parent == SHARED_MEMORY


def test_a_run_id_with_a_slash_stays_in_its_directory(tmp_path: Path) -> None:
    with BlobWriter(tmp_path, Fence("../a b", 1), 0, 4) as writer:
        path = writer.seal()
    assert path.parent == tmp_path and path.exists()


def test_sweep_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from streamrl_jax.bridge.blob import BlobWriter\n"
        "from streamrl_jax.types import Fence\n"
        "w = BlobWriter(Path(sys.argv[1]), Fence('run', 0), 5, 4); w.seal()\n"
        "half = BlobWriter(Path(sys.argv[1]), Fence('run', 0), 6, 4)\n"
        "print('ready', flush=True); time.sleep(120)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        theirs = set(tmp_path.iterdir())
        assert len(theirs) == 2
        assert sweep([tmp_path]) == []  # it lives
    finally:
        child.send_signal(signal.SIGKILL)
    mine = _write(tmp_path)
    other = tmp_path / "streamrl-notes.bin"
    other.write_bytes(b"")
    # Unreaped, it is still in the process table; it has ended all the same.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert set(sweep([tmp_path, tmp_path / "absent"])) == theirs
    child.communicate(timeout=120)
    assert set(tmp_path.iterdir()) == {mine, other}


def test_a_process_that_took_over_the_number_is_not_the_owner() -> None:
    me = Owner.current()
    assert not me.is_gone()
    assert Owner(me.namespace, me.pid, me.start + 1).is_gone()
    assert not Owner(
        me.namespace + 1, me.pid, me.start + 1
    ).is_gone()  # another namespace: not to be seen from here
