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
from streamrl_jax.control.outbox import Outbox
from streamrl_jax.control.pool import Pool
from streamrl_jax.control.queue import HeldQueue, Place
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication
from streamrl_jax.control.work import Work
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.types import Fence, Prompt, Sample, Sampling, UpdateReport

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
        self.work = Work(fence, rewards, HeldQueue(place), settings.max_attempts, intake, self.spawn)
        self.pool = Pool(fence, settings, launcher, access, self.work, self.spawn, on_event)
        self._rewards = rewards
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
        """Ends all tasks; each instance ends its process group."""
        tasks = list(self._tasks)
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
        self.work.fail(error)
        self.pool.fail(error)
        for told in self._when_failed:
            told(error)

    def when_failed(self, told: Callable[[BaseException], None]) -> None:
        """Has ``told`` called with the failure, on the loop; at once if the run has failed already."""
        self._when_failed.append(told)
        if self.failure is not None:
            told(self.failure)

    def check(self) -> None:
        """Raises what ended the run, if anything did."""
        if self.failure is not None:
            raise self.failure

    # ---------------------------------------------------------------- work

    def submit(self, job: Job, outbox: Outbox | None = None) -> Outbox:
        """Queues a job and hands out what there is room for.

        Args:
            job: what to do.
            outbox: where its samples are to come out beside others; None: in one of their own.

        Returns:
            Where they will come out.
        """
        self.check()
        outbox = self.work.submit(job, outbox)
        self.pool.pump()
        return outbox

    def delivered(self, sample: Sample) -> None:
        """Notes that the trainer has a sample; hands out what was held up by too many that it had not."""
        if self.work.delivered(sample):
            self.pool.pump()

    def probes(self, version: int, prompts: Sequence[Prompt], sampling: Sampling) -> list[Job]:
        """One job for each instance that serves ``version``, pinned to it, before all other work."""
        return [
            Job(f"probe/{version}/{name}", prompts, 1, sampling, version, version, PROBE_PRIORITY, probe=True,
                pinned=name)
            for name in self.pool.serving(version)
        ]  # fmt: skip

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

    async def _tick(self) -> None:
        due = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(TICK_S)
            if time.monotonic() - due < TICK_S:  # else this process itself was stopped: no call is to blame
                self._rewards.check()
            due = time.monotonic() + TICK_S

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
