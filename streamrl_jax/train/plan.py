"""The plan that several trainer processes keep: what each is about to enter, told before it does (DESIGN, Control)."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from streamrl_jax.control.plan import Step
from streamrl_jax.train.batcher import MicroBatch


class Plan:
    """Numbers a trainer process's collective programs, and enters each when all processes are about to.

    Call order: ``rows`` or ``whole`` right before each program whose devices belong to several processes. All that is
    called between two of them follows from what was acknowledged.

    Invariant: no process enters a program that another one does not enter next, over the same rows. Where they differ,
    or one is missing, the call raises in all of them, and none hangs in a collective.

    Args:
        acknowledge: Returns when all processes have said the same, as `RunController.acknowledge` does. None: there is
            one process, and nothing is asked.
    """

    def __init__(self, acknowledge: Callable[[Step], None] | None = None) -> None:
        self._acknowledge = acknowledge
        self._sequence = 0

    def rows(self, kind: str, micro: MicroBatch) -> None:
        """Before a program over a micro-batch: `score`, `estimate`, `critic` or `actor`."""
        if self._acknowledge is not None:
            rows, length = micro.rows.tokens.shape
            self._enter(kind, f"{rows} x {length}", make_up(micro))

    def whole(self, kind: str, number: int) -> None:
        """Before a program over parameters or gradients: `apply`, `finite`, `convert` or `checkpoint`.

        Args:
            kind: Which.
            number: Of the version that it starts from or makes.
        """
        if self._acknowledge is not None:
            self._enter(kind, f"version {number}", b"")

    def _enter(self, kind: str, shape: str, digest: bytes) -> None:
        assert self._acknowledge is not None
        self._acknowledge(Step(self._sequence, kind, shape, digest))
        self._sequence += 1


def make_up(micro: MicroBatch) -> bytes:
    """Digest of which answer lies where in a micro-batch."""
    places = sorted((place.row, place.start, place.answer.name) for place in micro.placements)
    return blake3("\n".join(f"{row} {start} {name}" for row, start, name in places).encode()).digest()
