"""The plan that several trainer processes keep: what each is about to enter, told before it does (DESIGN, Control)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

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

    def missing(self, timeout_s: float) -> BaseException | None:
        """After a program over all devices has failed: what the controller knows of the other processes.

        What fails first is often the connection to a process that has died, and does not say which.

        Args:
            timeout_s: Bound on the wait for it to notice.

        Returns:
            What it says of one that is missing; None: nothing, or there is no other process.
        """
        if self._acknowledge is None:
            return None
        found: Future[BaseException | None] = Future()

        def ask(acknowledge: Callable[[Step], None]) -> None:
            try:
                acknowledge(Step(self._sequence, "after a failed program", ""))
            except Exception as error:
                found.set_result(error)
            else:
                found.set_result(None)

        threading.Thread(target=ask, args=(self._acknowledge,), name="missing", daemon=True).start()
        try:
            return found.result(timeout_s)
        except TimeoutError:
            return None

    def _enter(self, kind: str, shape: str, digest: bytes) -> None:
        assert self._acknowledge is not None
        self._acknowledge(Step(self._sequence, kind, shape, digest))
        self._sequence += 1


def make_up(micro: MicroBatch) -> bytes:
    """Digest of which answer lies where in a micro-batch."""
    places = sorted((place.row, place.start, place.answer.name) for place in micro.placements)
    return blake3("\n".join(f"{row} {start} {name}" for row, start, name in places).encode()).digest()
