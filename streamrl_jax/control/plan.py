"""The acknowledged plan: all trainer processes enter the same collectives in the same order. Pure: no clock.

A collective that one process does not enter, or enters with another program, hangs all of them, and Python cannot
interrupt it. So each process says before each one what it is about to enter, and goes when all have said the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl_jax.control.absence import leave_out
from streamrl_jax.control.faults import ControlError

_SHOWN = 12  # hexadecimal digits of a digest that a message shows


@dataclass(frozen=True)
class Step:
    """One collective as a trainer process is about to enter it."""

    sequence: int  # 0, 1, 2, ... in each process
    kind: str  # which program: "grad", "apply", "publish", ...
    shape: str  # its shape bucket, as text
    digest: bytes = b""  # of what decides the make-up: the sample ids of the rows, in order

    def differs(self, other: Step) -> list[str]:
        """The names of the fields in which two steps of the same number differ, with both values."""
        found = [
            f"{name} {getattr(self, name)!r} and {getattr(other, name)!r}"
            for name in ("kind", "shape")
            if getattr(self, name) != getattr(other, name)
        ]
        if self.digest != other.digest:
            found.append(f"digest {self.digest.hex()[:_SHOWN]} and {other.digest.hex()[:_SHOWN]}")
        return found


class Plan:
    """Who is about to enter what.

    Call order: ``acknowledge`` for each reader and step, in any order among readers; a reader's own sequence numbers
    go up by one. A repeated acknowledgement (its reply was lost) changes nothing.

    Invariant: a step is let go only when all readers said the same of it; so at any time the readers are at most one
    step apart, and what is kept is at most one step of each.

    Args:
        world: readers.
    """

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"world = {world}: a run has at least one trainer process")
        self._world = world
        self._last: dict[int, Step] = {}  # of each reader
        self._since: dict[int, float] = {}
        self.gone = -1
        """The last sequence number that was let go."""

    def acknowledge(self, reader: int, step: Step, now_s: float = 0.0) -> bool:
        """Notes what a reader is about to enter.

        Args:
            reader: 0 to world - 1.
            step: what it enters.
            now_s: on any clock; see `overdue`.

        Returns:
            Whether every reader is there, so that all may go.

        Raises:
            ControlError: it differs from what another reader said, or is not the reader's next step.
        """
        if not 0 <= reader < self._world:
            raise ControlError(
                f"trainer process {reader} acknowledges a step of a run with {self._world} of them"
            )
        before = self._last.get(reader)
        if before is not None and step.sequence == before.sequence:
            if differing := step.differs(before):
                raise ControlError(
                    f"trainer process {reader} acknowledged step {step.sequence} twice, and differently: "
                    f"{', '.join(differing)}"
                )
            return step.sequence <= self.gone
        due = self.gone + 1
        if step.sequence != due:
            raise ControlError(
                f"trainer process {reader} acknowledges step {step.sequence} ({step.kind}); step {due} is the next"
            )
        for other, theirs in sorted(self._last.items()):
            if theirs.sequence == step.sequence and (differing := theirs.differs(step)):
                raise ControlError(
                    f"trainer processes {other} and {reader} are about to enter different things as step "
                    f"{step.sequence}: {', '.join(differing)}. They must run the same program, with the same "
                    "configuration, model and prompts"
                )
        self._last[reader] = step
        self._since[reader] = now_s
        if len(self.waiting) < self._world:
            return False
        self.gone = step.sequence
        return True

    @property
    def waiting(self) -> list[int]:
        """Readers that are at the next step."""
        return sorted(reader for reader, step in self._last.items() if step.sequence > self.gone)

    def forgive(self, seconds: float, now_s: float) -> None:
        """Leaves the time in which nobody could be heard out of the wait for a step.

        Args:
            seconds: how long that was.
            now_s: its end, on the clock of `acknowledge`.
        """
        self._since = {reader: leave_out(since, seconds, now_s) for reader, since in self._since.items()}

    def overdue(self, now_s: float, timeout_s: float) -> str:
        """What is missing for too long: who, and where the others are; empty when nothing is.

        Args:
            now_s: on the clock of `acknowledge`.
            timeout_s: bound between the first and the last reader of a step.
        """
        waiting = self.waiting
        if not waiting or now_s - min(self._since[reader] for reader in waiting) <= timeout_s:
            return ""
        step = self._last[waiting[0]]
        missing = [reader for reader in range(self._world) if reader not in waiting]
        lines = [
            f"trainer process {reader} was last at step {last.sequence} ({last.kind})"
            if (last := self._last.get(reader))
            else f"trainer process {reader} has not been at any step"
            for reader in missing
        ]
        there = ", ".join(map(str, waiting))
        return (
            f"step {step.sequence} ({step.kind}, {step.shape}) was not acknowledged by all {self._world} trainer "
            f"processes within {timeout_s:g} s (control.plan_timeout_s): {there} waited for it; {'; '.join(lines)}"
        )
