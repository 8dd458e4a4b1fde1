"""Starts the controller's process, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from streamrl_jax.config import Config
from streamrl_jax.config_io import dump_config
from streamrl_jax.control.board import running_calls
from streamrl_jax.control.codec import error_from_proto
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.process import ControllerSpec, write_spec
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen.guard import REAP_S, TRACKERS_S
from streamrl_jax.gen.launch.local import exit_reason, instance_environment, log_tail
from streamrl_jax.gen.launch.plan import FleetPlan
from streamrl_jax.gen.whereabouts import CONTROL_FILE
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.rundir import RunDir

START_TIMEOUT_S: Final = 60.0
_INSTANCE_GRACE_S: Final = 8.0 + TRACKERS_S + REAP_S + 2.0
_LOST_S: Final = 3.0  # for the orderly end of a controller that is lost: it hangs, or was stopped
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 20
_DUMP_LINES: Final = 80  # where every thread is, which a controller that stands still writes down


@dataclass(eq=False)
class ControllerProcess:
    """A started controller.

    Attributes:
        address: Where it serves.
        process: Its process.
        lifeline: Its standard input: it ends when this is closed.
        home: The run directory.
        close_timeout_s: Bound on its orderly end.
        given_up: Nobody counts on its orderly end any more.
    """

    address: str
    process: subprocess.Popen[bytes]
    lifeline: IO[bytes]
    home: RunDir
    close_timeout_s: float
    given_up: bool = False

    def ended(self) -> str | None:
        """Why it has ended; None while it lives."""
        return exit_reason(self.process.poll())

    def give_up(self) -> tuple[str, str]:
        """It is lost: what it was doing, and the end of its log. `stop` counts no more on its orderly end."""
        self.given_up = True
        calls = running_calls(board_file(self.home))
        doing = f" while it computed the reward of {' and of '.join(calls)}" if calls else ""
        log = self.home.logs / "controller.log"
        return doing, f"The last lines of {log}:\n{log_tail(log, _DUMP_LINES if calls else _TAIL_LINES)}"

    def stop(self) -> None:
        """Ends it and its instances, in bounded time.

        Raises:
            ControlError: an instance did not end.
        """
        with contextlib.suppress(BrokenPipeError):
            self.lifeline.close()
        try:
            self.process.wait(_LOST_S if self.given_up else self.close_timeout_s)
        except subprocess.TimeoutExpired:  # it hangs, or was stopped: the guards see it end
            self.process.kill()
            self.process.wait()
        end = time.monotonic() + _INSTANCE_GRACE_S
        while left := _instances_left(self.home.path):
            if time.monotonic() > end:
                raise ControlError(
                    f"instances of {self.home.path} did not end within {_INSTANCE_GRACE_S:g} s after their "
                    f"controller: processes {', '.join(map(str, left))}"
                )
            time.sleep(_POLL_S)
        board_file(self.home).unlink(missing_ok=True)
        (self.home.path / CONTROL_FILE).unlink(missing_ok=True)


def board_file(home: RunDir) -> Path:
    """Where the controller writes which samples are being rewarded."""
    return home.path / "instances" / "controller.calls"


def start_controller(
    cfg: Config, home: RunDir, model_dir: Path, fleet: FleetPlan, settings: ControlSettings
) -> ControllerProcess:
    """Starts the controller's process, and waits until it serves.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        model_dir: The policy's checkpoint.
        fleet: What instances come from.
        settings: Of the controller; what does not follow from the configuration is passed on.

    Raises:
        UserError: It cannot start (the reward function cannot be loaded there, its address is taken); no instance
            was started.
    """
    (home.path / "instances").mkdir(exist_ok=True)
    spec_file = home.path / "instances" / "controller.json"
    log = home.logs / "controller.log"
    read_end, write_end = os.pipe()
    spec = ControllerSpec(
        config=dump_config(cfg),
        run_id=home.fence.run_id,
        incarnation=home.fence.incarnation,
        readers=settings.readers,
        model_dir=str(model_dir),
        fleet=fleet.to_json(),
        cost=settings.dispatch.cost.to_json(),
        control_file=str(home.path / CONTROL_FILE),
        board_file=str(board_file(home)),
        parent=os.getpid(),
        report=write_end,
    )
    write_spec(spec, spec_file)
    command = [sys.executable, "-P", "-m", "streamrl_jax.control.process", "--spec", str(spec_file)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            start_new_session=True,
            # A file of the user's that holds a loss beside the reward imports JAX: it must not take a device there.
            env=instance_environment(os.environ) | {"JAX_PLATFORMS": "cpu"},
        )
    os.close(write_end)
    assert process.stdin is not None
    started = ControllerProcess("", process, process.stdin, home, settings.close_timeout_s)
    try:
        started.address = _address(read_end, process, log)
    except BaseException:
        started.stop()
        raise
    return started


def _address(pipe: int, process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits for the one line that the process reports."""
    with os.fdopen(pipe, "rb") as stream:
        if select.select([stream], [], [], START_TIMEOUT_S)[0] and (line := stream.readline()):
            told = json.loads(line)
            if "error" in told:
                kind, message, details = told["error"]
                raise error_from_proto(pb.Error(type=kind, message=message, details=details))
            return told["address"]
    reason = exit_reason(process.poll()) or f"no address within {START_TIMEOUT_S:g} s"
    raise ControlError(
        f"the controller's process did not start: {reason}. The last lines of {log}:",
        log_tail(log, _TAIL_LINES),
    )


def _instances_left(run_dir: Path) -> list[int]:
    """Processes, guards included, that were started with a spec of this run directory."""
    mark = f"{run_dir.absolute() / 'instances'}{os.sep}".encode()
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            arguments = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            if any(each.startswith(mark) and each.endswith(b".json") for each in arguments):
                found.append(int(entry.name))
    return found
