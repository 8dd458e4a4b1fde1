"""Estimates of the KL divergence from the policy's own samples."""

from __future__ import annotations

from typing import Literal, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from streamrl_jax.train.loss import LOG_RATIO_BOUND

KlEstimator = Literal["k1", "k2", "k3", "k3+"]


def kl_estimate(
    logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...], kind: KlEstimator
) -> Float[Array, ...]:
    """Per-token estimates of KL(policy || reference) from the policy's samples.

    Source: J. Schulman, "Approximating KL divergence", 2020. With d = reference_logp - logp:

        k1  = -d              unbiased, may be negative; as a loss its gradient averages to 0
        k2  = d^2 / 2         biased, small variance; its expected gradient is that of the KL
        k3  = exp(d) - 1 - d  unbiased, never negative; its expected gradient is that of KL(reference || policy)
        k3+ = the value of k3 with the gradient of k2: the low variance of the one, the right gradient of the other

    Masking and denominator: the caller's.

    Args:
        logprobs: The policy's.
        reference_logprobs: The reference's, of the same tokens.
        kind: The estimator.

    Returns:
        One estimate a token, nats.
    """
    difference = jnp.clip(reference_logprobs - logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match kind:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * jnp.square(difference)
        case "k3":
            return jnp.expm1(difference) - difference
        case "k3+":
            gradient = 0.5 * jnp.square(difference)
            value = jnp.expm1(difference) - difference
            return gradient + jax.lax.stop_gradient(value - gradient)
        case _:
            assert_never(kind)
