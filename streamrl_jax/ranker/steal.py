"""What an instance that runs dry takes from another's line. Pure: the controller and the simulation call it alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """An instance and the groups that wait for it.

    Attributes:
        step_s: Seconds of one of its steps at its batch.
        batch: Answers at once.
        tokens: Predicted tokens still to come of the answers that it runs; at least 0.
        waiting: Predicted tokens of an answer, of each waiting group, falling.
        answers: Of each waiting group.
        waiting_tokens: Predicted tokens of all that waits: the sum over groups of tokens times answers.
    """

    step_s: float
    batch: int
    tokens: float
    waiting: Sequence[float]
    answers: Sequence[int]
    waiting_tokens: float

    @property
    def ends_s(self) -> float:
        """Seconds until it has ended all of this, if its slots stay full."""
        return (self.tokens + self.waiting_tokens) / self.batch * self.step_s


@dataclass(frozen=True, slots=True)
class Theft:
    """One waiting group changes lines."""

    victim: int  # index of the line it leaves
    place: int  # its index in that line's `waiting`


def steal(lines: Sequence[Line], thief: int) -> Theft | None:
    """The group that an instance with nothing left in its line takes next.

    The victim is the line that ends last, the first of equals; it gives the longest waiting group with which the thief
    ends before the victim would have. If it has none, the line that ends next to last is asked, and so on. Called
    again and again it ends: each theft makes the later one of two ends earlier.

    Args:
        lines: Of all instances.
        thief: Index of the one that has free slots and nothing waiting.

    Returns:
        What moves; None: nothing that would help.
    """
    own = lines[thief]
    # Of lines that end together the first: sorted is stable.
    for victim in sorted(range(len(lines)), key=lambda index: -lines[index].ends_s):
        line = lines[victim]
        if victim == thief or not line.waiting:
            continue
        if line.ends_s <= own.ends_s:
            return None
        place = bisect_left(
            range(len(line.waiting)),
            True,
            key=lambda place: _end_with(own, line.waiting[place], line.answers[place]) < line.ends_s,
        )
        if place < len(line.waiting):
            return Theft(victim, place)
    return None


def _end_with(own: Line, tokens: float, answers: int) -> float:
    return max(tokens, (own.tokens + own.waiting_tokens + tokens * answers) / own.batch) * own.step_s
