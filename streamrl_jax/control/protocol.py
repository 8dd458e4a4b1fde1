"""What the trainer side asks of a controller, in a thread of its own (`controller`) or elsewhere (`remote`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.control.events import InstanceView
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.plan import Step
from streamrl_jax.types import Manifest, Prompt, Sample, Sampling, UpdateReport, WeightSource


class RunController(Protocol):
    """Generation as one trainer process sees it: jobs in, rewarded samples out, each exactly once (DESIGN rule 1).

    Call order: ``start``; ``publish`` version 0 and ``wait_ready`` in either order; then for each iteration
    ``submit``, ``samples``, ``publish``; ``close`` once, whatever happened. None waits without a bound. When anything
    ends the run, the exception is raised by the call that waits and by every later one.

    A run has ``world`` trainer processes, the readers 0 to world - 1; reader 0 is the leader. All of them make the same
    calls of ``submit``, ``samples``, ``probe``, ``wait_ready`` and ``acknowledge`` in the same order, and get the same
    answers in the same order. ``publish`` is the leader's. The other calls are anybody's, at any time.
    """

    @property
    def reader(self) -> int:
        """Which trainer process this is; 0 is the leader."""
        ...

    @property
    def world(self) -> int:
        """How many trainer processes the run has."""
        ...

    def start(self) -> None:
        """Starts the instances, or connects to who has; returns soon."""
        ...

    def wait_ready(self, timeout_s: float, at_least: int | None = None) -> None:
        """Waits until the instances are loaded: all of them, or ``at_least`` so many.

        Raises:
            ControlError: not in time; says what each one does.
            StopRequested: ``stop`` was called before any reader was told that they are ready.
        """
        ...

    def publish(
        self, manifest: Manifest, source: WeightSource, release: Callable[[], None] = lambda: None
    ) -> Future[list[UpdateReport]]:
        """Brings a version to every instance; ``release`` is called when nobody needs its source any more."""
        ...

    def submit(self, job: Job, into: str = "") -> None:
        """Queues a job; with ``into`` its samples come out among those of that job.

        The submissions of all readers are one; they must be equal.

        Raises:
            ControlError: the other job is unknown or done, or another reader submitted something else.
        """
        ...

    def samples(self, job_id: str, timeout_s: float) -> Iterator[Sample]:
        """Yields each of a job's samples once, in the order that all readers see.

        Raises:
            ControlError: none came in ``timeout_s``, or the job is unknown (or done).
            StopRequested: ``stop`` was called; at the same place in every reader.
            Exception: whatever ended the run.
        """
        ...

    def probe(self, version: int, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[str, ...]:
        """Asks every instance that serves ``version`` the same prompts; a job id each, the same in every reader."""
        ...

    def acknowledge(self, step: Step) -> None:
        """Waits until every trainer process is about to enter the same collective; at once where there is one.

        Raises:
            ControlError: another reader enters something else, or does not come within ``control.plan_timeout_s``.
        """
        ...

    def stop(self, reason: str) -> None:
        """Has ``samples`` (or ``wait_ready``) raise `StopRequested`, at one place for all readers. Returns at once.

        Safe in any thread, not in a signal handler.
        """
        ...

    def pool(self) -> tuple[InstanceView, ...]:
        """How each instance stands."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Totals since the start: what was dispatched, finished, restarted, and dropped, by kind."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Entries held in memory, by kind; 0 when every job is done."""
        ...

    def dispatched(self) -> tuple[Dispatched, ...]:
        """What became of the last `control.dispatched.KEPT` jobs that are answered, the oldest first."""
        ...

    def usage(self) -> Mapping[str, float]:
        """What the controller itself costs, as metrics: see ``control/`` in `metric_names`."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the run from outside (a version could not be written, say): every wait raises the error."""
        ...

    def close(self) -> None:
        """Ends everything that this one started.

        Raises:
            ControlError: something did not end within its bound.
        """
        ...
