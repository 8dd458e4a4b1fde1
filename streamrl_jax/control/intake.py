"""How many finished samples wait for the trainer, and which jobs may go on. Pure: no sockets, no clock.

======  ===========================================================================================
symbol  meaning
======  ===========================================================================================
L       ``control.max_buffered_samples``
C       samples that the instances hold at once: their slots and look-ahead
B       samples that are buffered: finished, and not taken by the trainer (being rewarded included)
W       ways out that are open: iterations (at most ``trainer.max_staleness`` + 1), evaluation, probes
======  ===========================================================================================

Bound: B < L + (1 + W) C, at every speed. A sample is handed out while B < L, and what was handed out may always come
in: so B passes L by the C samples that the instances held when it was reached. Past L only a way of which nothing is
buffered goes on: whoever reads it waits for an instance, and would wait for ever if the buffer, full of what is read
later, held it up. That ends with its first sample that comes in, after at most the C that the instances hold.

Example: L = 65,536 samples of at most 4,096 tokens (8 bytes each), 16 instances of 256 + 8, one iteration ahead: under
78,208 samples, 2.4 GiB.
"""

from __future__ import annotations

from collections import Counter


class Intake:
    """The samples that are buffered, by the way out that they take.

    Call order: ``arrived`` when an answer is accepted, ``consumed`` when the trainer has taken it; ``admits`` before a
    sample is handed out.

    Invariant: a way of which nothing is buffered is never held up. So whoever reads one way after another, in any
    order, always gets on (`tests/fast/test_control_intake.py`).

    Args:
        limit: samples; at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"control.max_buffered_samples = {limit}: at least one sample must be taken in")
        self._limit = limit
        self._buffered: Counter[str] = Counter()
        self._total = 0

    @property
    def buffered(self) -> int:
        """How many there are."""
        return self._total

    def admits(self, way: str) -> bool:
        """Whether samples that leave by this way may be handed out."""
        return self._total < self._limit or way not in self._buffered

    def arrived(self, way: str) -> None:
        """An answer was accepted."""
        self._buffered[way] += 1
        self._total += 1

    def consumed(self, way: str) -> bool:
        """The trainer has taken a sample.

        Returns:
            Whether something may be handed out now that was held up before.
        """
        was_full = self._total >= self._limit
        self._total -= 1
        self._buffered[way] -= 1
        if not self._buffered[way]:
            del self._buffered[way]
        return was_full and (self._total < self._limit or way not in self._buffered)
