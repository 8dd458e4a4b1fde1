"""Losses of policy and critic, per token. Summing, weights and denominators are `aggregate.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.config import ActorSection

KlEstimator = Literal["k1", "k2", "k3"]

# exp(20) is far beyond any clip and far from float32's overflow.
_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss is computed from, [rows, len] each; entry t belongs to token t.

    Attributes:
        logprobs: The current policy's, with gradient.
        behaviour_logprobs: Those of the distribution that the token was sampled from.
        advantages: Whitened where the configuration says so.
        mask: True where the policy wrote the token; elsewhere the other fields hold anything finite.
        segment_ids: Which packed sequence a token belongs to, for losses on whole sequences.
    """

    logprobs: Float[Array, "rows len"]
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
        Aggregation follows `actor.loss_agg_mode`; entropy bonus and KL are added by the caller.
        """
        ...


def log_ratio(inputs: PolicyInputs) -> Float[Array, "rows len"]:
    """log pi(token) - log behaviour(token), bounded to ±20, 0 outside the mask: its exp is finite."""
    difference = jnp.where(inputs.mask, inputs.logprobs - inputs.behaviour_logprobs, 0.0)
    return jnp.clip(difference, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)


def clipped_policy_loss(
    inputs: PolicyInputs, settings: ActorSection
) -> tuple[Float[Array, "rows len"], TokenStatistics]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), lower and upper clip apart (arXiv 2503.14476, 3.1).

        ratio = exp(logp - behaviour_logp)
        loss  = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        A < 0:  loss = min(loss, -A c)                        dual clip, arXiv 1912.09729

    The behaviour log-prob is the denominator in every mini-batch, epoch and staleness.

    Masking: entries outside the mask mean nothing. The denominator is `aggregate.denominator`'s.

    Args:
        inputs: See `PolicyInputs`.
        settings: `clip_ratio_low`, `clip_ratio_high` and `clip_ratio_c` (c).

    Returns:
        The loss of each token, and its statistics `ppo_kl` (k1 from behaviour to current policy),
        `pg_clipfrac` (the clip took effect) and `pg_clipfrac_lower` (the dual clip did).
    """
    change = log_ratio(inputs)
    ratio = jnp.exp(change)
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * jnp.clip(
        ratio, 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high
    )
    surrogate = jnp.maximum(unclipped, clipped)
    ceiling = -inputs.advantages * settings.clip_ratio_c
    negative = inputs.advantages < 0
    loss = jnp.where(negative, jnp.minimum(surrogate, ceiling), surrogate)
    statistics = {
        "ppo_kl": -change,
        "pg_clipfrac": (clipped > unclipped).astype(jnp.float32),
        "pg_clipfrac_lower": (negative & (surrogate > ceiling)).astype(jnp.float32),
    }
    return loss, statistics


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


def kl_estimate(
    logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...], kind: KlEstimator
) -> Float[Array, ...]:
    """Per-token estimates of KL(policy || reference) from the policy's samples.

    Source: J. Schulman, "Approximating KL divergence", 2020. With d = reference_logp - logp:

        k1 = -d              unbiased, may be negative; as a loss its gradient averages to 0
        k2 = d^2 / 2         biased, small variance; its expected gradient is that of the KL
        k3 = exp(d) - 1 - d  unbiased, never negative

    Masking and denominator: the caller's.

    Args:
        logprobs: The policy's.
        reference_logprobs: The reference's, of the same tokens.
        kind: The estimator.

    Returns:
        One estimate a token, nats.
    """
    difference = jnp.clip(reference_logprobs - logprobs, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    match kind:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * jnp.square(difference)
        case "k3":
            return jnp.expm1(difference) - difference
        case _:
            assert_never(kind)
