"""Instances that dial in: who they are, and when they are let in or sent away. Lives on the controller's loop.

::

    announced ──▶ name free? ──▶ added to the pool ──▶ STAY, STAY, … ──▶ left the pool ──▶ LEAVE, with the reason
                      │ no                                   │
                      └─▶ an earlier life of it: WAIT        └─▶ not heard of for a while, and not connected: dismissed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from streamrl_jax.control.pool import Pool
from streamrl_jax.errors import UserError
from streamrl_jax.gen.launch.fleet import Fleet

BEAT_S: Final = 2.0
"""How often one that stays is told so."""

SILENCE_S: Final = 15.0
"""One that is not connected and whose announcement broke off so long ago is gone."""

_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class Guest:
    """An instance that announces itself."""

    name: str
    life: str  # made anew by each process
    address: str
    host: str


class Word(StrEnum):
    """What a guest is told."""

    STAY = "stay"
    WAIT = "wait"
    LEAVE = "leave"
    OVER = "over"


@dataclass(eq=False)
class _Known:
    """A guest that was let in."""

    guest: Guest
    present: bool = True  # its announcement is open
    since: float = 0.0  # it broke off
    dismissed: bool = False  # for its silence: it may come back


class Guests:
    """Lets instances in that dial in, one life of each name at a time.

    Call order: ``attend`` for each announcement, ``watch`` as a task, ``close`` when the run is over.

    Invariant: a life that was drained, or sent away because it does not fit, is not let in again.

    Args:
        pool: the instances.
        fleet: their launcher.
        beat_s: how often one that stays is told so.
        silence_s: bound on an announcement that broke off.
    """

    def __init__(
        self, pool: Pool, fleet: Fleet, beat_s: float = BEAT_S, silence_s: float = SILENCE_S
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._known: dict[str, _Known] = {}  # by name
        self._sent_away: dict[str, str] = {}  # life -> why
        self._over = asyncio.Event()

    async def attend(self, guest: Guest) -> AsyncIterator[tuple[Word, str]]:
        """What to tell an instance, for as long as its announcement is open.

        Args:
            guest: as it announced itself.

        Yields:
            A word and the reason; `Word.LEAVE` and `Word.OVER` are the last.

        Raises:
            UserError: the name is another instance's, or the address may not be called.
        """
        try:
            while not self._over.is_set():
                if (why := self._left(guest)) is not None:
                    yield Word.LEAVE, why
                    return
                if self._admit(guest):
                    yield Word.STAY, ""
                    await self._pause(guest)
                else:
                    yield Word.WAIT, f"an earlier process called {guest.name} has not left yet"
                    await asyncio.sleep(_LOOK_S)
            yield Word.OVER, "the run has ended"
        finally:
            if (known := self._of(guest)) is not None:
                known.present, known.since = False, time.monotonic()

    def close(self) -> None:
        """The run is over: everybody is told so."""
        self._over.set()

    async def watch(self) -> None:
        """Takes out of the pool who neither announces itself nor is connected."""
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now = time.monotonic()
            for known in self._known.values():
                silent = not known.present and now - known.since > self._silence_s
                if silent and not known.dismissed and not self._pool.is_loaded(known.guest.name):
                    known.dismissed = True
                    self._pool.dismiss(
                        known.guest.name, f"it has not announced itself for {self._silence_s:g} s"
                    )

    def _of(self, guest: Guest) -> _Known | None:
        known = self._known.get(guest.name)
        return known if known is not None and known.guest.life == guest.life else None

    def _left(self, guest: Guest) -> str | None:
        """Why this life must not stay; None: it may."""
        known = self._of(guest)
        if known is not None and not known.dismissed and guest.name not in self._pool:
            self._sent_away[guest.life] = self._pool.gone().get(guest.name, "it has left the pool")
            del self._known[guest.name]
        return self._sent_away.get(guest.life)

    def _admit(self, guest: Guest) -> bool:
        """Whether it is in the pool now, as itself."""
        known = self._of(guest)
        if known is not None and not known.dismissed:
            known.present = True
            return True
        if guest.name in self._pool:
            self._oust(guest)
            return False
        self._fleet.guest(guest.name, guest.address, guest.host)
        self._known[guest.name] = _Known(guest)
        self._pool.add(guest.name, founding=False)
        return True

    def _oust(self, guest: Guest) -> None:
        """Makes room for a new life of a name, unless the old one is well."""
        old = self._known.get(guest.name)
        if old is None or old.present:
            raise UserError(
                f"an instance called {guest.name!r} is in the pool already; give this one another --name"
            )
        if self._pool.is_connected(guest.name) and old.guest.address != guest.address:
            return  # it works: only its announcement broke off
        old.dismissed = True
        self._pool.dismiss(guest.name, "it was started anew")

    async def _pause(self, guest: Guest) -> None:
        """Until there may be something to tell."""
        end = time.monotonic() + self._beat_s
        while time.monotonic() < end and guest.name in self._pool and not self._over.is_set():
            await asyncio.sleep(_LOOK_S)
