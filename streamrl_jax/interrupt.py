"""Signals that end a run in good order: SIGTERM, and the warning that schedulers send (SIGUSR1)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequested(Exception):
    """A scheduler or a user asked the run to write a checkpoint and end."""


class StopSignal:
    """Turns a signal into `StopRequested`, but only where the trainer's state is whole.

    Call order: `listening()` around the run (main thread), `interruptible()` around each wait. A signal that arrives
    elsewhere is kept, and raised at the next `interruptible()`.
    """

    def __init__(self) -> None:
        self._caught: str | None = None
        self._open = False

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Installs the handlers, and puts back the earlier ones at the end."""
        earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within it a signal raises `StopRequested` at once."""
        self._open = True
        try:
            self.check()
            yield
        finally:
            self._open = False

    def check(self) -> None:
        """Raises `StopRequested` if a signal has come."""
        if self._caught is not None:
            raise StopRequested(self._caught)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught = signal.Signals(number).name
        if self._open:
            raise StopRequested(self._caught)
