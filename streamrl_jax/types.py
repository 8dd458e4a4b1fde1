"""Every record that crosses a boundary of the system, as frozen dataclasses.

The way of the data (one iteration)::

    Prompt ──▶ Assignment ──▶ [SGS instance] ──▶ Generation ──▶ Sample ──▶ micro-batch ──▶ update
                                    ▲                                                        │
                                    └────────────── Manifest + bytes (version v + 1) ◀───────┘

A policy version is data: each token of a ``Generation`` says which version produced it (run-length coded in
``VersionRun``), and staleness is computed where the sample is consumed. This module imports NumPy and nothing
heavier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

TokenIds = Int32[np.ndarray, " tokens"]
Logprobs = Float32[np.ndarray, " tokens"]

NO_VERSION = -1
"""The version of an instance that holds dummy weights; the first push brings version 0."""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # a stop token, which is the last id of the answer
    LENGTH = "length"  # the limit of new tokens
    ABORT = "abort"  # cut off by the system; never trained on


class InstanceState(StrEnum):
    """What an SGS instance is doing (``InstanceState`` of the proto)."""

    LOADING = "loading"
    UPDATING = "updating"
    PAUSED = "paused"
    IDLE = "idle"
    GENERATING = "generating"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True)
class Fence:
    """One life of one run: what carries another fence is dropped and counted (DESIGN rule 1)."""

    run_id: str
    incarnation: int  # 0 at the first start, one more after each resume


@dataclass(frozen=True)
class VersionRun:
    """``length`` consecutive tokens that policy ``version`` produced."""

    version: int
    length: int


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from.

    Training allows temperature, length, stop ids and seed only; the other fields change the density and are
    refused unless ``evaluation`` is set (DESIGN rule 4).
    """

    temperature: float
    max_new_tokens: int  # of the whole answer, what an earlier attempt left included
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    evaluation: bool = False
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    forced_length: int | None = None  # recorded lengths: ignore stops, produce exactly this many

    @property
    def longest(self) -> int:
        """Tokens that the answer may have at the most."""
        return self.forced_length or self.max_new_tokens


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of the prompt set, tokenised once; text is never encoded again."""

    prompt_id: str  # stable over epochs and resumes: "<row>" of the prompt set
    token_ids: TokenIds
    columns: Mapping[str, Any]  # the row as read, for the reward function ("prompt", "answer", ...)


@dataclass(frozen=True, eq=False)
class Partial:
    """The beginning of an answer that an earlier attempt left behind."""

    token_ids: TokenIds
    logprobs: Logprobs
    versions: tuple[VersionRun, ...]


@dataclass(frozen=True, eq=False)
class Assignment:
    """A sample to produce: what the controller sends to one instance."""

    sample_id: str  # unique in the run: "<job>/<prompt_id>/<index in group>", as in "train/12/37/0"
    attempt: int  # 0, and one more each time the work is handed out again
    prompt_ids: TokenIds
    sampling: Sampling
    priority: int = 0  # lower runs first
    min_version: int = NO_VERSION  # an instance that serves an older version refuses
    resumed: Partial | None = None
    probe: bool = False  # agreement probe; not part of an iteration


@dataclass(frozen=True)
class Timings:
    """Durations on the instance's own clock, seconds."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Generation:
    """One finished answer as an instance returned it."""

    sample_id: str
    attempt: int
    token_ids: TokenIds  # the answer, the stop token included
    logprobs: Logprobs  # of the distribution sampled from, temperature included
    versions: tuple[VersionRun, ...]  # lengths sum to len(token_ids)
    finish_reason: FinishReason
    instance: str
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, eq=False)
class Progress:
    """Tokens of an answer that is still being written; a death of the instance does not lose them."""

    sample_id: str
    attempt: int
    offset: int  # index of the first of these tokens in the answer
    token_ids: TokenIds
    logprobs: Logprobs
    versions: tuple[VersionRun, ...]


class RejectReason(StrEnum):
    """Why an instance refused an assignment (``Rejected.Reason`` of the proto)."""

    TOO_LONG = "too_long"
    SAMPLING_NOT_ALLOWED = "sampling_not_allowed"
    WRONG_VERSION = "wrong_version"
    DRAINING = "draining"
    INVALID = "invalid"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True)
class Rejection:
    """An assignment that an instance refused."""

    sample_id: str
    attempt: int
    reason: RejectReason
    message: str  # names the field, the value and the remedy


@dataclass(frozen=True, eq=False)
class Sample:
    """A rewarded answer, ready for the trainer. Exactly one per dispatched sample id reaches it."""

    sample_id: str
    iteration: int
    prompt: Prompt
    group_index: int  # 0 .. rollout.n - 1
    generation: Generation
    reward: float  # the score as it was returned, NaN and infinities included
    reward_extras: Mapping[str, float] = field(default_factory=dict)
    arrived_s: float = 0.0  # controller's monotonic clock
    rewarded_s: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt.token_ids) + len(self.generation.token_ids)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a version in the checkpoint's layout."""

    name: str  # checkpoint name, e.g. "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16" | "float16"
    offset: int  # bytes from the start of the blob
    nbytes: int
    digest: bytes  # blake3 of the bytes


@dataclass(frozen=True)
class Manifest:
    """What a version consists of; checked in full before a byte of it is applied (DESIGN rule 6)."""

    fence: Fence
    version: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    digest: bytes  # blake3 over all of the above and below (bridge.manifest.manifest_digest)
    architecture: str
    base_version: int = NO_VERSION  # of a delta; NO_VERSION: full


@dataclass(frozen=True)
class WeightSource:
    """Where a version's bytes lie: ``path`` for an instance on the publisher's host, else ``address``."""

    path: str = ""  # the blob's file under /dev/shm
    address: str = ""  # host:port of a weight store; it asks for the run's token


@dataclass(frozen=True)
class UpdateReport:
    """What became of one instance's update."""

    instance: str
    accepted: bool
    version: int  # what it serves now
    reason: str = ""  # why it was refused: every fault found
    quarantined: bool = False  # loading failed after it began: the engine must be restarted
    staged_s: float = 0.0  # checking, behind running generation
    paused_s: float = 0.0  # generation stood still
    applied_s: float = 0.0  # loading proper, part of paused_s


@dataclass(frozen=True)
class Hello:
    """How a controller opens an instance's stream."""

    fence: Fence
    heartbeat_interval_s: float = 1.0
    progress_interval_s: float = 0.0  # 0: no partial answers
    answers: int = 0  # that it takes before it grants more; 0: any number


@dataclass(frozen=True)
class InstanceInfo:
    """What an instance says of itself when a controller greets it."""

    name: str
    slots: int  # sequences it runs at once
    lookahead: int  # further assignments it likes to hold
    max_model_len: int
    version: int
    same_host_weights: bool
    host_id: str
    engine: str
    kv_tokens: int = 0  # tokens of context that its KV cache holds; 0: not known


@dataclass(frozen=True)
class InstanceStatus:
    """A heartbeat, or the reply to GetStatus (which alone fills what follows ``steps_total``)."""

    state: InstanceState
    version: int
    running: int = 0
    waiting: int = 0
    tokens_since_last: int = 0
    engine_age_s: float = 0.0  # for which the engine itself, not its API process, has owed an answer
    steps_total: int = 0  # steps of the engine that sampled a token, since it started
    message: str = ""  # of FAILED: why
    phase: str = ""  # of LOADING: what it is doing
    tokens_total: int = 0
    uptime_s: float = 0.0  # since the process started


def group_runs(versions: Sequence[int]) -> tuple[VersionRun, ...]:
    """Run-length codes the versions of consecutive tokens.

    Args:
        versions: the version of each token, in order.

    Returns:
        Runs whose lengths sum to ``len(versions)``; neighbours differ in version.
    """
    runs: list[VersionRun] = []
    for version in versions:
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(version, runs[-1].length + 1)
        else:
            runs.append(VersionRun(version, 1))
    return tuple(runs)


def join_runs(runs: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """Joins neighbouring runs of the same version, without a step per token.

    Args:
        runs: of consecutive tokens.

    Returns:
        Runs over the same tokens; neighbours differ in version.
    """
    joined: list[VersionRun] = []
    for run in runs:
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def slice_runs(runs: Iterable[VersionRun], first: int, end: int) -> tuple[VersionRun, ...]:
    """The runs of the tokens ``first`` to ``end``."""
    cut: list[VersionRun] = []
    start = 0
    for run in runs:
        length = min(end, start + run.length) - max(first, start)
        if length > 0:
            cut.append(VersionRun(run.version, length))
        start += run.length
    return tuple(cut)


def expand_runs(runs: Sequence[VersionRun]) -> Int32[np.ndarray, " tokens"]:
    """Gives the version of each token.

    Args:
        runs: run-length coded versions.

    Returns:
        One version a token.
    """
    if not runs:
        return np.zeros(0, np.int32)
    return np.repeat([run.version for run in runs], [run.length for run in runs]).astype(np.int32)
