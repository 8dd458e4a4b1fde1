"""What the trainer asks for, and how the ids and seeds of its samples are made."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamrl_jax.types import Prompt, Sampling

_SEED_BITS = 31  # every engine takes a seed of this size


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

    def __post_init__(self) -> None:
        if not self.prompts or self.n < 1:
            raise ValueError(
                f"job {self.job_id}: {len(self.prompts)} prompts with n = {self.n}: nothing to do"
            )

    @property
    def size(self) -> int:
        """Samples of the job."""
        return len(self.prompts) * self.n


def engine_priority(job: Job) -> int:
    """Folds (priority, iteration) into the one number that an engine's queue knows; lower runs first."""
    return (job.priority << 32) + job.iteration


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """One sample of a job: the ``index``-th answer to the prompt at ``position``."""

    sample_id: str
    group: str  # the answers to one prompt share it, and an instance's prefix cache
    position: int
    index: int


def members(job: Job) -> Iterator[Member]:
    """Names every sample of a job, prompt by prompt, as they are asked for.

    A prompt that a job holds twice (the end of one epoch and the start of the next) is two groups; the second
    one's key gets the suffix ``~1``.

    Args:
        job: what to expand.

    Yields:
        ``job.size`` members; the ids are ``<job>/<prompt>/<index>`` and unique in the run.
    """
    seen: Counter[str] = Counter()
    for position, prompt in enumerate(job.prompts):
        repeat = seen[prompt.prompt_id]
        seen[prompt.prompt_id] += 1
        group = f"{job.job_id}/{prompt.prompt_id}" + (f"~{repeat}" if repeat else "")
        for index in range(job.n):
            yield Member(f"{group}/{index}", group, position, index)


def sampling_of(job: Job, sample_id: str, continued_attempt: int = 0) -> Sampling:
    """Gives a sample its own seed, so that the answers of a group differ.

    A repeated attempt keeps the seed: were it drawn anew, the answers short enough to end before their
    instance died would be over-represented. A continuation of a partial answer must not: an engine replays
    the seed's noise from its first token.

    Args:
        job: the sample's job; without a seed the engine draws freely.
        sample_id: the sample.
        continued_attempt: the attempt number when a partial answer is continued, else 0.

    Returns:
        The job's sampling with the sample's seed.
    """
    if job.sampling.seed is None:
        return job.sampling
    text = f"{job.sampling.seed}\0{sample_id}\0{continued_attempt}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return replace(job.sampling, seed=int.from_bytes(digest, "little") >> (64 - _SEED_BITS))
