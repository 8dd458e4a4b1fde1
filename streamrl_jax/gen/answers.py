"""Assignments at work on the engine, and finished answers until they are acknowledged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from streamrl_jax.gen.protocol import Delta, Engine, EngineFailed
from streamrl_jax.types import (
    Assignment,
    FinishReason,
    Generation,
    Progress,
    Rejection,
    RejectReason,
    Timings,
    join_runs,
)

log = logging.getLogger(__name__)

Key = tuple[str, int]
"""Sample id and attempt."""

Result = Generation | Progress | Rejection


@dataclass(eq=False)
class _Work:
    """One answer in the making; the arrays of its deltas are joined once, at the end."""

    assignment: Assignment
    deltas: list[Delta] = field(default_factory=list)
    told: int = 0  # deltas that Progress has sent
    told_s: float = 0.0
    task: asyncio.Task[None] | None = None


class Answers:
    """Runs assignments and keeps what they yield.

    Call order: `take`, `abort`, `acknowledge` in any order; `drop_all` when another life of the run begins.

    Invariant: each key that was taken yields exactly one `Generation` or one `Rejection`, unless a newer
    attempt or `drop_all` superseded it; a `Generation` is kept, and can be sent again, until it is
    acknowledged.

    Args:
        engine: does the work.
        instance: name that answers carry.
        post: takes each result, at once and without waiting.
        on_failure: takes the reason when the engine turns out to be dead.
    """

    def __init__(
        self,
        engine: Engine,
        instance: str,
        post: Callable[[Result], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._instance = instance
        self._post = post
        self._on_failure = on_failure
        self._active: dict[Key, _Work] = {}
        self._finished: dict[Key, Generation] = {}
        self._progress_interval_s = 0.0

    @property
    def running(self) -> int:
        """Answers of which a token has been seen."""
        return sum(bool(work.deltas) for work in self._active.values())

    @property
    def active(self) -> int:
        """Answers that are not finished."""
        return len(self._active)

    def report(self, interval_s: float) -> None:
        """A new stream is open, and wants progress so often (0: none).

        What the one before it was told may not have arrived: it is told again, from the beginning.
        """
        self._progress_interval_s = interval_s
        for work in self._active.values():
            work.told = 0

    def unacknowledged(self) -> tuple[Generation, ...]:
        """Finished answers that nobody has confirmed, oldest first."""
        return tuple(self._finished.values())

    def has(self, sample_id: str, attempt: int) -> bool:
        """Whether an answer is at work, or finished and not acknowledged."""
        return (sample_id, attempt) in self._active or (sample_id, attempt) in self._finished

    def take(self, assignment: Assignment) -> bool:
        """Starts an answer.

        A repeated assignment is idempotent: one at work stays at work, a finished one is sent again. A
        newer attempt of a sample ends the older ones.

        Args:
            assignment: was admitted.

        Returns:
            Whether it is new.
        """
        key = (assignment.sample_id, assignment.attempt)
        if key in self._active:
            return False
        if key in self._finished:
            self._post(self._finished[key])
            return False
        for other in [k for k in self._active if k[0] == key[0] and k[1] < key[1]]:
            self._drop(other)
        work = _Work(assignment, told_s=time.monotonic())
        self._active[key] = work
        work.task = asyncio.create_task(self._answer(key, work), name=f"answer {key[0]}/{key[1]}")
        return True

    async def abort(self, sample_id: str, attempt: int) -> None:
        """Cuts an answer short; what it has so far is its result, with ``FinishReason.ABORT``."""
        if (sample_id, attempt) in self._active:
            await self._engine.abort(sample_id, attempt)

    def acknowledge(self, sample_id: str, attempt: int) -> None:
        """The receiver has the answer in safe keeping."""
        self._finished.pop((sample_id, attempt), None)

    def drop_all(self) -> None:
        """Ends all work and forgets all answers: they belong to another life of the run."""
        for key in tuple(self._active):
            self._drop(key)
        self._finished.clear()

    def _drop(self, key: Key) -> None:
        work = self._active.pop(key)
        if work.task is not None:
            work.task.cancel()

    async def _answer(self, key: Key, work: _Work) -> None:
        try:
            await self._collect(work)
        except ValueError as error:
            self._refuse(key, RejectReason.INVALID, str(error))
        except EngineFailed as error:
            self._refuse(key, RejectReason.ENGINE_FAILED, str(error))
            self._on_failure(str(error))
        except Exception as error:
            log.exception("answer %s/%d failed", *key)
            self._refuse(key, RejectReason.ENGINE_FAILED, repr(error))
            self._on_failure(repr(error))
        else:
            self._active.pop(key)
            self._finished[key] = self._generation(work)
            self._post(self._finished[key])

    def _refuse(self, key: Key, reason: RejectReason, message: str) -> None:
        self._active.pop(key)
        self._post(Rejection(*key, reason, message))

    async def _collect(self, work: _Work) -> None:
        async for delta in self._engine.generate(work.assignment):
            work.deltas.append(delta)
            if self._progress_interval_s and delta.finish_reason is None:
                self._tell(work)
        if not work.deltas or work.deltas[-1].finish_reason is None:
            raise EngineFailed(f"the engine ended {work.assignment.sample_id} without a finish reason")

    def _tell(self, work: _Work) -> None:
        now = time.monotonic()
        if now - work.told_s < self._progress_interval_s:
            return
        assignment = work.assignment
        carried = len(assignment.resumed.token_ids) if assignment.resumed else 0
        new = work.deltas[work.told :]
        self._post(
            Progress(
                assignment.sample_id,
                assignment.attempt,
                carried + sum(len(delta.token_ids) for delta in work.deltas[: work.told]),
                np.concatenate([delta.token_ids for delta in new]),
                np.concatenate([delta.logprobs for delta in new]),
                join_runs(run for delta in new for run in delta.versions),
            )
        )
        work.told, work.told_s = len(work.deltas), now

    def _generation(self, work: _Work) -> Generation:
        assignment, deltas = work.assignment, work.deltas
        parts = [assignment.resumed, *deltas] if assignment.resumed else deltas
        return Generation(
            sample_id=assignment.sample_id,
            attempt=assignment.attempt,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=join_runs(run for part in parts for run in part.versions),
            finish_reason=deltas[-1].finish_reason or FinishReason.ABORT,
            instance=self._instance,
            timings=deltas[-1].timings or Timings(),
        )
