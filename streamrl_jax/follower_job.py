"""A trainer process that is not the first: it trains as the first one does, and keeps no records.

::

    first process                                    every other one
      run directory, controller, instances
      meet  ◀────────────── jax.distributed ──────────▶  meet
      checkpoint to start from ──── Orders ───────────▶  the same run, life and checkpoint
                                                         reaches the controller (control.json)
      train/loop.py  ◀── samples, plan, stop: one order ──▶  train/loop.py
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from streamrl_jax.config import Config
from streamrl_jax.config_io import differences
from streamrl_jax.control.client import Peer
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.whereabouts import CONTROL_FILE
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.devices import DeviceSplit, look_around, trainer_environment
from streamrl_jax.setup.distributed import Member, Orders, failures_told, met, trainer_log
from streamrl_jax.setup.inputs import Functions, read_inputs
from streamrl_jax.setup.jax_setup import prepare_jax
from streamrl_jax.setup.security import run_access
from streamrl_jax.trace import Trace
from streamrl_jax.types import Fence

if TYPE_CHECKING:
    from streamrl_jax.main_job import RunResult

_OWN: Final = ("trainer.distributed.", "trainer.devices:")  # settings in which trainer processes may differ
_LOOK_S: Final = 0.2


def follow(cfg: Config, member: Member, functions: Functions) -> RunResult:
    """Trains as one of several processes, to the end that all of them come to.

    Args:
        cfg: The resolved configuration; that of the first process, but for `trainer.distributed`.
        member: This process.
        functions: Functions of one's own, the same as the first process's.

    Returns:
        How the run ended.

    Raises:
        UserError: Something given is wrong, or the run cannot go on; names it and the remedy.
    """
    inputs = read_inputs(cfg, functions)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal().listening())
        machine = look_around(dict(os.environ))
        named = tuple(gpu.strip() for gpu in cfg.trainer.devices.split(",") if gpu.strip())
        own = DeviceSplit((), named or machine.gpus)
        prepare_jax(cfg, trainer_environment(cfg, own))
        stack.enter_context(met(cfg, member, own.trainer))
        from streamrl_jax.main_job import RunResult, run_loop
        from streamrl_jax.train.assemble import Edges, Restore, assembled
        from streamrl_jax.train.checkpoint import Checkpointer
        from streamrl_jax.train.processes import told_by_the_first

        orders = Orders(**told_by_the_first(None))
        _check_same(cfg, orders, member)
        home = RunDir(Path(orders.run_dir), Fence(orders.run_id, orders.incarnation))
        log = stack.enter_context(trainer_log(home.logs, member.index).open("a"))
        steps = cfg.trainer.total_training_steps
        display = stack.enter_context(Display(cfg.run.name, steps, console=Console(file=log)))
        display.phase("control", "waiting for the controller")
        controller = stack.enter_context(_reached(cfg, home, member))
        display.done("control")
        stack.enter_context(failures_told(controller))
        stack.enter_context(stop.relayed(controller.stop))
        checkpointer = stack.enter_context(Checkpointer(home.checkpoints, cfg.trainer.max_ckpt_to_keep))
        restore = None
        if orders.checkpoints:
            source = checkpointer
            if orders.forked:
                source = stack.enter_context(Checkpointer(Path(orders.checkpoints), 1))
            source.trust(orders.step)
            restore = Restore(source, orders.step, orders.forked)
        trace = stack.enter_context(Trace(home.logs / f"trainer-{member.index}.trace.json"))
        edges = Edges(controller, checkpointer, display, trace, stop)
        try:
            parts, start = stack.enter_context(assembled(cfg, home, inputs, edges, restore))
        except StopRequested as request:
            return RunResult(home.path, orders.step, (), str(request))
        return run_loop(parts, start, home, display)


def _check_same(cfg: Config, orders: Orders, member: Member) -> None:
    """Holds this process's configuration against the first one's."""
    first = Config.model_validate_json(orders.config)
    if differing := [line for line in differences(first, cfg) if not line.startswith(_OWN)]:
        raise UserError(
            f"trainer process {member.index} was started with another configuration than process 0 "
            f"({'; '.join(differing)}); start all of them with the same files and overrides"
        )


@contextlib.contextmanager
def _reached(cfg: Config, home: RunDir, member: Member) -> Iterator[RemoteController]:
    """The run's controller, found by the file that it writes; left at the end."""
    found = _found(home, cfg.trainer.distributed.start_timeout_s)
    settings = ControlSettings.of(cfg, member.count)
    peer = Peer(
        found["address"],
        net.Access.from_files(run_access(cfg, home)),
        home.fence,
        member.index,
        member.count,
        settings.reader_lease_s,
    )
    controller = RemoteController(settings, peer, lambda event: None)
    try:
        controller.start()
        yield controller
    finally:
        controller.close()


def _found(home: RunDir, timeout_s: float) -> dict[str, Any]:
    path = home.path / CONTROL_FILE
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if (found["run_id"], found["incarnation"]) == (home.fence.run_id, home.fence.incarnation):
                return found
        if time.monotonic() > end:
            raise UserError(
                f"{path} of run {home.fence.run_id}, life {home.fence.incarnation}, was not there within "
                f"{timeout_s:g} s (trainer.distributed.start_timeout_s): the first trainer process has not started the "
                "controller, or the run directory is not shared between the hosts"
            )
        time.sleep(_LOOK_S)
