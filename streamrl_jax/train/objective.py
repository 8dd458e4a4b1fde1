"""What actor and critic minimise, as pure functions of parameters and one micro-batch. `step.py` compiles them.

All losses here are *sums* over the micro-batch's tokens; the division by the global denominator is
`Steps.apply`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from streamrl_jax.config import Config
from streamrl_jax.train.advantage import Whitening, gae
from streamrl_jax.train.aggregate import Aggregation, Size, masked_sum, size_of
from streamrl_jax.train.correction import Corrected, correct
from streamrl_jax.train.kl import kl_estimate
from streamrl_jax.train.logprob import shift_values, token_logprobs
from streamrl_jax.train.loss import PolicyInputs, PolicyLoss, clipped_value_loss
from streamrl_jax.train.models import Model, Params
from streamrl_jax.train.moments import Moments, moments
from streamrl_jax.train.segments import segment_sums
from streamrl_jax.train.state import DeviceRows

jax.tree_util.register_dataclass(Whitening)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prepared:
    """A micro-batch with what an update needs to know of it beforehand, [rows, len] each.

    Attributes:
        rows: The micro-batch.
        reference_logprobs: The frozen reference's; None if it is not used.
        start_logprobs: The policy's at the start of the iteration; None where that is the policy itself (a single
            update), or where nothing reads them.
        advantages: Before whitening.
        values: The critic's at the start of the iteration; None without one, as `returns`.
        returns: What the values are fitted to.
    """

    rows: DeviceRows
    reference_logprobs: Float[Array, "rows len"] | None
    start_logprobs: Float[Array, "rows len"] | None
    advantages: Float[Array, "rows len"]
    values: Float[Array, "rows len"] | None = None
    returns: Float[Array, "rows len"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """What one micro-batch adds to the metrics; keys are the metrics' names.

    Attributes:
        means: Moments over kept tokens of what is reported as its mean.
        spreads: Moments over kept tokens of what is reported as mean, highest and lowest.
        weighted: Sums with the tokens' weights; the denominator is that of the loss.
        size: What those sums cover.
    """

    means: dict[str, Moments]
    spreads: dict[str, Moments] = field(default_factory=dict)
    weighted: dict[str, Float[Array, ""]] = field(default_factory=dict)
    size: Size = field(default_factory=Size)


def policy_logprobs(
    model: Model,
    params: Params,
    rows: DeviceRows,
    *,
    temperature: float,
    chunk: int,
    vocab_limit: int | None,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"], Float[Array, "rows len"]]:
    """Log-probs of packed rows' tokens and entropies (`token_logprobs`), and shares of `Model.hidden_and_balance`."""
    hidden, balance = model.hidden_and_balance(params, rows.tokens, rows.positions, rows.segment_ids)
    logprobs, entropies = token_logprobs(
        hidden,
        model.head_weight(params),
        rows.tokens,
        rows.segment_ids,
        temperature=temperature,
        chunk=chunk,
        vocab_limit=vocab_limit,
        mesh=model.mesh,
    )
    return logprobs, entropies, balance


@dataclass(frozen=True)
class Objective:
    """Actor, critic and settings, bound together. Holds no array.

    Attributes:
        actor: The policy's model, and the reference's.
        critic: The value model, if there is one.
        cfg: The run's configuration.
        loss: The policy loss.
        vocab_limit: Ids from here on are never sampled (`Tokenizer.vocab_limit`); None: all are.
    """

    actor: Model
    critic: Model | None
    cfg: Config
    loss: PolicyLoss
    vocab_limit: int | None

    @property
    def aggregation(self) -> Aggregation:
        """How the policy's loss becomes one number."""
        return Aggregation.of(self.cfg)

    def logprobs(
        self, params: Params, rows: DeviceRows
    ) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"], Float[Array, "rows len"]]:
        """`policy_logprobs` at the sampling temperature."""
        return policy_logprobs(
            self.actor,
            params,
            rows,
            temperature=self.cfg.rollout.temperature,
            chunk=self.cfg.model.logprob_chunk,
            vocab_limit=self.vocab_limit,
        )

    def values(self, params: Params, rows: DeviceRows) -> Float[Array, "rows len"]:
        """V_t: the critic's estimate in the state in which token t was chosen."""
        assert self.critic is not None
        output = self.critic.values(params, rows.tokens, rows.positions, rows.segment_ids)
        return shift_values(output, rows.segment_ids)

    def estimate(
        self,
        rows: DeviceRows,
        reference_logprobs: Float[Array, "rows len"] | None,
        start_logprobs: Float[Array, "rows len"] | None,
        values: Float[Array, "rows len"] | None,
    ) -> tuple[Prepared, Tally]:
        """Advantages: from the values if there is a critic, from the returns alone, or those that the group gave.

        REINFORCE++ (arXiv 2501.03262) is GAE without values: its advantage is the return that follows a token.
        """
        settings, mask = self.cfg.algorithm, rows.response_mask
        if self.cfg.uses_groups:
            spreads = {"critic/advantages_raw": moments(rows.advantages, mask)}
            return Prepared(rows, reference_logprobs, start_logprobs, rows.advantages), Tally({}, spreads)
        rewards, means = self._token_rewards(rows, reference_logprobs)
        baseline = jnp.zeros_like(rewards) if values is None else jax.lax.stop_gradient(values)
        advantages, returns = gae(
            rewards, baseline, mask, rows.segment_ids, gamma=settings.gamma, lam=settings.lam
        )
        spreads = {
            "critic/advantages_raw": moments(advantages, mask),
            "critic/returns": moments(returns, mask),
        }
        if values is None:
            return Prepared(rows, reference_logprobs, start_logprobs, advantages), Tally(means, spreads)
        spreads["critic/values"] = moments(baseline, mask)
        spreads["critic/value_errors"] = moments(returns - baseline, mask)
        prepared = Prepared(rows, reference_logprobs, start_logprobs, advantages, baseline, returns)
        return prepared, Tally(means, spreads)

    def value_loss(
        self, values: Float[Array, "rows len"], prepared: Prepared
    ) -> tuple[Float[Array, ""], Tally]:
        """The critic's summed loss: the clipped value loss, each kept token with weight 1."""
        assert prepared.values is not None and prepared.returns is not None
        clip = self.cfg.critic.cliprange_value
        loss, clipped = clipped_value_loss(values, prepared.values, prepared.returns, clip=clip)
        mask = prepared.rows.response_mask
        means = {"critic/vf_loss": moments(loss, mask), "critic/vf_clipfrac": moments(clipped, mask)}
        return masked_sum(loss, mask), Tally(means)

    def policy_loss(
        self, params: Params, prepared: Prepared, whitening: Whitening
    ) -> tuple[Float[Array, ""], tuple[Tally, Float[Array, "rows len"]]]:
        """The actor's summed loss, weighted per token.

            policy loss - entropy_coeff * entropy + kl_loss_coef * KL + router_aux_loss_coef * balance loss

        The balance loss of a token is that of its sequence, so that all four are aggregated alike.

        Returns:
            The sum, and with it the metrics (not scaled by the coefficients) and the current log-probs.
        """
        rows, settings = prepared.rows, self.cfg.actor
        logp, entropy, balance = self.logprobs(params, rows)
        corrected = self._corrected(prepared, logp)
        mask = rows.response_mask if corrected is None else corrected.mask
        advantages = (prepared.advantages - whitening.mean) * whitening.scale
        old = self._old_logprobs(prepared, logp)
        inputs = PolicyInputs(logp, old, rows.behaviour_logprobs, advantages, mask, rows.segment_ids)
        loss, statistics = self.loss(inputs, settings)
        if corrected is not None and corrected.weights is not None:
            loss = loss * corrected.weights
        weights = self.aggregation.weights(mask, rows.segment_ids)

        def weighted(values: Array) -> Array:
            return masked_sum(values, mask, weights)

        sums = {"actor/pg_loss": weighted(loss), "actor/entropy": weighted(entropy)}
        total = sums["actor/pg_loss"] - settings.entropy_coeff * sums["actor/entropy"]
        if settings.use_kl_loss:
            assert prepared.reference_logprobs is not None
            kl = kl_estimate(logp, prepared.reference_logprobs, settings.kl_loss_type)
            sums["actor/kl_loss"] = weighted(kl)
            total += settings.kl_loss_coef * sums["actor/kl_loss"]
        if self.actor.arch.experts:
            sums["actor/router_aux_loss"] = weighted(segment_sums(balance, rows.segment_ids))
            total += settings.router_aux_loss_coef * sums["actor/router_aux_loss"]
        means = {f"actor/{name}": moments(values, mask) for name, values in statistics.items()}
        spreads = {"critic/advantages": moments(advantages, mask)}
        if corrected is not None:
            spreads |= {
                f"rollout_corr/{name}": moments(values, rows.response_mask)
                for name, values in corrected.statistics.items()
            }
        tally = Tally(means, spreads, sums, size_of(mask, rows.segment_ids))
        return total, (tally, logp)

    def _start_logprobs(
        self, prepared: Prepared, logp: Float[Array, "rows len"]
    ) -> Float[Array, "rows len"] | None:
        """Those of the policy at the start of the iteration; None where they are not known."""
        if prepared.start_logprobs is not None:
            return prepared.start_logprobs
        return jax.lax.stop_gradient(logp) if self.cfg.single_update else None

    def _corrected(self, prepared: Prepared, logp: Float[Array, "rows len"]) -> Corrected | None:
        start = self._start_logprobs(prepared, logp)
        if start is None:
            return None
        rows = prepared.rows
        settings = self.cfg.algorithm.rollout_correction
        return correct(start, rows.behaviour_logprobs, rows.response_mask, rows.segment_ids, settings)

    def _old_logprobs(self, prepared: Prepared, logp: Float[Array, "rows len"]) -> Float[Array, "rows len"]:
        """What the loss's ratio is taken against."""
        if self.cfg.algorithm.rollout_correction.bypass_mode:
            return prepared.rows.behaviour_logprobs
        start = self._start_logprobs(prepared, logp)
        assert start is not None  # Config.scores_first
        return start

    def _token_rewards(
        self, rows: DeviceRows, reference_logprobs: Float[Array, "rows len"] | None
    ) -> tuple[Float[Array, "rows len"], dict[str, Moments]]:
        """r_t = score at the last token - kl_coef * KL_t of the behaviour policy (arXiv 2203.02155)."""
        settings = self.cfg.algorithm
        if not settings.use_kl_in_reward:
            return rows.rewards, {}
        assert reference_logprobs is not None
        kl = kl_estimate(rows.behaviour_logprobs, reference_logprobs, settings.kl_penalty)
        mask = rows.response_mask
        rewards = rows.rewards - settings.kl_coef * jnp.where(mask, kl, 0.0)
        return rewards, {"actor/reward_kl_penalty": moments(kl, mask)}
