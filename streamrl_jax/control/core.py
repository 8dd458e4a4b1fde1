"""Everything of a controller that lives on its event loop: pool, work, versions, rewards, failure, end. No threads.

Who runs the loop is a matter of its own: `controller.Controller` in a thread of the trainer's process,
`process` in a process without JAX.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from streamrl_jax.control.events import ControlEvent, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.once import Once
from streamrl_jax.control.outbox import Delivery, Outbox, Reading
from streamrl_jax.control.placing import Place
from streamrl_jax.control.plan import Step
from streamrl_jax.control.planning import Planning
from streamrl_jax.control.pool import Pool
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.readers import Readers
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication
from streamrl_jax.control.work import Work
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.types import NO_VERSION, Fence, Prompt, Sample, Sampling, UpdateReport

log = logging.getLogger(__name__)

PROBE_PRIORITY: Final = -(2**20)
"""Before everything that trains."""

TICK_S: Final = 0.5
_LAST_EVENTS_S: Final = (
    0.05  # gRPC still tells of ended calls; on a closed loop it would complain in other loops
)


class ControllerCore:
    """Generation as it is kept on one event loop: jobs in, rewarded samples out, each once (DESIGN rule 1).

    Call order: ``begin`` on the loop that runs everything; then any of the others, on the same loop; ``end``
    last. The first failure, wherever it happens on the loop, is the one that everybody is told: it goes to
    every outbox and every pending update, and is raised by every later ``submit`` and ``publish``.

    Args:
        settings: bounds and choices.
        fence: this life of the run.
        launcher: starts the instances, or knows their endpoints.
        rewards: computes rewards; started and closed by whoever made them.
        on_event: takes what happens, on the loop; must be quick.
        access: token and TLS of run and instances.
        place: chooses the instance of a sample; None: its group's, else the emptiest.
    """

    def __init__(
        self,
        settings: ControlSettings,
        fence: Fence,
        launcher: Launcher,
        rewards: RewardWorkers,
        on_event: Callable[[ControlEvent], None],
        access: net.Access = net.OPEN,
        place: Place | None = None,
    ) -> None:
        self.settings = settings
        self.fence = fence
        self.launcher = launcher
        self.failure: BaseException | None = None
        intake = Intake(settings.max_buffered_samples)
        self.work = Work(
            fence, rewards, HeldQueue(place), settings.max_attempts, intake, self.spawn, settings.dispatch
        )
        self.pool = Pool(fence, settings, launcher, access, self.work, self.spawn, on_event)
        self._planning = Planning(self.work, self.pool.ready, self.pool.pump, self.spawn)
        self.stopped = ""
        """Why the run was asked to stop; empty: it was not."""
        self.readers = Readers(settings.readers, settings.reader_lease_s, settings.plan_timeout_s)
        self._rewards = rewards
        self._once = Once(settings.readers)
        self._ways: dict[str, Outbox] = {}
        self._probes: list[Job] = []
        self._probed = NO_VERSION  # what the leader has asked for
        self._ending = False
        self._told_ready = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._when_failed: list[Callable[[BaseException], None]] = []

    # ---------------------------------------------------------------- life

    def begin(self) -> None:
        """Starts the instances; returns at once."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._rewards.attach()
        for name in self.launcher.names:
            self.pool.add(name)
        self.spawn(self._tick(), name="tick")

    async def end(self) -> None:
        """Ends all tasks; each instance ends its process group. From here on nothing is taken on."""
        self._ending = True
        while tasks := list(self._tasks):  # one that dials in meanwhile is ended too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(_LAST_EVENTS_S)
        self.fail(ControlError("the controller was closed"))
        self.pool.shelf.clear()

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        """Runs a coroutine on the loop until ``end``; its exception ends the run."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def fail(self, error: BaseException) -> None:
        """Ends the run: every wait raises the error. Only the first failure counts."""
        if self.failure is not None:
            return
        self.failure = error
        self.pool.fail(error)
        self.readers.fail(error)
        for outbox in self._ways.values():
            outbox.fail(error)
        for told in self._when_failed:
            told(error)

    def when_failed(self, told: Callable[[BaseException], None]) -> None:
        """Has ``told`` called with the failure, on the loop; at once if the run has failed already."""
        self._when_failed.append(told)
        if self.failure is not None:
            told(self.failure)

    def check(self) -> None:
        """Raises what ended the run, if anything did.

        Raises:
            ControlError: it is being ended.
        """
        if self.failure is not None:
            raise self.failure
        if self._ending:
            raise ControlError("the controller is being closed: the run is over")

    # ---------------------------------------------------------------- work

    def submit(self, job: Job, into: str = "", reader: int = 0, digest: bytes = b"") -> None:
        """Queues a job, once it is planned, and hands out what there is room for. Equal ones of all readers are one.

        Args:
            job: what to do.
            into: another job, among whose samples these come out; empty: under the job's own id.
            reader: who submits it.
            digest: of all that the job holds; equal for all readers.

        Raises:
            ControlError: the other job is unknown (or done), another reader submitted something else, or the one
                instance that may answer has left.
        """
        self.check()
        if not self._once.first(f"job {job.job_id}", reader, digest):
            return
        if job.pinned and not self.pool.holds(job.pinned):
            raise ControlError(f"job {job.job_id} is for {job.pinned} alone, which is not in the pool")
        outbox = self._way(into) if into else self._open_way(job.job_id)
        self.work.open(job, outbox)
        if into:
            self.pool.pump()
        else:
            self._planning.add(job)

    def follows(self, job: Job, reader: int) -> bool:
        """Whether a reader may submit a job now: where lengths are predicted, the leader comes first.

        It alone predicts, and what is told with the first submission is what counts.

        Raises:
            Exception: what ended the run.
        """
        self.check()
        planned = self.settings.dispatch.policy != "arrival"
        return reader == 0 or not planned or self._once.asked(f"job {job.job_id}", 0)

    def read(
        self, job_id: str, reader: int, position: int, window: int, deliver: Callable[[Delivery], None]
    ) -> Reading:
        """Begins to hand a job's samples to a reader; see `control.outbox.Reading`.

        Args:
            job_id: of a submitted job.
            reader: who reads.
            position: where to begin.
            window: samples that may be under way to the reader.
            deliver: takes them, on the loop.

        Raises:
            ControlError: the job is unknown, or all its samples were taken.
        """
        reading = Reading(self._way(job_id), reader, position, window, deliver)
        reading.go_on()
        return reading

    def stop(self, reason: str) -> None:
        """Ends the order of every way out, behind what any reader was given, and of those still to come."""
        if not self.stopped:
            self.stopped = reason
            for outbox in list(self._ways.values()):
                outbox.stop(reason)

    async def acknowledge(self, reader: int, step: Step) -> None:
        """Returns when every reader is about to enter the same step of the plan; a difference ends the run.

        Raises:
            Exception: what ended the run.
        """
        self.check()
        try:
            await self.readers.acknowledge(reader, step)
        except ControlError as error:
            self.fail(error)
            raise

    def ready(self, at_least: int | None) -> bool:
        """Whether so many instances are loaded (None: all).

        Raises:
            StopRequested: the run was asked to stop before any reader was told that they are.
        """
        self.check()
        if self.stopped and not self._told_ready:
            raise StopRequested(self.stopped)
        ready = self.pool.loaded() >= (self.pool.wanted() if at_least is None else at_least)
        self._told_ready = self._told_ready or ready
        return ready

    def not_ready(self, timeout_s: float) -> str:
        """Says that ``ready`` did not come true within a bound, and why."""
        return (
            f"{self.pool.loaded()} of {self.pool.wanted()} instances were ready within {timeout_s:g} s: "
            f"{self.pool.situation()}"
        )

    def delivered(self, sample: Sample) -> None:
        """Notes that the trainer has a sample; hands out what was held up by too many that it had not."""
        if self.work.delivered(sample):
            self.pool.pump()

    def probe(
        self,
        version: int,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        reader: int = 0,
        digest: bytes = b"",
    ) -> tuple[str, ...]:
        """Submits one job for each instance that serves ``version``, pinned to it, before all other work.

        The leader's call decides which instances these are: it has waited until they have the version. The others ask
        when it ``probed``.

        Returns:
            Their ids; for every reader those that the leader was told.
        """
        self.check()
        if reader == 0:
            self._probed = version
        if self._once.first(f"probe of version {version}", reader, digest):
            self._probes = [
                Job(f"probe/{version}/{name}", prompts, 1, sampling, version, version, PROBE_PRIORITY,
                    probe=True, pinned=name)
                for name in self.pool.serving(version)
            ]  # fmt: skip
            for job in self._probes:
                self.work.submit(job, self._open_way(job.job_id))
            self.pool.pump()
        return tuple(job.job_id for job in self._probes)

    def probed(self, version: int) -> bool:
        """Whether the leader has asked for the probe of ``version``.

        Raises:
            Exception: what ended the run.
        """
        self.check()
        return self._probed >= version

    def publish(self, publication: Publication, done: Future[list[UpdateReport]]) -> None:
        """Brings a version to every instance; ``done`` gets a report of each."""
        self.check()
        self.pool.publish(publication, done)

    # ---------------------------------------------------------------- books

    def views(self) -> tuple[InstanceView, ...]:
        """How each instance stands."""
        return self.pool.views()

    def counters(self) -> Mapping[str, int]:
        """Totals since the start: what was dispatched, finished, restarted, and dropped, by kind."""
        counts, pool = dict(self.work.ledger.counts()), self.pool.counts()
        counts["other_fence_dropped"] += pool["other_fence_dropped"]
        return {**counts, "restarts": pool["restarts"]}

    # ---------------------------------------------------------------- inside

    def _way(self, job_id: str) -> Outbox:
        if (outbox := self._ways.get(job_id)) is None:
            raise ControlError(f"job {job_id} was not submitted, or all its samples were taken")
        return outbox

    def _open_way(self, job_id: str) -> Outbox:
        outbox = Outbox(job_id, 0, self.settings.readers, self.delivered, lambda: self._close_way(job_id))
        if self.stopped:
            outbox.stop(self.stopped)
        self._ways[job_id] = outbox
        return outbox

    def _close_way(self, job_id: str) -> None:
        del self._ways[job_id]

    async def _tick(self) -> None:
        due = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - due
            if late_s >= TICK_S:  # this process itself was stopped: nobody else is to blame for that time
                self._rewards.forgive(late_s)
                self.readers.forgive(late_s)
            due = time.monotonic() + TICK_S
            self._rewards.check()
            self.readers.check()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if net.is_pollers(error):
            log.debug("gRPC's poller: %r", error)
            return
        self.fail(error if isinstance(error, BaseException) else ControlError(str(context["message"])))
