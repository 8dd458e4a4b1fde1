"""What `streamrl bench stream` measures with: rounds of samples, through a controller and over bare gRPC streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import numpy as np

from streamrl_jax.bench.counting_engine import BARE_SUFFIX, Pace
from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.control.client import Peer
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.errors import UserError
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.launch import LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Assignment, Fence, Generation, Manifest, Prompt, Sampling, WeightSource

FENCE: Final = Fence("bench", 0)
PROMPT_TOKENS: Final = 64
_WAIT_S: Final = 60.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setting:
    """One run of the benchmark.

    Attributes:
        pace: Of each instance.
        instances: How many.
        slots: Answers at once, of each.
        lookahead: Further assignments that each holds.
        progress_interval_s: Between two Progress messages of an answer; 0: none.
        samples: Of each round.
        core: The processor core that the controller is bound to; negative: none.
    """

    pace: Pace
    instances: int
    slots: int
    lookahead: int
    progress_interval_s: float
    samples: int
    core: int = -1

    def control(self) -> ControlSettings:
        """What a controller is set up with."""
        return ControlSettings(progress_interval_s=self.progress_interval_s)

    def to_json(self) -> dict[str, Any]:
        """For a process of its own."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Setting:
        """Reads what `to_json` wrote."""
        return cls(**{**fields, "pace": Pace(**fields["pace"])})


@dataclass(frozen=True, eq=False)
class Round:
    """What one round measured.

    Attributes:
        samples: How many came.
        wall_s: From the first to the last.
        latency_s: Of each sample: from its end on the instance to its arrival at the reader.
        cpu_s: Of the process under measurement.
    """

    samples: int
    wall_s: float
    latency_s: np.ndarray
    cpu_s: float


class Way(Protocol):
    """One of the ways that samples can take."""

    def run(self, samples: int) -> Round:
        """Takes so many samples from the instances, and measures."""
        ...


def cpu_seconds(pid: int) -> float:
    """Processor seconds that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_bytes(pid: int | str) -> int:
    """The largest resident size that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def bind(pid: int, cores: set[int]) -> None:
    """Binds all threads of a process to cores; those that come inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


@contextlib.contextmanager
def bound(core: int) -> Iterator[None]:
    """Binds this process to a core for a while; negative: leaves it."""
    before = os.sched_getaffinity(0)
    if core >= 0:
        bind(os.getpid(), {core})
    yield
    bind(os.getpid(), before)


def launcher(home: Path, setting: Setting, fence: Fence) -> LocalLauncher:
    """Starts the counting instances as real ones are started."""
    home.mkdir(parents=True, exist_ok=True)
    pace = home / "pace.json"
    pace.write_text(json.dumps(dataclasses.asdict(setting.pace)))
    options = EngineOptions(str(pace), max_model_len=1 << 20, max_num_seqs=setting.slots)
    specs = [
        InstanceSpec(f"counting-{number}", options, lookahead=setting.lookahead, fence=fence)
        for number in range(setting.instances)
    ]
    return LocalLauncher(specs, home, module="streamrl_jax.bench.counting_engine")


def prompts(count: int) -> list[Prompt]:
    """Prompts of `PROMPT_TOKENS` tokens."""
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return [Prompt(str(row), ids, {}) for row in range(count)]


def sampling(tokens: int) -> Sampling:
    """As in training."""
    return Sampling(1.0, tokens, (0,), seed=1)


def reward(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
    """Costs nothing: what is measured is the way there and back."""
    return RewardResult(1.0, {})


class ThroughController:
    """Samples through a controller, with everything that a run has but the trainer.

    Args:
        controller: started, all instances at version 0.
        pid: of the process that it lives in.
        tokens: of each answer.
        reader_core: the core that this process is bound to while it reads; negative: as it is.
    """

    def __init__(self, controller: RunController, pid: int, tokens: int, reader_core: int = -1) -> None:
        self.controller = controller
        self.pid = pid
        self._tokens = tokens
        self._reader_core = reader_core
        self._jobs = itertools.count()

    def run(self, samples: int) -> Round:
        """One job, read to its end."""
        with bound(self._reader_core):
            return self._read(samples)

    def _read(self, samples: int) -> Round:
        number = next(self._jobs)
        job = Job(f"train/{number}", prompts(samples), 1, sampling(self._tokens), number, 0)
        cpu_s, arrivals, stamps = cpu_seconds(self.pid), [], []
        self.controller.submit(job)
        for sample in self.controller.samples(job.job_id, _WAIT_S):
            arrivals.append(time.monotonic())
            stamps.append(sample.generation.timings.queued_s)
        return _round(arrivals, stamps, cpu_seconds(self.pid) - cpu_s)


@contextlib.contextmanager
def in_process(home: Path, setting: Setting) -> Iterator[ThroughController]:
    """A controller in a thread of this process."""
    controller = Controller(
        setting.control(), FENCE, launcher(home, setting, FENCE), reward, lambda ids: "", lambda event: None
    )
    with _serving(controller):
        yield ThroughController(controller, os.getpid(), setting.pace.tokens)


@contextlib.contextmanager
def out_of_process(home: Path, setting: Setting) -> Iterator[ThroughController]:
    """A controller in a process of its own, and its face in this one; the reader shares the instances' core."""
    home.mkdir(parents=True, exist_ok=True)
    spec = home / "setting.json"
    spec.write_text(json.dumps(setting.to_json()))
    command = [sys.executable, "-m", "streamrl_jax.bench.counting_controller", str(spec)]
    with (home / "controller.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().decode().strip()
        if not address:
            raise UserError(f"the controller did not start; see {home / 'controller.log'}")
        controller = RemoteController(setting.control(), Peer(address, net.OPEN, FENCE), lambda event: None)
        with _serving(controller):
            yield ThroughController(controller, process.pid, setting.pace.tokens, setting.pace.core)
    finally:
        process.stdin.close()
        process.wait(_WAIT_S)


@contextlib.contextmanager
def _serving(controller: RunController) -> Iterator[None]:
    """Starts it, brings version 0 to all instances, and closes it."""
    try:
        controller.start()
        controller.wait_ready(_WAIT_S)
        with version_zero(FENCE) as (manifest, source):
            controller.publish(manifest, source).result(_WAIT_S)
            yield
    finally:
        controller.close()


def join(home: Path, core: int, number: int) -> float:
    """Seconds from an engine that has loaded to its first sample at the reader.

    The version is published and a sample waits while the instance starts, as in a run that it joins. How long loading
    takes differs from join to join, so that the controller's looks at it come at any moment.
    """
    setting = Setting(Pace(core=core, load_s=1.0 + number * 0.37 % 1.0), 1, 4, 2, 0.0, 1)
    fence = Fence("bench", number)
    controller = Controller(
        ControlSettings(), fence, launcher(home, setting, fence), reward, lambda ids: "", lambda event: None
    )
    try:
        controller.start()
        with version_zero(fence) as (manifest, source):
            controller.publish(manifest, source)
            controller.submit(Job("train/0", prompts(1), 1, sampling(512), 0, 0))
            first = next(controller.samples("train/0", _WAIT_S))
            return time.monotonic() - first.generation.timings.prefill_s
    finally:
        controller.close()


@contextlib.contextmanager
def version_zero(fence: Fence) -> Iterator[tuple[Manifest, WeightSource]]:
    """A version of one small tensor, in shared memory for as long as the context lasts."""
    manifest, blob = pack(fence, 0, "Counting", {"weight": np.zeros(16, np.float32)})
    with BlobWriter(SHARED_MEMORY, fence, 0, len(blob)) as writer:
        writer.write(0, memoryview(blob))
        path = writer.seal()
    try:
        yield manifest, WeightSource(path=str(path))
    finally:
        path.unlink()


class Bare:
    """The same messages over plain gRPC streams, one an instance, without controller or service.

    Args:
        addresses: of the bare streams.
        setting: as for the others.
    """

    def __init__(self, addresses: Sequence[str], setting: Setting) -> None:
        self._addresses = addresses
        self._setting = setting
        self._loop = (
            asyncio.new_event_loop()
        )  # one for all rounds: gRPC's poller stumbles over loops that were closed
        self._loop.set_exception_handler(_leave_pollers)

    def run(self, samples: int) -> Round:
        """Assign out, Finished in, Acknowledge out, as many under way as the instances hold."""
        cpu_s, arrivals, stamps = cpu_seconds(os.getpid()), [], []

        async def all_streams() -> None:
            share = samples // len(self._addresses)
            await asyncio.gather(*(self._stream(one, share, arrivals, stamps) for one in self._addresses))

        self._loop.run_until_complete(all_streams())
        return _round(arrivals, stamps, cpu_seconds(os.getpid()) - cpu_s)

    async def _stream(self, address: str, samples: int, arrivals: list[float], stamps: list[float]) -> None:
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        held = min(samples, self._setting.slots + self._setting.lookahead)
        names = (f"train/0/{number}/0" for number in range(samples))

        def assign() -> pb.GenerateRequest:
            assignment = Assignment(next(names), 0, ids, sampling(self._setting.pace.tokens))
            return pb.GenerateRequest(assign=codec.assignment_to_proto(assignment))

        async with grpc.aio.insecure_channel(address, options=net.CHANNEL_OPTIONS) as channel:
            call = rpc.StreamGenerationStub(channel).Generate()
            for _ in range(held):
                await call.write(assign())
            for number in range(samples):
                message = await call.read()
                arrivals.append(time.monotonic())
                stamps.append(message.finished.timings.queued_s)
                done = pb.Acknowledge(sample_id=message.finished.sample_id)
                await call.write(pb.GenerateRequest(acknowledge=done))
                if number + held < samples:
                    await call.write(assign())
            await call.done_writing()


def _leave_pollers(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not net.is_pollers(context.get("exception")):
        loop.default_exception_handler(context)


def instance_pids(home: Path) -> list[int]:
    """The processes of a launcher's instances."""
    return [
        json.loads(path.read_text())["pid"]
        for path in sorted((home / "instances").glob("counting-*.address"))
    ]


def bare_addresses(home: Path) -> list[str]:
    """Where the instances of a launcher serve the bare stream."""
    return [path.read_text() for path in sorted((home / "instances").glob(f"*.address{BARE_SUFFIX}"))]


def _round(arrivals: list[float], stamps: list[float], cpu_s: float) -> Round:
    at = np.asarray(arrivals)
    return Round(len(at), float(at.max() - at.min()), at - np.asarray(stamps), cpu_s)


OPEN: Final = {"controller in a thread": in_process, "controller in a process": out_of_process}
"""By name of the way: opens a controller for (directory, setting)."""
