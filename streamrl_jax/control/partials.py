"""Beginnings of answers, kept so that a death of the instance does not lose them. Pure."""

from __future__ import annotations

import numpy as np

from streamrl_jax.types import Partial, Progress, Sampling, join_runs, slice_runs


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


def resumable(known: Partial | None, sampling: Sampling) -> Partial | None:
    """Cuts a beginning so that something is left to produce: an instance refuses an answer that is complete.

    Args:
        known: the beginning.
        sampling: gives the length limit and the stop ids.

    Returns:
        What the next attempt goes on from; None: it starts anew.
    """
    if known is None:
        return None
    keep = min(len(known.token_ids), sampling.longest - 1)
    if sampling.forced_length is None:
        stops = np.flatnonzero(np.isin(known.token_ids[:keep], sampling.stop_token_ids))
        keep = int(stops[0]) if stops.size else keep
    if keep == 0:
        return None
    versions = slice_runs(known.versions, 0, keep)
    return Partial(known.token_ids[:keep], known.logprobs[:keep], versions)
