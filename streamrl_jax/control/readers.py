"""The trainer processes as the controller sees them: who lives, and who is about to enter which collective."""

from __future__ import annotations

import asyncio
import time

from streamrl_jax.control.absence import leave_out
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.plan import Plan, Step


class Readers:
    """Liveness and plan of a run's trainer processes. Lives on the loop.

    Call order: ``beat`` at each sign of life; ``acknowledge`` before each collective; ``check`` now and then, after
    ``forgive`` when this process itself was stopped; ``fail`` once; ``left`` when a reader closed its side.

    Args:
        world: how many.
        lease_s: silence that ends the run.
        plan_timeout_s: between the first and the last one at a step.
    """

    def __init__(self, world: int, lease_s: float, plan_timeout_s: float) -> None:
        self._world = world
        self._plan = Plan(world)
        self._lease_s = lease_s
        self._timeout_s = plan_timeout_s
        self._heard: dict[int, float] = {}
        self._left: set[int] = set()
        self._going: dict[int, asyncio.Future[None]] = {}  # by step
        self._failure: BaseException | None = None

    def known(self, reader: int) -> None:
        """Raises `ControlError` where there is no such reader."""
        if not 0 <= reader < self._world:
            raise ControlError(f"there is no trainer process {reader}; the run has {self._world} of them")

    def beat(self, reader: int) -> None:
        """A reader gave a sign of life; one that has left may give a last one, and is not expected to go on."""
        if reader not in self._left:
            self._heard[reader] = time.monotonic()

    def left(self, reader: int) -> None:
        """A reader ended in good order; it is not expected any more."""
        self._left.add(reader)
        self._heard.pop(reader, None)

    async def acknowledge(self, reader: int, step: Step) -> None:
        """Returns when every reader is about to enter the same step.

        Raises:
            ControlError: they differ; or what `fail` was given.
        """
        if self._failure is not None:
            raise self._failure
        if self._plan.acknowledge(reader, step, time.monotonic()):
            if (going := self._going.pop(step.sequence, None)) is not None:
                going.set_result(None)
            return
        going = self._going.setdefault(step.sequence, asyncio.get_running_loop().create_future())
        await asyncio.shield(going)

    def check(self) -> None:
        """Raises `ControlError` when a reader is silent, or missing at a step, for too long."""
        now = time.monotonic()
        if late := self._plan.overdue(now, self._timeout_s):
            raise ControlError(late)
        for reader, heard in self._heard.items():
            if now - heard > self._lease_s:
                log = f"logs/trainer-{reader}.log of the run directory" if reader else "what it printed"
                raise ControlError(
                    f"trainer process {reader} gave no sign of life for {now - heard:.0f} s (control.lease_s = "
                    f"{self._lease_s:g}); look at {log}, then go on with --resume"
                )

    def forgive(self, seconds: float) -> None:
        """Holds the time in which this process itself was stopped, and could hear nobody, against nobody.

        Args:
            seconds: how long that was, until now.
        """
        now = time.monotonic()
        self._heard = {reader: leave_out(heard, seconds, now) for reader, heard in self._heard.items()}
        self._plan.forgive(seconds, now)

    def fail(self, error: BaseException) -> None:
        """Raises the error in whoever waits for the others, now and later."""
        self._failure = error
        for going in self._going.values():
            going.set_exception(error)
            going.exception()  # nobody may be waiting
        self._going.clear()
