"""Between this project's records and vLLM's: parameters in, log-probs, versions and timings out. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamrl_jax.gen.protocol import Delta, EngineFailed
from streamrl_jax.types import FinishReason, Sampling, Timings, VersionRun, group_runs

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

STREAM_INTERVAL: Final = 16
"""Tokens that vLLM gathers before it wakes the consumer of a running answer; first and last come at once."""

_FINISH: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def sampling_parameters(sampling: Sampling, carried: int) -> SamplingParams:
    """vLLM's parameters for a distribution, all of them set: nothing comes from a generation config.

    Args:
        sampling: the distribution.
        carried: tokens of the answer that an earlier attempt left.

    Returns:
        Parameters that return the sampled token's log-prob alone, as deltas.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    forced = sampling.forced_length
    left = (forced or sampling.max_new_tokens) - carried
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p or 0.0,
        seed=continuation_seed(sampling.seed, carried),
        stop_token_ids=[] if forced else list(sampling.stop_token_ids),
        ignore_eos=True,
        max_tokens=left,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        watermarking=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=STREAM_INTERVAL,
    )


def continuation_seed(seed: int | None, carried: int) -> int | None:
    """The seed of an answer that goes on.

    On CPU vLLM replays a seed's noise from its first number for a continuation, whose tokens would then be
    correlated with those at the answer's beginning; another seed is derived for it.

    Args:
        seed: of the answer; None: the engine's own generator.
        carried: tokens that are there already.

    Returns:
        ``seed`` itself for a whole answer, else one derived from both numbers.
    """
    if seed is None or not carried:
        return seed
    digest = hashlib.blake2b(f"{seed}/{carried}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> np.ndarray:
    """Picks the sampled token's log-prob at each position.

    Args:
        token_ids: sampled, in order.
        logprobs: vLLM's `FlatLogprobs` of the same positions, which may hold further ids in any order.

    Returns:
        float32, one a token.

    Raises:
        ValueError: a position lacks its token.
    """
    if list(logprobs.token_ids) == list(token_ids):  # one entry a position, the usual case
        return np.asarray(logprobs.logprobs, np.float32)
    picked: list[float] = []
    for token, start, end in zip(token_ids, logprobs.start_indices, logprobs.end_indices, strict=True):
        picked.append(logprobs.logprobs[logprobs.token_ids.index(token, start, end)])
    return np.asarray(picked, np.float32)


def token_versions(starts: Sequence[tuple[str, int]], first: int, count: int) -> tuple[VersionRun, ...]:
    """Versions of the tokens ``first`` to ``first + count`` of an answer.

    Args:
        starts: (version, index of its first token), ascending.
        first: index of the first token asked for.
        count: how many.

    Returns:
        Their runs.
    """
    versions: list[int] = []
    for index in range(first, first + count):
        versions.append(int([version for version, start in starts if start <= index][-1]))
    return group_runs(versions)


def to_delta(
    output: RequestOutput, completion: CompletionOutput, starts: Sequence[tuple[str, int]], told: int
) -> Delta:
    ids = list(completion.token_ids)
    reason = completion.finish_reason
    if reason is not None and reason not in _FINISH:
        raise EngineFailed(f"vLLM ended {output.request_id} with finish reason {reason!r}")
    return Delta(
        np.asarray(ids, np.int32),
        sampled_logprobs(ids, completion.logprobs) if ids else np.zeros(0, np.float32),
        token_versions(starts, told, len(ids)),
        None if reason is None else _FINISH[reason],
        Timings() if reason is None else _timings(output.metrics),
    )


def _timings(stats: Any) -> Timings:
    """Durations from EngineCore's own time stamps; 0 for a stage that an aborted answer did not reach."""
    stages = (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts)
    spans = [end - start if end else 0.0 for start, end in pairwise(stages)]
    return Timings(*(max(0.0, span) for span in spans))
