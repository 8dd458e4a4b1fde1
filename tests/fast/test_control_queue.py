"""The held queue: order, admission by version and room, groups kept together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.control.jobs import Job, members, sampling_of
from streamrl_jax.control.placing import Room, Waiting, place_with_group
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.types import NO_VERSION, Prompt, Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(0,), seed=3)


def prompt(row: str) -> Prompt:
    return Prompt(row, np.asarray([1, 2], np.int32), {})


def waiting(name: str, version: int = 0, order: int = 0, pinned: str = "", group: str = "") -> Waiting:
    return Waiting(name, group or name, version, (order,), pinned)


waitings = st.lists(
    st.builds(
        Waiting,
        sample_id=st.uuids().map(str),
        group=st.sampled_from("pqrs"),
        min_version=st.integers(0, 3),
        order=st.tuples(st.integers(-2, 2), st.integers(0, 9)),
        pinned=st.sampled_from(["", "", "", "a", "b"]),
    ),
    max_size=30,
    unique_by=lambda one: one.sample_id,
)
rooms = st.lists(
    st.builds(
        Room,
        instance=st.sampled_from("abc"),
        version=st.integers(-1, 3),
        capacity=st.integers(1, 12),
        held=st.integers(0, 12),
        pinned_only=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda one: one.instance,
)


def greedy_reference(queued: Sequence[Waiting], rooms: Sequence[Room]) -> list[str]:
    """Which samples leave, in which order, when every instance may take every sample."""
    free = sum(room.free for room in rooms)
    return [one.sample_id for one in sorted(queued, key=lambda one: one.order)][:free]


@given(waitings, rooms)
def test_admission(queued: list[Waiting], rooms: list[Room]) -> None:
    """Nothing beyond a capacity, under a version, pinned elsewhere or lost; what stays has no place to go."""
    queue = HeldQueue()
    for one in queued:
        queue.push(one)
    placed = queue.take(rooms)
    by_name = {room.instance: room for room in rooms}
    given_to = Counter(placement.instance for placement in placed)
    for placement in placed:
        room = by_name[placement.instance]
        assert room.version != NO_VERSION
        assert placement.waiting.min_version <= room.version
        assert placement.waiting.pinned in ("", room.instance)
        assert placement.waiting.pinned or not room.pinned_only
    for name, count in given_to.items():
        assert by_name[name].held + count <= by_name[name].capacity
    left = {one.sample_id for one in queued} - {placement.waiting.sample_id for placement in placed}
    assert len(queue) == len(left)
    for one in queued:
        if one.sample_id in left:
            for room in rooms:
                after = room.held + given_to[room.instance]
                blocked = (
                    after >= room.capacity
                    or one.min_version > room.version
                    or room.version == NO_VERSION
                    or (one.pinned != room.instance if one.pinned else room.pinned_only)
                )
                assert blocked, f"{one} could have gone to {room}"
    assert queue.take([Room("all", 99, 1000, 0), Room("a", 99, 99, 0), Room("b", 99, 99, 0)]) is not None
    assert len(queue) == 0


@given(waitings, rooms, st.data())
def test_the_emptiest_is_found_as_by_looking_at_all(
    queued: list[Waiting], rooms: list[Room], data: st.DataObject
) -> None:
    """The queue's own way to the emptiest instance places every sample as `place_with_group` does."""
    quick, plain = HeldQueue(), HeldQueue(place_with_group)
    for one in queued:
        front = data.draw(st.booleans())
        quick.push(one, front)
        plain.push(one, front)
    for _ in range(2):
        assert quick.take(rooms) == plain.take(rooms)
        assert len(quick) == len(plain)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=4), rooms, st.data())
def test_what_is_drawn_as_needed_leaves_as_what_lies_there(
    jobs: list[list[int]], rooms: list[Room], data: st.DataObject
) -> None:
    """Samples that are added as an iterator leave as if all had been pushed, and at most one of each is drawn ahead."""
    lazy, plain = HeldQueue(), HeldQueue()
    drawn = Counter[int]()

    def draws(number: int, ones: list[Waiting]) -> Iterator[Waiting]:
        for one in ones:
            drawn[number] += 1
            yield one

    for number, orders in enumerate(jobs):
        version, pinned = data.draw(st.integers(0, 3)), data.draw(st.sampled_from(["", "a"]))
        ones = [
            waiting(f"{number}/{place}", version, 100 * order + number, pinned, f"{number}/{order}")
            for place, order in enumerate(sorted(orders))
        ]
        lazy.add("", draws(number, ones), len(ones))
        for one in ones:
            plain.push(one)
    size = len(plain)
    assert len(lazy) == size
    placed = lazy.take(rooms)
    assert placed == plain.take(rooms)
    assert len(lazy) == size - len(placed)
    assert lazy.pinned("a", 2) == plain.pinned("a", 2)
    assert drawn.total() <= len(placed) + len(jobs)
    assert {one.sample_id for one in lazy.drop_pinned("a")} == {
        one.sample_id for one in plain.drop_pinned("a")
    }


def test_what_is_held_back_does_not_block_what_is_behind() -> None:
    queue = HeldQueue()
    queue.add("later", iter([waiting("l/0", order=0), waiting("l/1", order=0)]), 2)
    queue.add("now", iter([waiting("n/0", order=1), waiting("n/1", order=1)]), 2)
    queue.push(waiting("lost", order=9), front=True)
    placed = queue.take([Room("a", 0, 9, 0)], lambda way: way == "now")
    assert [p.waiting.sample_id for p in placed] == ["lost", "n/0", "n/1"]
    assert [p.waiting.sample_id for p in queue.take([Room("a", 0, 9, 0)])] == ["l/0", "l/1"]
    assert len(queue) == 0 and queue.oldest_version() is None


@pytest.mark.parametrize("instances", [8, 1000])
def test_offering_one_instance_does_not_look_at_the_others(instances: int) -> None:
    """An instance whose room has changed is offered alone: as many samples leave as when all are offered."""
    queue = HeldQueue()
    queue.add("", (waiting(str(number)) for number in range(10_000)), 10_000)
    rooms = [Room(f"i{number}", 0, 4, 0) for number in range(instances)]
    assert len(queue.take(rooms)) == 4 * instances
    assert queue.take([replace(room, held=4) for room in rooms]) == []
    assert [p.instance for p in queue.take([Room("i3", 0, 4, 3)])] == ["i3"]


@given(st.lists(st.integers(-3, 3), max_size=20), st.integers(1, 9))
def test_order_is_that_of_a_sort(orders: list[int], capacity: int) -> None:
    queue = HeldQueue()
    queued = [waiting(str(index), order=order) for index, order in enumerate(orders)]
    for one in queued:
        queue.push(one)
    rooms = [Room("a", 0, capacity, 0), Room("b", 0, capacity, 1)]
    assert [placement.waiting.sample_id for placement in queue.take(rooms)] == greedy_reference(queued, rooms)


def test_what_comes_back_goes_first() -> None:
    queue = HeldQueue()
    queue.push(waiting("new", order=-5))
    queue.push(waiting("lost", order=7), front=True)
    assert [placement.waiting.sample_id for placement in queue.take([Room("a", 0, 9, 0)])] == ["lost", "new"]


def test_a_version_that_is_not_out_does_not_block_what_is_behind() -> None:
    queue = HeldQueue()
    queue.push(waiting("next", version=2, order=0))
    queue.push(waiting("now", version=1, order=1))
    assert [placement.waiting.sample_id for placement in queue.take([Room("a", 1, 9, 0)])] == ["now"]
    assert queue.oldest_version() == 2
    assert [placement.waiting.sample_id for placement in queue.take([Room("a", 2, 9, 0)])] == ["next"]


def test_dummy_weights_answer_nothing() -> None:
    queue = HeldQueue()
    queue.push(waiting("any", version=NO_VERSION))
    assert queue.take([Room("a", NO_VERSION, 9, 0)]) == []


def test_group_stays_on_one_instance_while_it_has_room() -> None:
    queue = HeldQueue()
    for group in "pqrs":
        for index in range(4):
            queue.push(waiting(f"{group}/{index}", order="pqrs".index(group), group=group))
    placed = queue.take([Room("a", 0, 8, 0), Room("b", 0, 8, 0)])
    homes = {group: {p.instance for p in placed if p.waiting.group == group} for group in "pqrs"}
    assert all(len(instances) == 1 for instances in homes.values())
    assert Counter(p.instance for p in placed) == {"a": 8, "b": 8}


def test_group_moves_on_when_its_instance_is_full() -> None:
    queue = HeldQueue()
    for index in range(6):
        queue.push(waiting(f"p/{index}", group="p"))
    assert Counter(p.instance for p in queue.take([Room("a", 0, 4, 0), Room("b", 0, 4, 0)])) == {
        "a": 4,
        "b": 2,
    }


def test_place_takes_the_emptiest() -> None:
    one = waiting("x")
    assert place_with_group(one, [Room("a", 0, 8, 4), Room("b", 0, 100, 40)], "") == "b"
    assert place_with_group(one, [Room("a", 0, 8, 4), Room("b", 0, 100, 40)], "a") == "a"
    assert place_with_group(one, [Room("a", 0, 8, 4), Room("b", 0, 100, 40)], "gone") == "b"


def test_another_policy_decides() -> None:
    """The place for skewness-aware dispatching: long answers to instances of their own."""
    queue = HeldQueue(place=lambda one, rooms, home: "long" if "tail" in one.sample_id else rooms[0].instance)
    for name in ("tail/0", "short/0", "tail/1"):
        queue.push(waiting(name))
    placed = queue.take([Room("short", 0, 9, 0), Room("long", 0, 9, 0)])
    assert {p.waiting.sample_id: p.instance for p in placed} == {
        "tail/0": "long", "short/0": "short", "tail/1": "long",
    }  # fmt: skip


def test_an_update_lets_only_its_probes_through() -> None:
    queue = HeldQueue()
    queue.push(waiting("train", order=-9))
    queue.push(waiting("probe", pinned="a"))
    queue.push(waiting("next probe", version=1, pinned="a"))
    assert queue.pinned("a", 0) == 1
    assert queue.pinned("a", 1) == 2
    placed = queue.take([Room("a", 0, 9, 0, pinned_only=True)])
    assert [p.waiting.sample_id for p in placed] == ["probe"]
    assert [one.sample_id for one in queue.drop_pinned("a")] == ["next probe"]
    assert len(queue) == 1


def test_members_are_named_once_even_when_a_prompt_comes_twice() -> None:
    job = Job("train/4", [prompt("7"), prompt("8"), prompt("7")], 2, SAMPLING, 4, 4)
    found = list(members(job))
    assert [one.sample_id for one in found] == [
        "train/4/7/0", "train/4/7/1", "train/4/8/0", "train/4/8/1", "train/4/7~1/0", "train/4/7~1/1",
    ]  # fmt: skip
    assert job.size == len({one.sample_id for one in found})


def test_seeds_differ_within_a_group_and_stay_over_attempts() -> None:
    job = Job("train/4", [prompt("7")], 8, SAMPLING, 4, 4)
    asked = list(members(job))
    seeds = [sampling_of(job, one).seed for one in asked]
    assert len(set(seeds)) == 8
    assert seeds == [sampling_of(job, one).seed for one in asked]
    assert sampling_of(job, asked[0], continued_attempt=1).seed not in seeds
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
