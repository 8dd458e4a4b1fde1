"""What became of dispatch plans: how long each job took, and where its answers ran. Pure: the clock is the caller's."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Float64

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control.dispatching import Arrangement
from streamrl_jax.control.jobs import Job, Member
from streamrl_jax.control.lines import Lines
from streamrl_jax.ranker.risk import USUAL, Spread
from streamrl_jax.types import Generation

KEPT: Final = 256
"""Finished jobs that are remembered."""

_ITERATIONS: Final = 4  # whose lengths are recent
_LENGTHS: Final = 4096  # of each of them that are kept, and errors


@dataclass(frozen=True)
class Dispatched:
    """One job that is answered."""

    job_id: str
    policy: Policy  # "arrival" too where nothing was predicted
    samples: int  # that were answered
    planned_s: float  # 0: not predicted
    actual_s: float  # from the first hand-out to the last answer
    in_lines: bool  # whether a plan said which instance answers what
    steals: int  # prompts that an instance took over from another's line
    as_planned: int  # answers that ran where they were planned


@dataclass(eq=False)
class _Account:
    job: Job
    arrangement: Arrangement
    lines: Lines | None
    began_s: float | None = None
    answered: int = 0
    cancelled: int = 0
    as_planned: int = 0
    lengths: array[int] = field(default_factory=lambda: array("i"))
    errors: array[float] = field(default_factory=lambda: array("f"))  # log(length / prediction)


class Accounts:
    """Follows jobs from their first hand-out to their last answer.

    Call order: ``open`` a job; ``handed`` for each sample that leaves; ``answered`` for each answer that is accepted;
    ``lost`` for each that is taken back, ``cancelled`` for each that is given up.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Account] = {}
        self._recent: deque[Float64[np.ndarray, " answers"]] = deque(maxlen=_ITERATIONS)
        self._errors: deque[Float64[np.ndarray, " answers"]] = deque(maxlen=_ITERATIONS)
        self.finished: deque[Dispatched] = deque(maxlen=KEPT)
        """The last jobs that were answered, the oldest first."""

    def __len__(self) -> int:
        """Jobs with answers to come."""
        return len(self._open)

    def open(self, job: Job, arrangement: Arrangement, lines: Lines | None) -> None:
        """Opens a job. Probes, and what is added to another job, have no account."""
        self._open[job.job_id] = _Account(job, arrangement, lines)

    def handed(self, job_id: str, now_s: float) -> None:
        """A sample left the queue."""
        if (account := self._open.get(job_id)) is not None and account.began_s is None:
            account.began_s = now_s

    def answered(self, job: Job, asked: Member, answer: Generation, now_s: float) -> None:
        """An answer was accepted."""
        if (account := self._open.get(job.job_id)) is None:
            return
        if account.arrangement.lines is not None:
            number = asked.position * job.n + asked.index
            account.as_planned += account.arrangement.lines.planned(number) == answer.instance
        self._left(account, asked, answer.attempt, answer.instance)
        account.lengths.append(len(answer.token_ids))
        if job.predicted is not None:
            account.errors.append(math.log(len(answer.token_ids) / job.predicted[asked.position]))
        account.answered += 1
        self._close_if_complete(account, now_s)

    def lost(self, job: Job, asked: Member, attempt: int, instance: str) -> None:
        """An attempt was taken back."""
        if (account := self._open.get(job.job_id)) is not None:
            self._left(account, asked, attempt, instance)

    def cancelled(self, job_id: str, now_s: float) -> None:
        """A sample will not be answered: the instance that alone could have done so has left."""
        if (account := self._open.get(job_id)) is not None:
            account.cancelled += 1
            self._close_if_complete(account, now_s)

    def recent(self) -> Sequence[float] | Float64[np.ndarray, " answers"]:
        """Lengths of the answers of the last iterations that are complete: not of those under way, whose long answers
        are still to come."""
        return np.concatenate(self._recent) if self._recent else ()

    def spread(self) -> Spread:
        """How lengths turned out in the last complete iterations that were predicted; before there is one, what is
        usual."""
        return Spread.of(np.concatenate(self._errors)) if self._errors else USUAL

    def _left(self, account: _Account, asked: Member, attempt: int, instance: str) -> None:
        if account.lines is not None and attempt == 0:  # later ones did not come from a line
            account.lines.done(asked.position * account.job.n + asked.index, instance)

    def _close_if_complete(self, account: _Account, now_s: float) -> None:
        job = account.job
        if account.answered + account.cancelled < job.size:
            return
        del self._open[job.job_id]
        if not account.answered:
            return
        if not job.evaluation:
            self._recent.append(_thinned(account.lengths))
            if account.errors:
                self._errors.append(_thinned(account.errors))
        self.finished.append(
            Dispatched(
                job_id=job.job_id,
                policy=account.arrangement.policy,
                samples=account.answered,
                planned_s=account.arrangement.planned_s,
                actual_s=now_s - (now_s if account.began_s is None else account.began_s),
                in_lines=account.lines is not None,
                steals=0 if account.lines is None else account.lines.steals,
                as_planned=account.as_planned,
            )
        )


def _thinned(values: array[int] | array[float]) -> Float64[np.ndarray, " kept"]:
    """In their order by size, every so many where there are too many; the least and the greatest stay."""
    found = np.sort(np.asarray(values, np.float64))
    if len(found) > _LENGTHS:
        found = found[np.linspace(0, len(found) - 1, _LENGTHS).round().astype(np.int64)]
    return found
