"""Generation instances for the controller's tests: real services over real gRPC, with a counting engine
inside.

They run on a loop of their own, as processes of their own would, and can be killed, hung, cut off and
restarted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import numpy as np

from streamrl_jax.control.client import Peer
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.server import Serving
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen import net
from streamrl_jax.gen.host import host_id
from streamrl_jax.gen.launch import Launched, Launcher
from streamrl_jax.gen.protocol import Delta, EngineFailed
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.rewards import RewardFn, RewardResult
from streamrl_jax.types import (
    NO_VERSION,
    Assignment,
    Fence,
    Generation,
    Manifest,
    Prompt,
    Sampling,
    TokenIds,
    WeightSource,
    expand_runs,
)
from tests.fakes import FakeEngine, FaultyStream, fake_logprob, fake_token

T = TypeVar("T")
FENCE = Fence("run", 0)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=32, stop_token_ids=(0,), seed=5)

SETTINGS = ControlSettings(
    start_timeout_s=60,
    heartbeat_interval_s=0.05,
    lease_s=20.0,
    max_restarts=3,
    update_timeout_s=60,
    drain_timeout_s=60,
    reward_timeout_s=60,
    close_timeout_s=60,
)
"""A busy machine is not taken for a dead instance."""
HASTY = replace(SETTINGS, lease_s=1.0)
"""For what is found out by a lease that runs out."""
LAST_WORDS_S = 5.0
"""A failed engine's process tells why for so long, unless it is ended before: long enough to be heard in any case."""


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Prompts whose answers differ."""
    return [Prompt(str(row), np.asarray([1, row], np.int32), {}) for row in range(first, first + count)]


def job(iteration: int, count: int = 8, n: int = 4, min_version: int | None = None, **rest: Any) -> Job:
    """A training job of ``count * n`` samples."""
    least = iteration if min_version is None else min_version
    return Job(f"train/{iteration}", prompts(count, 100 * iteration), n, SAMPLING, iteration, least, **rest)


def manifest(version: int, fence: Fence = FENCE) -> Manifest:
    """A version without tensors: the engine counts and needs none."""
    return Manifest(fence, version, (), 0, bytes(32), "Tiny")


def source(version: int) -> WeightSource:
    """Where it would lie."""
    return WeightSource(path=f"/dev/shm/streamrl-{FENCE.run_id}-{FENCE.incarnation}-v{version}.test.bin")


def reward_by_length(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
    """Easy to check."""
    return RewardResult(float(len(answer.token_ids)), {"words": float(len(text.split()))})


def decode(ids: TokenIds) -> str:
    """The ids as words."""
    return " ".join(map(str, ids))


def check_answer(sample_prompt: Prompt, answer: Generation) -> None:
    """The answer is the one that the counting engine gives to this prompt."""
    ids = [fake_token(sample_prompt.token_ids, index) for index in range(len(answer.token_ids))]
    assert answer.token_ids.tolist() == ids
    np.testing.assert_allclose(answer.logprobs, [fake_logprob(token) for token in ids], rtol=1e-6)
    assert len(expand_runs(answer.versions)) == len(ids)


@dataclass
class HeldEngine(FakeEngine):
    """Each answer stands still after ``held_at(assignment)`` tokens (0: it does not) until `thaw`; pings go on.

    A test that needs an answer in the middle of its making so has one, however slow the machine is.
    """

    held_at: Callable[[Assignment], int] = lambda assignment: 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def thaw(self) -> None:
        super().thaw()
        self._released.set()

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        left = self.held_at(assignment)
        async for delta in super().generate(assignment):
            yield delta
            left -= 1
            if left == 0:
                await self._released.wait()


@dataclass
class LoadingEngine(FakeEngine):
    """Loads until `thaw`."""

    _loaded: asyncio.Event = field(default_factory=asyncio.Event)

    def thaw(self) -> None:
        super().thaw()
        self._loaded.set()

    async def start(self, report: Callable[[str], None]) -> None:
        report("counting to start")
        await self._loaded.wait()


@dataclass(eq=False)
class Process:
    """One life of an instance. What the controller sees of it is what it sees of a real process."""

    world: World
    name: str
    engine: FakeEngine
    faults: FaultyStream
    server: grpc.aio.Server
    address: str
    managed: bool
    running: asyncio.Task[None]
    exit_code: int | None = None
    stopped: bool = False

    def ended(self) -> str | None:
        return f"exit code {self.exit_code}" if self.managed and self.exit_code is not None else None

    def log_tail(self) -> str:
        return f"{self.name}: the last line of the log"

    async def stop(self) -> None:
        if self.managed:
            await asyncio.wrap_future(self.world.submit(self.end()))

    async def end(self, exit_code: int | None = 0) -> None:
        """Nothing is answered any more."""
        self.stopped = True
        self.exit_code = exit_code if self.exit_code is None else self.exit_code
        self.running.cancel()
        await self.server.stop(0)

    def kill(self) -> None:
        """kill -9."""
        self.world.call(self.end(-9))

    def hang(self) -> None:
        """The engine stops; the process around it goes on."""
        self.world.loop.call_soon_threadsafe(self.engine.hang)

    def thaw(self) -> None:
        """Ends what holds the engine."""
        self.world.loop.call_soon_threadsafe(self.engine.thaw)

    def crash(self, reason: str) -> None:
        """The engine dies; the process around it reports so."""
        self.world.loop.call_soon_threadsafe(self.engine.crash, reason)


@dataclass(eq=False)
class World:
    """Starts instances when the controller asks for them. Keeps the contract of ``Launcher``.

    ``engine`` and ``faults`` make the insides of the ``life``-th life (0, 1, ...) of an instance.
    """

    names: tuple[str, ...]
    engine: Callable[[str, int], FakeEngine] = lambda name, life: FakeEngine()
    faults: Callable[[str, int], dict[str, Any]] = lambda name, life: {}
    stream: Callable[..., FaultyStream] = FaultyStream
    managed: bool = True
    access: net.Access = net.OPEN
    lives: dict[str, list[Process]] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.loop.run_forever, name="world")
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result(60)

    async def start(self, name: str) -> Process:
        lives = self.lives.setdefault(name, [])
        if lives and not self.managed:
            return lives[-1]
        lives.append(await asyncio.wrap_future(self.submit(self.launch(name, len(lives)))))
        return lives[-1]

    def forget(self, name: str) -> None:
        """Its lives are kept, for the test to look at."""

    async def launch(self, name: str, life: int, address: str = "127.0.0.1:0") -> Process:
        """Starts a process; also by hand, for an endpoint."""
        engine = self.engine(name, life)
        service = GenerationService(engine, Identity(name, 2, host_id()))
        faults = self.stream(service, **self.faults(name, life))
        server = net.make_server(self.access)
        rpc.add_StreamGenerationServicer_to_server(faults, server)
        bound = net.bind(server, address, self.access)
        await server.start()

        async def run() -> None:
            try:
                await service.run()
            except EngineFailed:
                await asyncio.sleep(LAST_WORDS_S)
                await process.end(1)

        running = asyncio.create_task(run())
        process = Process(self, name, engine, faults, server, bound, self.managed, running)
        return process

    def now(self, name: str) -> Process:
        """The present life."""
        return self.lives[name][-1]

    async def _cancel_all(self) -> None:
        """Ends what a held engine still waits for."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def close(self) -> None:
        for lives in self.lives.values():
            for process in lives:
                self.call(process.end())
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@dataclass(eq=False)
class Run:
    """A controller, its instances and what it told."""

    world: World
    controller: RunController
    events: list[ControlEvent]

    def seen(self, kind: EventKind, instance: str = "") -> list[ControlEvent]:
        return [e for e in list(self.events) if e.kind is kind and instance in ("", e.instance)]

    def wait_for(self, what: Callable[[], object], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, f"{what} did not come true; {self.events[-5:]}"
            time.sleep(0.01)

    def publish(self, version: int, **rest: Any) -> Any:
        return self.controller.publish(manifest(version), source(version), **rest)


FACADES = ("in this process", "in another one")
FACADE = {"now": FACADES[0]}
"""Which face of a controller `running` gives: tests that hold for both set it."""


def facade(
    settings: ControlSettings,
    fence: Fence,
    world: World,
    reward: RewardFn,
    events: list[ControlEvent],
    access: net.Access,
) -> RunController:
    """A controller that was not started. Its other face reaches it over gRPC, though it lives here too."""
    if FACADE["now"] == FACADES[0]:
        return Controller(settings, fence, world, reward, decode, events.append, access)
    return AcrossTheWire(settings, fence, world, reward, events, access)


class AcrossTheWire(RemoteController):
    """The remote face over a controller that runs in a thread of this process."""

    def __init__(
        self,
        settings: ControlSettings,
        fence: Fence,
        world: World,
        reward: RewardFn,
        events: list[ControlEvent],
        access: net.Access,
    ) -> None:
        self._host = Controller(
            settings, fence, world, reward, decode, lambda event: None, access, serving=Serving(access)
        )
        self._events = events
        self._given = (settings, fence, access)

    def start(self) -> None:
        self._host.start()
        settings, fence, access = self._given
        peer = Peer(self._host.address, access, fence)
        super().__init__(settings, peer, self._events.append, self._host.close)
        super().start()


@contextmanager
def running(
    world: World,
    settings: ControlSettings = SETTINGS,
    reward: RewardFn = reward_by_length,
    version: int | None = 0,
    fence: Fence = FENCE,
    access: net.Access = net.OPEN,
) -> Iterator[Run]:
    """A started controller with ``version`` on all instances; everything is ended afterwards."""
    events: list[ControlEvent] = []
    controller = facade(settings, fence, world, reward, events, access)
    run = Run(world, controller, events)
    try:
        controller.start()
        if version is not None:
            controller.wait_ready(60)
            if version != NO_VERSION:
                run.publish(version).result(60)
        yield run
    finally:
        try:
            controller.close()
        finally:
            world.close()


class JoinedLauncher:
    """Hands each name to the launcher that knows it.

    Args:
        launchers: their names differ.
    """

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._by_name = {name: launcher for launcher in launchers for name in launcher.names}

    @property
    def names(self) -> Sequence[str]:
        """All of them."""
        return tuple(self._by_name)

    async def start(self, name: str) -> Launched:
        """Starts one, by the launcher that knows it."""
        return await self._by_name[name].start(name)

    def forget(self, name: str) -> None:
        """Tells the launcher that knows it."""
        self._by_name[name].forget(name)
