"""What is left of the directory in which a command starts instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.setup.serving import scratch


def fill(folder: Path) -> None:
    (folder / "logs" / "instance-0.log").write_text("what it said")
    (folder / "weights").mkdir()
    (folder / "weights" / "step_0").write_bytes(b"0" * 1000)
    (folder / "control.sock").touch()
    (folder / "link").symlink_to(folder / "weights")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("error", [None, StopRequested("SIGTERM"), KeyboardInterrupt()])
def test_nothing_is_left_where_nothing_failed(error: BaseException | None, place: Path) -> None:
    if error is None:
        with scratch("eval") as folder:
            fill(folder)
    else:
        with pytest.raises(type(error)), scratch("eval") as folder:
            fill(folder)
            raise error
    assert list(place.iterdir()) == []


def test_of_what_failed_the_logs_are_kept_and_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError), scratch("eval") as folder:
        fill(folder)
        raise UserError("instance-0 does not start")
    assert [path.name for path in folder.rglob("*")] == ["logs", "instance-0.log"]
    assert f"the logs of what failed are kept: {folder}/logs" in capsys.readouterr().err


def test_where_no_instance_had_begun_no_logs_are_kept(place: Path) -> None:
    with pytest.raises(UserError), scratch("eval"):
        raise UserError("model.path has no tokenizer")
    assert list(place.iterdir()) == []
