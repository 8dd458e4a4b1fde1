"""A controller over instances that are processes of their own, whose faults are real: signals, cut wires, full disks.

Every wait has a bound, and every fault a time stamp: `Scene.noticed_after` says how long the controller took.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen.launch import Launcher, LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.types import Fence, Manifest, Sample, WeightSource
from tests.fast.control_world import FENCE, SETTINGS, check_answer, decode, job, reward_by_length

LEASE_S = 2.0
_NAP_S = 0.05
TICK_S = LEASE_S / 4  # between two judgements (`control.instance`)
WAIT_S = 300.0  # which only a hang reaches: even on a slow machine an instance starts anew within a minute
SLACK_S = 5.0  # on every bound, beside the pauses of a busy machine (`Pauses`)

CHAOS = replace(SETTINGS, start_timeout_s=180, lease_s=30.0, heartbeat_interval_s=0.1, max_restarts=20)
"""Only the faults that a test makes are noticed: a busy machine is not taken for one."""
MEASURED = replace(CHAOS, lease_s=LEASE_S)
"""Where the lease is what is measured."""
PACE: Mapping[str, Any] = {"tokens_per_s": 200.0, "shortest": 5, "longest": 30}


def specs(names: Iterable[str], paces: Mapping[str, Mapping[str, Any]] | None = None) -> list[InstanceSpec]:
    """Counting instances of four slots; ``paces`` says which of them behave otherwise than `PACE`."""
    return [
        InstanceSpec(
            name,
            EngineOptions(json.dumps({**PACE, **(paces or {}).get(name, {})}), 512, max_num_seqs=4),
            lookahead=2,
        )
        for name in names
    ]


def local(
    run_dir: Path, names: Iterable[str], paces: Mapping[str, Mapping[str, Any]] | None = None
) -> LocalLauncher:
    """Starts them as the main job does."""
    return LocalLauncher(specs(names, paces), run_dir, module="tests.fake_instance", grace_s=0.5)


def pid_of(run_dir: Path, name: str) -> int:
    """The instance's process; its guard is another."""
    return json.loads((run_dir / "instances" / f"{name}.address").read_text())["pid"]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Guards and instances of a run: they name its directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(run_dir) in part for part in process.info["cmdline"] or ())
    ]


class Pauses:
    """How long a thread of this process, which only wants to sleep, was kept from waking: the machine was busy.

    Controller and event loop may have been kept waiting by as much.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic() + _NAP_S
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            if now - due > _NAP_S:
                self.seconds += now - due
            due = now + _NAP_S

    def close(self) -> None:
        """Ends it."""
        self._ended.set()
        self._thread.join()


def wait_until(
    what: Callable[[], object], timeout_s: float = WAIT_S, told: Callable[[], str] = lambda: ""
) -> None:
    """Polls until ``what`` is true; ``told`` says how things stand where it does not come true."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"not within {timeout_s} s; {told()}"
        time.sleep(0.01)


def known_tokens(controller: Controller, name: str) -> list[int]:
    """Of each answer that an instance has begun and not finished, how many tokens the controller has."""

    def count() -> list[int]:
        work = controller._core.work
        known = [work._partials.get(sample_id) for sample_id in work.ledger.held(name)]
        return [len(one.token_ids) for one in known if one is not None]

    return controller._ask(count)


@dataclass(eq=False)
class Scene:
    """A started controller, what it told and when, and the samples that were taken from it."""

    controller: Controller
    told: list[tuple[float, ControlEvent]]
    run_dir: Path
    pauses: Pauses
    samples: list[Sample] = field(default_factory=list)
    submitted: int = 0

    @property
    def slack_s(self) -> float:
        """What is added to every bound: `SLACK_S`, and the time for which the machine held this process up."""
        return SLACK_S + self.pauses.seconds

    def submit(self, iteration: int, prompts: int, n: int = 4, **rest: Any) -> str:
        """A training job of ``prompts * n`` samples; returns its id."""
        self.submitted += prompts * n
        asked = job(iteration, prompts, n, min_version=0, **rest)
        self.controller.submit(asked)
        return asked.job_id

    def take(self, job_id: str, at: Mapping[int, Callable[[], object]] | None = None) -> list[Sample]:
        """All of a job's samples; ``at`` says what happens when so many of them are here."""
        taken: list[Sample] = []
        for sample in self.controller.samples(job_id, WAIT_S):
            check_answer(sample.prompt, sample.generation)
            taken.append(sample)
            if at and (fault := at.get(len(taken))):
                fault()
        self.samples += taken
        return taken

    def signal(self, name: str, number: signal.Signals) -> float:
        """Sends a signal to an instance's process; returns when."""
        os.kill(pid_of(self.run_dir, name), number)
        return time.monotonic()

    def seen(
        self, kind: EventKind, instance: str = "", since: float = 0.0
    ) -> list[tuple[float, ControlEvent]]:
        """Events of a kind, with their times."""
        return [
            (when, event)
            for when, event in list(self.told)
            if event.kind is kind and instance in ("", event.instance) and when >= since
        ]

    def wait_for(self, what: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Polls until ``what`` is true."""
        wait_until(what, timeout_s, lambda: str(self.told[-5:]))

    def noticed_after(self, instance: str, fault_s: float) -> tuple[float, str]:
        """How long after a fault the instance was taken for dead, and why."""
        self.wait_for(lambda: self.seen(EventKind.LOST, instance, fault_s))
        when, event = self.seen(EventKind.LOST, instance, fault_s)[0]
        return when - fault_s, event.text

    def adds_up(self) -> Mapping[str, int]:
        """Every sample that was submitted was taken, once, and the totals say so (`Ledger.check`)."""
        times = Counter(sample.sample_id for sample in self.samples)
        assert len(times) == self.submitted and set(times.values()) == {1}
        counts = self.controller.counters()
        assert counts["opened"] == counts["delivered"] == counts["finished"] == self.submitted
        assert counts["cancelled"] == 0
        assert counts["dispatched"] == counts["finished"] + counts["taken_back"]
        assert counts["redispatched"] == counts["taken_back"]
        assert counts["redispatched"] == sum(event.count for _, event in self.seen(EventKind.REDISPATCH))
        self.wait_for(lambda: set(self.controller.sizes().values()) == {0})
        return counts


@contextmanager
def version_zero(fence: Fence) -> Iterator[tuple[Manifest, WeightSource]]:
    """Weights in shared memory, of which a counting engine takes no notice."""
    manifest, blob = pack(fence, 0, "Tiny", {"w": np.zeros(8, np.float32)})
    with BlobWriter(SHARED_MEMORY, fence, 0, len(blob)) as writer:
        writer.write(0, bytes(blob))
        path = writer.seal()
    try:
        yield manifest, WeightSource(path=str(path))
    finally:
        path.unlink()


@contextmanager
def scene(
    launcher: Launcher,
    run_dir: Path,
    settings: ControlSettings = CHAOS,
    fence: Fence = FENCE,
    publish: bool = True,
) -> Iterator[Scene]:
    """A controller with all instances ready and at version 0; ended afterwards, and nothing of it is left."""
    told: list[tuple[float, ControlEvent]] = []
    controller = Controller(
        settings,
        fence,
        launcher,
        reward_by_length,
        decode,
        lambda event: told.append((time.monotonic(), event)),
    )
    pauses = Pauses()
    with contextlib.closing(pauses), version_zero(fence) as (manifest, source):
        try:
            controller.start()
            controller.wait_ready(180)
            if publish:
                controller.publish(manifest, source).result(WAIT_S)
            yield Scene(controller, told, run_dir, pauses)
        finally:
            controller.close()
    if isinstance(launcher, LocalLauncher):
        assert processes_of(run_dir) == []


@contextmanager
def endpoints(run_dir: Path, names: Sequence[str], **pace: Any) -> Iterator[dict[str, str]]:
    """Instances that a user started by hand, which outlive controllers; their addresses by name."""
    with started(local(run_dir, names, dict.fromkeys(names, pace))) as found:
        yield found


@contextmanager
def started(launcher: LocalLauncher) -> Iterator[dict[str, str]]:
    """Runs a launcher's instances for as long as the block lasts."""
    from tests.chaos.proxies import LoopThread

    with LoopThread("by hand") as hand:
        running = {name: hand.call(launcher.start(name)) for name in launcher.names}
        try:
            yield {name: instance.address for name, instance in running.items()}
        finally:
            for instance in running.values():
                hand.call(instance.stop())
