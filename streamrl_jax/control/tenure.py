"""How long an instance belongs to the pool, and what becomes of it when it is lost.

=============================================  =======================================================
the lost instance                              what follows
=============================================  =======================================================
is being drained                               it leaves; nothing is started
does not fit this run (and never served it)    it leaves, and the reason is reported
has restarts left                              it is started anew (an endpoint: connected to again)
the run began with it, and started it itself   the run ends with its name and the end of its log
any other (an endpoint; one that was added)    it leaves, and the reason is reported
=============================================  =======================================================

What never came up will hardly come up at the fifth try: it has one restart at the most. An instance that was added and
has not yet served is on trial: whatever is wrong with it (another run's, another token, another model) ends its own
stay, never the run.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from streamrl_jax.control.faults import ControlError


class Fate(StrEnum):
    """What becomes of an instance that was lost."""

    AGAIN = "again"
    LEAVES = "leaves"
    ENDS_RUN = "ends the run"


class Tenure:
    """The stay of one instance in the pool, over all its lives.

    Call order: ``managed``, ``loaded`` and ``served`` are set as they become true; ``fate`` after each loss; ``leave``
    and ``leaving`` at any time.

    Args:
        founding: the run began with it.
        max_restarts: ``gen.max_restarts``.
    """

    def __init__(self, *, founding: bool, max_restarts: int) -> None:
        self.founding = founding
        self.managed = True  # its process is the launcher's
        self.loaded = False  # it came up at least once
        self.served = False  # it had a version that was checked, at least once
        self.misfit = False  # it cannot belong to this run
        self.restarts = 0
        self.at_once = False  # what it holds is handed out again instead of waited for
        self.farewell = ""  # why it left
        self._max_restarts = max_restarts
        self._told = asyncio.Event()

    @property
    def on_trial(self) -> bool:
        """Whether its faults are its own matter."""
        return not self.founding and not self.served

    @property
    def awaited(self) -> bool:
        """Whether the run, which begins with it, has still to wait until it is up for the first time."""
        return self.founding and not self.loaded

    @property
    def leaving(self) -> bool:
        """Whether it was told to leave."""
        return self._told.is_set()

    @property
    def allowed_restarts(self) -> int:
        """How often it may be started anew."""
        return self._max_restarts if self.loaded else min(1, self._max_restarts)

    def leave(self, why: str, *, at_once: bool) -> None:
        """Tells it to leave; the first reason counts."""
        self.farewell = self.farewell or why
        self.at_once = self.at_once or at_once
        self._told.set()

    async def told_to_leave(self) -> None:
        """Returns when it was told to leave."""
        await self._told.wait()

    def fate(self, lost: str) -> Fate:
        """Decides by the table of the module; counts a restart, or notes the farewell.

        Args:
            lost: that it was lost and why, for the farewell.
        """
        if self.leaving:
            self.farewell = f"{self.farewell}; {lost}"
            return Fate.LEAVES
        if not self.misfit and self.restarts < self.allowed_restarts:
            self.restarts += 1
            return Fate.AGAIN
        self.farewell = lost
        return Fate.ENDS_RUN if self.founding and self.managed else Fate.LEAVES

    def once_too_often(self, lost: str, log_tail: str) -> ControlError:
        """What ends the run with it.

        Args:
            lost: that it was lost and why.
            log_tail: the last lines of its log.
        """
        return ControlError(
            f"{lost}. It is started at most {self.allowed_restarts + 1} times (gen.max_restarts); mend what ends it, "
            "then go on with --resume",
            f"the last lines of its log:\n{log_tail}" if log_tail else "",
        )
