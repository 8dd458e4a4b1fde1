"""A job's samples in the trainer's process: from whoever receives them to the thread that trains."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator

from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.outbox import Batch, Delivery, End, Failed
from streamrl_jax.control.usage import Meter
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.types import Sample


class Inbox:
    """What was delivered of one way out, and how much of it the trainer has taken.

    ``put`` may be called from any thread, the rest on the trainer's. A batch that comes a second time (the stream
    broke, and its samples were sent again) is dropped as far as its positions are known.

    Args:
        job_id: named in errors.
        size: samples of the job.
        meter: takes how long samples were under way while the trainer waited for one; None: nobody asks.
    """

    def __init__(self, job_id: str, size: int, meter: Meter | None = None) -> None:
        self._job_id = job_id
        self._size = size
        self._items: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._meter = meter
        self._waits_since: float | None = None
        self._here: deque[Sample] = deque()  # taken from the queue, not yielded yet
        self._first = 0  # the position of the first of them
        self._behind = 0  # and the one behind them, samples that will not come included
        self.position = 0
        """Everything before it was taken."""

    def grow(self, size: int) -> None:
        """Makes room for the samples of one more job."""
        self._size += size

    def put(self, delivery: Delivery) -> None:
        """Adds what came."""
        since = self._waits_since
        if self._meter is not None and since is not None and isinstance(delivery, Batch):
            now = time.monotonic()
            for sample in delivery.samples:
                self._meter.arrived(now - max(since, sample.rewarded_s))
        self._items.put(delivery)

    def drain(
        self, timeout_s: float, report: Callable[[int, bool], None], situation: Callable[[], str]
    ) -> Generator[Sample]:
        """Yields each sample once; a second call goes on where the first was left.

        Args:
            timeout_s: bound on the wait for one sample, seconds.
            report: told (position, whether this thread waits now) before a sample is yielded, and before a wait.
            situation: says for the error how things stand.

        Yields:
            The samples, until the last; a job that is added while the last one is looked at goes on.

        Raises:
            ControlError: none came within the bound.
            StopRequested: the order ends here.
        """
        while True:
            while self._here:
                sample = self._here.popleft()
                self._first += 1
                self.position = self._first if self._here else self._behind
                report(self.position, False)
                yield sample
            self._waits_since = time.monotonic()
            report(self.position, True)
            delivery = self._next(timeout_s, situation)
            self._waits_since = None
            if isinstance(delivery, End):
                self._items.put(delivery)
                return
            if isinstance(delivery, Batch):
                self._accept(delivery)
            elif isinstance(delivery, Failed):
                self._items.put(delivery)  # for every later call, as the others
                raise delivery.error
            else:
                self._items.put(delivery)
                raise StopRequested(delivery.reason)

    def _next(self, timeout_s: float, situation: Callable[[], str]) -> Delivery:
        since = time.monotonic()
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            raise ControlError(
                f"no sample of {self._job_id} arrived for {time.monotonic() - since:.0f} s "
                f"(trainer.sample_timeout_s); {self.position} of {self._size} are here. {situation()}"
            ) from None

    def _accept(self, batch: Batch) -> None:
        known = max(0, self.position - batch.position)
        self._here.extend(batch.samples[known:])
        self._first = batch.position + known
        self._behind = max(self._behind, batch.next)
        if not self._here:
            self.position = self._behind
