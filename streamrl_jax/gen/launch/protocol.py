"""How instances come into being and end: what the controller asks of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Launched(Protocol):
    """One started instance."""

    @property
    def address(self) -> str:
        """``host:port`` at which it answers, also while it loads."""
        ...

    @property
    def managed(self) -> bool:
        """Whether its process is the launcher's, which can end it and start another."""
        ...

    def ended(self) -> str | None:
        """Why its process has ended; None while it lives, or when that cannot be seen from here."""
        ...

    def log_tail(self) -> str:
        """The last lines of its log; empty where there is none to read."""
        ...

    async def stop(self) -> None:
        """Ends it with all its processes, in bounded time; does nothing if it has ended or is not managed."""
        ...


class Launcher(Protocol):
    """Starts the instances of a run, by name.

    Call order: `start` for a name; after `Launched.stop` again, for the next life of the same instance; `forget` when
    it has left for good.
    """

    @property
    def names(self) -> Sequence[str]:
        """The instances that can be started."""
        ...

    async def start(self, name: str) -> Launched:
        """Starts one; returns as soon as it answers calls, long before its engine is loaded.

        Raises:
            UserError: it did not come up to the point of answering; with the last lines of its log.
        """
        ...

    def forget(self, name: str) -> None:
        """The instance has left the run: it will not be started again."""
        ...
