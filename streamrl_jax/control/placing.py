"""What waits, what has room, and which instance takes a sample. Pure: no sockets, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    capped: bool = False  # a plan's bound on what an instance holds counts for it


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


class Offer:
    """What the instances can still take, while one `HeldQueue.take` lasts.

    Args:
        rooms: of all that are offered.
        place: chooses the instance; None: the group's, else the emptiest.
        caps: as for `cap`.
    """

    def __init__(self, rooms: Sequence[Room], place: Place | None, caps: Mapping[str, int]) -> None:
        self._place = place
        self._rooms = {room.instance: room for room in rooms if room.free and room.version != NO_VERSION}
        self._free = {name: room.free for name, room in self._rooms.items()}
        self._kept: dict[str, int] = {}  # of what is free, so much is not for what is capped
        # By version and whether it is for what is capped: the instances that take what is not pinned, the emptiest
        # first. Shares only sink, so that one which is out of date comes up too early, and is put right then.
        self._emptiest: dict[tuple[int, bool], list[tuple[float, int, str]]] = {}
        self.cap(caps)

    def cap(self, caps: Mapping[str, int]) -> None:
        """Sets how many samples an instance may hold at once, for what is `Waiting.capped`; none: its capacity."""
        kept = {name: self._rooms[name].capacity - cap for name, cap in caps.items() if name in self._rooms}
        self._kept = {name: beyond for name, beyond in kept.items() if beyond > 0}
        self._emptiest.clear()
        for number, room in enumerate(self._rooms.values()):
            if not room.pinned_only:
                entry = (-self._free[room.instance] / room.capacity, number, room.instance)
                for capped in (False, True) if self._kept else (False,):
                    self._emptiest.setdefault((room.version, capped), []).append(entry)
        for heap in self._emptiest.values():
            heapq.heapify(heap)

    def takes(self, min_version: int, pinned: str, capped: bool) -> bool:
        """Whether one of them may answer a sample of such needs."""
        if pinned:
            room = self._rooms.get(pinned)
            return room is not None and self._left(pinned, capped) > 0 and room.version >= min_version
        return any(self._top(kind) for kind in self._kinds(min_version, capped))

    def choose(self, waiting: Waiting, home: str) -> str:
        """The instance that gets the sample; one of them takes it."""
        if waiting.pinned:
            instance = waiting.pinned
        elif self._place is not None:
            instance = self._place(waiting, self._fit(waiting), home)
        elif self._is_open(home, waiting.min_version, waiting.capped):
            instance = home
        else:
            tops = map(self._top, self._kinds(waiting.min_version, waiting.capped))
            instance = min(top for top in tops if top is not None)[2]
        self._free[instance] -= 1
        return instance

    def open(self, min_version: int) -> dict[str, int]:
        """How many capped samples, pinned to nobody, each instance that is open for them takes."""
        return {
            name: self._left(name, True) for name in self._rooms if self._is_open(name, min_version, True)
        }

    def gave(self, names: Iterable[str]) -> None:
        """Notes that each of the instances was given a sample."""
        for name in names:
            self._free[name] -= 1

    def _left(self, name: str, capped: bool) -> int:
        return self._free[name] - (self._kept.get(name, 0) if capped else 0)

    def _kinds(self, min_version: int, capped: bool) -> list[tuple[int, bool]]:
        capped = capped and bool(self._kept)
        return [kind for kind in self._emptiest if kind[0] >= min_version and kind[1] == capped]

    def _is_open(self, name: str, min_version: int, capped: bool) -> bool:
        room = self._rooms.get(name)
        if room is None or room.pinned_only or room.version < min_version:
            return False
        return self._left(name, capped) > 0

    def _fit(self, waiting: Waiting) -> list[Room]:
        return [
            replace(room, held=room.capacity - self._free[name])
            for name, room in self._rooms.items()
            if self._is_open(name, waiting.min_version, waiting.capped)
        ]

    def _top(self, kind: tuple[int, bool]) -> tuple[float, int, str] | None:
        """The emptiest one of a kind; None: all are full."""
        heap = self._emptiest[kind]
        while heap:
            share, number, name = heap[0]
            if self._left(name, kind[1]) <= 0:
                heapq.heappop(heap)
                continue
            now = -self._free[name] / self._rooms[name].capacity
            if now == share:
                return heap[0]
            heapq.heapreplace(heap, (now, number, name))
        return None
