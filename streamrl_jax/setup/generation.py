"""Opens the generation side of a run: the weight store, the instances' launcher, the controller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from streamrl_jax.bridge.store import StoredVersion, StoreServer, WeightStore
from streamrl_jax.config import Config
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen import net
from streamrl_jax.gen.launch.fleet import Fleet
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.devices import DeviceSplit
from streamrl_jax.setup.fleet import fleet_plan, open_fleet
from streamrl_jax.setup.inputs import Inputs
from streamrl_jax.setup.security import run_access

_LOOK_S = 1.0


def make_launcher(
    cfg: Config, home: RunDir, inputs: Inputs, split: DeviceSplit, files: net.AccessFiles
) -> Fleet:
    """The launcher of the run's local instances and of its endpoints.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        inputs: The policy's checkpoint and its tokenizer.
        split: Which instance runs on what.
        files: What run and instances share.

    Raises:
        UserError: An endpoint is no address, named twice, or on another machine in plain text
            without `security.insecure`.
    """
    return open_fleet(fleet_plan(cfg, home, inputs, split, files))


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

    controller: Controller
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
        UserError: ``bridge.listen`` cannot be bound; no process was started.
    """
    files = run_access(cfg, home)
    access = net.Access.from_files(files)
    with _open_store(cfg, home, access) as store:
        launcher = make_launcher(cfg, home, inputs, split, files)
        controller = Controller(
            ControlSettings.of(cfg, readers),
            home.fence,
            launcher,
            inputs.reward,
            inputs.tokenizer.decode,
            display.event,
            access=access,
        )
        with _running(controller, display):
            yield GenerationSide(controller, store)


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
def _running(controller: Controller, display: Display) -> Iterator[None]:
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


def _watch(controller: Controller, display: Display, done: threading.Event) -> None:
    """Keeps the instances' lines on the screen fresh."""
    while not done.wait(_LOOK_S):
        display.instances(controller.pool())
