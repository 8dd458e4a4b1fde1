"""A thread that does what it is given, in order, and whose failures reach the thread that gave it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

_NICE: Final = 10  # behind the trainer's threads; what runs on XLA's own threads is not covered


class Background:
    """Tasks of low priority, one after the other.

    Call order: ``do`` any number of times; ``close`` once.

    Invariant: tasks run in the order in which they were given. After an exception none is begun, and ``check`` and
    ``do`` raise it, with the traceback of the thread. The process does not end before the thread: JAX, which cannot be
    interrupted while it compiles, would take it down.

    Args:
        name: Of the thread.
        close_s: How long ``close`` waits for the task that runs, seconds.
    """

    def __init__(self, name: str, close_s: float) -> None:
        self.stopping = threading.Event()
        """Set when it is closed: a long task looks at it between its steps, and ends."""
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
        while (entry := self._tasks.get()) is not None:
            task, result = entry
            if self.stopping.is_set() or self._error is not None:
                result.cancel()
                continue
            try:
                found = task()
            except Exception as error:
                self._error = error
                result.set_exception(error)
            else:
                result.set_result(found)
