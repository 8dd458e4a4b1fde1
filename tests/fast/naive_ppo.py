"""PPO as a textbook writes it: one padded row a sample, loops, means over the whole batch.

What the streamed, packed, sharded step must equal. It shares the model with the trainer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamrl_jax.config import Config, OptimSection
from streamrl_jax.train.models import Model, Params
from streamrl_jax.types import Sample

from .tiny_training import MAX_PROMPT, MAX_RESPONSE

LENGTH = MAX_PROMPT + MAX_RESPONSE


@dataclass(frozen=True)
class Padded:
    """One sample a row, [samples, LENGTH]; `mask` is 1 at answer tokens."""

    tokens: Any
    segments: Any
    mask: Any
    behaviour: Any
    scores: Any  # one a sample

    @property
    def positions(self) -> Any:
        return np.broadcast_to(np.arange(LENGTH), self.tokens.shape)


def padded(samples: Sequence[Sample]) -> Padded:
    shape = (len(samples), LENGTH)
    made = Padded(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape),
        np.zeros(shape),
        np.array([sample.reward for sample in samples]),
    )
    for row, sample in enumerate(samples):
        prompt, answer = len(sample.prompt.token_ids), len(sample.generation.token_ids)
        made.tokens[row, : prompt + answer] = [*sample.prompt.token_ids, *sample.generation.token_ids]
        made.segments[row, : prompt + answer] = 1
        made.mask[row, prompt : prompt + answer] = 1
        made.behaviour[row, prompt : prompt + answer] = sample.generation.logprobs
    return made


def logprobs(model: Model, params: Params, batch: Padded, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies, aligned at the token."""
    hidden = model.hidden_states(params, batch.tokens, batch.positions, batch.segments)
    logs = jax.nn.log_softmax(hidden[:, :-1] @ model.head_weight(params).T / temperature)
    chosen = jnp.take_along_axis(logs, batch.tokens[:, 1:, None], axis=2)[:, :, 0]
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=2)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def critic_values(model: Model, params: Params, batch: Padded) -> jax.Array:
    output = model.values(params, batch.tokens, batch.positions, batch.segments)
    return jnp.pad(output[:, :-1], ((0, 0), (1, 0)))


def gae(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    advantages = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        following = None
        for t in reversed(np.flatnonzero(mask[row])):
            ahead = 0.0 if following is None else values[row, following]
            more = 0.0 if following is None else advantages[row, following]
            advantages[row, t] = rewards[row, t] + gamma * ahead - values[row, t] + gamma * lam * more
            following = t
    return advantages


def mean(x: Any, mask: np.ndarray) -> Any:
    return (x * mask).sum() / mask.sum()


def actor_loss(
    params: Params, model: Model, cfg: Config, batch: Padded, advantages: Any, reference: Any
) -> Any:
    logp, entropy = logprobs(model, params, batch, cfg.rollout.temperature)
    ratio = jnp.exp(jnp.where(batch.mask == 1, logp - batch.behaviour, 0))
    clipped = jnp.clip(ratio, 1 - cfg.actor.clip_ratio_low, 1 + cfg.actor.clip_ratio_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, -cfg.actor.clip_ratio_c * advantages), loss)
    gap = jnp.where(batch.mask == 1, reference - logp, 0)
    kl = jnp.exp(gap) - gap - 1
    parts = {"actor/pg_loss": mean(loss, batch.mask), "actor/entropy": mean(entropy, batch.mask)}
    parts["actor/kl_loss"] = mean(kl, batch.mask)
    total = parts["actor/pg_loss"] - cfg.actor.entropy_coeff * parts["actor/entropy"]
    return total + cfg.actor.kl_loss_coef * parts["actor/kl_loss"], parts


def critic_loss(params: Params, model: Model, clip: float, batch: Padded, old: Any, returns: Any) -> Any:
    values = critic_values(model, params, batch)
    near = old + jnp.clip(values - old, -clip, clip)
    return 0.5 * mean(jnp.maximum((values - returns) ** 2, (near - returns) ** 2), batch.mask)


@dataclass
class NaiveAdam:
    """AdamW with clipping, leaf by leaf in double precision."""

    settings: OptimSection
    clip: float
    steps: int = 0
    first: Any = 0.0
    second: Any = 0.0

    def step(self, params: Params, gradient: Params) -> tuple[Params, float]:
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), gradient)
        norm = float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(wide))))
        wide = jax.tree.map(lambda leaf: leaf * min(1.0, self.clip / norm), wide)
        zeros = jax.tree.map(np.zeros_like, wide)
        beta1, beta2 = self.settings.betas
        self.steps += 1
        self.first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, self.first or zeros, wide)
        self.second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, self.second or zeros, wide)

        def moved(path: Any, param: Any, m: np.ndarray, v: np.ndarray) -> jax.Array:
            decay = 0.0 if path[-1].key in ("scale", "bias") else self.settings.weight_decay
            direction = (
                m / (1 - beta1**self.steps) / (np.sqrt(v / (1 - beta2**self.steps)) + self.settings.eps)
            )
            wide_param = np.asarray(param, np.float64)
            return jnp.asarray(wide_param - self.settings.lr * (direction + decay * wide_param), jnp.float32)

        return jax.tree_util.tree_map_with_path(moved, params, self.first, self.second), norm


jax.tree_util.register_dataclass(Padded)


class NaivePpo:
    """Sequential PPO with a critic; call `iterate` for each iteration."""

    def __init__(
        self, cfg: Config, actor: Model, critic: Model, params: Params, values: Params, reference: Params
    ) -> None:
        self.cfg, self.params, self.values, self.reference = cfg, params, values, reference
        self._actor, self._logprobs = _actor_functions(actor, cfg.model_dump_json())
        self._critic, self._value = _critic_functions(critic, cfg.critic.cliprange_value)
        self._actor_adam = NaiveAdam(cfg.actor.optim, cfg.actor.grad_clip)
        self._critic_adam = NaiveAdam(cfg.critic.optim, cfg.critic.grad_clip)
        self.spread = (0.0, 1.0)  # mean and standard deviation of the last iteration's advantages

    def iterate(
        self,
        samples: Sequence[Sample],
        *,
        mini_batches: Sequence[set[str]] = (),
        epochs: int = 1,
        spread: tuple[float, float] | None = None,
    ) -> dict[str, float]:
        """Trains on an iteration.

        Args:
            samples: All of it.
            mini_batches: Sample ids of each; none: one update on all.
            epochs: Passes over them.
            spread: Mean and standard deviation to whiten with; None: those of these samples.

        Returns:
            The metrics of the last update.
        """
        settings, batch = self.cfg.algorithm, padded(samples)
        reference = np.asarray(self._logprobs(self.reference, batch), np.float64)
        old = np.asarray(self._value(self.values, batch), np.float64)
        rewards = -settings.kl_coef * (batch.behaviour - reference) * batch.mask
        for row, score in enumerate(batch.scores):
            rewards[row, np.flatnonzero(batch.mask[row])[-1]] += score
        raw = gae(rewards, old, batch.mask, settings.gamma, settings.lam)
        center = mean(raw, batch.mask)
        self.spread = (center, np.sqrt(mean((raw - center) ** 2, batch.mask)))
        center, deviation = spread or self.spread
        advantages, returns = (raw - center) / deviation * batch.mask, (raw + old) * batch.mask
        names = np.array([sample.sample_id for sample in samples])
        parts = [np.isin(names, list(part))[:, None] for part in mini_batches] or [np.ones((len(names), 1))]
        found: dict[str, float] = {}
        for _ in range(epochs):
            for part in parts:
                mini = replace(batch, mask=batch.mask * part)
                found = self._update(mini, advantages * part, old, returns, reference)
        return found

    def _update(
        self,
        batch: Padded,
        advantages: np.ndarray,
        old: np.ndarray,
        returns: np.ndarray,
        reference: np.ndarray,
    ) -> dict[str, float]:
        (_, metrics), gradient = self._actor(self.params, batch, advantages, reference)
        value_loss, value_gradient = self._critic(self.values, batch, old, returns)
        self.params, norm = self._actor_adam.step(self.params, gradient)
        self.values, value_norm = self._critic_adam.step(self.values, value_gradient)
        found = {name: float(value) for name, value in metrics.items()}
        return found | {
            "actor/grad_norm": norm,
            "critic/grad_norm": value_norm,
            "critic/vf_loss": float(value_loss),
        }


@lru_cache(maxsize=4)
def _actor_functions(model: Model, cfg_json: str) -> tuple[Any, Any]:
    cfg = Config.model_validate_json(cfg_json)

    def loss(params: Params, batch: Padded, advantages: jax.Array, reference: jax.Array) -> Any:
        return actor_loss(params, model, cfg, batch, advantages, reference)

    score = jax.jit(lambda params, batch: logprobs(model, params, batch, cfg.rollout.temperature)[0])
    return jax.jit(jax.value_and_grad(loss, has_aux=True)), score


@lru_cache(maxsize=4)
def _critic_functions(model: Model, clip: float) -> tuple[Any, Any]:
    def loss(params: Params, batch: Padded, old: jax.Array, returns: jax.Array) -> Any:
        return critic_loss(params, model, clip, batch, old, returns)

    return jax.jit(jax.value_and_grad(loss)), jax.jit(partial(critic_values, model))
