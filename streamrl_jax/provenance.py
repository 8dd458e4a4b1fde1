"""What a run ran on: code, packages, machine, model, data. Written once for each life of a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from blake3 import blake3

from streamrl_jax import __version__
from streamrl_jax.config import Config
from streamrl_jax.config_io import FUNCTION_KEYS, dump_config
from streamrl_jax.files import write_atomically
from streamrl_jax.rundir import RunDir

_GIT_TIMEOUT_S: Final = 20.0
_HASHED_BYTES: Final = 32 * 2**30  # of one model; beyond it files are known by their beginning and size
_HEADER_BYTES: Final = 2**20
# Beginnings of names.
_KEPT_VARIABLES: Final = (
    "CUDA_",
    "HF_HUB_OFFLINE",
    "JAX_",
    "LD_LIBRARY_PATH",
    "NCCL_",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "STREAMRL_",
    "TOKENIZERS_",
    "TPU_",
    "VLLM_",
    "XLA_",
)
_SECRET_WORDS: Final = ("TOKEN_", "_TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


@dataclass(frozen=True)
class Provenance:
    """Everything that names what ran.

    Attributes:
        written: When, local time with its offset from UTC.
        run_id: The run.
        incarnation: Which life of it.
        command: The command line.
        directory: Where it ran.
        version: Of this package.
        commit: Of the source tree; empty when it is not a git checkout.
        dirty: Changed and new files, as git lists them; the difference itself is in `diff_file`.
        diff_file: File in the run directory with the uncommitted difference; empty: none.
        config_digest: blake3 of the resolved configuration.
        sources: Files of functions of one's own (reward, loss, advantage) -> their text.
        model: Digests of the checkpoint's files.
        data: Digests of the prompt files.
        packages: Installed packages and versions.
        machine: Python, system, processor, memory.
        devices: The trainer's devices, as JAX names them.
        environment: Variables that change how a run behaves; never secrets.
    """

    written: str
    run_id: str
    incarnation: int
    command: tuple[str, ...]
    directory: str
    version: str
    commit: str
    dirty: tuple[str, ...]
    diff_file: str
    config_digest: str
    sources: Mapping[str, str]
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    packages: Mapping[str, str]
    machine: Mapping[str, Any]
    devices: tuple[str, ...]
    environment: Mapping[str, str]


def write_provenance(
    run: RunDir, config: Config, devices: Sequence[str], model_dir: Path | None = None
) -> Provenance:
    """Collects the provenance and writes it into the run directory.

    Args:
        run: The open run directory.
        config: The resolved configuration.
        devices: The trainer's devices, as JAX names them.
        model_dir: Where the checkpoint lies; None: `model.path`, if that is a directory.

    Returns:
        What was written.
    """
    source = Path(__file__).parents[1]
    difference = _git(source, "diff", "HEAD", "--no-color")
    diff_file = run.provenance.with_suffix(".diff") if difference else None
    if diff_file:
        write_atomically(diff_file, difference.encode())
    found = Provenance(
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        run_id=run.fence.run_id,
        incarnation=run.fence.incarnation,
        command=tuple(sys.argv),
        directory=os.getcwd(),
        version=__version__,
        commit=_git(source, "rev-parse", "HEAD").strip(),
        dirty=tuple(_git(source, "status", "--porcelain").splitlines()),
        diff_file=diff_file.name if diff_file else "",
        config_digest=blake3(dump_config(config).encode()).hexdigest(),
        sources=_sources(config),
        model=digests([model_dir or Path(config.model.path)]),
        data=digests(Path(name) for name in (config.data.train, config.data.test, config.sft.data)),
        packages=_packages(),
        machine=_machine(),
        devices=tuple(devices),
        environment=kept_environment(os.environ),
    )
    write_atomically(run.provenance, (json.dumps(asdict(found), indent=2) + "\n").encode())
    return found


def digests(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Names files by their content.

    Args:
        paths: Files, or directories whose own files count; what does not exist (a hub id, `task:add`, an
            empty name) is passed over.

    Returns:
        File -> size and blake3. Beyond 32 GiB in all only the first MiB of a file is digested, which covers
        the header of a safetensors file; the key then reads `blake3_first_mib`.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and path.name:
            files += sorted(entry for entry in path.iterdir() if entry.is_file())
        elif path.is_file():
            files.append(path)
    found: dict[str, dict[str, Any]] = {}
    hashed = 0
    for file in files:
        size = file.stat().st_size
        hashed += size
        if hashed <= _HASHED_BYTES:
            digest = {"blake3": blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()}
        else:
            with file.open("rb") as stream:
                digest = {"blake3_first_mib": blake3(stream.read(_HEADER_BYTES)).hexdigest()}
        found[str(file)] = {"bytes": size, **digest}
    return found


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Picks the variables that change how a run behaves.

    Args:
        environment: All variables.

    Returns:
        Those of JAX, XLA, CUDA, NCCL, vLLM, SLURM and this project; none whose name speaks of a secret.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_KEPT_VARIABLES) and not any(word in name.upper() for word in _SECRET_WORDS)
    }


def _git(source: Path, *arguments: str) -> str:
    """Output of git in the source tree; empty when there is no git, no checkout, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _sources(config: Config) -> dict[str, str]:
    """Text of the files that functions of one's own come from; git need not know them."""
    values = config.model_dump()
    named = {
        values[section][key].rpartition(":")[0]
        for section, key in (name.split(".") for name in FUNCTION_KEYS)
    }
    return {name: Path(name).read_text(errors="replace") for name in sorted(named) if Path(name).is_file()}


def _packages() -> dict[str, str]:
    return dict(sorted((entry.name, entry.version) for entry in importlib.metadata.distributions()))


def _machine() -> dict[str, Any]:
    return {
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
