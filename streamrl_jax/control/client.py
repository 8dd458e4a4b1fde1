"""A trainer process's line to the controller, on an event loop: liveness both ways, calls, samples."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from streamrl_jax.control.absence import leave_out
from streamrl_jax.control.codec import error_from_proto, event_from_proto, used_from_proto
from streamrl_jax.control.events import ControlEvent
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.fencing import fence_metadata
from streamrl_jax.control.outbox import Failed
from streamrl_jax.control.usage import Meter
from streamrl_jax.control.wayin import FINAL_CODES, WayIn
from streamrl_jax.gen import codec, net
from streamrl_jax.gen.host import host_id
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.proto import control_pb2_grpc as rpc
from streamrl_jax.types import Fence, Prompt, UpdateReport

log = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_AGAIN_S: Final = 0.2
_BEAT_S: Final = 1.0  # at least so often, also with a long lease: figures of the controller come with it
_LAST_EVENTS_S: Final = 0.05  # gRPC still ends the tasks of its calls


@dataclass(frozen=True)
class Peer:
    """How a trainer process reaches its run's controller.

    Attributes:
        address: ``host:port``.
        access: token and TLS.
        fence: of the run.
        reader: which trainer process this is.
        world: how many there are.
        lease_s: silence after which the controller is taken for dead.
        ended: why its process has ended, where that can be seen; None while it lives.
        situation: what is known of a controller that is silent: what it was doing, the end of its log.
    """

    address: str
    access: net.Access
    fence: Fence
    reader: int = 0
    world: int = 1
    lease_s: float = 30.0
    ended: Callable[[], str | None] = lambda: None
    situation: Callable[[], tuple[str, str]] = lambda: ("", "")


@dataclass(eq=False)
class Published:
    """A version on its way."""

    done: Future[list[UpdateReport]]
    release: Callable[[], None]
    released: bool = False

    def let_go(self) -> None:
        """Nobody needs its source any more; the first call counts."""
        if not self.released:
            self.released = True
            self.release()


@dataclass(eq=False)
class ControlClient:
    """Keeps the line. Lives on the loop that makes it.

    Call order: ``run`` as a task, from then on anything; ``end`` last.

    Invariant: when the controller is silent for its lease, its process ends, it refuses this process, or anything here
    fails, ``on_lost`` is called once, and every pending publication fails.

    Attributes:
        peer: whom it talks to.
        on_event: takes what happens.
        on_lost: told that the controller is gone.
        on_failed: told what ended the run.
        meter: takes the controller's figures.
    """

    peer: Peer
    on_event: Callable[[ControlEvent], None]
    on_lost: Callable[[BaseException], None]
    on_failed: Callable[[BaseException], None]
    meter: Meter
    published: dict[int, Published] = field(default_factory=dict)
    ways: dict[str, WayIn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._channel = net.open_channel(self.peer.address, self.peer.access)
        self.stub: Any = rpc.RunControlStub(self._channel)
        self.metadata = (*self.peer.access.metadata, *fence_metadata(self.peer.fence))
        self._heard = time.monotonic()
        self._seen = 0
        self._closing = False
        self._lost = False
        self._shift_s = 0.0
        self._host = host_id()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Attaches, and watches the controller."""
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(self._watched)
        try:
            while not self._lost:
                over = asyncio.Event()
                call = self.stub.Attach(self._beats(over), metadata=self.metadata)
                try:
                    async for reply in call:
                        self._take(reply)
                except ValueError as error:
                    self._lose(f"the controller sent a message that is none: {error}")
                except grpc.aio.AioRpcError as error:
                    if error.code() in FINAL_CODES:
                        self._lose(f"the controller refuses this process: {error.details()}")
                    elif not self._closing:
                        log.warning(
                            "the line to the controller broke: %s: %s", error.code().name, error.details()
                        )
                finally:
                    over.set()
                    call.cancel()
                await asyncio.sleep(_AGAIN_S)
        finally:
            watching.cancel()

    def leave(self) -> None:
        """The controller is told to end, or is left: that the line breaks is no fault from now on."""
        self._closing = True

    async def end(self) -> None:
        """Ends all streams; what is pending fails."""
        self.leave()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_pending(ControlError("the controller was closed"))
        await self._channel.close()
        await asyncio.sleep(_LAST_EVENTS_S)

    def follow(self, job_id: str, prompts: Iterable[Prompt], n: int) -> WayIn:
        """Makes a job's way in; its stream is opened by `receive`."""
        way = WayIn(self.stub, self.metadata, self.peer.reader, job_id, prompts, n, self.meter)
        self.ways[job_id] = way
        return way

    def receive(self, way: WayIn) -> None:
        """Begins to receive."""
        way.shift_s = self._shift_s
        task = asyncio.get_running_loop().create_task(way.run())
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                way.inbox.put(Failed(error))

        task.add_done_callback(ended)

    # ---------------------------------------------------------------- inside

    async def _beats(self, over: asyncio.Event) -> AsyncIterator[pb.AttachRequest]:
        interval = min(self.peer.lease_s / 6, _BEAT_S)
        yield pb.AttachRequest(
            reader=self.peer.reader,
            world=self.peer.world,
            interval_s=interval,
            seen=self._seen,
        )
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await over.wait()
                    return
            yield pb.AttachRequest(reader=self.peer.reader, seen=self._seen)

    def _take(self, reply: pb.AttachReply) -> None:
        self._heard = time.monotonic()
        if reply.HasField("beat"):
            self.meter.used(used_from_proto(reply.beat))
            # Clocks of one host are one; another host's is set by the quickest message, which this is about.
            same = reply.beat.host_id.partition(":")[0] == self._host.partition(":")[0]
            self._shift_s = 0.0 if same else self._heard - reply.beat.clock_s
        if reply.sequence:
            if reply.sequence <= self._seen:
                return
            self._seen = reply.sequence
        kind = reply.WhichOneof("kind")
        if kind == "event":
            self.on_event(event_from_proto(reply.event))
        elif kind == "updated":
            self._updated(reply.updated)
        elif kind == "released":
            if (published := self.published.get(reply.released)) is not None:
                published.let_go()
        elif kind == "failure":
            error = error_from_proto(reply.failure)
            if reply.HasField("beat"):
                self.on_failed(error)
            else:  # it does not take this process
                self._lost = True
                self.on_lost(error)

    def _updated(self, message: pb.Updated) -> None:
        published = self.published.get(message.version)
        if published is None or published.done.done():
            return
        if message.HasField("error"):
            published.done.set_exception(error_from_proto(message.error))
        else:
            reports = [codec.report_from_proto(row.instance, row.response) for row in message.reports]
            published.done.set_result(reports)
        for version, each in list(self.published.items()):  # the publisher's thread adds to it
            if each.released and each.done.done():
                del self.published[version]

    async def _watch(self) -> None:
        due = time.monotonic() + _TICK_S
        while not self._lost:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # Where this process itself stood still, that time is not the controller's silence.
            if now - due > 3 * _TICK_S:
                self._heard = leave_out(self._heard, now - due, now)
            due = now + _TICK_S
            ended = self.peer.ended()
            if ended is not None:
                self._lose(f"the controller's process has ended ({ended})")
            elif now - self._heard > self.peer.lease_s:
                self._lose(
                    f"the controller gave no sign of life for {now - self._heard:.0f} s "
                    f"(control.lease_s = {self.peer.lease_s:g})"
                )

    def _watched(self, task: asyncio.Task[None]) -> None:
        """The watch ends when the controller is lost; should it fail itself, nobody would notice that any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.break_off(error)

    def break_off(self, error: BaseException) -> None:
        """Something here failed: the controller is as good as lost."""
        self._lost = True
        self._fail_pending(error)
        self.on_lost(error)

    def _lose(self, what: str) -> None:
        if self._lost or self._closing:
            return
        self._lost = True
        doing, tail = self.peer.situation()
        error = ControlError(f"{what}{doing}. Go on with --resume", tail)
        self._fail_pending(error)
        self.on_lost(error)

    def _fail_pending(self, error: BaseException) -> None:
        for published in list(self.published.values()):
            if not published.done.done():
                published.done.set_exception(error)
