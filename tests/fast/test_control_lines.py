"""Lines of a planned job: own line first and by length, taken over when another runs dry, nothing left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.control.lines import LinePlan, Lines, Seat, _Line
from streamrl_jax.control.placing import Placement, Room, Waiting
from streamrl_jax.control.queue import HeldQueue

NAMES = ("a", "b", "c")


def drawn(number: int, order: tuple[int, ...] = (0, 3, -1)) -> Waiting:
    return Waiting(str(number), "", 0, order, capped=True)


def line_plan(
    seat: list[int],
    tokens: list[float],
    answers: int = 1,
    caps: dict[str, int] | None = None,
    names: Sequence[str] = NAMES,
) -> LinePlan:
    """A plan whose lines fall in length; equals in the order given."""
    seats = tuple(Seat(name, 4, 1.0, 0.5) for name in names)
    where = np.asarray(seat, np.int32)
    rank = np.zeros(len(seat), np.int32)
    for number in range(len(names)):
        mine = np.flatnonzero(where == number)
        rank[mine[np.argsort(-np.asarray(tokens)[mine], kind="stable")]] = np.arange(len(mine))
    return LinePlan(seats, where, rank, np.asarray(tokens, np.float64), answers, caps or {})


def numbers(placed: list[Placement]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for one in placed:
        found[one.instance].append(int(one.waiting.sample_id))
    return dict(found)


def test_each_takes_its_own_line_the_longest_first() -> None:
    lines = Lines(line_plan([0, 1, 0, 1, 0], [5, 9, 7, 2, 6]), drawn)
    assert numbers(lines.fill({"a": 2, "b": 1})) == {"a": [2, 4], "b": [1]}
    assert numbers(lines.fill({"b": 1})) == {"b": [3]}
    assert lines.steals == 0 and lines.waiting == 1


def test_the_answers_to_a_prompt_follow_each_other() -> None:
    lines = Lines(line_plan([0, 0], [5, 9], answers=3), drawn)
    assert numbers(lines.fill({"a": 4})) == {"a": [3, 4, 5, 0]}
    assert numbers(lines.fill({"a": 9})) == {"a": [1, 2]}


def test_one_that_runs_dry_takes_from_the_line_that_ends_last() -> None:
    lines = Lines(line_plan([0, 1, 1, 2, 2, 2], [3, 4, 4, 4, 4, 4]), drawn)
    assert numbers(lines.fill({"a": 2})) == {"a": [0, 3]}
    assert lines.steals == 1


def test_a_whole_prompt_is_taken_over_and_the_rest_of_one_if_there_is_no_other() -> None:
    lines = Lines(line_plan([0, 0], [9, 5], answers=4), drawn)
    assert numbers(lines.fill({"a": 1})) == {"a": [0]}
    assert numbers(lines.fill({"b": 6})) == {"b": [4, 5, 6, 7, 1, 2]}, (
        "the one that nobody has begun, then the rest"
    )
    assert numbers(lines.fill({"a": 6})) == {"a": [3]}
    assert lines.waiting == 0


def test_one_that_joins_begins_by_taking_over() -> None:
    lines = Lines(line_plan([0, 0, 0, 0], [9, 8, 7, 6]), drawn)
    assert numbers(lines.fill({"a": 1, "new": 2})) == {"a": [0], "new": [1, 2]}


def test_what_nobody_works_at_goes_by_its_length() -> None:
    """A lost instance's long prompts do not wait until the others have done their short ones."""
    lines = Lines(line_plan([0, 0, 1, 1, 1], [90, 3, 40, 6, 5]), drawn)
    lines.abandon("a")
    assert numbers(lines.fill({"b": 3})) == {"b": [0, 2, 3]}
    assert numbers(lines.fill({"a": 1})) == {"a": [1]}, "it is back"
    assert numbers(lines.fill({"b": 3})) == {"b": [4]}


def test_a_cap_ends_with_the_long_answers_that_it_was_for() -> None:
    lines = Lines(line_plan([0, 0, 1, 1, 1, 1], [90, 80, 3, 3, 3, 3], caps={"a": 2}), drawn)
    assert (lines.cap("a"), lines.cap("b"), lines.cap("new")) == (2, None, None)
    assert numbers(lines.fill({"a": 2, "b": 1})) == {"a": [0, 1], "b": [2]}
    lines.done(0, "a")
    assert lines.cap("a") == 2
    assert numbers(lines.fill({"a": 1})) == {"a": [3]}, "it stays at its small batch"
    lines.done(1, "a")
    assert lines.cap("a") is None
    assert numbers(lines.fill({"a": 9})) == {"a": [4, 5]}


def test_a_cap_that_ends_since_others_took_what_it_was_for_is_told() -> None:
    """The capped one has said nothing itself: unless it is offered again it waits for a message of its own."""
    queue = HeldQueue()
    lines = Lines(line_plan([0, 1, 1, 1], [9, 8, 7, 6], caps={"a": 1}), drawn)
    queue.line_up("0", (0, 3), 0, lines)
    busy = Room("a", 0, 4, 1)  # with an older job's answer, which fills it up to its cap
    assert numbers(queue.take([Room("b", 0, 2, 0), busy])) == {"b": [1, 2]} and not queue.uncapped
    assert numbers(queue.take([Room("b", 0, 4, 2)])) == {"b": [3, 0]}
    assert lines.cap("a") is None and queue.uncapped


def test_a_cap_that_ends_by_a_theft_lets_its_instance_fill_up() -> None:
    queue = HeldQueue()
    queue.line_up("0", (0, 3), 0, Lines(line_plan([0, 1, 1, 1, 1], [9, 2, 1, 1, 1], caps={"a": 1}), drawn))
    assert numbers(queue.take([Room("b", 0, 1, 0), Room("a", 0, 4, 1)])) == {"b": [1]}
    assert numbers(queue.take([Room("c", 0, 1, 0)])) == {"c": [0]} and queue.uncapped
    assert numbers(queue.take([Room("a", 0, 4, 1)])) == {"a": [2, 3, 4]}, "beyond its cap"


def test_a_line_in_which_something_waits_ends_with_that() -> None:
    """As the simulation weighs it: the longest answer that runs there ends no later for what is taken over."""
    lines = Lines(line_plan([0, 0, 0, 1], [1000, 700, 1, 600]), drawn)
    assert numbers(lines.fill({"a": 1, "b": 1})) == {"a": [0], "b": [3]}
    assert numbers(lines.fill({"b": 1})) == {"b": [2]}, "with 700 more it would end after 425.25 s"


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=24), st.integers(1, 3), st.lists(st.integers(0, 4), max_size=5),
    st.lists(st.integers(0, 1), max_size=40),
)  # fmt: skip
def test_of_abandoned_lines_the_longest_goes_first(
    tokens: list[int], answers: int, before: list[int], turns: list[int]
) -> None:
    """Against a look at all of them, also where a unit was begun before, and while instances come back and go again."""
    names = [*(f"x{number}" for number in range(5)), "own"]
    plan = line_plan(
        [at % 6 for at in range(len(tokens))], [float(one) for one in tokens], answers, names=names
    )
    lines = Lines(plan, drawn)
    for name, count in zip(names, before, strict=False):
        lines.fill({name: min(count, answers - 1)})  # begins a unit
    for name in names[:5]:
        lines.abandon(name)
    own = lines._lines["own"]
    for turn, back in enumerate(turns):
        name = names[turn % 5]
        if back:
            lines.fill({name: 1})
            lines.abandon(name)
        waits = [line for line in lines._lines.values() if line is not own and line.waits]
        fresh = own.current < 0 and (waits or own.waits)
        longest = max((line.next_tokens for line in [*waits, own]), default=0.0)
        placed = lines.fill({"own": 1})
        if fresh:
            (taken,) = numbers(placed)["own"]
            assert tokens[taken // answers] == longest


def test_the_rest_of_a_prompt_counts_once_nothing_else_waits_there() -> None:
    """It is longer than what was taken before it, and than what another one leaves behind meanwhile."""
    lines = Lines(line_plan([0, 0, 1, 1], [9, 3, 6, 5], answers=2), drawn)
    assert numbers(lines.fill({"a": 1})) == {"a": [0]}
    lines.abandon("a")
    assert numbers(lines.fill({"c": 2})) == {"c": [2, 3]}
    lines.abandon("b")
    assert numbers(lines.fill({"c": 2})) == {"c": [1, 4]}


def test_what_the_longest_abandoned_prompt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logarithm, not a look at each line that was abandoned."""
    looks = Counter[str]()
    looked = _Line.next_tokens.fget
    assert looked is not None

    def counted(line: _Line) -> float:
        looks["at a line"] += 1
        return looked(line)

    monkeypatch.setattr(_Line, "next_tokens", property(counted))
    names = [f"x{number}" for number in range(501)]
    plan = line_plan([at % 500 for at in range(2000)], [float(at % 97) for at in range(2000)], names=names)
    lines = Lines(plan, drawn)
    for name in names[:500]:
        lines.abandon(name)
    looks.clear()
    assert len(lines.fill({"x500": 2000})) == 2000
    assert looks["at a line"] < 20 * 2000


# ---------------------------------------------------------------- in the queue


@dataclass
class Scene:
    """A queue with planned and other jobs, and instances that answer, are lost, join and leave when told to."""

    capacity: int
    queue: HeldQueue = field(default_factory=HeldQueue)
    held: dict[str, dict[str, bool]] = field(default_factory=lambda: {name: {} for name in NAMES})
    plans: dict[int, tuple[Lines, LinePlan]] = field(default_factory=dict)
    submitted: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    handed: set[str] = field(default_factory=set)

    def plan(self, tokens: list[int], answers: int, caps: dict[str, int], names: list[str]) -> None:
        number = len(self.plans)
        seat = [(3 * at + tokens[0]) % len(names) for at in range(len(tokens))]
        made = line_plan(seat, [float(one) for one in tokens], answers, caps, names)
        lines = Lines(
            made, lambda answer: Waiting(f"{number}/{answer}", f"{number}", 0, (0, number, -1), capped=True)
        )
        self.plans[number] = lines, made
        self.queue.line_up(str(number), (0, number, -9), 0, lines)
        self.submitted += lines.waiting
        self.pump()

    def push(self, count: int) -> None:
        for _ in range(count):
            self.queue.push(Waiting(f"x{self.submitted}/0", "", 0, (0, len(self.plans), 0), capped=True))
            self.submitted += 1
        self.pump()

    def pump(self, only: str = "") -> None:
        while True:
            names = [only] if only else list(self.held)
            caps = {name: self.cap(name) for name in names}
            rooms = [Room(name, 0, self.capacity, len(self.held[name])) for name in names]
            placed = self.queue.take(rooms)
            for one in placed:
                assert one.waiting.sample_id not in self.held[one.instance]
                first = (
                    one.waiting.sample_id not in self.handed
                )  # a further attempt does not come from a line
                self.held[one.instance][one.waiting.sample_id] = first
                self.handed.add(one.waiting.sample_id)
            for room in rooms:
                assert len(self.held[room.instance]) <= self.capacity
                cap = caps[room.instance]
                if cap is not None and self.cap(room.instance) is not None:
                    assert len(self.held[room.instance]) <= max(cap, room.held)
            if not self.queue.uncapped:
                break
            self.queue.uncapped, only = False, ""
        if not only:
            self.nobody_idles()

    def cap(self, name: str) -> int | None:
        waiting = [lines for lines, _ in self.plans.values() if lines.waiting]
        return waiting[0].cap(name) if waiting else None

    def nobody_idles(self) -> None:
        """Nothing is left that an instance could have taken, but for what a cap held back."""
        for name, held in self.held.items():
            cap = self.cap(name)
            bound = self.capacity if cap is None else min(cap, self.capacity)
            assert len(self.queue) == 0 or len(held) >= bound

    def left(self, name: str, sample_id: str) -> None:
        job, _, answer = sample_id.partition("/")
        if not job.startswith("x") and self.held[name].pop(sample_id):
            self.plans[int(job)][0].done(int(answer), name)
        self.held[name].pop(sample_id, None)

    def answer(self, name: str) -> None:
        if held := self.held.get(name):
            sample_id = next(iter(held))
            self.left(name, sample_id)
            self.answered[sample_id] += 1
            self.pump(name)

    def lose(self, name: str, *, gone: bool) -> None:
        if name not in self.held or (gone and len(self.held) == 1):
            return
        self.queue.abandon(name)
        lost = list(self.held[name])
        for sample_id in lost:
            self.left(name, sample_id)
            waiting = Waiting(sample_id, "", 0, (0, 0, 0), capped=True)
            self.queue.push(waiting, front=True)
        if gone:
            del self.held[name]
        elif len(self.held) > 1:  # it is away for a while
            away = self.held.pop(name)
            self.pump()
            self.held[name] = away
        self.pump()

    def join(self) -> None:
        self.held[f"new{len(self.answered)}-{len(self.held)}"] = {}
        self.pump()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("plan"), st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 3)),
        st.tuples(st.just("push"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("answer"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("join"), st.just(0), st.just(0)),
    ),
    max_size=40,
)
caps = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4))


@settings(deadline=None)
@given(steps, st.integers(1, 5), caps)
def test_whatever_happens_every_sample_is_answered_once(
    steps: list[tuple], capacity: int, caps: dict[str, int]
) -> None:
    """Instances are lost, leave, come back and join: nothing waits while one has room, none is filled beyond its
    capacity or cap, and at the end each sample was answered, once.
    """
    scene = Scene(capacity)
    for kind, first, second in steps:
        name = list(scene.held)[first % len(scene.held)] if kind in ("answer", "lose") else ""
        if kind == "plan":
            scene.plan(first, second, caps, list(scene.held)[:3])
        elif kind == "push":
            scene.push(first)
        elif kind == "answer":
            scene.answer(name)
        elif kind == "lose":
            scene.lose(name, gone=second)
        else:
            scene.join()
    while any(scene.held.values()):
        for name in list(scene.held):
            scene.answer(name)
    assert len(scene.queue) == 0 and set(scene.answered.values()) <= {1}
    assert len(scene.answered) == scene.submitted
