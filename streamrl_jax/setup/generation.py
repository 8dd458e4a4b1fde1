"""Opens the generation side of a run: the weight store, the instances' launcher, the controller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from streamrl_jax.bridge.store import StoredVersion, StoreServer, WeightStore
from streamrl_jax.config import Config
from streamrl_jax.control.client import Peer
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.protocol import RunController
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.server import Serving
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen import net
from streamrl_jax.gen.launch.plan import FleetPlan
from streamrl_jax.gen.whereabouts import CONTROL_FILE
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.controller import start_controller
from streamrl_jax.setup.devices import DeviceSplit
from streamrl_jax.setup.fleet import fleet_plan, open_fleet
from streamrl_jax.setup.inputs import Inputs
from streamrl_jax.setup.security import run_access
from streamrl_jax.setup.step_cost import step_cost

_LOOK_S = 1.0


@dataclass
class Store:
    """The run's weight store, for instances on other hosts. It is open before there is anything to serve.

    Attributes:
        address: ``host:port`` as other hosts reach it.
        versions: Gives what lies ready; whoever publishes sets it.
    """

    address: str = ""
    versions: Callable[[], Mapping[int, StoredVersion]] = dict


@dataclass(frozen=True)
class GenerationSide:
    """What the trainer side talks to.

    Attributes:
        controller: Jobs in, samples out; brings versions to the instances.
        store: Where instances on other hosts fetch them.
    """

    controller: RunController
    store: Store


@contextlib.contextmanager
def open_generation(
    cfg: Config, home: RunDir, inputs: Inputs, split: DeviceSplit, display: Display, readers: int = 1
) -> Iterator[GenerationSide]:
    """Opens the weight store, starts the instances and a controller over them; ends all, whatever happens.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        inputs: Model, tokenizer, reward.
        split: Which instance runs on what.
        display: Shows what the instances do.
        readers: Trainer processes.

    Yields:
        The generation side; its instances load meanwhile.

    Raises:
        UserError: ``bridge.listen`` cannot be bound, or ``dispatch.cost`` cannot be read; no process was started.
    """
    cost = step_cost(cfg, inputs.model_dir / "config.json")
    files = run_access(cfg, home, starts=True)
    access = net.Access.from_files(files)
    with _open_store(cfg, home, access) as store:
        plan = fleet_plan(cfg, home, inputs, split, files)
        settings = ControlSettings.of(cfg, readers, cost)
        if cfg.control.process and not inputs.reward_given:
            controller = _in_a_process(cfg, home, inputs, plan, settings, access, display)
        else:
            controller = Controller(
                settings,
                home.fence,
                open_fleet(plan),
                inputs.reward,
                inputs.tokenizer.decode,
                display.event,
                access=access,
                serving=Serving(access, cfg.control.listen, home.path / CONTROL_FILE),
            )
        with _running(controller, display):
            yield GenerationSide(controller, store)


def _in_a_process(
    cfg: Config,
    home: RunDir,
    inputs: Inputs,
    plan: FleetPlan,
    settings: ControlSettings,
    access: net.Access,
    display: Display,
) -> RunController:
    started = start_controller(cfg, home, inputs.model_dir, plan, settings)
    peer = Peer(
        started.address,
        access,
        home.fence,
        world=settings.readers,
        lease_s=settings.reader_lease_s,
        ended=started.ended,
        situation=started.give_up,
    )
    return RemoteController(settings, peer, display.event, started.stop)


@contextlib.contextmanager
def _open_store(cfg: Config, home: RunDir, access: net.Access) -> Iterator[Store]:
    store = Store()
    service = WeightStore(lambda: home.fence, lambda: store.versions())
    with StoreServer(service, cfg.bridge.listen, access) as server:
        store.address = advertised(server.address, cfg.bridge.advertise)
        yield store


def advertised(address: str, host: str) -> str:
    """The store's address as other hosts reach it.

    Args:
        address: ``host:port`` that was bound.
        host: ``bridge.advertise``; empty: the bound one.
    """
    return f"{host}:{address.rpartition(':')[2]}" if host else address


@contextlib.contextmanager
def _running(controller: RunController, display: Display) -> Iterator[None]:
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(controller, display, done), name="watch-pool", daemon=True
    )
    try:
        controller.start()
        watcher.start()
        yield
    finally:
        done.set()
        if watcher.is_alive():
            watcher.join(2 * _LOOK_S)
        controller.close()


def _watch(controller: RunController, display: Display, done: threading.Event) -> None:
    """Keeps the instances' lines on the screen fresh."""
    while not done.wait(_LOOK_S):
        try:
            display.instances(controller.pool())
        except ControlError:  # it is gone: the trainer's own call says so
            return
