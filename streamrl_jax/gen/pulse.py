"""For how long the engine itself has owed an answer."""

from __future__ import annotations

import asyncio
import time

from streamrl_jax.gen.protocol import Engine


class Pulse:
    """Asks the engine again and again, and knows since when it has been silent.

    Call order: `run` as a task once the engine has started; `age_s` at any time. A stopped EngineCore
    leaves its API process alive and well: its ping is never answered, and the age grows.

    Args:
        engine: is asked.
        interval_s: rest between an answer and the next question.
    """

    def __init__(self, engine: Engine, interval_s: float = 0.5) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._asked_s: float | None = None  # the question that is not answered yet; None: there is none

    @property
    def age_s(self) -> float:
        """Seconds for which an answer has been missing; 0 between two questions, and while the engine is excused.

        So an engine that stood still together with this process, as when a whole machine is, is not taken for silent
        because of the rest before its next question.
        """
        if self._asked_s is None:
            return 0.0
        return max(0.0, time.monotonic() - max(self._asked_s, self._engine.excused_until_s))

    async def run(self) -> None:
        """Asks until the engine is dead.

        The wait for one answer has no bound of its own: whoever reads `age_s` has one (the lease).

        Raises:
            EngineFailed: the engine is dead.
        """
        while True:
            self._asked_s = time.monotonic()
            await self._engine.ping()
            self._asked_s = None
            await asyncio.sleep(self._interval_s)
