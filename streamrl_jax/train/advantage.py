"""Advantages: GAE over packed rows (with a critic), and baselines from the group of answers to one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int

from streamrl_jax.config import AlgorithmSection
from streamrl_jax.train.moments import Moments
from streamrl_jax.train.segments import carry_from_right, last_of_segment

# A spread this small beside the values is what rounding leaves of equal ones (float32 resolves 6e-8).
_ROUNDING = 1e-5

# Of float32 log-probs. Where no answer earned anything, and policy and reference are still the same, this is all that a
# KL in the reward leaves of advantages.
_LOGPROB_ROUNDING = 1e-6

_GROUP_EPS = 1e-6

GroupAdvantage = Callable[[Float64[np.ndarray, " group"]], Float64[np.ndarray, " group"]]
"""Scores of the answers to one prompt -> the advantage of each, given to all its tokens.
What `algorithm.advantage_fn` names."""


def gae(
    rewards: Float[Array, "rows len"],
    values: Float[Array, "rows len"],
    mask: Bool[Array, "rows len"],
    segment_ids: Int[Array, "rows len"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) on packed rows.

    For the kept tokens t of a segment, with t' the next kept one of the same segment (V_t' = A_t' = 0 after
    the last):

        delta_t = r_t + gamma V_t' - V_t
        A_t     = delta_t + gamma lam A_t'
        R_t     = A_t + V_t

    Masking: tokens that the policy did not write are passed over; they cost no discount, and what they hold
    (value or reward) enters nothing. Nothing crosses a segment. There is no denominator.

    Args:
        rewards: Reward received upon token t.
        values: V_t, the critic's estimate in the state in which token t was chosen.
        mask: True where the policy wrote the token.
        segment_ids: Which packed sequence a token belongs to; the tokens of one are contiguous.
        gamma: Discount per kept token.
        lam: Weight of longer returns.

    Returns:
        Advantages and returns, float32, 0 outside the mask.
    """
    last = last_of_segment(segment_ids)
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    kept_rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    carried = carry_from_right(jnp.where(mask, 0.0, 1.0), values, last)
    next_values = jnp.where(last, 0.0, jnp.roll(carried, -1, axis=1))
    deltas = jnp.where(mask, kept_rewards + gamma * next_values - values, 0.0)
    advantages = carry_from_right(jnp.where(mask, gamma * lam, 1.0), deltas, last)
    return jnp.where(mask, advantages, 0.0), jnp.where(mask, advantages + values, 0.0)


@dataclass(frozen=True)
class Whitening:
    """A' = (A - mean) * scale, by statistics known before the batch or taken from the whole of it."""

    mean: float = 0.0
    scale: float = 1.0


def whitening(statistics: Moments) -> Whitening:
    """Whitening by masked mean and variance (the variance of the values themselves: m2 / count).

    Equal advantages whiten to 0: a spread that is rounding residue, of the values or of log-probs in a KL, is not
    divided by.
    """
    deviation = math.sqrt(statistics.variance)
    magnitude = math.hypot(float(statistics.mean), deviation)
    nothing = deviation <= max(_ROUNDING * magnitude, _LOGPROB_ROUNDING)
    return Whitening(float(statistics.mean), 0.0 if nothing else 1.0 / deviation)


def group_advantage(settings: AlgorithmSection) -> GroupAdvantage:
    """The group advantage of `algorithm.adv_estimator`.

    Args:
        settings: `adv_estimator` and `norm_adv_by_std_in_grpo`.

    Returns:
        GRPO's, RLOO's, or for REINFORCE++ with a baseline the centred scores, which are whitened over the batch later.

    Raises:
        ValueError: The estimator takes nothing from the group.
    """
    match settings.adv_estimator:
        case "grpo":
            return partial(group_advantages, divide_by_std=settings.norm_adv_by_std_in_grpo)
        case "rloo":
            return leave_one_out_advantages
        case "reinforce_plus_plus_baseline":
            return partial(group_advantages, divide_by_std=False)
        case other:
            raise ValueError(f"algorithm.adv_estimator = {other!r} takes no advantage from the group")


def group_advantages(
    scores: Float64[np.ndarray, " group"], *, divide_by_std: bool = True
) -> Float64[np.ndarray, " group"]:
    """GRPO's advantage (arXiv 2402.03300, section 4.1.2): (r_i - mean(r)) / (std(r) + 1e-6).

    Without the division it is Dr. GRPO's (arXiv 2503.20783). The standard deviation is the sample's (n - 1).

    Args:
        scores: Rewards of the answers to one prompt.
        divide_by_std: Whether to divide.

    Returns:
        One advantage an answer, given to each of its tokens; exactly 0 where the scores are equal up to
        rounding.

    Raises:
        ValueError: The group has a single answer, which has no baseline.
    """
    centred = _centred(scores)
    return centred / (centred.std(ddof=1) + _GROUP_EPS) if divide_by_std else centred


def leave_one_out_advantages(scores: Float64[np.ndarray, " group"]) -> Float64[np.ndarray, " group"]:
    """RLOO's advantage (arXiv 2402.14740): r_i minus the mean of the other answers' rewards.

    Args and Raises as `group_advantages`.
    """
    return _centred(scores) * (len(scores) / (len(scores) - 1))


def level(scores: Float64[np.ndarray, " group"]) -> bool:
    """Whether all scores of a group are equal up to rounding: such a group teaches nothing."""
    return bool(np.ptp(scores) <= _ROUNDING * np.abs(scores).max())


def _centred(scores: Float64[np.ndarray, " group"]) -> Float64[np.ndarray, " group"]:
    if len(scores) < 2:
        raise ValueError(f"a group of {len(scores)} has no baseline: give at least two answers per prompt")
    scores = np.asarray(scores, np.float64)
    return np.zeros_like(scores) if level(scores) else scores - scores.mean()
