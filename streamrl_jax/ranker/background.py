"""A thread that does what it is given, in order, and whose failures reach the thread that gave it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

_NICE: Final = 10  # behind the trainer's threads; what runs on XLA's own threads is not covered


class Background:
    """Tasks of low priority, one after the other.

    Call order: ``do`` any number of times; ``close`` once.

    Invariant: tasks run in the order in which they were given. After an exception none is begun, and ``check`` and
    ``do`` raise it, with the traceback of the thread. A `CancelledError` is none: the task wanted the result of one
    that another thread never began, and that thread tells why. Nothing that a task held is kept when it has ended.
    The process does not end before the thread: JAX, which cannot be interrupted while it compiles, would take it down.

    Args:
        name: Of the thread.
        close_s: How long ``close`` waits for the task that runs, seconds.
    """

    def __init__(self, name: str, close_s: float) -> None:
        self.stopping = threading.Event()
        """Set when it is closed: a long task looks at it between its steps, and ends."""
        self.failed_at: float | None = None
        """When a task raised, on the monotonic clock; None: none has."""
        self._close_s = close_s
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def do(self, task: Callable[[], T]) -> Future[T]:
        """Gives it a task.

        Args:
            task: What to do; it may raise.

        Returns:
            Its result; cancelled where it is never begun.

        Raises:
            Exception: An earlier task's.
        """
        self.check()
        result: Future[T] = Future()
        self._tasks.put((task, result))
        return result

    def check(self) -> None:
        """Raises what a task raised; nothing otherwise."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread: tasks that wait are cancelled, the one that runs is waited for."""
        self.stopping.set()
        self._tasks.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("thread %s is still at work; the process ends after it", self._thread.name)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # where the system lets a thread have no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._next_done():
            pass

    def _next_done(self) -> bool:
        """Runs the next task; false: it is closed."""
        if (entry := self._tasks.get()) is None:
            return False
        task, result = entry
        if self.stopping.is_set() or self._error is not None:
            result.cancel()
            return True
        try:
            found = task()
        except CancelledError:
            result.cancel()
        except Exception as error:
            self._error, self.failed_at = error, time.monotonic()
            result.set_exception(error)
        else:
            result.set_result(found)
        return True


def check_all(threads: Iterable[Background]) -> None:
    """Raises what a task of one of the threads raised, of several the first; nothing otherwise."""
    failed = [(thread.failed_at, thread) for thread in threads if thread.failed_at is not None]
    if failed:
        min(failed, key=lambda entry: entry[0])[1].check()


def result_of(begun: Future[T], seconds: float, threads: Iterable[Background]) -> T:
    """What a task has found; where it was never begun since one of the threads had failed, that failure.

    Args:
        begun: Its result.
        seconds: How long to wait for it.
        threads: Those that it may have waited for, its own among them.

    Raises:
        TimeoutError: It takes longer.
        Exception: What a task raised.
    """
    try:
        return begun.result(seconds)
    except CancelledError:
        check_all(threads)
        raise
