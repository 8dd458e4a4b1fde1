"""AdamW with schedule and global-norm clipping (optax), applied to gradients of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax import tree_utils

from streamrl_jax.config import OptimSection
from streamrl_jax.train.models import Params

# Last part of a parameter's path: norms and biases are not decayed.
_NOT_DECAYED = frozenset({"scale", "bias"})


def learning_rate(settings: OptimSection, total_steps: int) -> optax.Schedule:
    """Linear warm-up to `lr`, then constant, or a cosine or a line down to `lr * min_lr_ratio`.

    The k-th of w warm-up steps uses lr * k / w, so that the first step moves too.

    Args:
        settings: `lr`, `lr_warmup_steps`, `lr_scheduler`, `min_lr_ratio`.
        total_steps: The network's optimizer steps in the whole run, warm-up included.

    Returns:
        Steps taken so far -> rate of the next one.
    """
    warmup = settings.lr_warmup_steps
    decay_steps = max(total_steps - warmup, 1)
    match settings.lr_scheduler:
        case "constant":
            main = optax.constant_schedule(settings.lr)
        case "cosine":
            main = optax.cosine_decay_schedule(settings.lr, decay_steps, alpha=settings.min_lr_ratio)
        case "linear":
            main = optax.linear_schedule(settings.lr, settings.lr * settings.min_lr_ratio, decay_steps)
    if not warmup:
        return main
    ramp = optax.linear_schedule(settings.lr / warmup, settings.lr, max(warmup - 1, 1))
    return optax.join_schedules([ramp, main], [warmup])


@dataclass(frozen=True)
class Optimizer:
    """One network's optimizer. Its state is optax's; the number of steps taken is Adam's own count.

    Attributes:
        rule: Clipping, moments and decay, without the learning rate.
        schedule: Steps taken -> learning rate.
    """

    rule: optax.GradientTransformation
    schedule: optax.Schedule

    def update(
        self, gradient: Params, state: Any, params: Params
    ) -> tuple[Params, Any, dict[str, Float[Array, ""]]]:
        """Takes one step.

        Args:
            gradient: Of the mean loss.
            state: optax's.
            params: float32 masters.

        Returns:
            New parameters, new state, and `grad_norm` (before clipping) and `lr` of this step.
        """
        rate = jnp.asarray(self.schedule(steps_taken(state)), jnp.float32)
        direction, state = self.rule.update(gradient, state, params)
        new = jax.tree.map(lambda param, step: (param - rate * step).astype(param.dtype), params, direction)
        return new, state, {"grad_norm": optax.tree.norm(gradient), "lr": rate}


def make_optimizer(settings: OptimSection, *, grad_clip: float, total_steps: int) -> Optimizer:
    """AdamW (arXiv 1711.05101) on gradients clipped to a global norm.

    Args:
        settings: Rate, betas, eps, decay.
        grad_clip: Largest global norm, over all parameters of the network.
        total_steps: See `learning_rate`.
    """
    first, second = settings.betas
    rule = optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.scale_by_adam(b1=first, b2=second, eps=settings.eps),
        optax.add_decayed_weights(settings.weight_decay, mask=decayed),
    )
    return Optimizer(rule, learning_rate(settings, total_steps))


def steps_taken(state: Any) -> Int[Array, ""]:
    """How many updates an optimizer state has seen."""
    return tree_utils.tree_get(state, "count")


def decayed(params: Params) -> Any:
    """Which parameters weight decay applies to: a tree of booleans."""

    def matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key not in _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(matrix, params)
