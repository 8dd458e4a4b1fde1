"""Losses of policy and critic, per token. Summing, weights and denominators are `aggregate.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.config import ActorSection
from streamrl_jax.train.segments import segment_means

LOG_RATIO_BOUND: Final = 20.0
"""Bound on the size of a log-ratio: exp(20) is far beyond any clip, and far from float32's overflow."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss is computed from, [rows, len] each; entry t belongs to token t.

    Attributes:
        logprobs: The current policy's, with gradient.
        old_logprobs: What the ratio is taken against: the behaviour policy's, or decoupled the proximal policy's
            (`algorithm.rollout_correction.bypass_mode = false`).
        behaviour_logprobs: Those of the distribution that the token was sampled from.
        advantages: Whitened where the configuration says so.
        mask: True where the token is trained on; elsewhere the other fields hold anything finite.
        segment_ids: Which packed sequence a token belongs to, for losses on whole sequences.
    """

    logprobs: Float[Array, "rows len"]
    old_logprobs: Float[Array, "rows len"]
    behaviour_logprobs: Float[Array, "rows len"]
    advantages: Float[Array, "rows len"]
    mask: Bool[Array, "rows len"]
    segment_ids: Int[Array, "rows len"]


TokenStatistics = Mapping[str, Float[Array, "rows len"]]


class PolicyLoss(Protocol):
    """A policy loss: what `algorithm.loss_fn` names. It is traced by JAX."""

    def __call__(
        self, inputs: PolicyInputs, settings: ActorSection
    ) -> tuple[Float[Array, "rows len"], TokenStatistics]:
        """Gives the loss of each token, and per-token statistics.

        The statistics' masked means are logged as `actor/<name>`. Entries outside the mask are ignored.
        Aggregation follows `actor.loss_agg_mode`; importance weights, entropy bonus and KL are the caller's.
        """
        ...


def log_ratio(inputs: PolicyInputs) -> Float[Array, "rows len"]:
    """log pi(token) - log pi_old(token), bounded to ±20, 0 outside the mask: its exp is finite."""
    difference = jnp.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    inputs: PolicyInputs, settings: ActorSection
) -> tuple[Float[Array, "rows len"], TokenStatistics]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), lower and upper clip apart (arXiv 2503.14476, 3.1).

        ratio = exp(logp - old_logp)
        loss  = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        A < 0:  loss = min(loss, -A c)                        dual clip, arXiv 1912.09729

    The old log-prob is the same in every mini-batch and epoch; see `PolicyInputs`.

    Masking: entries outside the mask mean nothing. The denominator is `aggregate.Aggregation`'s.

    Args:
        inputs: See `PolicyInputs`.
        settings: `clip_ratio_low`, `clip_ratio_high` and `clip_ratio_c` (c).

    Returns:
        The loss of each token, and its statistics `ppo_kl` (k1 from old to current policy),
        `pg_clipfrac` (the clip took effect) and `pg_clipfrac_lower` (the dual clip did).
    """
    change = log_ratio(inputs)
    surrogate, held = _clipped(jnp.exp(change), inputs.advantages, settings)
    ceiling = -inputs.advantages * settings.clip_ratio_c
    negative = inputs.advantages < 0
    loss = jnp.where(negative, jnp.minimum(surrogate, ceiling), surrogate)
    statistics = {
        "ppo_kl": -change,
        "pg_clipfrac": held,
        "pg_clipfrac_lower": (negative & (surrogate > ceiling)).astype(jnp.float32),
    }
    return loss, statistics


def sequence_policy_loss(
    inputs: PolicyInputs, settings: ActorSection
) -> tuple[Float[Array, "rows len"], TokenStatistics]:
    """GSPO's clipped surrogate: one ratio for the whole answer (arXiv 2507.18071, eq. 5 to 7).

        s    = exp( mean over the answer's kept tokens of (logp - old_logp) )
        loss = max(-A s, -A clip(s, 1 - low, 1 + high))          the same at each token of the answer

    Its gradient at token t is taken through log pi(token_t) alone (the token form of eq. 14), which with
    `loss_agg_mode = "seq-mean-token-mean"` is the gradient of the paper's objective. s is far nearer to 1 than a
    token's ratio: the paper clips at 3e-4 and 4e-4.

    Masking: tokens outside the mask enter no mean. The denominator is `aggregate.Aggregation`'s.

    Args:
        inputs: See `PolicyInputs`.
        settings: `clip_ratio_low`, `clip_ratio_high`.

    Returns:
        The loss of each token, and `ppo_kl` (k1 from old to current policy) and `pg_clipfrac`.
    """
    change = log_ratio(inputs)
    mean = jax.lax.stop_gradient(segment_means(change, inputs.mask, inputs.segment_ids))
    # The value of the sequence's ratio, with the gradient of the token's log-prob.
    ratio = jnp.exp(mean) * (1.0 + change - jax.lax.stop_gradient(change))
    loss, clipped = _clipped(ratio, inputs.advantages, settings)
    return loss, {"ppo_kl": -change, "pg_clipfrac": clipped}


def clipped_weight_loss(
    inputs: PolicyInputs, settings: ActorSection
) -> tuple[Float[Array, "rows len"], TokenStatistics]:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): the importance weight is clipped, not the token's gradient.

        ratio = exp(logp - old_logp)
        loss  = -stop_gradient( clip(ratio, 1 - low, 1 + high) ) A logp

    So every token keeps a gradient. The paper sets no lower bound: `clip_ratio_low = 1` does.

    Masking: entries outside the mask mean nothing. The denominator is `aggregate.Aggregation`'s.

    Args:
        inputs: See `PolicyInputs`.
        settings: `clip_ratio_low`, `clip_ratio_high`.

    Returns:
        The loss of each token, and `ppo_kl` and `pg_clipfrac` (the weight was clipped).
    """
    change = log_ratio(inputs)
    ratio = jnp.exp(jax.lax.stop_gradient(change))
    weight = jnp.clip(ratio, 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    clipped = (weight != ratio).astype(jnp.float32)
    return -weight * inputs.advantages * inputs.logprobs, {"ppo_kl": -change, "pg_clipfrac": clipped}


def policy_gradient_loss(
    inputs: PolicyInputs, settings: ActorSection
) -> tuple[Float[Array, "rows len"], TokenStatistics]:
    """REINFORCE (Williams, 1992): loss = -A logp, without any ratio.

    Off-policy it is biased unless `algorithm.rollout_correction.rollout_is` weights it.

    Masking: entries outside the mask mean nothing. The denominator is `aggregate.Aggregation`'s.

    Args:
        inputs: See `PolicyInputs`.
        settings: Nothing is read.

    Returns:
        The loss of each token, and `ppo_kl` (k1 from old to current policy).
    """
    del settings
    return -inputs.advantages * inputs.logprobs, {"ppo_kl": -log_ratio(inputs)}


POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {
    "vanilla": clipped_policy_loss,
    "gspo": sequence_policy_loss,
    "cispo": clipped_weight_loss,
    "reinforce": policy_gradient_loss,
}
"""What `actor.loss_mode` names."""


def clipped_value_loss(
    values: Float[Array, "rows len"],
    old_values: Float[Array, "rows len"],
    returns: Float[Array, "rows len"],
    *,
    clip: float,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    """PPO's clipped value loss: 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Source: the reference implementation of arXiv 1707.06347, as described in arXiv 2005.12729, section 3.
    Masking: the caller's. The denominator is the number of kept tokens, whatever `actor.loss_agg_mode`.

    Args:
        values: The critic's, with gradient.
        old_values: The critic's at the start of the iteration.
        returns: R, from `advantage.gae`.
        clip: c, `critic.cliprange_value`.

    Returns:
        The loss of each token, and 1 where the clip took effect, else 0.
    """
    near = jnp.clip(values, old_values - clip, old_values + clip)
    plain, clipped = jnp.square(values - returns), jnp.square(near - returns)
    return 0.5 * jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)


def _clipped(
    ratio: Float[Array, "rows len"], advantages: Float[Array, "rows len"], settings: ActorSection
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and 1 where the clip took effect."""
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return jnp.maximum(unclipped, clipped), (clipped > unclipped).astype(jnp.float32)
