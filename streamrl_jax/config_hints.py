"""Settings that are allowed, but seldom what was meant: said once, when a run is planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from streamrl_jax.config import Config

_WIDE_SEQUENCE_CLIP: Final = 0.1
"""A geometric mean over an answer's tokens hardly ever lies so far from 1."""


def hints(cfg: Config) -> Iterator[str]:
    """Yields a sentence for each setting that is probably an oversight, with what to do about it.

    Args:
        cfg: A valid configuration.
    """
    actor, algorithm = cfg.actor, cfg.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef and actor.kl_loss_type == "k1":
        yield (
            "actor.kl_loss_type = 'k1': as a loss its gradient averages to zero and holds nothing back; 'k2' and 'k3+' "
            "have the KL's gradient"
        )
    if algorithm.loss_fn:
        return
    widest = max(actor.clip_ratio_low, actor.clip_ratio_high)
    if actor.loss_mode == "gspo" and widest >= _WIDE_SEQUENCE_CLIP:
        yield (
            f"actor.loss_mode = 'gspo' with actor.clip_ratio_low = {actor.clip_ratio_low:g} and clip_ratio_high = "
            f"{actor.clip_ratio_high:g}: a whole answer's ratio lies so near to 1 that this clips next to nothing; the "
            "paper has 3e-4 and 4e-4 for answers of thousands of tokens"
        )
    if actor.loss_mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"actor.loss_mode = 'gspo' with actor.loss_agg_mode = '{actor.loss_agg_mode}': GSPO's objective is "
            "'seq-mean-token-mean'"
        )
    if actor.loss_mode == "reinforce" and algorithm.rollout_correction.rollout_is == "none":
        if cfg.trainer.max_staleness:
            yield (
                f"actor.loss_mode = 'reinforce' with trainer.max_staleness = {cfg.trainer.max_staleness}: the loss has "
                "no ratio, and nothing corrects for older samples; set bypass_mode = false and rollout_is = 'token' or "
                "'sequence' in [algorithm.rollout_correction]"
            )
        elif not cfg.single_update:
            yield (
                "actor.loss_mode = 'reinforce' with several updates an iteration: the loss has no ratio, and nothing "
                "corrects for the updates before; use one update, or a loss with a ratio"
            )
