"""What the controller costs: memory and processor time of its process, and how long samples take through it."""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LATENCIES: Final = 4096  # of the newest samples
_PAGE: Final = resource.getpagesize()


@dataclass(frozen=True)
class Used:
    """So far."""

    clock_s: float = 0.0  # monotonic, of the controller's host
    cpu_s: float = 0.0
    rss_bytes: int = 0


class Usage:
    """Reads this process's own figures, at most once in ``every_s``."""

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._last = Used()

    def now(self) -> Used:
        """The newest figures."""
        if time.monotonic() - self._last.clock_s >= self._every_s:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            self._last = Used(time.monotonic(), time.process_time(), pages * _PAGE)
        return self._last


class Meter:
    """Turns figures into the metrics ``control/...``; between two calls of ``metrics`` lies one iteration."""

    def __init__(self) -> None:
        self._before = Used()
        self._newest = Used()
        self._share = 0.0
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    def used(self, used: Used) -> None:
        """Takes figures as they come."""
        if not self._before.clock_s:
            self._before = used
        self._newest = used

    def arrived(self, seconds: float) -> None:
        """A sample is in the trainer's process, so long after it was rewarded."""
        self._latencies.append(seconds)

    def metrics(self) -> Mapping[str, float]:
        """Since the last call; what is not known yet is left out."""
        found: dict[str, float] = {}
        span = self._newest.clock_s - self._before.clock_s
        if self._newest.rss_bytes:
            found["control/rss_bytes"] = float(self._newest.rss_bytes)
            if span > 0:  # else nothing newer has come: the last share stands
                self._share = (self._newest.cpu_s - self._before.cpu_s) / span
            found["control/cpu_share"] = self._share
        latencies = [self._latencies.popleft() for _ in range(len(self._latencies))]
        if latencies:
            found["control/latency_ms/median"] = 1e3 * statistics.median(latencies)
            found["control/latency_ms/max"] = 1e3 * max(latencies)
        self._before = self._newest
        return found
