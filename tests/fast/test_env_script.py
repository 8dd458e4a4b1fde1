"""`make env`: clones share packages and never code; what was interrupted is never taken for whole.

The packages here are two empty wheels made on the spot, and setuptools as it is installed, so that whole
installations run offline.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # above the bounds within

REPO = Path(__file__).resolve().parents[2]
BASE_PYTHON = Path(sys.base_prefix) / "bin" / "python3.11"
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "streamrl-jax"
version = "0.1.0"
[project.entry-points."vllm.general_plugins"]
streamrl_weights = "streamrl_jax.gen.weights:register"
[tool.setuptools]
packages = ["streamrl_jax"]
"""
ASK = """
import streamrl_jax, tinydep
from importlib.metadata import entry_points
plugins = entry_points(group="vllm.general_plugins").names
print(streamrl_jax.__file__, tinydep.__file__, "streamrl_weights" in plugins)
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def pack_installed(folder: Path, name: str) -> None:
    """Makes a wheel of an installed package again."""
    installed = metadata.distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{installed.version}-py3-none-any.whl", "w") as wheel:
        for file in installed.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                wheel.write(str(file.locate()), str(file))


def write_source(folder: Path, name: str, version: str) -> None:
    """Makes a source distribution, for a package that publishes no wheel."""
    setup = (
        f"from setuptools import setup\nsetup(name={name!r}, version={version!r}, py_modules=[{name!r}])\n"
    )
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for file, text in (("setup.py", setup), (f"{name}.py", "")):
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def make_clone(folder: Path) -> Path:
    (folder / "streamrl_jax").mkdir(parents=True)
    (folder / "streamrl_jax" / "__init__.py").touch()
    (folder / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "env.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    pins = ["tinydep==1.0", "torch==0.1", f"setuptools=={metadata.version('setuptools')}"]
    lock = "\n".join(["# comment", *pins, "tinysource==1.0  # from source", ""])
    (folder / "requirements.lock").write_text(lock)
    return folder


class Machine:
    """A place for shared packages and a folder of wheels, without a network."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "shared packages"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        write_wheel(self.wheels, "tinydep", "1.0")
        write_wheel(self.wheels, "torch", "0.1")
        write_source(self.wheels, "tinysource", "1.0")
        pack_installed(self.wheels, "setuptools")
        self.environ = os.environ | {
            "PYTHON": str(BASE_PYTHON),
            "CC": "false",
            "STREAMRL_ENV_ROOT": str(self.root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }

    def start(self, clone: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [clone / "scripts" / "env.sh", *arguments],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def make_env(self, clone: Path, *arguments: str, **environ: str) -> tuple[int, str]:
        process = self.start(clone, *arguments, **environ)
        said, _ = process.communicate(timeout=600)
        return process.returncode, said

    def shared(self, clone: Path) -> Path:
        return Path(self.make_env(clone, "--where")[1].strip())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def ask(clone: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [clone / ".venv" / "bin" / "python", "-c", ASK]
    return subprocess.run(
        command, cwd=clone.parent, env=environ, capture_output=True, text=True, timeout=600, check=True
    ).stdout.strip()


def test_clones_share_packages_and_not_code(machine: Machine, tmp_path: Path) -> None:
    clones = [make_clone(tmp_path / name) for name in ("one", "two")]
    shared = machine.shared(clones[0])
    site = shared / "lib" / "python3.11" / "site-packages"
    # An earlier start was killed half way, in both parts.
    site.mkdir(parents=True)
    (site / "half.py").touch()
    (clones[0] / ".venv" / "bin").mkdir(parents=True)

    runs = [machine.start(clone) for clone in clones]
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    # Started together, one installs and the other waits.
    assert sum("installing 4 packages" in text for text in said) == 1

    assert not (site / "half.py").exists()
    for clone in clones:
        assert ask(clone) == f"{clone}/streamrl_jax/__init__.py {site}/tinydep.py True"

    # No compiler: all but the source packages is there. With one, the next start completes it.
    assert all("reasoning-gym tasks stay unavailable" in text for text in said)
    assert not (site / "tinysource.py").exists()
    code, later = machine.make_env(clones[0], CC="true")
    assert code == 0, later
    assert (site / "tinysource.py").exists()

    stamp = (clones[0] / ".venv" / ".complete").stat().st_mtime_ns
    started = time.monotonic()
    assert machine.make_env(clones[0]) == (0, "")
    assert time.monotonic() - started < 300
    assert (clones[0] / ".venv" / ".complete").stat().st_mtime_ns == stamp


def test_a_torch_that_is_nowhere_leaves_no_environment_behind(machine: Machine, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "one")
    (machine.wheels / "torch-0.1-py3-none-any.whl").unlink()
    code, said = machine.make_env(clone)
    assert code == 1
    assert "taking it from PyTorch's CPU wheel index" in said
    assert "torch==0.1 is neither where pip is configured to look nor at" in said
    assert not (machine.shared(clone) / ".complete").exists()
    assert not (clone / ".venv").exists()


def test_another_python_is_refused_by_name(machine: Machine, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "one")
    other = tmp_path / "python3.12"
    other.write_text("#!/bin/sh\necho 3.12 linux x86_64\n")
    other.chmod(0o755)
    code, said = machine.make_env(clone, PYTHON=str(other))
    assert code == 1
    assert f"{other} is Python/system/processor '3.12 linux x86_64'" in said

    code, said = machine.make_env(clone, PYTHON="/no/such/python")
    assert code == 1
    assert "PYTHON=/no/such/python is not a command" in said


def test_a_place_that_cannot_be_written_is_named(machine: Machine, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "one")
    code, said = machine.make_env(clone, STREAMRL_ENV_ROOT="/dev/null/packages")
    assert code == 1
    assert "cannot write to /dev/null/packages; set STREAMRL_ENV_ROOT" in said
