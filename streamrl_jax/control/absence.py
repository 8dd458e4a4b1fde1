"""Time in which this process itself was stopped: it could hear nobody then, and holds it against nobody."""

from __future__ import annotations


def leave_out(since_s: float, absent_s: float, now_s: float) -> float:
    """Moves the moment from which a silence counts by the time in which this process was stopped, and no further.

    Args:
        since_s: that moment, on a monotonic clock.
        absent_s: how long this process was stopped.
        now_s: the end of that time. What came in the meantime is not moved beyond it.

    Returns:
        The moment from which it counts now.
    """
    return min(now_s, since_s + absent_s)
