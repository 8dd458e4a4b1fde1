"""Importance correction for the gap between the policy that sampled and the one that is trained.

Two things open it: staleness (the weights have moved on), and the generator's arithmetic (other kernels, another
dtype). With pi_start, the trainer's policy at the start of the iteration, and pi_b, the behaviour policy whose
log-probs came with the sample:

    rho_t = pi_start(token_t) / pi_b(token_t)

What is done with it, by `algorithm.rollout_correction`:

    rollout_is  truncated importance sampling: token t's loss is multiplied with min(rho, C), without gradient
                (Espeholt et al., arXiv 1802.01561; for the generator's mismatch: Yao et al., "Your efficient RL
                framework secretly brings you off-policy RL training", 2025)
    rollout_rs  masked importance sampling (rejection): tokens with rho outside [low, high] are left out

rho is that of the token, the product over the answer's kept tokens ("sequence"), or their geometric mean
("geometric"). Together with `bypass_mode = false`, where the loss's ratio is pi / pi_start, rollout_is is decoupled PPO
(Hilton et al., arXiv 2110.00641; asynchronous: arXiv 2505.24298).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.config_algorithm import RolloutCorrectionSection
from streamrl_jax.train.loss import LOG_RATIO_BOUND
from streamrl_jax.train.segments import segment_means, segment_sums

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Corrected:
    """What a correction does to a micro-batch, [rows, len] each, without gradient.

    Attributes:
        mask: The tokens that are still trained on.
        weights: What their loss is multiplied with; None: nothing.
        statistics: Per-token numbers over the mask from before the correction; logged as `rollout_corr/<name>`.
    """

    mask: Bool[Array, "rows len"]
    weights: Float[Array, "rows len"] | None
    statistics: Mapping[str, Float[Array, "rows len"]]


def correct(
    start_logprobs: Float[Array, "rows len"],
    behaviour_logprobs: Float[Array, "rows len"],
    mask: Bool[Array, "rows len"],
    segment_ids: Int[Array, "rows len"],
    settings: RolloutCorrectionSection,
) -> Corrected:
    """Weights and masks tokens by rho; see the module.

    Masking: tokens outside the mask enter no product. A token that is rejected leaves the denominator too.

    Args:
        start_logprobs: Of pi_start.
        behaviour_logprobs: Of pi_b.
        mask: True where the policy wrote the token and it is trained on.
        segment_ids: Which packed sequence a token belongs to.
        settings: Levels and thresholds.

    Returns:
        The mask and weights, and `rho` (raw, of the token), `rho_kl` (-log rho: k1 from behaviour to start) and, where
        they apply, `rollout_is` (the truncated weight) and `rollout_rs_masked`.
    """
    log_rho = jnp.where(mask, jax.lax.stop_gradient(start_logprobs - behaviour_logprobs), 0.0)
    statistics = {"rho": _ratio(log_rho), "rho_kl": -log_rho}
    weights = None
    if settings.rollout_is != "none":
        rho = _ratio(_at_level(log_rho, mask, segment_ids, settings.rollout_is))
        weights = jnp.minimum(rho, settings.rollout_is_threshold)
        statistics["rollout_is"] = weights
    kept = mask
    if settings.rollout_rs != "none":
        rho = _ratio(_at_level(log_rho, mask, segment_ids, settings.rollout_rs))
        inside = (rho >= settings.rollout_rs_lower) & (rho <= settings.rollout_rs_threshold)
        kept = mask & inside
        statistics["rollout_rs_masked"] = 1.0 - inside.astype(jnp.float32)
    return Corrected(kept, weights, statistics)


def _ratio(log_rho: Float[Array, "rows len"]) -> Float[Array, "rows len"]:
    return jnp.exp(jnp.clip(log_rho, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _at_level(
    log_rho: Float[Array, "rows len"],
    mask: Bool[Array, "rows len"],
    segment_ids: Int[Array, "rows len"],
    level: Level,
) -> Float[Array, "rows len"]:
    match level:
        case "token":
            return log_rho
        case "sequence":
            return segment_sums(log_rho, segment_ids)
        case "geometric":
            return segment_means(log_rho, mask, segment_ids)
        case _:
            assert_never(level)
