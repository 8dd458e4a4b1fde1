"""A job's way out: from the controller's loop to the thread that trains."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator

from streamrl_jax.control.faults import ControlError
from streamrl_jax.types import Sample

_CANCELLED = object()


class Outbox:
    """Finished samples of one job, and of those that were added to it, in the order of their arrival.

    ``put``, ``cancel``, ``grow`` and ``fail`` are called on the loop, ``drain`` on the trainer's thread. Its length
    is bounded by the jobs'.

    Args:
        job_id: named in errors.
        size: samples of the job.
    """

    def __init__(self, job_id: str, size: int) -> None:
        self.job_id = job_id
        self._size = size
        self._taken = 0
        self._items: queue.SimpleQueue[Sample | BaseException | object] = queue.SimpleQueue()

    def grow(self, size: int) -> None:
        """Makes room for the samples of one more job."""
        self._size += size

    def put(self, sample: Sample) -> None:
        """Adds a rewarded sample."""
        self._items.put(sample)

    def cancel(self) -> None:
        """Tells that one sample will not come (a probe whose instance is gone)."""
        self._items.put(_CANCELLED)

    def fail(self, error: BaseException) -> None:
        """Raises the error in whoever waits, now and at every later call."""
        self._items.put(error)

    def drain(
        self, timeout_s: float, taken: Callable[[Sample], None], situation: Callable[[], str]
    ) -> Generator[Sample]:
        """Yields each sample once; a second call goes on where the first was left.

        Args:
            timeout_s: bound on the wait for one sample, seconds.
            taken: told of each sample before it is yielded.
            situation: says for the error how things stand.

        Yields:
            The samples, until the last; a job that is added while the last one is looked at goes on.

        Raises:
            ControlError: none came within the bound.
        """
        while self._taken < self._size:
            since = time.monotonic()
            try:
                item = self._items.get(timeout=timeout_s)
            except queue.Empty:
                raise ControlError(
                    f"no sample of {self.job_id} arrived for {time.monotonic() - since:.0f} s "
                    f"(trainer.sample_timeout_s); {self._taken} of {self._size} are here. {situation()}"
                ) from None
            if isinstance(item, BaseException):
                self._items.put(item)
                raise item
            self._taken += 1
            if isinstance(item, Sample):
                taken(item)
                yield item
