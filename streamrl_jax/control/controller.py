"""The controller's face to the trainer: plain calls, answered by an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from streamrl_jax.control.codec import job_digest, probe_digest
from streamrl_jax.control.core import TICK_S, ControllerCore
from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.control.events import ControlEvent, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.handover import Handover
from streamrl_jax.control.hub import Hub
from streamrl_jax.control.inbox import Inbox
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.placing import Place
from streamrl_jax.control.plan import Step
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.server import RunControlService, Serving, serve
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication
from streamrl_jax.control.usage import Meter, Usage
from streamrl_jax.control.watchdog import Watchdog
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.rewards import RewardFn
from streamrl_jax.types import Fence, Manifest, Prompt, Sample, Sampling, TokenIds, UpdateReport, WeightSource

log = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_S = 30.0  # bound on a question to the loop, which answers at once unless it is stuck
_WINDOW = 64  # samples that are given ahead where there are several readers: a stop comes behind them


class Controller:
    """Generation as the trainer sees it: jobs in, rewarded samples out, each exactly once (DESIGN rule 1).

    Call order: ``start``; ``publish`` version 0 and ``wait_ready`` in either order; then for each iteration
    ``submit``, ``samples``, ``publish``; ``close`` once, whatever happened. All calls come from the
    trainer's threads; none waits without a bound. When anything on the loop fails, the exception is raised,
    with its traceback, by the call that waits and by every later one.

    Args:
        settings: bounds and choices.
        fence: this life of the run.
        launcher: starts the instances, or knows their endpoints.
        reward: the reward function; runs on threads of the controller.
        decode: token ids to text, for the reward function.
        on_event: takes what happens, on the controller's thread; must be quick.
        access: token and TLS of run and instances.
        place: chooses the instance of a sample; None: its group's, else the emptiest.
        serving: where others reach it: further trainer processes, the commands; None: nowhere.
    """

    def __init__(
        self,
        settings: ControlSettings,
        fence: Fence,
        launcher: Launcher,
        reward: RewardFn,
        decode: Callable[[TokenIds], str],
        on_event: Callable[[ControlEvent], None],
        access: net.Access = net.OPEN,
        place: Place | None = None,
        serving: Serving | None = None,
    ) -> None:
        self._settings = settings
        self._rewards = RewardWorkers(reward, decode, settings.reward_timeout_s, settings.reward_workers)
        self._hub = Hub(settings.readers, on_event)
        told = self._hub.event if serving else on_event
        self._core = ControllerCore(settings, fence, launcher, self._rewards, told, access, place)
        self._core.when_failed(self._when_failed)
        self._watchdog = Watchdog(settings.grace_s)
        self._inboxes: dict[str, Inbox] = {}
        self._reports: dict[str, Callable[[int, bool], None]] = {}
        self._failed = threading.Event()
        self._served = contextlib.AsyncExitStack()
        self._serving = serving
        self._address = ""
        self._usage, self._meter = Usage(), Meter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._closed = False

    # ---------------------------------------------------------------- the trainer's calls

    @property
    def reader(self) -> int:
        """The controller lives in the leader's process."""
        return 0

    @property
    def world(self) -> int:
        """How many trainer processes the run has."""
        return self._settings.readers

    def start(self) -> None:
        """Starts the instances and returns at once."""
        self._rewards.start()
        self._thread.start()
        if self._serving is not None:
            opened = asyncio.run_coroutine_threadsafe(self._serve(self._serving), self._loop)
            self._address = opened.result(_ASK_S)
        self._ask(self._core.begin)

    def wait_ready(self, timeout_s: float, at_least: int | None = None) -> None:
        """Waits until the instances are loaded.

        Args:
            timeout_s: bound, seconds.
            at_least: so many are enough; None: all of them.

        Raises:
            ControlError: not in time; says what each one does.
        """
        end = time.monotonic() + timeout_s
        while True:
            if self._ask(lambda: self._core.ready(at_least)):
                return
            if time.monotonic() > end:
                raise ControlError(self._ask(lambda: self._core.not_ready(timeout_s)))
            self._failed.wait(0.1)

    def publish(
        self, manifest: Manifest, source: WeightSource, release: Callable[[], None] = lambda: None
    ) -> Future[list[UpdateReport]]:
        """Brings a version to every instance, after what it runs (or in flight, if so set).

        Args:
            manifest: what the version consists of.
            source: where its bytes lie; it must last until ``release`` is called.
            release: called once, on the controller's thread, when no instance needs the source any more:
                a newer version is out, and nobody loads this one.

        Returns:
            One report per instance, when each has the version, or is lost (it gets it when it is back).
        """
        done: Future[list[UpdateReport]] = Future()
        publication = Publication(manifest, source, release, time.monotonic())
        self._ask(lambda: self._core.publish(publication, done))
        return done

    def submit(self, job: Job, into: str = "") -> None:
        """Queues a job; its samples go to instances that serve ``job.min_version`` or newer.

        Args:
            job: what to do.
            into: another job, whose last sample was not yet followed by the end of ``samples``: these come out
                among its own. Empty: the job's samples come out under its own id.

        Raises:
            ControlError: that other job is unknown (or done).
        """
        inbox = self._inbox(into) if into else None
        self._ask(lambda: self._core.submit(job, into, self.reader, self._digest(job, into)))
        if inbox is not None:
            inbox.grow(job.size)
        else:
            self._open(job.job_id, job.size)

    def samples(self, job_id: str, timeout_s: float) -> Iterator[Sample]:
        """Yields each of a job's samples once, in the order of arrival.

        Args:
            job_id: of a submitted job.
            timeout_s: bound on the wait for one sample.

        Raises:
            ControlError: none came in time, or the job is unknown (or done).
            Exception: whatever ended the run on the controller's side.
        """
        inbox, report = self._inbox(job_id), self._reports[job_id]
        try:
            yield from inbox.drain(timeout_s, report, lambda: self._ask(self._core.pool.situation))
        except Exception as error:
            self._watchdog.heed(error)
            raise
        self._inboxes.pop(job_id, None)
        self._reports.pop(job_id, None)

    def probe(self, version: int, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[str, ...]:
        """Asks every instance that serves ``version`` to answer the same prompts, before all other work.

        An update waits for them, so their tokens are of this version, unless the instance is lost meanwhile:
        look at the versions. If it is lost for good, they are given up and ``samples`` ends early.

        Args:
            version: the one to compare.
            prompts: what to answer.
            sampling: as in training.

        Returns:
            One job id per instance, for ``samples``. Probes are not rewarded.
        """
        digest = probe_digest(version, prompts, sampling) if self.world > 1 else b""
        jobs = self._ask(lambda: self._core.probe(version, prompts, sampling, self.reader, digest))
        for job_id in jobs:
            self._open(job_id, len(prompts))
        return jobs

    def acknowledge(self, step: Step) -> None:
        """Waits until every trainer process is about to enter the same collective; at once where there is one.

        Raises:
            ControlError: another reader enters something else, or does not come within ``control.plan_timeout_s``.
        """
        if self.world > 1:
            going = asyncio.run_coroutine_threadsafe(self._core.acknowledge(self.reader, step), self._loop)
            try:
                going.result(self._settings.plan_timeout_s + _ASK_S)
            except Exception as error:
                self._watchdog.heed(error)
                raise

    def stop(self, reason: str) -> None:
        """Has ``samples`` (or ``wait_ready``) raise `StopRequested`, at one place for all readers. Returns at once."""
        self._loop.call_soon_threadsafe(self._core.stop, reason)

    def pool(self) -> tuple[InstanceView, ...]:
        """How each instance stands."""
        return self._ask(self._core.views)

    def counters(self) -> Mapping[str, int]:
        """Totals since the start: what was dispatched, finished, restarted, and dropped, by kind."""
        return self._ask(self._core.counters)

    def sizes(self) -> Mapping[str, int]:
        """Entries held in memory, by kind; 0 when every job is done."""
        return self._ask(self._core.work.sizes)

    def dispatched(self) -> tuple[Dispatched, ...]:
        """What became of the last jobs."""
        return self._ask(lambda: tuple(self._core.work.accounts.finished))

    def usage(self) -> Mapping[str, float]:
        """What the process that it shares with the trainer costs since the last call, and how long samples take."""
        self._meter.used(self._usage.now())
        return self._meter.metrics()

    @property
    def address(self) -> str:
        """``host:port`` at which it serves; empty: nowhere."""
        return self._address

    def fail(self, error: BaseException) -> None:
        """Ends the run from outside (a version could not be written, say): every wait raises the error."""
        self._watchdog.heed()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._core.fail, error)
        else:
            self._core.fail(error)

    def close(self) -> None:
        """Ends streams, instances (whole process groups) and threads.

        Raises:
            ControlError: something did not end within its bound.
        """
        self._watchdog.heed()
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._settings.close_timeout_s)
        self._rewards.close(1.0)
        if self._thread.is_alive():
            raise ControlError(f"the controller did not end within {self._settings.close_timeout_s:g} s")

    # ---------------------------------------------------------------- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._core.end())
            self._loop.run_until_complete(self._served.aclose())
        finally:
            self._loop.close()

    async def _serve(self, serving: Serving) -> str:
        service = RunControlService(self._core, self._hub, lambda: None)
        return await self._served.enter_async_context(serve(service, self._core, serving))

    def _when_failed(self, error: BaseException) -> None:
        self._failed.set()
        if self.world > 1:
            self._watchdog.arm(error)

    # ---------------------------------------------------------------- from the trainer's threads

    def _open(self, job_id: str, size: int) -> None:
        inbox = Inbox(job_id, size, self._meter)
        window = _WINDOW if self.world > 1 else sys.maxsize
        reading = self._ask(lambda: self._core.read(job_id, self.reader, 0, window, inbox.put))
        taken = Handover[tuple[int, bool]](self._loop, lambda told: reading.taken(*told))
        self._inboxes[job_id] = inbox
        self._reports[job_id] = partial(_report, taken)

    def _inbox(self, job_id: str) -> Inbox:
        if (inbox := self._inboxes.get(job_id)) is None:
            raise ControlError(f"job {job_id} was not submitted, or all its samples were taken")
        return inbox

    def _digest(self, job: Job, into: str) -> bytes:
        return job_digest(job, into) if self.world > 1 else b""

    def _ask(self, question: Callable[[], T]) -> T:
        """Runs a function on the loop and returns what it returns."""
        if not self._thread.is_alive():
            if self._closed:
                return question()  # nothing runs any more: the books may be read from here
            raise ControlError("the controller was not started")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        for _ in range(int(_ASK_S / TICK_S)):
            try:
                return answer.result(TICK_S)
            except concurrent.futures.TimeoutError:
                pass
            except Exception as error:
                self._watchdog.heed(error)
                raise
            if not self._thread.is_alive() and not answer.done():
                raise ControlError("the controller was closed")
        raise ControlError(f"the controller's loop did not answer within {_ASK_S:g} s")


def _report(taken: Handover[tuple[int, bool]], position: int, waits: bool) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: what it left in the inbox is told as it is
        taken.put((position, waits))
