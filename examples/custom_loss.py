"""A policy loss of one's own: REINFORCE with a truncated importance weight, in place of PPO's clipped surrogate.

    streamrl demo configs/demo.toml --algorithm.loss_fn examples/custom_loss.py:truncated_reinforce

It is traced by JAX, so it is made of `jax.numpy`. The trainer adds entropy bonus and KL, applies the mask and
divides by the denominator of `actor.loss_agg_mode`: a loss function gives one value per token.
"""

import jax
import jax.numpy as jnp

from streamrl_jax.config import ActorSection
from streamrl_jax.train.loss import PolicyInputs, TokenStatistics, log_ratio


def truncated_reinforce(inputs: PolicyInputs, settings: ActorSection) -> tuple[jax.Array, TokenStatistics]:
    """loss_t = -min(ratio_t, 1 + high) A_t log pi_t, the weight without gradient (as in IMPALA, arXiv 1802.01561)."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(inputs)))
    weight = jnp.minimum(ratio, 1.0 + settings.clip_ratio_high)
    truncated = (ratio > weight).astype(jnp.float32)
    return -weight * inputs.advantages * inputs.logprobs, {"truncated_share": truncated}
