"""Jobs on their way into the queue: each is planned in a thread, while the loop goes on. Lives on the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from streamrl_jax.control.dispatching import Ready
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.work import Work


class Planning:
    """Plans jobs one after another.

    Call order: ``add`` each job that `Work.open` knows; it hands out what there is room for.

    Invariant: jobs enter the queue in the order in which they were added, each once: one that needs no plan waits for
    those before it too, since it could take the room that is theirs. A plan is made for the instances that are there
    as it is begun; lines are soft pins, so that those that have left or joined since do no harm.

    Args:
        work: the open jobs.
        ready: the instances that can be given work.
        pump: hands out what waits.
        spawn: runs a coroutine on the loop; its exception ends the run.
    """

    def __init__(
        self,
        work: Work,
        ready: Callable[[], Sequence[Ready]],
        pump: Callable[[], None],
        spawn: Callable[..., object],
    ) -> None:
        self._work = work
        self._ready = ready
        self._pump = pump
        self._spawn = spawn
        self._jobs: deque[Job] = deque()  # the first one is being planned

    def add(self, job: Job) -> None:
        """Queues a job's samples, at once if nothing has to be planned."""
        if not self._jobs and not self._work.plans(job):
            self._work.queue_up(job, self._work.planner(job, ())())
            self._pump()
            return
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._spawn(self._plan(), name="plans")

    async def _plan(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            arrangement = await asyncio.to_thread(self._work.planner(job, self._ready()))
            self._work.queue_up(job, arrangement)
            self._jobs.popleft()
            self._pump()
