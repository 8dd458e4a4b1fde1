"""Beginnings of answers, kept so that a death of the instance does not lose them. Pure."""

from __future__ import annotations

import numpy as np

from streamrl_jax.types import FinishReason, Generation, Partial, Progress, Sampling, join_runs, slice_runs


def extend(known: Partial | None, progress: Progress) -> Partial | None:
    """Appends new tokens to what is known of an answer.

    Args:
        known: its beginning so far; None: nothing.
        progress: of the same attempt.

    Returns:
        The longer beginning. What overlaps is not doubled; after a gap the old one is returned, since the
        tokens between are missing.
    """
    have = 0 if known is None else len(known.token_ids)
    skip = have - progress.offset
    if not 0 <= skip < len(progress.token_ids):
        return known
    new = Partial(
        progress.token_ids[skip:],
        progress.logprobs[skip:],
        slice_runs(progress.versions, skip, len(progress.token_ids)),
    )
    if known is None:
        return new
    return Partial(
        np.concatenate([known.token_ids, new.token_ids]),
        np.concatenate([known.logprobs, new.logprobs]),
        join_runs((*known.versions, *new.versions)),
    )


def ending(known: Partial, sampling: Sampling) -> tuple[Partial, FinishReason] | None:
    """Says whether a beginning is the whole answer, of which only the last message is missing.

    To cut off the end and draw it anew would be a second chance for answers that had ended, and make them longer.

    Args:
        known: the beginning.
        sampling: gives the length limit and the stop ids.

    Returns:
        The answer up to its end, and why it ended; None: it goes on.
    """
    keep, reason = sampling.longest, FinishReason.LENGTH
    if sampling.forced_length is None:
        stops = np.flatnonzero(np.isin(known.token_ids[:keep], sampling.stop_token_ids))
        if stops.size:
            keep, reason = int(stops[0]) + 1, FinishReason.STOP
    if len(known.token_ids) < keep:
        return None
    whole = Partial(known.token_ids[:keep], known.logprobs[:keep], slice_runs(known.versions, 0, keep))
    return whole, reason


def whole(progress: Progress, answer: Partial, reason: FinishReason, instance: str) -> Generation:
    """The answer that `ending` found, as its last message would have told it.

    Args:
        progress: its last tokens that came.
        answer: all of it.
        reason: why it ended.
        instance: whose it is.
    """
    return Generation(
        progress.sample_id,
        progress.attempt,
        answer.token_ids,
        answer.logprobs,
        answer.versions,
        reason,
        instance,
    )


def resumable(known: Partial | None, min_version: int) -> Partial | None:
    """What the next attempt goes on from.

    Args:
        known: the beginning of an answer that is not at its end.
        min_version: the oldest version that the sample may hold (DESIGN rule 5).

    Returns:
        ``known``; None when a token of it is too old: the next attempt starts at the prompt. A beginning of it that
        is new enough is not kept either, since versions only grow along an answer.
    """
    if known is None or any(run.version < min_version for run in known.versions):
        return None
    return known
