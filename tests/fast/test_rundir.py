"""Run directories: whole or not there, one process at a time, a new incarnation at each resume."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl_jax import rundir
from streamrl_jax.errors import UserError
from streamrl_jax.files import write_atomically
from streamrl_jax.types import Fence

REPOSITORY = Path(__file__).parents[2]


def test_a_run_is_made_whole_with_its_own_id(tmp_path: Path) -> None:
    with rundir.create(tmp_path / "runs" / "My Run!", "[run]\n") as run:
        assert re.fullmatch(r"my-run-[0-9a-f]{8}", run.fence.run_id)
        assert run.fence.incarnation == 0
        assert run.config.read_text() == "[run]\n"
        assert run.samples.is_dir() and run.checkpoints.is_dir() and run.logs.is_dir()
        assert run.provenance.name == "provenance.json"
        assert not run.has_progress
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["My Run!"]


def test_each_resume_is_a_new_incarnation_of_the_same_run(tmp_path: Path) -> None:
    with rundir.create(tmp_path / "r", "") as first:
        pass
    for incarnation in (1, 2):
        with rundir.reopen(tmp_path / "r") as again:
            assert again.fence == Fence(first.fence.run_id, incarnation)
            assert rundir.look(tmp_path / "r").fence == again.fence
            assert again.provenance.name == f"provenance-{incarnation}.json"


def test_a_resume_with_changes_is_what_the_next_resume_finds(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with rundir.create(path, "a = 1\n"):
        pass
    for text in ("a = 1\n", "a = 2\n", ""):
        with rundir.reopen(path, text) as run:
            assert run.config.read_text() == (text or "a = 2\n")
    assert (path / "config-1.toml").read_text() == "a = 1\n"
    assert sorted(entry.name for entry in path.glob("config*.toml")) == ["config-1.toml", "config.toml"]


def test_an_empty_directory_is_taken_and_any_other_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with rundir.create(tmp_path / "empty", "") as run:
        run.metrics.write_text("{}\n")
    with pytest.raises(UserError, match=r"empty exists; continue it with --resume, choose another run\.name"):
        rundir.create(tmp_path / "empty", "").__enter__()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(UserError, match="exists and is not a run directory"):
        rundir.create(tmp_path / "photos", "").__enter__()
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["a.jpg"]


def test_a_fault_of_the_user_before_any_progress_leaves_the_name_free(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model"), rundir.create(tmp_path / "r", ""):
        raise UserError("no such model")
    assert list(tmp_path.iterdir()) == []


def test_what_has_progress_or_failed_otherwise_stays(tmp_path: Path) -> None:
    with pytest.raises(UserError), rundir.create(tmp_path / "far", "") as run:
        (run.checkpoints / "step_1").mkdir()
        raise UserError("the reward function failed")
    with pytest.raises(UserError), rundir.create(tmp_path / "logged", "") as run:
        (run.logs / "instance-0.log").write_text("why it did not start")
        raise UserError("instance-0 did not start")
    with pytest.raises(ZeroDivisionError), rundir.create(tmp_path / "crashed", ""):
        raise ZeroDivisionError
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["crashed", "far", "logged"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be made: Not a directory.*run\.dir"):
        rundir.create(tmp_path / "file" / "r", "").__enter__()


def test_a_second_process_is_refused_with_the_first_ones_id_until_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\nfrom streamrl_jax import rundir\n"
        "with rundir.create(pathlib.Path(sys.argv[1]), ''):\n    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    path = tmp_path / "r"
    command = [sys.executable, "-c", code, str(path)]
    holder = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            rundir.reopen(path).__enter__()
        assert rundir.look(path).fence.incarnation == 0
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=120)
    with rundir.reopen(path) as run:
        assert run.fence.incarnation == 1
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            rundir.reopen(path).__enter__()


def test_a_missing_run_names_the_near_ones(tmp_path: Path) -> None:
    with rundir.create(tmp_path / "demo", ""):
        pass
    with pytest.raises(UserError, match=f"dmo does not exist; there are {tmp_path}/demo"):
        rundir.look(tmp_path / "dmo")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"other is not a run directory: it holds no run\.json"):
        rundir.look(tmp_path / "other")
    with pytest.raises(UserError, match=rf"holds no run\.json\. Did you mean {tmp_path}/demo\?"):
        rundir.look(tmp_path)  # as the folder of a demo, which holds its run
    with pytest.raises(UserError, match="no run is in"):
        rundir.look(tmp_path / "other" / "x")


@pytest.mark.parametrize("text", ["", "{}", '{"run_id": "a", "incarnation": "0"}', "[1]"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    with rundir.create(tmp_path / "r", ""):
        pass
    (tmp_path / "r" / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json does not hold run_id and incarnation"):
        rundir.look(tmp_path / "r")


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "text, not bytes")  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_full_disk_is_told_in_a_paragraph(tmp_path: Path, resumed: bool) -> None:
    path = tmp_path / "run"
    if resumed:
        with rundir.create(path, ""):
            pass
    opened = rundir.reopen(path) if resumed else rundir.create(path, "")
    with pytest.raises(UserError, match=r"run could not be written: No space left .* --resume .*run"), opened:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
