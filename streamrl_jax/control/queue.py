"""The held queue of samples, and which instance each one goes to. Pure: no sockets, no clock.

The controller holds the queue and keeps every instance just full (its slots and a small look-ahead): what is
still here can be re-ordered, re-balanced, and given to an instance that joins.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl_jax.control.lines import Lines
from streamrl_jax.control.placing import Offer, Place, Placement, Room, Waiting


@dataclass(eq=False, slots=True)
class _Lane:
    """Samples that are drawn as they are needed; one of them, the next, is in the queue."""

    way: str
    rest: Iterator[Waiting]
    left: int  # with the next one


_Head = tuple[bool, tuple[int, ...], int, Waiting, _Lane | None]
"""What the queue sorts by (not front, order, number), then the sample and the lane that it was drawn from."""

_Key = tuple[int, str, bool]
"""Version, pin and whether caps count: samples of one key may go to the same instances."""


@dataclass(eq=False, slots=True)
class _Planned:
    """A job that waits in lines; in the queue it is one entry, before all other samples of its order."""

    way: str
    order: tuple[int, ...]
    number: int
    min_version: int
    lines: Lines

    @property
    def place(self) -> tuple[bool, tuple[int, ...], int]:
        return True, self.order, self.number


class HeldQueue:
    """Samples in order of priority. What came back from a lost instance goes before everything else.

    A sample is handed out only to an instance that serves ``min_version`` or newer (DESIGN rule 5) and that
    has room; a sample whose version is not out yet does not block those behind it.

    Invariant: after ``take`` with all instances nothing is left that one of them could have taken, but for what
    ``admits`` or a plan's caps held back. So an instance whose room alone has changed can be offered alone, unless
    ``uncapped`` says that caps have ended. A cap ends with the last waiting sample of its plan, or with the last answer
    that it is for, and is 1 or more, so that it strands nothing. One ``take`` costs as much as it has rooms, and a
    logarithm for each sample that leaves.

    Args:
        place: chooses the instance; None: as `place_with_group`, without looking at all rooms for each sample.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._buckets: dict[_Key, list[_Head]] = {}
        self._pins: dict[str, set[_Key]] = {}  # instance -> keys of what it alone may answer; "": of the rest
        self._homes: dict[str, str] = {}
        self._left: dict[str, int] = {}  # group -> samples here; the home is forgotten with the last one
        self._planned: list[_Planned] = []  # by order
        self.uncapped = False
        """Caps have ended, and nobody has set this to false since: all instances have to be offered again."""
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

    def line_up(self, way: str, order: tuple[int, ...], min_version: int, lines: Lines) -> None:
        """Adds a job that was planned: its samples wait in lines.

        Args:
            way: given to ``admits`` of `take`.
            order: where it stands between other jobs; before samples whose order begins so.
            min_version: of all its samples.
            lines: with at least one sample.
        """
        self._waiting += lines.waiting
        self._pushed += 1
        planned = _Planned(way, order, self._pushed, min_version, lines)
        bisect.insort(self._planned, planned, key=lambda planned: planned.place)

    def abandon(self, instance: str) -> None:
        """Notes that an instance was lost or leaves: what waits in its lines goes to others meanwhile."""
        for planned in self._planned:
            planned.lines.abandon(instance)

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
        offer = Offer(rooms, self._place, self._caps(rooms))
        placed = self._fill(offer, rooms, admits)
        while self._end_plans():
            offer.cap(self._caps(rooms))
            placed += self._fill(offer, rooms, admits)
        return placed

    def _fill(self, offer: Offer, rooms: Sequence[Room], admits: Callable[[str], bool]) -> list[Placement]:
        pins = ("", *(room.instance for room in rooms))
        keys = [key for pin in pins for key in self._pins.get(pin, ()) if offer.takes(*key)]
        ready: list[tuple[tuple[Any, ...], _Key | _Planned]] = [(self._buckets[key][0], key) for key in keys]
        ready += [(planned.place, planned) for planned in self._planned if admits(planned.way)]
        heapq.heapify(ready)
        placed: list[Placement] = []
        kept: list[tuple[_Key, _Head]] = []
        while ready:
            head, key = heapq.heappop(ready)
            if isinstance(key, _Planned):
                placed += self._hand_out_planned(key, offer)
                continue
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
        versions = [key[0] for key in self._buckets] + [planned.min_version for planned in self._planned]
        return min(versions, default=None)

    def _caps(self, rooms: Iterable[Room]) -> dict[str, int]:
        """The caps of these instances: those of the first plan of which anything waits."""
        if not self._planned:
            return {}
        lines = self._planned[0].lines
        found = {room.instance: lines.cap(room.instance) for room in rooms} if lines.has_caps else {}
        return {instance: cap for instance, cap in found.items() if cap is not None}

    def _end_plans(self) -> bool:
        """Forgets plans of which nothing waits; returns whether that ended caps."""
        ended = [planned for planned in self._planned if not planned.lines.waiting]
        if ended:
            self._planned = [planned for planned in self._planned if planned.lines.waiting]
        uncapped = any(planned.lines.has_caps for planned in ended)
        self.uncapped |= uncapped
        return uncapped

    def _hand_out_planned(self, planned: _Planned, offer: Offer) -> list[Placement]:
        placed = planned.lines.fill(offer.open(planned.min_version))
        self.uncapped |= planned.lines.uncapped
        planned.lines.uncapped = False
        offer.gave(placement.instance for placement in placed)
        self._waiting -= len(placed)
        return placed

    def _hand_out(self, key: _Key, offer: Offer) -> Placement:
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
        key = (waiting.min_version, waiting.pinned, waiting.capped)
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
