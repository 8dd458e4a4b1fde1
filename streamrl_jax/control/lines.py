"""What waits of a planned job: a line of prompts for each instance. Pure: no sockets, no clock.

A plan (`control.dispatching`) says which instance answers what and in which order. That is a soft pin: an instance
takes its own line first, and when that is empty, what is still in another's. So nothing waits for an instance that is
slow, busy, lost or gone, and one that joins begins by taking over (decision 0015).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from streamrl_jax.control.placing import Placement, Waiting
from streamrl_jax.ranker.steal import Line, take_over

Units = Int[np.ndarray, " units"]
Tokens = Float64[np.ndarray, " units"]


@dataclass(frozen=True, slots=True)
class Seat:
    """An instance in a plan."""

    name: str
    batch: int  # answers at once
    step_s: float  # of one decode step at that batch
    least_s: float  # of one with a single answer


@dataclass(frozen=True, eq=False)
class LinePlan:
    """Which instance answers what, and in which order.

    A *unit* is what stays together: the answers to one prompt, or a single answer. Unit u is the answers u * answers
    up to (u + 1) * answers, in the order of `control.jobs.members`.
    """

    seats: Sequence[Seat]
    seat: Units  # index into `seats`, for each unit
    rank: Units  # its place in that instance's line; lower goes first
    tokens: Tokens  # expected of one of its answers; falls along a line
    answers: int  # of a unit
    caps: Mapping[str, int] = field(
        default_factory=dict
    )  # samples that an instance holds at once; none: all it can

    def planned(self, answer: int) -> str:
        """The instance that an answer was planned for."""
        return self.seats[self.seat[answer // self.answers]].name


@dataclass(eq=False, slots=True)
class _Line:
    """Units from ``first`` on wait, and of the unit ``current`` (-1: none) the answers from ``answer`` on."""

    seat: Seat
    number: int
    units: Units  # by rank
    tokens: Tokens  # of an answer of each
    first: int = 0
    current: int = -1
    current_tokens: float = 0.0
    answer: int = 0
    waiting_tokens: float = 0.0
    running: dict[int, float] = field(
        default_factory=dict
    )  # answers that left it and are not done, and their tokens
    running_tokens: float = 0.0
    own: int = 0  # answers that were planned here, and wait or run here
    abandoned: bool = False  # nobody works at it

    @property
    def waits(self) -> bool:
        return self.current >= 0 or self.first < len(self.units)

    @property
    def ends_s(self) -> float:
        return (self.running_tokens + self.waiting_tokens) / self.seat.batch * self.seat.step_s

    @property
    def next_tokens(self) -> float:
        """Expected of an answer that another line would take from here; 0: none waits."""
        if self.first < len(self.units):
            return float(self.tokens[self.first])
        return self.current_tokens if self.current >= 0 else 0.0

    def remove(self, place: int) -> int:
        """Takes the unit at this place of those that wait."""
        unit = int(self.units[self.first + place])
        if place:
            self.units = np.delete(self.units, self.first + place)
            self.tokens = np.delete(self.tokens, self.first + place)
        else:
            self.first += 1
        return unit


class _Ranking:
    """Lines by a figure that changes, the greatest first; of equal ones the lower number.

    An entry that is out of date comes up too early, and is put right then. So a line is entered again whenever its
    figure may have risen, and never because it has fallen.

    Args:
        figure: of a line.
        counts: whether a line is in the ranking at present.
    """

    def __init__(self, figure: Callable[[_Line], float], counts: Callable[[_Line], bool]) -> None:
        self._figure = figure
        self._counts = counts
        self._heap: list[tuple[float, int, int, _Line]] = []
        self._entries = 0

    def enter(self, line: _Line) -> None:
        if self._counts(line):
            heapq.heappush(self._heap, self._entry(line))

    def first(self) -> _Line | None:
        """The line of the greatest figure; None: none is in the ranking."""
        while self._heap:
            negative, _, _, line = self._heap[0]
            if not self._counts(line):
                heapq.heappop(self._heap)
            elif -self._figure(line) > negative:
                heapq.heapreplace(self._heap, self._entry(line))
            else:
                return line
        return None

    def _entry(self, line: _Line) -> tuple[float, int, int, _Line]:
        self._entries += 1  # so that two entries of a line never compare lines
        return -self._figure(line), line.number, self._entries, line


class Lines:
    """The lines of one job.

    Call order: ``fill`` as instances have room, until nothing is ``waiting``; ``done`` when one has answered.

    Invariant: each answer leaves once. Those of a line leave by rank, the answers of a unit one after another. After
    ``fill`` nothing waits while an instance that was offered has room. What waits takes the memory of the plan alone.

    Args:
        plan: who answers what.
        draw: makes the sample of an answer, by its number, when it leaves.
    """

    def __init__(self, plan: LinePlan, draw: Callable[[int], Waiting]) -> None:
        self._plan = plan
        self._draw = draw
        order = np.lexsort((plan.rank, plan.seat))
        ends = np.searchsorted(plan.seat[order], np.arange(len(plan.seats) + 1))
        self._lines = {
            seat.name: self._line(seat, number, order[ends[number] : ends[number + 1]])
            for number, seat in enumerate(plan.seats)
        }
        self._abandoned = _Ranking(lambda line: line.next_tokens, lambda line: line.abandoned and line.waits)
        self._latest = _Ranking(lambda line: line.ends_s, lambda line: line.waits)
        for line in self._lines.values():
            self._latest.enter(line)
        self.waiting = len(plan.seat) * plan.answers
        """Answers that have not left."""
        self.steals = 0
        """Units, or rests of them, that an instance took over from another's line."""
        self.uncapped = False
        """A cap has ended because others took what it was for, and nobody has set this to false since."""

    @property
    def has_caps(self) -> bool:
        """Whether some instances may hold fewer samples than they can."""
        return bool(self._plan.caps)

    def cap(self, instance: str) -> int | None:
        """How many samples an instance may hold at once while any of these wait; None: as many as it can.

        A small batch is for the long answers that were planned there: the cap ends with the last of them, and the
        instance fills up from other lines.
        """
        cap = self._plan.caps.get(instance)
        return cap if cap is not None and self._lines[instance].own else None

    def fill(self, free: MutableMapping[str, int]) -> list[Placement]:
        """Fills instances, first from their own lines, then from those of others.

        Args:
            free: how many samples each of them takes; sinks by what it gets.

        Returns:
            The samples that leave, in order.
        """
        placed: list[Placement] = []
        for name in free:
            if (line := self._lines.get(name)) is not None:
                self._return(line)
                placed += self._leave(line, free)
        dry = deque(name for name in free if free[name])
        while dry and self.waiting:
            line = self._line_of(dry.popleft())
            self._take_over(line)
            placed += self._leave(line, free)
            if free[line.seat.name]:
                dry.append(line.seat.name)
        return placed

    def done(self, answer: int, instance: str) -> None:
        """Notes that an instance does not run an answer any more: it has ended it, or was lost."""
        if (line := self._lines.get(instance)) is not None:
            line.running_tokens -= line.running.pop(answer)
            line.own -= self._is_own(line, answer // self._plan.answers)

    def abandon(self, instance: str) -> None:
        """Notes that an instance was lost or leaves: while it gets nothing, the others take the longest of its prompts
        before shorter ones of their own."""
        if (line := self._lines.get(instance)) is not None and line.waits and not line.abandoned:
            line.abandoned = True
            self._abandoned.enter(line)

    def _return(self, line: _Line) -> None:
        line.abandoned = False

    def _is_own(self, line: _Line, unit: int) -> bool:
        return bool(self._plan.seat[unit] == line.number)

    def _line(self, seat: Seat, number: int, units: Units) -> _Line:
        tokens, answers = self._plan.tokens[units], self._plan.answers
        waiting = float(tokens.sum()) * answers
        return _Line(seat, number, units, tokens, waiting_tokens=waiting, own=len(units) * answers)

    def _line_of(self, name: str) -> _Line:
        """The line of an instance; one that has joined since is like the largest of the plan."""
        if (line := self._lines.get(name)) is None:
            like = max(self._plan.seats, key=lambda seat: seat.batch)
            seat = replace(like, name=name)
            line = self._lines[name] = self._line(seat, len(self._lines), np.zeros(0, np.int64))
        return line

    def _leave(self, line: _Line, free: MutableMapping[str, int]) -> Iterator[Placement]:
        answers, name = self._plan.answers, line.seat.name
        while line.waits and free[name]:
            if line.current < 0:
                self._prefer_abandoned(line)
            if line.current < 0:
                line.current_tokens, line.answer = float(line.tokens[line.first]), 0
                line.current = line.remove(0)
            number = line.current * answers + line.answer
            line.waiting_tokens -= line.current_tokens
            line.running[number] = line.current_tokens
            line.running_tokens += line.current_tokens
            line.answer += 1
            if line.answer == answers:
                line.current = -1
            free[name] -= 1
            self.waiting -= 1
            yield Placement(self._draw(number), name)

    def _prefer_abandoned(self, line: _Line) -> None:
        """Takes what goes next of an abandoned line, if that is longer than what goes next of the own one."""
        longest = self._abandoned.first()
        if longest is not None and longest.next_tokens > line.next_tokens:
            self._move(longest, line, 0)

    def _take_over(self, thief: _Line) -> None:
        """Moves a unit, or the rest of one, to a line in which nothing waits.

        It is the longest of those that nobody works at, else of the line that ends last; which one of that,
        `ranker.steal.take_over` says.
        """
        if (abandoned := self._abandoned.first()) is not None:
            self._move(abandoned, thief, 0)
            return
        victim = self._latest.first()
        assert victim is not None, "asked only while something waits, and then it waits in a line"
        begun = victim.first == len(victim.units)  # all that waits is the rest of a unit
        self._move(victim, thief, 0 if begun else take_over(self._seen(thief), self._seen(victim)))

    def _move(self, victim: _Line, thief: _Line, place: int) -> None:
        """Makes a waiting unit of one line the next of another, of which none has been begun; where none waits, the
        rest of the one that was begun."""
        if victim.first < len(victim.units):
            tokens, answer = float(victim.tokens[victim.first + place]), 0
            unit = victim.remove(place)
            if victim.abandoned and victim.first == len(victim.units):
                # The rest of the one that was begun is longer than those that came after it.
                self._abandoned.enter(victim)
        else:
            unit, tokens, answer = victim.current, victim.current_tokens, victim.answer
            victim.current = -1
        thief.current, thief.current_tokens, thief.answer = unit, tokens, answer
        moved = self._plan.answers - answer
        victim.waiting_tokens -= tokens * moved
        thief.waiting_tokens += tokens * moved
        if self._is_own(victim, unit):
            victim.own -= moved
            self.uncapped |= not victim.own and victim.seat.name in self._plan.caps
        thief.own += moved * self._is_own(thief, unit)
        self._latest.enter(thief)
        self.steals += 1

    def _seen(self, line: _Line) -> Line:
        """A line as `ranker.steal` weighs it. What a running answer has written so far is not taken off; a line in
        which anything waits ends with that."""
        waiting = line.tokens[line.first :]
        return Line(
            step_s=line.seat.step_s,
            batch=line.seat.batch,
            tokens=max(0.0, line.running_tokens),  # a sum of differences may be off in the last digits
            waiting=_View(waiting),
            answers=_View(np.broadcast_to(np.int64(self._plan.answers), len(waiting))),
            waiting_tokens=line.waiting_tokens,
            running=len(line.running),
            longest=0.0 if line.waits else max(line.running.values(), default=0.0),
            least_s=line.seat.least_s,
        )


class _View(Sequence[Any]):
    """An array as a sequence, of which nothing is copied."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return self._array[index]
