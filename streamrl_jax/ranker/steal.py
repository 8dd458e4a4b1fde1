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
        running: Answers that it runs; None: not known, its batch is taken for full.
        longest: Predicted tokens that the longest of these has still to come.
        least_s: Seconds of one of its steps with a single answer; None: as `step_s`.
    """

    step_s: float
    batch: int
    tokens: float
    waiting: Sequence[float]
    answers: Sequence[int]
    waiting_tokens: float
    running: int | None = None
    longest: float = 0.0
    least_s: float | None = None

    @property
    def ends_s(self) -> float:
        """Seconds until it has ended all of this, if its slots stay full."""
        return max(self.longest, (self.tokens + self.waiting_tokens) / self.batch) * self.step_s

    def ends_with(self, tokens: float, answers: int) -> float:
        """Seconds until it has ended what it runs and a further group, which slows it down as it fills its slots.

        Args:
            tokens: Predicted, of an answer of the group.
            answers: Of the group.
        """
        held = self.batch if self.running is None else self.running + answers
        running = max(1, min(self.batch, held))
        least = self.step_s if self.least_s is None else self.least_s
        step_s = least + (self.step_s - least) * (running - 1) / max(1, self.batch - 1)
        total = self.tokens + self.waiting_tokens + tokens * answers
        return max(self.longest, tokens, total / running) * step_s


@dataclass(frozen=True, slots=True)
class Theft:
    """One waiting group changes lines."""

    victim: int  # index of the line it leaves
    place: int  # its index in that line's `waiting`


def steal(lines: Sequence[Line], thief: int) -> Theft | None:
    """The group that an instance with nothing left in its line takes to end all of it sooner.

    The victim is the line that ends last, the first of equals; it gives the longest waiting group with which the thief,
    its own running answers included, ends before the victim would have. If it has none, the line that ends next to
    last is asked, and so on. Called again and again it ends: each theft makes the later one of two ends earlier.

    Args:
        lines: Of all instances.
        thief: Index of the one that has free slots and nothing waiting.

    Returns:
        What moves; None: nothing that would help.
    """
    own = lines[thief]
    bound = own.ends_with(0.0, 0)
    late = [(-line.ends_s, index) for index, line in enumerate(lines) if line.waiting and index != thief]
    for end, victim in sorted(late):
        if -end <= bound:
            return None
        waiting, answers = lines[victim].waiting, lines[victim].answers
        place = bisect_left(
            range(len(waiting)),
            True,
            key=lambda at, end=-end, waiting=waiting, answers=answers: (
                own.ends_with(waiting[at], answers[at]) < end
            ),
        )
        if place < len(waiting):
            return Theft(victim, place)
    return None


def take_over(thief: Line, latest: Line) -> int:
    """Which group an instance with nothing left in its line takes from the line that ends last.

    Whoever has room does not idle while anything waits: predictions err, and an answer that has begun ends sooner than
    one that has not. So where nothing would help by the predictions (`steal`), it is the longest group.

    Args:
        thief: Has free slots and nothing waiting.
        latest: The line that ends last, of those in which something waits.

    Returns:
        The group's index in ``latest.waiting``.
    """
    theft = steal([thief, latest], 0)
    return theft.place if theft is not None else 0
