"""One generation stage as a run would do it, in simulated time. Pure Python and NumPy.

The instances (`engine_model`) get their answers in one of two ways: by a plan, each from its own line, or *pulled* from
one queue that all share, in the order of arrival or the longest first. Predictions steer, true lengths happen. An
instance whose line is empty takes from the line that ends last by `ranker.steal.take_over`, as the controller does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from streamrl_jax.plan.engine_model import Answer, Engine
from streamrl_jax.ranker.plans import Plan, Server, caps_of, checked_work, lines_of
from streamrl_jax.ranker.steal import Line, take_over

Order = Literal["arrival", "lpt"]


@dataclass(frozen=True, eq=False)
class Stage:
    """The work of one generation stage.

    Attributes:
        lengths: Tokens that each answer has, at least 1.
        prompts: Tokens of each prompt, at least 0.
        predicted: Expected tokens of an answer, of each prompt, above 0.
    """

    lengths: Int64[np.ndarray, "groups n"]
    prompts: Int64[np.ndarray, " groups"]
    predicted: Float64[np.ndarray, " groups"]

    def __post_init__(self) -> None:
        if self.lengths.ndim != 2 or self.lengths.shape[0] != self.predicted.size:
            raise ValueError(
                f"lengths {self.lengths.shape}: one row a prompt, as many as predicted ({self.predicted.size})"
            )
        if self.lengths.size and self.lengths.min() < 1:
            raise ValueError(f"lengths: {self.lengths.min()} is below 1")


@dataclass(frozen=True)
class Conditions:
    """How the controller and the instances play together.

    Attributes:
        stealing: Whether an instance with an empty line takes from another's; lines must then have the longest first.
        look_ahead: Answers that an instance holds beyond its batch.
        refill_s: Seconds from an answer's end until what takes its place comes in; look-ahead bridges it.
    """

    stealing: bool = True
    look_ahead: int = 0
    refill_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Outcome:
    """What happened.

    Attributes:
        makespan_s: When the last answer ended.
        finish_s: When each server ended its last answer; 0 without any.
        steps: Of each server, decode steps.
        tokens: Of each server.
        busy_s: Of each server, seconds in which it decoded or took in prompts.
        slots: Of each server.
        ended_s: When each answer ended.
        stolen: Groups that changed lines.
        put_off: Answers that gave up their place for lack of KV cache.
    """

    makespan_s: float
    finish_s: Float64[np.ndarray, " servers"]
    steps: Int64[np.ndarray, " servers"]
    tokens: Int64[np.ndarray, " servers"]
    busy_s: Float64[np.ndarray, " servers"]
    slots: Int64[np.ndarray, " servers"]
    ended_s: Float64[np.ndarray, "groups n"]
    stolen: int
    put_off: int

    @property
    def busy(self) -> Float64[np.ndarray, " servers"]:
        """The share of the stage in which each server worked."""
        return self.busy_s / self.makespan_s if self.makespan_s else self.busy_s

    @property
    def filled(self) -> float:
        """Tokens over all slots of all servers in all steps of the longest."""
        places = int(self.slots.sum()) * int(self.steps.max(initial=0))
        return float(self.tokens.sum()) / places if places else 0.0


def run_plan(
    stage: Stage, plan: Plan, servers: Sequence[Server], conditions: Conditions | None = None
) -> Outcome:
    """Runs a stage whose answers wait in the lines of a plan.

    An instance holds no more than the plan's batch while it has answers of its own (`control.lines.Lines.cap`); then it
    fills up from other lines.

    Args:
        stage: The work; its groups are the plan's.
        plan: Places, ranks and batches.
        servers: As the plan counts them.
        conditions: None: the defaults.
    """
    _check(stage, servers)
    engines = [Engine(server) for server in servers]
    source = _Lines(stage, plan, engines)
    return _Run(stage, engines, source, conditions or Conditions()).outcome()


def run_pulled(
    stage: Stage, order: Order, servers: Sequence[Server], conditions: Conditions | None = None
) -> Outcome:
    """Runs a stage whose answers wait in one queue, and go to whichever instance has room.

    At the start the answers to a prompt go together to the emptiest instance; then each goes where a slot falls free.

    Args:
        stage: The work.
        order: As the groups are given, or the longest predicted first.
        servers: At least one.
        conditions: Stealing has no meaning here. None: the defaults.
    """
    _check(stage, servers)
    engines = [Engine(server) for server in servers]
    groups = np.arange(stage.predicted.size)
    if order == "lpt":
        groups = np.argsort(-stage.predicted, kind="stable")
    queue = _Queue(_answers(stage, groups))
    return _Run(stage, engines, queue, conditions or Conditions()).outcome()


def _check(stage: Stage, servers: Sequence[Server]) -> None:
    checked_work(stage.predicted, max(1, stage.lengths.shape[1]), servers, stage.prompts)


def _answers(stage: Stage, groups: Iterable[int]) -> deque[list[Answer]]:
    """The answers of some groups, group by group."""
    n = stage.lengths.shape[1]
    return deque(
        [
            Answer(
                group,
                group * n + place,
                tokens,
                float(stage.predicted[group]),
                int(stage.prompts[group]),
            )
            for place, tokens in enumerate(stage.lengths[group].tolist())
        ][::-1]
        for group in np.asarray(groups).tolist()
    )


class _OwnLine:
    """The groups that wait for one instance; each group's next answer is its list's last."""

    def __init__(self, groups: deque[list[Answer]]) -> None:
        self.groups = groups
        self.predicted = deque(group[0].predicted for group in groups)
        self.answers = deque(len(group) for group in groups)
        self.tokens = sum(p * n for p, n in zip(self.predicted, self.answers, strict=True))

    def pop(self) -> Answer:
        """The next answer; there is one."""
        answer = self.groups[0].pop()
        self.answers[0] -= 1
        self.tokens -= answer.predicted
        if not self.groups[0]:
            self.remove(0)
        return answer

    def remove(self, place: int) -> list[Answer]:
        """Takes a group out."""
        group = self.groups[place]
        self.tokens -= self.predicted[place] * len(group)
        for row in (self.groups, self.predicted, self.answers):
            del row[place]
        return group

    def append(self, group: list[Answer]) -> None:
        """Adds a group at the end."""
        self.groups.append(group)
        self.predicted.append(group[0].predicted)
        self.answers.append(len(group))
        self.tokens += group[0].predicted * len(group)


class _Lines:
    """Where answers wait by a plan."""

    def __init__(self, stage: Stage, plan: Plan, engines: list[Engine]) -> None:
        self._engines, self._home = engines, plan.instance
        self._lines = [_OwnLine(_answers(stage, line)) for line in lines_of(plan)]
        n = stage.lengths.shape[1]
        self._caps = caps_of(plan, [engine.server for engine in engines], n)
        self._mine = (
            np.bincount(plan.instance, minlength=len(engines)) * n
        ).tolist()  # answers that are not done
        context = float(stage.predicted.mean() / 2 + stage.prompts.mean()) if stage.predicted.size else 0.0
        self._batch = [max(1, int(batch)) for batch in plan.batch]
        self._step_s = [
            float(engine.server.cost.ptl(batch, context))
            for engine, batch in zip(engines, self._batch, strict=True)
        ]
        self._least_s = [float(engine.server.cost.ptl(1, context)) for engine in engines]
        self._waiting = sum(len(line.groups) for line in self._lines)
        self.stolen = 0

    def cap(self, index: int) -> int | None:
        """How many answers an instance may hold; None: as many as it has room for."""
        return self._caps.get(index) if self._mine[index] else None

    def done(self, answer: Answer, index: int) -> None:
        """Notes that an instance has ended an answer; one that others took over no longer counts at home."""
        self._mine[index] -= bool(self._home[answer.group] == index)

    def first(self, capacity: Sequence[int]) -> list[tuple[int, Answer]]:
        """What goes out at the start."""
        out: list[tuple[int, Answer]] = []
        for index, room in enumerate(capacity):
            for _ in range(room):
                answer = self._own(index)
                if answer is None:
                    break
                out.append((index, answer))
        return out

    def next(self, index: int, now: float, stealing: bool) -> Answer | None:
        """The next answer for an instance; None: nothing for it."""
        answer = self._own(index)
        if answer is None and stealing and self._waiting:
            seen = {at: self._seen(at, now) for at, line in enumerate(self._lines) if line.groups}
            latest = max(seen, key=lambda at: seen[at].ends_s)
            place = take_over(self._seen(index, now), seen[latest])
            group = self._lines[latest].remove(place)
            home = self._home[group[0].group]
            self._mine[latest] -= len(group) * bool(home == latest)
            self._mine[index] += len(group) * bool(home == index)  # its own come back to it
            self._lines[index].append(group)
            self.stolen += 1
            answer = self._own(index)
        return answer

    def _own(self, index: int) -> Answer | None:
        line = self._lines[index]
        if not line.groups:
            return None
        before = len(line.groups)
        answer = line.pop()
        self._waiting -= before - len(line.groups)
        return answer

    def _seen(self, index: int, now: float) -> Line:
        line, engine = self._lines[index], self._engines[index]
        return Line(
            self._step_s[index],
            self._batch[index],
            engine.expected_at(now),
            line.predicted,
            line.answers,
            max(0.0, line.tokens),
            engine.running,
            engine.longest() if not line.groups else 0.0,  # a line with answers waiting ends with them
            self._least_s[index],
        )


class _Queue:
    """Where answers wait for whichever instance has room."""

    def __init__(self, groups: deque[list[Answer]]) -> None:
        self._groups = groups
        self.stolen = 0

    def cap(self, index: int) -> int | None:
        """Nothing is put off."""
        return None

    def done(self, answer: Answer, index: int) -> None:
        """Nothing to note."""

    def first(self, capacity: Sequence[int]) -> list[tuple[int, Answer]]:
        """What goes out at the start: a group to the emptiest instance, and on to the next one when that is full."""
        out: list[tuple[int, Answer]] = []
        emptiest = [(-1.0, index, room) for index, room in enumerate(capacity) if room]
        heapq.heapify(emptiest)
        while emptiest and self._groups:
            _, index, room = heapq.heappop(emptiest)
            size = min(room, len(self._groups[0]))
            out += [(index, self._pop()) for _ in range(size)]
            if room > size:
                heapq.heappush(emptiest, (-(room - size) / capacity[index], index, room - size))
        return out

    def next(self, index: int, now: float, stealing: bool) -> Answer | None:
        """The next answer for an instance; None: there is none left."""
        return self._pop() if self._groups else None

    def _pop(self) -> Answer:
        answer = self._groups[0].pop()
        if not self._groups[0]:
            self._groups.popleft()
        return answer


class _Run:
    """The events of one stage, in order of time: an instance has something to do, or answers come in.

    Invariant: no instance's clock is ahead of an event that concerns it.
    """

    def __init__(
        self, stage: Stage, engines: list[Engine], source: _Lines | _Queue, conditions: Conditions
    ) -> None:
        self._engines, self._source, self._conditions = engines, source, conditions
        self._ended = np.zeros(stage.lengths.shape)
        self._finish = np.zeros(len(engines))
        self._coming = [0] * len(engines)  # answers under way to an instance
        self._turn = [0] * len(engines)  # of its events, the one that counts
        self._events: list[tuple[float, int, int, list[Answer] | None]] = []
        self._pushed = 0

    def outcome(self) -> Outcome:
        """Runs until nothing is left."""
        for index, answer in self._source.first(
            [self._capacity(index) for index in range(len(self._engines))]
        ):
            self._engines[index].hand(answer, 0.0)
        for index in range(len(self._engines)):
            self._refill(index, 0.0)
        while self._events:
            now, index, turn, arriving = heapq.heappop(self._events)
            if arriving is None and turn != self._turn[index]:
                continue
            self._happen(index, now, arriving)
        return self._result()

    def _happen(self, index: int, now: float, arriving: list[Answer] | None) -> None:
        engine = self._engines[index]
        for answer in engine.run(now):
            self._ended.flat[answer.number] = engine.clock
            self._finish[index] = engine.clock
            self._source.done(answer, index)
        for answer in arriving or ():
            engine.hand(answer, now)
            self._coming[index] -= 1
        self._refill(index, max(now, engine.clock))

    def _refill(self, index: int, now: float) -> None:
        """Asks for as much as the instance has room for, starts what it holds, and notes its next event."""
        engine = self._engines[index]
        held = engine.held + self._coming[index]
        taken: list[Answer] = []
        while held + len(taken) < self._capacity(index) and (
            answer := self._source.next(index, now, self._conditions.stealing)
        ):
            taken.append(answer)
            if not self._conditions.refill_s:
                engine.hand(answer, now)
        if taken and self._conditions.refill_s:
            self._coming[index] += len(taken)
            self._push(now + self._conditions.refill_s, index, taken)
        engine.admit()
        self._turn[index] += 1
        if (at := engine.next_s()) < math.inf:
            self._push(at, index, None)

    def _capacity(self, index: int) -> int:
        cap = self._source.cap(index)
        return self._engines[index].server.slots + self._conditions.look_ahead if cap is None else cap

    def _push(self, at: float, index: int, arriving: list[Answer] | None) -> None:
        # An answer that comes in has a turn of its own: it stays valid whatever happens before.
        turn = self._turn[index] if arriving is None else -(self._pushed + 1)
        self._pushed += 1
        heapq.heappush(self._events, (at, index, turn, arriving))

    def _result(self) -> Outcome:
        engines = self._engines
        return Outcome(
            float(self._finish.max(initial=0.0)),
            self._finish,
            np.array([engine.steps for engine in engines], np.int64),
            np.array([engine.tokens for engine in engines], np.int64),
            np.array([engine.busy_s for engine in engines]),
            np.array([engine.server.slots for engine in engines], np.int64),
            self._ended,
            self._source.stolen,
            sum(engine.put_off for engine in engines),
        )
