"""The held queue of samples, and which instance each one goes to. Pure: no sockets, no clock.

The controller holds the queue and keeps every instance just full (its slots and a small look-ahead): what is
still here can be re-ordered, re-balanced, and given to an instance that joins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from streamrl_jax.types import NO_VERSION


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sample that is not handed out."""

    sample_id: str
    group: str  # the answers to one prompt
    min_version: int
    order: tuple[int, ...] = (0,)  # (priority, iteration, place in the job); the smallest goes first
    pinned: str = ""  # the one instance that may answer


@dataclass(frozen=True, slots=True)
class Room:
    """What an instance can take now."""

    instance: str
    version: int
    capacity: int  # slots and look-ahead
    held: int  # handed out to it and not finished
    pinned_only: bool = False  # an update waits until it is empty: only probes of this version

    @property
    def free(self) -> int:
        """Further samples that it takes."""
        return max(0, self.capacity - self.held)

    def takes(self, min_version: int, pinned: str) -> bool:
        """Whether it may answer a sample of such needs."""
        if not self.free or min_version > self.version or self.version == NO_VERSION:
            return False
        return pinned == self.instance if pinned else not self.pinned_only


@dataclass(frozen=True, slots=True)
class Placement:
    """A sample and the instance that gets it."""

    waiting: Waiting
    instance: str


Place = Callable[[Waiting, Sequence[Room], str], str]
"""Chooses among the instances that may take the sample, at least one:
``(sample, rooms, the group's last instance or "") -> name``. Skewness-aware dispatching is another one."""


def place_with_group(waiting: Waiting, rooms: Sequence[Room], home: str) -> str:
    """Keeps the answers to one prompt together (one prefill for all), else takes the emptiest instance.

    Args:
        waiting: the sample.
        rooms: the instances that may take it, at least one.
        home: where the last sample of its group went, "" for the first.

    Returns:
        ``home`` while it has room, else the instance with the largest free share (the first of equals).
    """
    if any(room.instance == home for room in rooms):
        return home
    return max(rooms, key=lambda room: room.free / room.capacity).instance


class HeldQueue:
    """Samples in order of priority. What came back from a lost instance goes before everything else.

    A sample is handed out only to an instance that serves ``min_version`` or newer (DESIGN rule 5) and that
    has room; a sample whose version is not out yet does not block those behind it.

    Args:
        place: chooses the instance.
    """

    def __init__(self, place: Place = place_with_group) -> None:
        self._place = place
        self._buckets: dict[tuple[int, str], list[tuple[bool, tuple[int, ...], int, Waiting]]] = {}
        self._homes: dict[str, str] = {}
        self._left: dict[str, int] = {}  # group -> samples here; the home is forgotten with the last one
        self._pushed = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def push(self, waiting: Waiting, front: bool = False) -> None:
        """Adds a sample; ``front`` for one that was handed out before."""
        self._pushed += 1
        bucket = self._buckets.setdefault((waiting.min_version, waiting.pinned), [])
        heapq.heappush(bucket, (not front, waiting.order, self._pushed, waiting))
        self._left[waiting.group] = self._left.get(waiting.group, 0) + 1

    def take(self, rooms: Sequence[Room]) -> list[Placement]:
        """Fills the instances as far as they have room.

        Args:
            rooms: all instances that can be given work.

        Returns:
            The samples that left the queue, in its order, each with its instance; no instance is filled
            beyond its capacity.
        """
        now = {room.instance: room for room in rooms}
        placed: list[Placement] = []
        while True:
            heads = (
                (bucket[0], key)
                for key, bucket in self._buckets.items()
                if any(room.takes(*key) for room in now.values())
            )
            head = min(heads, default=None)
            if head is None:
                return placed
            key = head[1]
            home = self._homes.get(head[0][-1].group, "")
            waiting = self._pop(key)
            fit = [room for room in now.values() if room.takes(*key)]
            instance = self._place(waiting, fit, home)
            if self._left.get(waiting.group):
                self._homes[waiting.group] = instance
            now[instance] = replace(now[instance], held=now[instance].held + 1)
            placed.append(Placement(waiting, instance))

    def drop_pinned(self, instance: str) -> list[Waiting]:
        """Removes what only ``instance`` could answer, since it left for good."""
        keys = [key for key in self._buckets if key[1] == instance]
        return [self._pop(key) for key in keys for _ in range(len(self._buckets[key]))]

    def pinned(self, instance: str, version: int) -> int:
        """Samples that wait for this instance alone and that ``version`` can answer."""
        return sum(
            len(bucket)
            for (min_version, pinned), bucket in self._buckets.items()
            if pinned == instance and min_version <= version
        )

    def oldest_version(self) -> int | None:
        """The smallest ``min_version`` that waits, for messages; None when empty."""
        return min((version for version, _ in self._buckets), default=None)

    def _pop(self, key: tuple[int, str]) -> Waiting:
        bucket = self._buckets[key]
        waiting = heapq.heappop(bucket)[-1]
        if not bucket:
            del self._buckets[key]
        self._left[waiting.group] -= 1
        if not self._left[waiting.group]:
            del self._left[waiting.group]
            self._homes.pop(waiting.group, None)
        return waiting
