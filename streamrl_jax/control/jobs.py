"""What the trainer asks for, and how the ids and seeds of its samples are made."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from streamrl_jax.config_ranker import Policy
from streamrl_jax.types import Prompt, Sampling

_SEED_BITS: Final = 31  # every engine takes a seed of this size
_ITERATION_BITS: Final = 20
_LENGTH_BITS: Final = 12
MOST_SAMPLES: Final = 1 << 24  # of a job: a plan takes some tens of bytes for each
LONGEST: Final = 2.0**53
"""Largest length that may be predicted, tokens."""

_LONGEST_LOG2: Final = 20.0  # a length of 2^20 tokens, the longest that the wire takes, is the largest one


@dataclass(frozen=True, eq=False)
class Job:
    """Some prompts with ``n`` answers each: an iteration (or an addition to one), an evaluation, an agreement probe."""

    job_id: str  # "train/12", "train/12+3" (a further prompt), "eval/12", "probe/12/instance-0"; unique in the run
    prompts: Sequence[Prompt]
    n: int  # answers per prompt
    sampling: Sampling
    iteration: int
    min_version: int  # no token of an older version
    priority: int = 0  # lower runs first
    evaluation: bool = False
    probe: bool = False  # not rewarded, not part of an iteration
    pinned: str = ""  # the one instance that may answer; empty: any
    predicted: Sequence[float] | None = None
    """Expected tokens of an answer, one per prompt, each 1 or more; None: nothing is known, and nothing is planned.
    They steer where and when a sample runs, never what is sampled, and are no part of the job's digest: of several
    trainer processes the leader alone predicts, and submits first."""
    forced: Sequence[int] | None = None
    """Exact tokens of each sample, in the order of `members`: recorded lengths, for evaluations only."""
    policy: Policy | None = None
    """How it is dispatched; None: as the controller's settings say. Without predictions nothing is planned."""

    def __post_init__(self) -> None:
        if not self.prompts or self.n < 1:
            raise ValueError(
                f"job {self.job_id}: {len(self.prompts)} prompts with n = {self.n}: nothing to do"
            )
        if self.size > MOST_SAMPLES:
            raise ValueError(
                f"job {self.job_id}: {len(self.prompts)} prompts with n = {self.n} are {self.size} samples; at most "
                f"{MOST_SAMPLES} are taken"
            )
        if self.predicted is not None:
            _check_lengths(f"job {self.job_id}: predicted", self.predicted, len(self.prompts), LONGEST)
        if self.forced is not None:
            if not self.evaluation:
                raise ValueError(f"job {self.job_id}: forced lengths are for evaluations only")
            _check_lengths(f"job {self.job_id}: forced", self.forced, self.size, self.sampling.max_new_tokens)

    @property
    def size(self) -> int:
        """Samples of the job."""
        return len(self.prompts) * self.n


def _check_lengths(what: str, lengths: Sequence[float], count: int, longest: float) -> None:
    if len(lengths) != count:
        raise ValueError(f"{what} has {len(lengths)} lengths; {count} are needed")
    found = np.asarray(lengths, np.float64)
    bad = np.flatnonzero(~(np.isfinite(found) & (found >= 1) & (found <= longest)))
    if bad.size:
        raise ValueError(
            f"{what}[{bad[0]}] = {found[bad[0]]:g} is no length: it must be finite, and in [1, {longest:g}]"
        )


def engine_priority(job: Job, position: int = 0, *, late: bool = False) -> int:
    """Folds (priority, iteration, -predicted length) into the one number that an engine's queue knows.

    64 bits with a sign, from the highest::

        priority 32 (signed) | iteration 20 | 4095 - length 12

    So the priority decides between any two jobs, and training gives every iteration its own. Among jobs of one priority
    the older iteration goes first, then what is late or not predicted, then the longer answer. Iterations saturate at
    2^20 - 1. Lengths count in steps of 0.34 % (4095 log2(tokens) / 20) and saturate at 2^20 tokens, which is what late
    samples count as; what falls together runs in the order of its arrival.

    Args:
        job: of the sample.
        position: of its prompt in the job.
        late: whether it is added to a job whose samples were asked for before, which waits for it.

    Returns:
        Lower runs first.
    """
    top = length = (1 << _LENGTH_BITS) - 1
    if job.predicted is not None and not late:
        length = min(top, int(top * math.log2(job.predicted[position]) / _LONGEST_LOG2))
    iteration = min(max(job.iteration, 0), (1 << _ITERATION_BITS) - 1)
    return (job.priority << 32) + (iteration << _LENGTH_BITS) + top - length


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """One sample of a job: the ``index``-th answer to the prompt at ``position``."""

    sample_id: str
    group: str  # the answers to one prompt share it, and an instance's prefix cache
    position: int
    index: int


class Roster:
    """Names a job's samples, in any order.

    A prompt that a job holds twice (the end of one epoch and the start of the next) is two groups; the second
    one's key gets the suffix ``~1``.

    Args:
        job: whose.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        seen: Counter[str] = Counter()
        self._repeats: dict[int, int] = {}  # how many earlier positions hold the same prompt, where any does
        for position, prompt in enumerate(job.prompts):
            if repeat := seen[prompt.prompt_id]:
                self._repeats[position] = repeat
            seen[prompt.prompt_id] += 1

    def member(self, number: int) -> Member:
        """The sample with this number, in the order of `members`."""
        position, index = divmod(number, self._job.n)
        return _member(self._job, position, index, self._repeats.get(position, 0))


def members(job: Job, order: Iterable[int] | None = None) -> Iterator[Member]:
    """Names every sample of a job, prompt by prompt, as they are asked for.

    Args:
        job: what to expand.
        order: its positions; None: as they are.

    Yields:
        ``job.size`` members; the ids are ``<job>/<prompt>/<index>`` and unique in the run (see `Roster`).
    """
    if order is not None:
        roster = Roster(job)
        for position in order:
            for index in range(job.n):
                yield roster.member(int(position) * job.n + index)
        return
    seen: Counter[str] = Counter()
    for position, prompt in enumerate(job.prompts):
        repeat = seen[prompt.prompt_id]
        seen[prompt.prompt_id] += 1
        for index in range(job.n):
            yield _member(job, position, index, repeat)


def _member(job: Job, position: int, index: int, repeat: int) -> Member:
    group = f"{job.job_id}/{job.prompts[position].prompt_id}" + (f"~{repeat}" if repeat else "")
    return Member(f"{group}/{index}", group, position, index)


def limits_of(job: Job, asked: Member) -> Sampling:
    """What a sample's answer is drawn from, without its own seed."""
    if job.forced is None:
        return job.sampling
    return replace(job.sampling, forced_length=int(job.forced[asked.position * job.n + asked.index]))


def sampling_of(job: Job, asked: Member, continued_attempt: int = 0) -> Sampling:
    """Gives a sample its own seed, so that the answers of a group differ, and its own length if that is given.

    A repeated attempt keeps the seed: were it drawn anew, the answers short enough to end before their
    instance died would be over-represented. A continuation of a partial answer must not: an engine replays
    the seed's noise from its first token.

    Args:
        job: the sample's job; without a seed the engine draws freely.
        asked: the sample.
        continued_attempt: the attempt number when a partial answer is continued, else 0.

    Returns:
        The job's sampling with the sample's seed and forced length.
    """
    sampling = limits_of(job, asked)
    if sampling.seed is None:
        return sampling
    text = f"{sampling.seed}\0{asked.sample_id}\0{continued_attempt}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little") >> (64 - _SEED_BITS))
