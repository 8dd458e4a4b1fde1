"""The held queue of samples, and which instance each one goes to. Pure: no sockets, no clock.

The controller holds the queue and keeps every instance just full (its slots and a small look-ahead): what is
still here can be re-ordered, re-balanced, and given to an instance that joins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
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


@dataclass(eq=False, slots=True)
class _Lane:
    """Samples that are drawn as they are needed; one of them, the next, is in the queue."""

    way: str
    rest: Iterator[Waiting]
    left: int  # with the next one


_Head = tuple[bool, tuple[int, ...], int, Waiting, _Lane | None]
"""What the queue sorts by (not front, order, number), then the sample and the lane that it was drawn from."""

_Key = tuple[int, str]
"""Version and pin: samples of one key may go to the same instances."""


class HeldQueue:
    """Samples in order of priority. What came back from a lost instance goes before everything else.

    A sample is handed out only to an instance that serves ``min_version`` or newer (DESIGN rule 5) and that
    has room; a sample whose version is not out yet does not block those behind it.

    Invariant: after ``take`` with all instances nothing is left that one of them could have taken, but for what
    ``admits`` held back. So an instance whose room alone has changed can be offered alone. One ``take`` costs as
    much as it has rooms, and a logarithm for each sample that leaves.

    Args:
        place: chooses the instance; None: as `place_with_group`, without looking at all rooms for each sample.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._buckets: dict[_Key, list[_Head]] = {}
        self._pins: dict[str, set[_Key]] = {}  # instance -> keys of what it alone may answer; "": of the rest
        self._homes: dict[str, str] = {}
        self._left: dict[str, int] = {}  # group -> samples here; the home is forgotten with the last one
        self._pushed = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, waiting: Waiting, front: bool = False) -> None:
        """Adds a sample; ``front`` for one that was handed out before."""
        self._waiting += 1
        self._insert(waiting, front, None)

    def add(self, way: str, waiting: Iterator[Waiting], size: int) -> None:
        """Adds many samples, which are drawn one by one: those that wait take no memory.

        Args:
            way: given to ``admits`` of `take`.
            waiting: of one version and pin, in rising order; the answers to one prompt follow each other.
            size: how many, at least one.
        """
        self._waiting += size
        self._draw(_Lane(way, waiting, size))

    def take(
        self, rooms: Sequence[Room], admits: Callable[[str], bool] = lambda way: True
    ) -> list[Placement]:
        """Fills the instances as far as they have room.

        Args:
            rooms: the instances that can be given work; all of them, or those whose rooms have changed.
            admits: whether samples that were added with this ``way`` may leave now. What was pushed may always.

        Returns:
            The samples that left the queue, in its order, each with its instance; no instance is filled
            beyond its capacity.
        """
        if not self._waiting:
            return []
        offer = _Offer(rooms, self._place)
        pins = ("", *(room.instance for room in rooms))
        keys = [key for pin in pins for key in self._pins.get(pin, ()) if offer.takes(*key)]
        ready = [(self._buckets[key][0], key) for key in keys]
        heapq.heapify(ready)
        placed: list[Placement] = []
        kept: list[tuple[_Key, _Head]] = []
        while ready:
            head, key = heapq.heappop(ready)
            if not offer.takes(*key):
                continue
            lane = head[4]
            if lane is not None and not admits(lane.way):
                kept.append((key, heapq.heappop(self._buckets[key])))
            else:
                placed.append(self._hand_out(key, offer))
            if self._buckets[key]:
                heapq.heappush(ready, (self._buckets[key][0], key))
        for key, head in kept:
            heapq.heappush(self._buckets[key], head)
        self._forget_empty(keys)
        return placed

    def drop_pinned(self, instance: str) -> list[Waiting]:
        """Removes what only ``instance`` could answer, since it left for good."""
        keys = list(self._pins.get(instance, ()))
        dropped: list[Waiting] = []
        for key in keys:
            while self._buckets[key]:
                dropped.append(self._pop(key))
        self._forget_empty(keys)
        return dropped

    def pinned(self, instance: str, version: int) -> int:
        """Samples that wait for this instance alone and that ``version`` can answer."""
        return sum(
            lane.left if lane else 1
            for key in self._pins.get(instance, ())
            if key[0] <= version
            for _, _, _, _, lane in self._buckets[key]
        )

    def oldest_version(self) -> int | None:
        """The smallest ``min_version`` that waits, for messages; None when empty."""
        return min((version for version, _ in self._buckets), default=None)

    def _hand_out(self, key: _Key, offer: _Offer) -> Placement:
        home = self._homes.get(self._buckets[key][0][3].group, "")
        waiting = self._pop(key)
        instance = offer.choose(waiting, home)
        if waiting.group in self._left:
            self._homes[waiting.group] = instance
        return Placement(waiting, instance)

    def _draw(self, lane: _Lane) -> None:
        self._insert(next(lane.rest), False, lane)

    def _insert(self, waiting: Waiting, front: bool, lane: _Lane | None) -> None:
        self._pushed += 1
        key = (waiting.min_version, waiting.pinned)
        if key not in self._buckets:
            self._buckets[key] = []
            self._pins.setdefault(waiting.pinned, set()).add(key)
        heapq.heappush(self._buckets[key], (not front, waiting.order, self._pushed, waiting, lane))
        self._left[waiting.group] = self._left.get(waiting.group, 0) + 1

    def _pop(self, key: _Key) -> Waiting:
        _, _, _, waiting, lane = heapq.heappop(self._buckets[key])
        self._waiting -= 1
        if lane is not None:
            lane.left -= 1
            if lane.left:
                self._draw(lane)
        self._left[waiting.group] -= 1
        if not self._left[waiting.group]:
            del self._left[waiting.group]
            self._homes.pop(waiting.group, None)
        return waiting

    def _forget_empty(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if not self._buckets[key]:
                del self._buckets[key]
                self._pins[key[1]].discard(key)
                if not self._pins[key[1]]:
                    del self._pins[key[1]]


class _Offer:
    """What the instances can still take, while one `HeldQueue.take` lasts.

    Args:
        rooms: of all that are offered.
        place: chooses the instance; None: the group's, else the emptiest.
    """

    def __init__(self, rooms: Sequence[Room], place: Place | None) -> None:
        self._place = place
        self._rooms = {room.instance: room for room in rooms if room.free and room.version != NO_VERSION}
        self._free = {name: room.free for name, room in self._rooms.items()}
        # By version, the instances that take what is not pinned, the emptiest first. Shares only sink, so that one
        # which is out of date comes up too early, and is put right then.
        self._emptiest: dict[int, list[tuple[float, int, str]]] = {}
        for number, room in enumerate(self._rooms.values()):
            if not room.pinned_only:
                entry = (-room.free / room.capacity, number, room.instance)
                self._emptiest.setdefault(room.version, []).append(entry)
        for heap in self._emptiest.values():
            heapq.heapify(heap)

    def takes(self, min_version: int, pinned: str) -> bool:
        """Whether one of them may answer a sample of such needs."""
        if pinned:
            room = self._rooms.get(pinned)
            return room is not None and self._free[pinned] > 0 and room.version >= min_version
        return any(version >= min_version and self._top(version) for version in self._emptiest)

    def choose(self, waiting: Waiting, home: str) -> str:
        """The instance that gets the sample; one of them takes it."""
        if waiting.pinned:
            instance = waiting.pinned
        elif self._place is not None:
            instance = self._place(waiting, self._fit(waiting.min_version), home)
        elif self._is_open(home, waiting.min_version):
            instance = home
        else:
            tops = (self._top(version) for version in self._emptiest if version >= waiting.min_version)
            instance = min(top for top in tops if top is not None)[2]
        self._free[instance] -= 1
        return instance

    def _is_open(self, name: str, min_version: int) -> bool:
        room = self._rooms.get(name)
        if room is None or room.pinned_only or room.version < min_version:
            return False
        return self._free[name] > 0

    def _fit(self, min_version: int) -> list[Room]:
        return [
            replace(room, held=room.capacity - self._free[name])
            for name, room in self._rooms.items()
            if self._is_open(name, min_version)
        ]

    def _top(self, version: int) -> tuple[float, int, str] | None:
        """The emptiest one of a version; None: all are full."""
        heap = self._emptiest[version]
        while heap:
            share, number, name = heap[0]
            now = -self._free[name] / self._rooms[name].capacity
            if now == share and share < 0:
                return heap[0]
            if now < 0:
                heapq.heapreplace(heap, (now, number, name))
            else:
                heapq.heappop(heap)
        return None
