"""Signals that end a run in good order: SIGTERM, and the warning that schedulers send (SIGUSR1)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Final

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TELLING_S: Final = 5.0  # bound on telling of a signal that came at the very end


_BAD_END: Final = threading.Event()


def part_badly() -> None:
    """Notes that this process met other trainer processes, and had an error while the others go on, or hang."""
    _BAD_END.set()


def parted_badly() -> bool:
    """Whether `part_badly` was called: the interpreter's orderly end would wait for the others, and abort."""
    return _BAD_END.is_set()


class StopRequested(Exception):
    """A scheduler or a user asked the run to write a checkpoint and end."""


class StopSignal:
    """Turns a signal into `StopRequested`, but only where the trainer's state is whole.

    Call order: `listening()` around the run, `interruptible()` around each wait. A signal that arrives elsewhere is
    kept, and raised at the next `interruptible()`. Only the first one interrupts: a scheduler that warns first and then
    insists does not tear the checkpoint that the warning brought about.

    Ctrl-C is raised at once, anywhere, and again at the next wait: in a destructor or in a weak reference's callback
    Python only prints an exception and goes on.
    """

    def __init__(self) -> None:
        self._caught: str | None = None
        self._to_tell: SimpleQueue[str | None] | None = None
        self._interrupted = False
        self._open = False

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Installs the handlers, and puts back the earlier ones at the end.

        Python lets only the main thread do so; a run that is called from another one takes no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            earlier[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield self
        finally:
            for number, handler in earlier.items():
                # None: a handler that Python did not install (faulthandler's) and cannot put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def relayed(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Within it a signal raises nothing here: it is told to whoever stops all trainer processes at one place.

        Args:
            tell: As `RunController.stop`; called on a thread of its own, with the signal's name. A signal that has come
                before is told at once.
        """
        to_tell: SimpleQueue[str | None] = SimpleQueue()  # its `put` is safe in a signal handler
        thread = threading.Thread(target=_tell, args=(to_tell, tell), name="stop", daemon=True)
        thread.start()
        self._to_tell = to_tell
        if self._caught is not None:
            to_tell.put(self._caught)
        try:
            yield
        finally:
            self._to_tell = None
            to_tell.put(None)
            thread.join(_TELLING_S)

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
        """Raises `StopRequested` if a signal has come, `KeyboardInterrupt` after Ctrl-C."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._caught is not None and self._to_tell is None:
            raise StopRequested(self._caught)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught = self._caught or signal.Signals(number).name
        if self._to_tell is not None:
            self._to_tell.put(self._caught)
        elif self._open:
            self._open = False
            raise StopRequested(self._caught)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


def _tell(to_tell: SimpleQueue[str | None], tell: Callable[[str], None]) -> None:
    while (reason := to_tell.get()) is not None:
        tell(reason)
