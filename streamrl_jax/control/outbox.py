"""A job's way out: its finished samples in one order, until every trainer process has them. Lives on the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from streamrl_jax.control.faults import ControlError
from streamrl_jax.types import Sample


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Consecutive samples from ``position`` on; ``next`` is what follows, the samples that will not come included."""

    position: int
    samples: list[Sample]
    next: int


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """There is no further sample."""


@dataclass(frozen=True, eq=False, slots=True)
class Stop:
    """The run was asked to stop, at this place of the order."""

    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Failed:
    """The run has ended."""

    error: BaseException


Delivery = Batch | End | Stop | Failed
"""What a reader gets next."""


class Outbox:
    """Finished samples of one job, and of those that were added to it, in the order in which they were rewarded.

    Call order: ``put`` and ``cancel`` for each sample, ``grow`` before the end was read; each reader opens a `Reading`,
    which calls ``read`` and ``take``.

    Invariant: all readers see the same entries at the same positions, the place where the run is stopped and the end
    included. What was read is kept until every reader has taken it; so its length is bounded by the jobs', and, since
    the intake counts what is kept, by the slowest reader.

    Args:
        job_id: names it.
        size: samples of the job.
        readers: trainer processes that take them.
        on_taken: told of each sample that every reader has.
        on_end: told when every reader has read the end.
    """

    def __init__(
        self,
        job_id: str,
        size: int,
        readers: int = 1,
        on_taken: Callable[[Sample], None] = lambda sample: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.job_id = job_id
        self._size = size
        self._entries: deque[Sample | None] = deque()  # from `_first` on; None: it will not come
        self._first = 0
        self._taken = [0] * readers
        self._sent = 0  # the most that any reader was given
        self._ended: set[int] = set()
        self._stop: tuple[int, str] | None = None
        self._failure: BaseException | None = None
        self._readings: list[Reading] = []
        self._on_taken = on_taken
        self._on_end = on_end

    # ---------------------------------------------------------------- filled

    def grow(self, size: int) -> None:
        """Makes room for the samples of one more job."""
        self._size += size

    def put(self, sample: Sample) -> None:
        """Adds a rewarded sample."""
        self._entries.append(sample)
        self._tell()

    def cancel(self) -> None:
        """Tells that one sample will not come (a probe whose instance is gone)."""
        self._entries.append(None)
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Raises the error in whoever waits, behind what is here already."""
        if self._failure is None:
            self._failure = error
            self._tell()

    def stop(self, reason: str) -> None:
        """Ends the order behind what any reader was given; no effect once one has read the end."""
        if self._stop is None and not self._ended:
            self._stop = (self._sent, reason)
            self._tell()

    # ---------------------------------------------------------------- read

    def read(self, reader: int, position: int, most: int, waits: bool) -> Delivery | None:
        """What a reader finds at a position.

        Args:
            reader: who.
            position: of the first sample that it wants.
            most: samples at once.
            waits: it has taken everything before ``position`` and submits nothing further before it hears more.

        Returns:
            None: nothing yet.
        """
        if self._stop is not None and position >= self._stop[0]:
            return Stop(self._stop[1])
        end = min(self._first + len(self._entries), position + most)
        if self._stop is not None:
            end = min(end, self._stop[0])
        if position < end:
            batch = self._batch(position, end)
            self._sent = max(self._sent, batch.next)
            return batch
        if waits and position >= self._size:
            self._ended.add(reader)
            if len(self._ended) == len(self._taken):
                self._on_end()
            return End()
        if self._failure is not None:
            return Failed(self._failure)
        return None

    def check(self, reader: int, position: int) -> None:
        """Raises `ControlError` where a reader cannot begin at ``position``: it has more, or less, than it says."""
        least, most = self._taken[reader], self._first + len(self._entries)
        if not least <= position <= most:
            raise ControlError(
                f"trainer process {reader} asks for the samples of {self.job_id} from {position} on; it has taken "
                f"{least} of the {most} that are there"
            )

    def take(self, reader: int, position: int) -> None:
        """Notes that a reader has everything before ``position``."""
        self._taken[reader] = max(self._taken[reader], min(position, self._first + len(self._entries)))
        for _ in range(min(self._taken) - self._first):
            self._first += 1
            sample = self._entries.popleft()
            if sample is not None:
                self._on_taken(sample)

    def attach(self, reading: Reading) -> None:
        """Tells a reading whenever there may be more."""
        self._readings.append(reading)

    def detach(self, reading: Reading) -> None:
        """Tells it no more."""
        if reading in self._readings:
            self._readings.remove(reading)

    def _batch(self, position: int, end: int) -> Batch:
        """Samples up to the first one that will not come, and the place behind those that will not."""
        samples: list[Sample] = []
        at = position
        while at < end and (sample := self._entries[at - self._first]) is not None:
            samples.append(sample)
            at += 1
        while at < end and self._entries[at - self._first] is None:
            at += 1
        return Batch(position, samples, at)

    def _tell(self) -> None:
        for reading in list(self._readings):
            reading.go_on()


class Reading:
    """One reader's way through an outbox: hands over what comes, at most ``window`` samples ahead of what it took.

    Call order: ``go_on`` once; ``taken`` as the reader goes; ``close``. After `End`, `Stop` or `Failed` nothing comes.

    Args:
        outbox: what is read.
        reader: who reads.
        position: where to begin.
        window: samples that may be under way.
        deliver: takes what comes, on the loop.

    Raises:
        ControlError: the reader cannot be at this position.
    """

    def __init__(
        self, outbox: Outbox, reader: int, position: int, window: int, deliver: Callable[[Delivery], None]
    ) -> None:
        outbox.check(reader, position)
        self._outbox = outbox
        self._reader = reader
        self._position = position
        self._taken = position
        self._window = window
        self._deliver = deliver
        self._waits = False
        self._over = False
        outbox.attach(self)

    def taken(self, position: int, waits: bool) -> None:
        """The reader has everything before ``position``; ``waits``: and wants more, or to hear that there is none.

        Raises:
            ControlError: it was not given so much.
        """
        if position > self._position:
            raise ControlError(
                f"trainer process {self._reader} says that it has {position} samples of {self._outbox.job_id}; it was "
                f"given {self._position}"
            )
        self._taken = max(self._taken, position)
        self._waits = waits
        self._outbox.take(self._reader, position)
        self.go_on()

    def go_on(self) -> None:
        """Hands over what there is and what the window allows."""
        while not self._over and (room := self._taken + self._window - self._position) > 0:
            waits = self._waits and self._taken == self._position
            found = self._outbox.read(self._reader, self._position, room, waits)
            if found is None:
                return
            if isinstance(found, Batch):
                self._position = found.next
            else:
                self.close()
            self._deliver(found)

    def close(self) -> None:
        """Ends it."""
        self._over = True
        self._outbox.detach(self)
