"""The controller's face to the trainer where the controller is a process of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import grpc

from streamrl_jax.control import codec
from streamrl_jax.control.client import ControlClient, Peer, Published
from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.control.dispatched_codec import dispatched_from_proto
from streamrl_jax.control.events import ControlEvent, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.handover import Handover
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.outbox import Failed
from streamrl_jax.control.plan import Step
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.usage import Meter
from streamrl_jax.control.watchdog import Watchdog
from streamrl_jax.control.wayin import WayIn
from streamrl_jax.gen import codec as records
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.types import Manifest, Prompt, Sample, Sampling, UpdateReport, WeightSource

T = TypeVar("T")

_TICK_S: Final = 0.25
_ASK_S: Final = 30.0  # bound on a question that is answered at once
_BOOKS_S: Final = 2.0  # bound on reading the books at the end
_AGAIN: Final = (grpc.StatusCode.UNAVAILABLE,)


class RemoteController:
    """A `RunController` whose work is done in another process, see there for the calls and what they raise.

    Bound: when that process is killed or hangs, every call that waits, and every later one, raises a `ControlError`
    within ``control.lease_s`` (1 s where its end can be seen), with the last lines of its log.

    Args:
        settings: bounds.
        peer: where it is.
        on_event: takes what happens, on a thread of this one; must be quick.
        end: ends what was started for it, after everything else; raises `ControlError` if that fails.
    """

    def __init__(
        self,
        settings: ControlSettings,
        peer: Peer,
        on_event: Callable[[ControlEvent], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._peer = peer
        self._on_event = on_event
        self._end = end
        self._meter = Meter()
        self._watchdog = Watchdog(settings.grace_s)
        self._lost: BaseException | None = None
        self._closed = False
        self._books: dict[str, Any] = {}
        self._reports: dict[str, Callable[[int, bool], None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="controller-client", daemon=True)
        self._client: ControlClient | None = None

    # ---------------------------------------------------------------- the trainer's calls

    @property
    def reader(self) -> int:
        """Which trainer process this is."""
        return self._peer.reader

    @property
    def world(self) -> int:
        """How many there are."""
        return self._peer.world

    def start(self) -> None:
        """Connects."""
        self._thread.start()
        self._wait(self._connect(), _ASK_S)

    def wait_ready(self, timeout_s: float, at_least: int | None = None) -> None:
        """Waits until the instances are loaded."""
        wanted = -1 if at_least is None else at_least
        request = pb.WaitReadyRequest(reader=self.reader, timeout_s=timeout_s, at_least=wanted)
        self._call("WaitReady", request, timeout_s + _ASK_S)

    def publish(
        self, manifest: Manifest, source: WeightSource, release: Callable[[], None] = lambda: None
    ) -> Future[list[UpdateReport]]:
        """Brings a version to every instance."""
        done: Future[list[UpdateReport]] = Future()
        client = self._connected()
        client.published.setdefault(manifest.version, mine := Published(done, release))
        request = pb.PublishRequest(
            reader=self.reader,
            manifest=records.manifest_to_proto(manifest),
            path=source.path,
            address=source.address,
        )
        try:
            self._call("Publish", request, again=False)
        except BaseException:
            if client.published.get(manifest.version) is mine:
                del client.published[manifest.version]
            raise
        return done

    def submit(self, job: Job, into: str = "") -> None:
        """Queues a job."""
        way = self._way(into) if into else None
        self._wait(self._send("Submit", job, into), self._settings.update_timeout_s)
        if way is not None:
            way.grow(job.prompts, job.n)
        else:
            self._connected().follow(job.job_id, job.prompts, job.n)

    def samples(self, job_id: str, timeout_s: float) -> Iterator[Sample]:
        """Yields each of a job's samples once."""
        way = self._way(job_id)
        if job_id not in self._reports:
            self._reports[job_id] = partial(_report, Handover(self._loop, lambda told: way.taken(*told)))
            self._loop.call_soon_threadsafe(self._connected().receive, way)
        if self._lost is not None:
            way.inbox.put(Failed(self._lost))
        try:
            yield from way.inbox.drain(timeout_s, self._reports[job_id], self._situation)
        except Exception as error:
            self._watchdog.heed(error)
            raise
        self._connected().ways.pop(job_id, None)
        self._reports.pop(job_id, None)

    def probe(self, version: int, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[str, ...]:
        """Asks every instance that serves ``version`` the same prompts."""
        asked = Job(f"probe/{version}", prompts, 1, sampling, version, version, probe=True)
        digest = codec.probe_digest(version, prompts, sampling)
        # Only the leader knows when the instances have the version; the others are answered after it.
        bound = _ASK_S + (self._settings.longest_update_s if self.reader else 0.0)
        reply = self._wait(self._send("Probe", asked, "", digest, bound), bound)
        for job_id in reply.job_ids:
            self._connected().follow(job_id, prompts, 1)
        return tuple(reply.job_ids)

    def acknowledge(self, step: Step) -> None:
        """Waits until every trainer process is about to enter the same collective; at once where there is one."""
        if self.world > 1:
            self._call(
                "Acknowledge", codec.step_to_proto(self.reader, step), self._settings.plan_timeout_s + _ASK_S
            )

    def stop(self, reason: str) -> None:
        """Asks for a stop at one place for all readers. Returns at once."""
        self._say("StopAll", pb.TextRequest(reader=self.reader, text=reason))

    def pool(self) -> tuple[InstanceView, ...]:
        """How each instance stands."""
        return self._book("Pool", lambda reply: tuple(map(codec.view_from_proto, reply.instances)))

    def counters(self) -> Mapping[str, int]:
        """Totals since the start."""
        return self._book("Counters", lambda reply: dict(reply.numbers))

    def sizes(self) -> Mapping[str, int]:
        """Entries held in memory."""
        return self._book("Sizes", lambda reply: dict(reply.numbers))

    def dispatched(self) -> tuple[Dispatched, ...]:
        """What became of the last jobs."""
        return self._book("Dispatched", lambda reply: tuple(map(dispatched_from_proto, reply.jobs)))

    def usage(self) -> Mapping[str, float]:
        """What the controller costs since the last call."""
        return self._meter.metrics()

    def fail(self, error: BaseException) -> None:
        """Ends the run from outside: every wait raises the error itself."""
        self._watchdog.heed()
        if self._closed:
            return
        self._loop.call_soon_threadsafe(self._lose, error)
        self._say("Fail", pb.FailRequest(reader=self.reader, failure=codec.error_to_proto(error)))

    def close(self) -> None:
        """Ends the controller (the leader) or leaves it, and everything here.

        Raises:
            ControlError: something did not end within its bound.
        """
        self._watchdog.heed()
        if self._closed:
            return
        try:
            if self._thread.is_alive():
                with contextlib.suppress(Exception):  # it may be gone: what it started is ended below
                    self._leave()
        finally:
            self._closed = True
            if self._client is not None:
                self._client.leave()
            self._end()
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(self._settings.close_timeout_s)
        if self._thread.is_alive():
            raise ControlError("the line to the controller did not end within its bound")
        if self._client is not None:
            for published in list(self._client.published.values()):
                published.let_go()

    # ---------------------------------------------------------------- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._shut())
        finally:
            self._loop.close()

    async def _connect(self) -> None:
        self._client = ControlClient(self._peer, self._on_event, self._lose, self._failed, self._meter)
        self._line = asyncio.create_task(self._client.run())
        self._line.add_done_callback(self._line_ended)

    def _line_ended(self, line: asyncio.Task[None]) -> None:
        if self._client is not None and not line.cancelled() and (error := line.exception()) is not None:
            self._client.break_off(error)

    async def _shut(self) -> None:
        if self._client is not None:
            self._line.cancel()
            await asyncio.gather(self._line, return_exceptions=True)
            await self._client.end()

    def _lose(self, error: BaseException) -> None:
        """Nothing more will come; the first reason counts."""
        if self._lost is None:
            self._lost = error
            for way in list(self._connected().ways.values()):  # the trainer's thread changes it
                way.inbox.put(Failed(error))
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if self.world > 1:
            self._watchdog.arm(error)

    async def _unary(self, name: str, request: Any, timeout_s: float, again: bool = True) -> Any:
        """One call; where it may be repeated, a line that breaks is waited for until the controller is lost."""
        client = self._connected()
        while True:
            try:
                call = getattr(client.stub, name)
                return await call(request, metadata=client.metadata, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if not again or error.code() not in _AGAIN:
                    raise ControlError(f"the controller did not answer {name}: {_words(error)}") from error
                await asyncio.sleep(_TICK_S)

    async def _send(self, name: str, job: Job, into: str, digest: bytes = b"", timeout_s: float = 0.0) -> Any:
        client = self._connected()
        pieces = codec.job_to_proto(self.reader, job, into, digest=digest)
        try:
            bound = timeout_s or self._settings.update_timeout_s
            call = getattr(client.stub, name)(metadata=client.metadata, timeout=bound)
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended: the call itself says why
                for piece in pieces:
                    await call.write(piece)
                await call.done_writing()
            return await call
        except grpc.aio.AioRpcError as error:
            raise ControlError(f"the controller did not take job {job.job_id}: {_words(error)}") from error

    # ---------------------------------------------------------------- from the trainer's threads

    def _call(self, name: str, request: Any, timeout_s: float = _ASK_S, again: bool = True) -> Any:
        return self._wait(self._unary(name, request, timeout_s, again), timeout_s + _ASK_S)

    def _say(self, name: str, request: Any) -> None:
        """A call whose answer nobody waits for. Where it does not come through, the controller is lost."""

        def said(future: Future[Any]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._lose, error)

        asyncio.run_coroutine_threadsafe(self._unary(name, request, _ASK_S), self._loop).add_done_callback(
            said
        )

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Waits for work on the loop, for as long as the controller lives; raises the error of a reply."""
        if self._closed or not self._thread.is_alive():
            work.close()
            raise ControlError(f"the controller was {'closed' if self._closed else 'not started'}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        reply: Any = None
        try:
            for _ in range(max(1, int(timeout_s / _TICK_S))):
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    reply = future.result(_TICK_S)
                    break
                if self._lost is not None:
                    break
        except Exception:
            if self._lost is None:
                raise
        finally:
            future.cancel()
        if self._lost is not None:
            self._watchdog.heed()
            raise self._lost
        if not future.done() or future.cancelled():
            raise ControlError(f"the controller did not answer within {timeout_s:g} s")
        if reply is not None and reply.HasField("error"):
            error = codec.error_from_proto(reply.error)
            self._watchdog.heed(error)
            raise error
        return reply

    def _book(self, name: str, read: Callable[[Any], T]) -> T:
        """A question about the books; after the end it is answered as they were then."""
        if self._closed and name in self._books:
            return self._books[name]
        reply = self._call(name, pb.Ask(reader=self.reader))
        try:
            self._books[name] = read(reply)
        except ValueError as error:
            raise ControlError(f"the controller's answer to {name} is none: {error}") from error
        return self._books[name]

    def _leave(self) -> None:
        for read in (self.pool, self.counters, self.sizes, self.dispatched):
            read()
        self._connected().leave()
        self._wait(self._unary("Close", pb.Ask(reader=self.reader), _BOOKS_S, again=False), _BOOKS_S)

    def _situation(self) -> str:
        return self._call("Situation", pb.Ask(reader=self.reader)).text

    def _way(self, job_id: str) -> WayIn:
        client = self._connected()
        if (way := client.ways.get(job_id)) is None:
            raise ControlError(f"job {job_id} was not submitted, or all its samples were taken")
        return way

    def _connected(self) -> ControlClient:
        if self._client is None:
            raise ControlError("the controller was not started")
        return self._client


def _report(taken: Handover[tuple[int, bool]], position: int, waits: bool) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        taken.put((position, waits))


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
