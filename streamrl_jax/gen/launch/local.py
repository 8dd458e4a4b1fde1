"""Instances as processes of this machine, which end with the launcher whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import streamrl_jax
from streamrl_jax.errors import UserError
from streamrl_jax.gen.guard import GRACE_S, REAP_S, TRACKERS_S, kill_group
from streamrl_jax.gen.options import NO_ADDRESS_EXIT_CODE, InstanceSpec, engine_seed, write_spec

ANSWER_TIMEOUT_S: Final = 60.0
"""Bound on the time from the start of a process to its listening; loading comes after."""

TAIL_LINES: Final = 25
"""Lines of an instance's log that go into an error."""

_POLL_S: Final = 0.03


class LocalInstance:
    """A started process with its guard.

    Args:
        address: where it answers.
        process_group: of the instance, without the guard.
        guard: its guard's process.
        lifeline: write end of the guard's pipe; its closing ends the instance.
        log: its log file.
        grace_s: what it gets to end in good order.
    """

    managed = True

    def __init__(
        self,
        address: str,
        process_group: int,
        guard: subprocess.Popen[bytes],
        lifeline: IO[bytes],
        log: Path,
        grace_s: float,
    ) -> None:
        self.address = address
        self.process_group = process_group
        self._guard = guard
        self._lifeline = lifeline
        self._log = log
        self._grace_s = grace_s

    def ended(self) -> str | None:
        """Why its process has ended; None while it lives."""
        return exit_reason(self._guard.poll())

    def log_tail(self) -> str:
        """The last lines of its log."""
        return log_tail(self._log)

    async def stop(self) -> None:
        """Ends it: SIGTERM, a grace, then SIGKILL to its process group."""
        await _stop(self._guard, self._lifeline, self.process_group, self._grace_s)


class LocalLauncher:
    """Starts instances as processes of this machine.

    Invariant: none of their processes survives the launcher's by more than the grace, however it ended.

    Args:
        specs: one an instance. Listening address, address file and seed are the launcher's to set.
        run_dir: specs go to ``instances/``, logs to ``logs/<instance>.log``.
        run_seed: ``run.seed``; each start of each instance gets an engine seed of its own from it.
        python: interpreter of the generation environment; empty: this one.
        module: what is run with ``--spec FILE`` (tests start a fake).
        grace_s: what an instance gets to end in good order before its group is killed.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        run_dir: Path,
        *,
        run_seed: int = 0,
        python: str = "",
        module: str = "streamrl_jax.gen.instance",
        grace_s: float = GRACE_S,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._run_seed = run_seed
        self._python = python or sys.executable
        self._module = module
        self._grace_s = grace_s
        self._starts: dict[str, int] = {}
        for folder in ("instances", "logs"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> Sequence[str]:
        """The instances that can be started."""
        return tuple(self._specs)

    def admit(self, spec: InstanceSpec) -> None:
        """Learns of another instance, which can then be started."""
        self._specs[spec.name] = spec

    def forget(self, name: str) -> None:
        """The instance has left the run; its log stays."""
        self._specs.pop(name, None)

    def host(self, name: str) -> str:
        """Where an instance runs: on this host."""
        return socket.gethostname()

    def log_path(self, name: str) -> Path:
        """Where an instance's output goes."""
        return self._run_dir / "logs" / f"{name}.log"

    async def start(self, name: str) -> LocalInstance:
        """Starts one; returns as soon as it answers calls, long before its engine is loaded.

        Raises:
            UserError: it ended, or did not listen in time; with the last lines of its log.
        """
        number = self._starts.get(name, 0)
        self._starts[name] = number + 1
        address_file = self._run_dir / "instances" / f"{name}.address"
        address_file.unlink(missing_ok=True)
        guard, lifeline = self._spawn(self._write_spec(name, number, address_file), self.log_path(name))
        try:
            address, pid = await self._wait_until_it_answers(name, guard, address_file)
        except BaseException:
            await asyncio.shield(_stop(guard, lifeline, None, self._grace_s))
            raise
        return LocalInstance(address, pid, guard, lifeline, self.log_path(name), self._grace_s)

    def _write_spec(self, name: str, number: int, address_file: Path) -> Path:
        spec = self._specs[name]
        incarnation = spec.fence.incarnation if spec.fence else 0
        seed = engine_seed(self._run_seed, name, incarnation, number)
        spec = dataclasses.replace(
            spec, address_file=str(address_file), engine=dataclasses.replace(spec.engine, seed=seed)
        )
        path = self._run_dir / "instances" / f"{name}.json"
        try:
            write_spec(spec, path)
        except OSError as error:
            raise UserError(f"instance {name} did not start: {_unwritable(path)}") from error
        return path

    def _spawn(self, spec: Path, log: Path) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        read_end, write_end = os.pipe()
        command = [self._python, "-P", "-m", self._module, "--spec", str(spec)]
        guard = [self._python, "-P", "-m", "streamrl_jax.gen.guard"]
        guard += [str(read_end), str(os.getpid()), str(self._grace_s)]
        try:
            with log.open("ab", buffering=0) as output:
                # The instance works without its log: a disk that is full for it may be full for nothing else.
                with contextlib.suppress(OSError):
                    output.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
                process = subprocess.Popen(
                    [*guard, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end,),
                    start_new_session=True,
                    env=instance_environment(os.environ),
                )
        except OSError as error:
            os.close(write_end)
            raise UserError(f"gen.python = {self._python!r} cannot be run: {error}") from error
        finally:
            os.close(read_end)
        return process, os.fdopen(write_end, "wb")

    async def _wait_until_it_answers(
        self, name: str, guard: subprocess.Popen[bytes], address_file: Path
    ) -> tuple[str, int]:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not address_file.exists():
            code = guard.poll()
            if code == NO_ADDRESS_EXIT_CODE:
                raise UserError(f"instance {name} did not start: {_unwritable(address_file)}")
            reason = exit_reason(code)
            if reason is None and time.monotonic() > deadline:
                reason = f"no address within {ANSWER_TIMEOUT_S:g} s"
            if reason is not None:
                log = self.log_path(name)
                raise UserError(
                    f"instance {name} did not start: {reason}. The last lines of {log}: {log_tail(log, 5)}"
                )
            await asyncio.sleep(_POLL_S)
        found = json.loads(address_file.read_text())
        return found["address"], found["pid"]


async def _stop(
    guard: subprocess.Popen[bytes], lifeline: IO[bytes], process_group: int | None, grace_s: float
) -> None:
    lifeline.close()
    deadline = time.monotonic() + grace_s + TRACKERS_S + REAP_S + 1
    while guard.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if guard.poll() is None:  # stopped, say: the signal of its death ends the instance's main process
        guard.kill()
        guard.wait()
    if process_group is not None:
        await asyncio.to_thread(kill_group, process_group)


def _unwritable(path: Path) -> str:
    free = shutil.disk_usage(path.parent).free
    return (
        f"{path} could not be written ({free} bytes are free there). Free some, or lift the quota, or put the run "
        "directory (run.dir) on a larger disk"
    )


def exit_reason(code: int | None) -> str | None:
    """Words for a guard's exit code: None while it lives."""
    if code is None:
        return None
    number = -code if code < 0 else code - 128
    if 0 < number < signal.NSIG:
        return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}"


def log_tail(path: Path, lines: int = TAIL_LINES, most: int = 16384) -> str:
    """The last lines of a log, at most ``most`` bytes; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def instance_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of an instance: this one's, and this source tree on the path.

    Args:
        inherited: of the launcher.

    Returns:
        A copy. A package that is installed is left to the other interpreter's own installation: its folder
        holds this interpreter's other packages too. ``VLLM_PORT`` is left out: several instances of a host would
        all take their ports from there on; without it vLLM asks the kernel.
    """
    environment = {name: value for name, value in inherited.items() if name != "VLLM_PORT"}
    root = Path(streamrl_jax.__file__).resolve().parent.parent
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root not in installed:
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{rest}" if rest else str(root)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
