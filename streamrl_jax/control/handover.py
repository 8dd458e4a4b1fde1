"""From threads to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """Brings items from any thread to a function on a loop, in the order of their arrival.

    One wake-up of the loop takes everything that has come until then: at thousands of samples a second the wake-ups
    would cost more than the work.

    Args:
        loop: on which ``take`` is called.
        take: gets each item; what it raises goes to the loop's exception handler.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._told = False

    def put(self, item: T) -> None:
        """Adds an item, from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._items.append(item)
        # The item lies there before it is looked whether the loop was told: so it is taken by the call that is on its
        # way, which clears the mark before it looks, or by a new one.
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._told = False
        while self._items:
            self._take(self._items.popleft())
