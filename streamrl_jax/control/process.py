"""The controller as a process of its own, without JAX: ``python -m streamrl_jax.control.process --spec FILE.json``.

    main job ──pipe──▶ controller ──pipe──▶ guard ──▶ instance

It ends, and its instances with it, when the main job says so, closes the pipe or is killed. What it has to report to
the main job (where it listens, or why it cannot start) is one line of JSON on a pipe of its own; its log is its
standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamrl_jax.config_io import Layer, config_from_layers
from streamrl_jax.control.board import Board
from streamrl_jax.control.codec import error_to_proto
from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.hub import Hub
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.server import RunControlService, Serving, serve
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import USER_ERROR_EXIT_CODE, UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.launch.plan import FleetPlan
from streamrl_jax.gen.parentage import die_with
from streamrl_jax.ranker.cost import TokenLatency
from streamrl_jax.rewards import load_reward
from streamrl_jax.setup.fleet import open_fleet
from streamrl_jax.types import Fence

log = logging.getLogger(__name__)

_THE_MAIN_JOBS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send these to all processes of a job: the main job obeys them, and needs its controller meanwhile."""

_PULSE_S: Final = 1.0
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class ControllerSpec:
    """What the process is started with; travels as JSON.

    Attributes:
        config: The resolved configuration, TOML.
        run_id: Of the run's fence.
        incarnation: Of the run's fence.
        readers: Trainer processes.
        model_dir: The policy's checkpoint, for its tokenizer.
        fleet: What instances come from (`FleetPlan`), JSON.
        cost: Of a decode step (`TokenLatency`), JSON.
        control_file: Where it writes at which address it is found.
        board_file: Where it writes which samples are being rewarded.
        parent: Process id of the main job, with which it ends.
        report: File descriptor of the pipe to the main job.
    """

    config: str
    run_id: str
    incarnation: int
    readers: int
    model_dir: str
    fleet: str
    cost: Mapping[str, Any]
    control_file: str
    board_file: str
    parent: int
    report: int

    @property
    def fence(self) -> Fence:
        """This life of the run."""
        return Fence(self.run_id, self.incarnation)


def write_spec(spec: ControllerSpec, path: Path) -> None:
    """Writes a spec as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(spec), indent=1))


def read_spec(path: Path) -> ControllerSpec:
    """Reads what `write_spec` wrote."""
    return ControllerSpec(**json.loads(path.read_text()))


class Process:
    """Everything of the controller's process.

    Call order: construct (loads what can be refused), ``run``.

    Args:
        spec: how it is set up.

    Raises:
        UserError: the reward function or the tokenizer cannot be loaded, or an endpoint is none.
    """

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec = spec
        cfg = config_from_layers([Layer("the run's configuration", tomllib.loads(spec.config))])
        self._settings = ControlSettings.of(cfg, spec.readers, TokenLatency.from_json(spec.cost))
        plan = FleetPlan.from_json(spec.fleet)
        access = net.Access.from_files(plan.access)
        self._serving = Serving(access, cfg.control.listen, Path(spec.control_file))
        workers = self._settings.reward_workers
        self._rewards = RewardWorkers(
            load_reward(cfg.reward),
            Tokenizer.load(Path(spec.model_dir)).decode,
            self._settings.reward_timeout_s,
            workers,
            Board(Path(spec.board_file), workers),
        )
        self._hub = Hub(spec.readers, _log_event)
        self._core = ControllerCore(
            self._settings, spec.fence, open_fleet(plan), self._rewards, self._hub.event, access
        )

    async def run(self) -> None:
        """Serves until it is told to end."""
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), told.set)  # readable when the main job closes its end, or dies
        service = RunControlService(self._core, self._hub, told.set)
        self._rewards.start()
        async with serve(service, self._core, self._serving) as address:
            self._core.begin()
            self._core.when_failed(lambda error: log.error("the run ends: %s", error))
            self._core.spawn(self._pulse(), name="pulse")
            report(self._spec.report, {"address": address, "pid": os.getpid()})
            log.info("serves at %s", address)
            await told.wait()
            loop.remove_reader(sys.stdin.fileno())
            faulthandler.cancel_dump_traceback_later()
            log.info("told to end")
            await self._core.end()
        self._rewards.close(1.0)

    async def _pulse(self) -> None:
        """When this loop stands still, a thread of C writes into the log where everything is."""
        while True:
            faulthandler.dump_traceback_later(self._settings.reader_lease_s / 2)
            await asyncio.sleep(_PULSE_S)


def report(pipe: int, what: dict[str, Any]) -> None:
    """Tells the main job one thing, and nothing after it."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "w") as stream:
        stream.write(json.dumps(what) + "\n")


def _log_event(event: ControlEvent) -> None:
    if event.kind is not EventKind.PHASE:
        log.info(
            "%s %s %s %s", event.kind, event.instance, event.version if event.version >= 0 else "", event.text
        )


def main(arguments: list[str]) -> int:
    """Becomes the controller of the spec in ``--spec FILE.json``; returns its exit code."""
    spec = read_spec(Path(arguments[arguments.index("--spec") + 1]))
    die_with(spec.parent)
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    for number in _THE_MAIN_JOBS:
        signal.signal(number, signal.SIG_IGN)
    try:
        process = Process(spec)
        asyncio.run(process.run())
    except UserError as error:
        told = error_to_proto(error)
        log.error("%s", error)
        report(spec.report, {"error": [told.type, told.message, told.details]})
        return USER_ERROR_EXIT_CODE
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a reward that never returns must not keep the interpreter
