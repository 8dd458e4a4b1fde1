"""How an instance spends its time, and how fast it writes. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl_jax.control.events import Activity
from streamrl_jax.gen.codec import wire


class ActivityClock:
    """Sums the seconds of each activity.

    Args:
        now: monotonic seconds at the start; the first activity is DOWN.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._activity = Activity.DOWN
        self._seconds = dict.fromkeys(Activity, 0.0)

    @property
    def activity(self) -> Activity:
        """The present one."""
        return self._activity

    def switch(self, activity: Activity, now: float) -> None:
        """Ends the present activity and begins another (or the same)."""
        self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    def seconds(self, now: float) -> Mapping[Activity, float]:
        """Seconds per activity up to now."""
        self.switch(self._activity, now)
        return dict(self._seconds)


class TokenRate:
    """Tokens in all, and a second over a sliding window. Both stay numbers that can be sent on, whatever is reported.

    Args:
        window_s: how far back it looks.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self.total = 0
        self._window_s = window_s
        self._marks: list[tuple[float, int]] = []

    def add(self, tokens: int, now: float) -> None:
        """Counts tokens that were made up to now."""
        self.total = min(self.total + tokens, wire.MAX_TOTAL)
        self._marks.append((now, tokens))
        self._trim(now)

    def per_s(self, now: float) -> float:
        """The rate of the last ``window_s``."""
        self._trim(now)
        return sum(tokens for _, tokens in self._marks) / self._window_s

    def _trim(self, now: float) -> None:
        self._marks = [mark for mark in self._marks if now - mark[0] <= self._window_s]
