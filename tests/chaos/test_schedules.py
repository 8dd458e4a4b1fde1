"""Faults in any order, at any time, several at once: three instances, a random schedule, every sample once."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamrl_jax.gen.launch import LocalInstance, LocalLauncher, StaticLauncher
from streamrl_jax.types import Fence

from .harness import LEASE_S, MEASURED, local, pid_of, scene
from .proxies import LoopThread, Wire

NAMES = "abc"
KINDS = ("kill", "stop", "cut", "half_open", "delay", "throttle")
_lives = itertools.count()


@dataclass(frozen=True)
class Fault:
    """What happens to whom, when (seconds after the one before), and for how long."""

    kind: str
    name: str
    after_s: float
    lasts_s: float


FAULTS = st.builds(
    Fault,
    st.sampled_from(KINDS),
    st.sampled_from(NAMES),
    st.floats(0.0, 0.6),
    st.sampled_from([0.2, 0.5 * LEASE_S, 1.5 * LEASE_S]),
)


@dataclass(eq=False)
class Fleet:
    """Three endpoints behind wires, each restarted by hand when it was killed."""

    run_dir: Path
    hand: LoopThread
    launcher: LocalLauncher
    running: dict[str, LocalInstance]
    wires: dict[str, Wire]

    def meet(self, fault: Fault) -> None:
        """Lets a fault happen, waits, and mends it."""
        wire = self.wires[fault.name]
        match fault.kind:
            case "kill":
                os.kill(pid_of(self.run_dir, fault.name), signal.SIGKILL)
                self.hand.call(self.running[fault.name].stop())
                self.running[fault.name] = self.hand.call(self.launcher.start(fault.name))
                wire.target = self.running[fault.name].address
            case "stop":
                pid = pid_of(self.run_dir, fault.name)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(fault.lasts_s)
                os.kill(pid, signal.SIGCONT)
            case "delay":
                wire.delay(0.2)
            case "throttle":
                wire.throttle(10_000)
            case kind:
                getattr(wire, kind)()
        if fault.kind in ("cut", "half_open", "delay", "throttle"):
            time.sleep(fault.lasts_s)
            wire.mend()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    run_dir = tmp_path_factory.mktemp("fleet")
    launcher = local(run_dir, NAMES)
    with LoopThread("by hand") as hand:
        running = {name: hand.call(launcher.start(name)) for name in NAMES}
        wires = {name: Wire(hand, instance.address).open() for name, instance in running.items()}
        found = Fleet(run_dir, hand, launcher, running, wires)
        try:
            yield found
        finally:
            for instance in found.running.values():
                hand.call(instance.stop())


@given(st.lists(FAULTS, min_size=2, max_size=5))
@example([Fault("stop", name, 0.0, 1.5 * LEASE_S) for name in NAMES])
@example(
    [Fault("half_open", "a", 0.1, 1.5 * LEASE_S), Fault("kill", "b", 0.0, 0.2), Fault("cut", "c", 0.0, 0.2)]
)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_happens_each_sample_comes_once(fleet: Fleet, faults: list[Fault]) -> None:
    """Each schedule is a life of the run of its own, on the same endpoints, with progress on. Faults overlap: one that
    lasts is mended by a thread of its own.
    """
    launcher = StaticLauncher({name: wire.address for name, wire in fleet.wires.items()})
    often = replace(MEASURED, progress_interval_s=0.05, max_restarts=50)
    with scene(launcher, fleet.run_dir, often, Fence("schedule", next(_lives))) as found:
        job_id = found.submit(0, 75)
        at_work: dict[str, threading.Thread] = {}

        def disturb() -> None:
            for fault in faults:
                time.sleep(fault.after_s)
                if (busy := at_work.get(fault.name)) is not None:
                    busy.join()  # one fault at a time for each
                at_work[fault.name] = threading.Thread(target=fleet.meet, args=(fault,))
                at_work[fault.name].start()

        disturber = threading.Thread(target=disturb)
        disturber.start()
        found.take(job_id)
        disturber.join()
        for thread in at_work.values():
            thread.join()
        found.adds_up()
        found.wait_for(lambda: all(view.version == 0 for view in found.controller.pool()), 60)
        found.take(found.submit(1, 10))
        found.adds_up()
