"""The end of a trainer process that hangs: a collective cannot be interrupted from Python."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final

from streamrl_jax.interrupt import StopRequested

log = logging.getLogger(__name__)

HUNG_EXIT_CODE: Final = 3


class Watchdog:
    """Ends this process if its main thread does not come back within a grace after the run has failed.

    The thread that makes this is the main thread, which trains; others (the display's, the publisher's) may be told of
    the failure as well, and say nothing about where that one is.

    Call order: ``arm`` when the run has failed; ``heed`` whenever a thread is told so, or closes.

    Args:
        grace_s: bound.
        end: ends the process.
    """

    def __init__(self, grace_s: float, end: Callable[[int], None] = os._exit) -> None:
        self._grace_s = grace_s
        self._end = end
        self._main = threading.current_thread()
        self._heeded = threading.Event()
        self._armed = threading.Lock()

    def arm(self, error: BaseException) -> None:
        """Begins to wait; the first call counts."""
        if self._armed.acquire(blocking=False) and not self._heeded.is_set():
            threading.Thread(target=self._wait, args=(error,), name="watchdog", daemon=True).start()

    def heed(self, told: BaseException | None = None) -> None:
        """The main thread is not in a collective, if it is the one that says so.

        Args:
            told: what it was told. A request to stop is no failure: it goes on to write a checkpoint with the others,
                and may hang there.
        """
        if threading.current_thread() is self._main and not isinstance(told, StopRequested):
            self._heeded.set()

    def _wait(self, error: BaseException) -> None:
        if self._heeded.wait(self._grace_s):
            return
        print(
            f"streamrl: error: {error}\nThis trainer process did not come back from a collective within "
            f"{self._grace_s:g} s (control.grace_s) and is ended.",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        self._end(HUNG_EXIT_CODE)
