"""What the controller tells the outside: events as they happen, and a view of each instance on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from streamrl_jax.types import NO_VERSION, InstanceState


class EventKind(StrEnum):
    """What happened."""

    PHASE = "phase"  # an instance starts: text says what it does, seconds for how long
    READY = "ready"  # an instance is loaded and connected
    LOST = "lost"  # an instance is taken for dead: text says why
    RESTART = "restart"  # it is started anew: count says which restart this is
    GONE = "gone"  # an endpoint is given up
    RECONNECTED = "reconnected"  # the stream broke, the instance lives
    REDISPATCH = "redispatch"  # count samples were taken back from an instance
    UPDATED = "updated"  # an instance serves a new version, seconds after it was published
    RELEASED = "released"  # nobody needs the source of this version any more


@dataclass(frozen=True)
class ControlEvent:
    """One line for the progress display and the log."""

    kind: EventKind
    instance: str = ""
    text: str = ""
    version: int = NO_VERSION
    count: int = 0
    seconds: float = 0.0


class Activity(StrEnum):
    """What an instance spends its time on."""

    BUSY = "busy"  # it holds samples
    IDLE = "idle"  # it is up and holds none
    UPDATING = "updating"  # it is given weights and holds none
    DOWN = "down"  # it starts, or is dead


@dataclass(frozen=True)
class InstanceView:
    """One instance as the controller sees it."""

    name: str
    address: str
    state: InstanceState
    version: int
    held: int  # samples that it has of ours
    running: int  # of them in the engine's batch
    waiting: int  # of them queued inside the instance
    tokens_per_s: float  # over the last few seconds
    tokens: int  # since the start of the run
    restarts: int
    seconds: Mapping[Activity, float] = field(default_factory=dict)  # spent so far, by activity

    @property
    def idle_ratio(self) -> float:
        """Share of its life that the instance was up and had nothing to do."""
        total = sum(self.seconds.values())
        return self.seconds.get(Activity.IDLE, 0.0) / total if total else 0.0


class ActivityClock:
    """Sums the seconds of each activity.

    Args:
        now: monotonic seconds at the start; the first activity is DOWN.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._activity = Activity.DOWN
        self._seconds = dict.fromkeys(Activity, 0.0)

    def switch(self, activity: Activity, now: float) -> None:
        """Ends the present activity and begins another (or the same)."""
        self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    def seconds(self, now: float) -> Mapping[Activity, float]:
        """Seconds per activity up to now."""
        self.switch(self._activity, now)
        return dict(self._seconds)


class TokenRate:
    """Tokens per second over a sliding window.

    Args:
        window_s: how far back it looks.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._marks: list[tuple[float, int]] = []

    def add(self, tokens: int, now: float) -> None:
        """Counts tokens that were made up to now."""
        self._marks.append((now, tokens))
        self._trim(now)

    def per_s(self, now: float) -> float:
        """The rate of the last ``window_s``."""
        self._trim(now)
        return sum(tokens for _, tokens in self._marks) / self._window_s

    def _trim(self, now: float) -> None:
        self._marks = [mark for mark in self._marks if now - mark[0] <= self._window_s]
