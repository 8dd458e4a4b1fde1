"""A trainer that stops consuming stops dispatch; whoever reads gets on, whatever is buffered for later."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.control.intake import Intake
from streamrl_jax.control.placing import Room, Waiting
from streamrl_jax.control.queue import HeldQueue

CAPACITY = 3
INSTANCES = ("a", "b")


class Scene:
    """Queue and intake as the controller uses them, with instances that answer, lose and are lost when told to."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.queue = HeldQueue()
        self.intake = Intake(limit)
        self.held: dict[str, list[Waiting]] = {name: [] for name in INSTANCES}
        self.buffered: dict[str, deque[str]] = {}
        self.left: dict[str, int] = {}
        self.consumed: list[str] = []
        self.submitted = 0

    def submit(self, size: int, priority: int) -> None:
        way = f"job{len(self.left)}"
        self.left[way] = size
        self.buffered[way] = deque()
        self.submitted += size

        def draw() -> Iterator[Waiting]:
            for number in range(size):
                yield Waiting(f"{way}/{number}", way, 0, (priority, number))

        self.queue.add(way, draw(), size)
        self.pump()

    def pump(self) -> None:
        rooms = [Room(name, 0, CAPACITY, len(held)) for name, held in self.held.items()]
        for placed in self.queue.take(rooms, self.intake.admits):
            self.held[placed.instance].append(placed.waiting)

    def arrive(self, name: str) -> None:
        if self.held[name]:
            way, _, number = self.held[name].pop(0).sample_id.partition("/")
            self.intake.arrived(way)
            self.buffered[way].append(number)
        self.pump()

    def lose(self, name: str) -> None:
        for waiting in self.held[name]:
            self.queue.push(waiting, front=True)
        self.held[name] = []
        self.pump()

    def consume(self, way: str) -> None:
        if self.buffered[way]:
            self.consumed.append(f"{way}/{self.buffered[way].popleft()}")
            self.left[way] -= 1
            if self.intake.consumed(way):
                self.pump()

    def check(self) -> None:
        ways = sum(1 for left in self.left.values() if left)
        assert self.intake.buffered == sum(map(len, self.buffered.values()))
        assert self.intake.buffered < self.limit + (1 + ways) * CAPACITY * len(INSTANCES)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(0, 2)),
        st.tuples(st.just("arrive"), st.sampled_from(INSTANCES), st.just(0)),
        st.tuples(st.just("lose"), st.sampled_from(INSTANCES), st.just(0)),
        st.tuples(st.just("consume"), st.integers(0, 5), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps, st.integers(1, 8), st.randoms())
def test_whatever_happened_whoever_reads_gets_on(
    steps: list[tuple], limit: int, order: random.Random
) -> None:
    """After any schedule the jobs can be read to their ends one after another, in any order, and nothing is lost."""
    scene = Scene(limit)
    for kind, first, second in steps:
        if kind == "submit":
            scene.submit(first, second)
        elif kind == "consume":
            ways = list(scene.left)
            if ways:
                scene.consume(ways[first % len(ways)])
        else:
            getattr(scene, kind)(first)
        scene.check()
    ways = list(scene.left)
    order.shuffle(ways)
    for way in ways:
        while scene.left[way]:
            before = len(scene.consumed)
            scene.consume(way)
            if (
                len(scene.consumed) == before
            ):  # the reader waits: the instances go on, and one is lost now and then
                assert any(scene.held.values()), f"{way} waits, and no instance works"
                for name in INSTANCES:
                    scene.lose(name) if order.random() < 0.2 else scene.arrive(name)
            scene.check()
    assert len(scene.consumed) == len(set(scene.consumed)) == scene.submitted
    assert scene.intake.buffered == 0 and len(scene.queue) == 0


def test_a_reader_that_stops_stops_dispatch_and_starts_it_again() -> None:
    scene = Scene(limit=4)
    scene.submit(100, 0)
    for _ in range(50):
        for name in INSTANCES:
            scene.arrive(name)
    assert not any(scene.held.values()), "the instances idle"
    assert scene.intake.buffered == 3 + CAPACITY * len(INSTANCES)
    while scene.intake.buffered >= 4:
        assert not any(scene.held.values())
        scene.consume("job0")
    assert all(len(held) == CAPACITY for held in scene.held.values()), "it goes on by itself"


def test_what_is_read_now_is_not_held_up_by_what_is_read_later() -> None:
    scene = Scene(limit=2)
    scene.submit(50, 0)
    for _ in range(20):
        scene.arrive("a")
        scene.arrive("b")
    scene.submit(3, 5)  # an evaluation, of low priority, while the next iteration fills the buffer
    assert any(waiting.group == "job1" for held in scene.held.values() for waiting in held)


def test_the_limit_is_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"control.max_buffered_samples = 0"):
        Intake(0)
