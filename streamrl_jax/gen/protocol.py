"""What the service asks of an engine. `engine.py` keeps it with vLLM; tests keep it with a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from streamrl_jax.types import (
    Assignment,
    FinishReason,
    Logprobs,
    Manifest,
    Timings,
    TokenIds,
    UpdateReport,
    VersionRun,
)


class EngineFailed(Exception):
    """The engine is dead or must be restarted; nothing that it holds will finish."""


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can hold; known before it is started, but for what may be 0."""

    slots: int  # sequences it runs at once
    max_model_len: int  # prompt and answer, tokens
    description: str  # e.g. "vllm 0.32.0"
    vocab_size: int = 0  # ids that the model has an embedding for; 0: not known yet
    weight_bytes: int = 0  # of a version for the model, at most; 0: not known
    kv_tokens: int = 0  # tokens of context that its KV cache holds; 0: not known yet


@dataclass(frozen=True, eq=False)
class Delta:
    """New tokens of one answer. The last one carries the finish reason and the timings."""

    token_ids: TokenIds
    logprobs: Logprobs  # of the distribution sampled from
    versions: tuple[VersionRun, ...]  # of the weights that each of these tokens was sampled with
    finish_reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)


class Engine(Protocol):
    """A continuous-batching engine whose weights are replaced while it lives.

    Call order: `start` once; then `generate`, `abort`, `update_weights`, `pause`, `resume`, `ping` in any
    order and concurrently (but one `update_weights` at a time); `close` once, from any state.
    """

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        ...

    @property
    def version(self) -> int:
        """The version that it serves; -1 while it holds dummy or foreign weights."""
        ...

    @property
    def tokens_total(self) -> int:
        """Tokens sampled since the start; grows while work proceeds, also between deltas."""
        ...

    @property
    def steps_total(self) -> int:
        """Steps since the start that sampled a token, of however many sequences."""
        ...

    @property
    def excused_until_s(self) -> float:
        """Up to which moment (monotonic seconds) its silence proves nothing, since weights are applied."""
        ...

    async def start(self, report: Callable[[str], None]) -> None:
        """Loads; returns when it can generate. ``report`` takes a line that says what it is doing.

        Raises:
            EngineFailed: it did not come up; with the reason.
        """
        ...

    def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        """Samples an answer, or the rest of one if the assignment carries a partial answer.

        Args:
            assignment: was admitted (`admission.py`).

        Returns:
            Deltas without what the assignment already carries; exactly the last has a finish reason.
            Closing the iterator aborts the work.

        Raises:
            ValueError: the engine refuses the request.
            EngineFailed: it died.
        """
        ...

    async def abort(self, sample_id: str, attempt: int) -> None:
        """Ends an answer: its iterator yields a last delta of reason ``ABORT``. Unknown ids are ignored."""
        ...

    async def update_weights(
        self, manifest: Manifest, blob: Path, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        """Replaces the weights: stage and check everything, pause, apply, resume (DESIGN rule 6).

        Args:
            manifest: what the version consists of.
            blob: file that holds its bytes.
            in_flight: what runs is kept and its KV recomputed; else it finishes first.
            timeout_s: bound on the whole.

        Returns:
            The report, ``instance`` left empty. Not accepted and not quarantined: the old version serves on.
        """
        ...

    async def forget_version(self) -> None:
        """The weights belong to another life of the run: tokens carry version -1 until the next update."""
        ...

    async def pause(self, *, keep: bool) -> None:
        """Stops sampling, at once if ``keep``, else when what runs has finished. New work waits."""
        ...

    async def resume(self) -> None:
        """Samples again."""
        ...

    async def ping(self) -> None:
        """Returns when the engine proper (not its front end) has answered.

        Raises:
            EngineFailed: it is dead.
        """
        ...

    async def close(self) -> None:
        """Ends the engine and its processes."""
        ...
