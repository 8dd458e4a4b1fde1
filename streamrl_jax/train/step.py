"""The jitted programs of a training iteration, built once for an architecture, a mesh and a configuration.

    single update (streams)      learn_critic_on_arrival ─▶ learn_actor ─▶ apply
    several updates              estimate ─▶ per mini-batch: (learn_critic, learn_actor) ─▶ apply
    with a reference             score first

Each works on one micro-batch; only `apply` sees the whole (mini-)batch. What is accumulated are gradients of
sums, and metrics leave as sums and counts, so the result does not depend on how samples were split (DESIGN
rule 2). The order of the calls is `trainer.Trainer`'s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from streamrl_jax.config import Config
from streamrl_jax.train.advantage import Whitening
from streamrl_jax.train.aggregate import Size, size_of
from streamrl_jax.train.batcher import HostRows, empty_rows
from streamrl_jax.train.loss import POLICY_LOSSES, PolicyLoss
from streamrl_jax.train.mesh import batch_sharding, replicated
from streamrl_jax.train.models import Arch, Model, Params
from streamrl_jax.train.models.decoder import Compute
from streamrl_jax.train.objective import Objective, Prepared, Tally
from streamrl_jax.train.optim import make_optimizer
from streamrl_jax.train.shapes import BatchShape
from streamrl_jax.train.state import (
    DeviceRows,
    Gradients,
    Network,
    TrainState,
    abstract_network,
    abstract_state,
    add,
    choose,
    init_network,
    initial_scalars,
    place,
    place_whole,
    shardings,
    take_step,
    zeros,
)

Accumulators = tuple[Gradients, Gradients | None]
"""Of actor and critic."""

UpdateReport = dict[str, Float[Array, ""]]


class Steps:
    """See the module. Holds programs and no training state. What is "donated" must not be used again."""

    def __init__(
        self,
        arch: Arch,
        mesh: Mesh,
        cfg: Config,
        *,
        policy_loss: PolicyLoss | None = None,
        vocab_limit: int | None = None,
    ) -> None:
        """Describes the programs; they compile at their first call (`warm_up`).

        Args:
            arch: Of actor, critic and reference.
            mesh: From `make_mesh`.
            cfg: The run's configuration.
            policy_loss: The loss of the policy; None: `actor.loss_mode`'s.
            vocab_limit: From `Tokenizer.vocab_limit`, as the instances have it.
        """
        self.cfg = cfg
        self.mesh = mesh
        self.vocab_limit = vocab_limit
        compute = Compute(cfg.model.compute_dtype, cfg.model.remat, cfg.model.attention_block)
        self.actor = Model(arch, mesh, "lm", compute)
        self.critic = Model(arch, mesh, "value", compute) if cfg.uses_critic else None
        updates, iterations = cfg.mini_batches * cfg.actor.ppo_epochs, cfg.trainer.total_training_steps
        learning = iterations - (cfg.critic.warmup_steps if cfg.uses_critic else 0)  # the actor's iterations
        self._actor_optimizer = make_optimizer(
            cfg.actor.optim, grad_clip=cfg.actor.grad_clip, total_steps=max(learning, 0) * updates
        )
        self._critic_optimizer = make_optimizer(
            cfg.critic.optim, grad_clip=cfg.critic.grad_clip, total_steps=iterations * updates
        )
        loss = policy_loss or POLICY_LOSSES[cfg.actor.loss_mode]
        self._objective = Objective(self.actor, self.critic, cfg, loss, vocab_limit)
        self._abstract = abstract_state(
            abstract_network(self.actor, self._actor_optimizer),
            abstract_network(self.critic, self._critic_optimizer) if self.critic else None,
            replicated(mesh),
        )
        self._build()

    def _build(self) -> None:
        """Gives each program its shardings: networks by the table, rows over data and fsdp, scalars whole."""
        state = shardings(self._abstract)
        rows: Any = batch_sharding(self.mesh)
        whole: Any = replicated(self.mesh)
        actor, critic = state.actor.params, state.critic.params if state.critic else None
        actor_sum = Gradients(actor, whole, whole)
        critic_sum = Gradients(critic, whole, whole) if critic else None
        sums = (actor_sum, critic_sum)
        self._score = jax.jit(self._score_body, in_shardings=(actor, rows), out_shardings=rows)
        self._estimate = jax.jit(
            self._estimate_body, in_shardings=(critic, rows, rows, rows), out_shardings=(rows, whole)
        )
        self._learn_critic_on_arrival = jax.jit(
            self._learn_critic_on_arrival_body,
            in_shardings=(critic, critic_sum, rows, rows),
            out_shardings=(critic_sum, rows, whole),
            donate_argnums=1,
        )
        self._learn_critic = jax.jit(
            self._learn_critic_body,
            in_shardings=(critic, critic_sum, rows),
            out_shardings=(critic_sum, whole),
            donate_argnums=1,
        )
        self._learn_actor = jax.jit(
            self._learn_actor_body,
            in_shardings=(actor, actor_sum, rows, whole),
            out_shardings=(actor_sum, whole, whole),
            donate_argnums=1,
        )
        self._whole = jax.jit(lambda array: array, out_shardings=whole)
        self._finite = jax.jit(self._finite_body, in_shardings=(sums,), out_shardings=whole)
        self._zeros = jax.jit(self._zeros_body, out_shardings=sums)
        self._apply = jax.jit(
            self._apply_body,
            in_shardings=(state, sums, whole),
            out_shardings=(state, sums, whole),
            donate_argnums=(0, 1),
        )

    # ------------------------------------------------------------------ state

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings: what a checkpoint is restored into."""
        return self._abstract

    def init_state(self, actor_params: Params, critic_params: Params | None = None) -> TrainState:
        """A state at its beginning.

        Args:
            actor_params: The policy's parameters; they become part of the state (`apply` donates them).
            critic_params: The critic's; None: the policy's body under a value head of zeros, if there is a
                critic.
        """
        critic = self.init_critic(actor_params, critic_params)
        actor = init_network(self._actor_optimizer, actor_params, self._abstract.actor)
        return TrainState(actor, critic, *place_whole(initial_scalars(), self.mesh))

    def init_critic(self, actor_params: Params, critic_params: Params | None = None) -> Network | None:
        """A critic at its beginning; None where the configuration has none. Arguments as `init_state`'s."""
        if self.critic is None or self._abstract.critic is None:
            return None
        params = self.critic.value_params_from(actor_params) if critic_params is None else critic_params
        return init_network(self._critic_optimizer, params, self._abstract.critic)

    def zero_gradients(self) -> Accumulators:
        """Accumulators of actor and critic, where they lie."""
        return self._zeros()

    def place(self, rows: HostRows) -> DeviceRows:
        """Copies a micro-batch's rows to the devices that work on them."""
        return place(rows, self.mesh)

    # --------------------------------------------------------------- programs

    def score(self, params: Params, rows: DeviceRows) -> Float[Array, "rows len"]:
        """Log-probs under policy or reference, at the sampling temperature; 0 where no state precedes."""
        return self._score(params, rows)

    def score_to_host(self, params: Params, rows: DeviceRows) -> Float[np.ndarray, "rows len"]:
        """`score`, all rows of it in every process."""
        return jax.device_get(self._whole(self._score(params, rows)))

    def estimate(
        self,
        critic: Params | None,
        rows: DeviceRows,
        reference_logprobs: Float[Array, "rows len"] | None,
        start_logprobs: Float[Array, "rows len"] | None = None,
    ) -> tuple[Prepared, Tally]:
        """Values and advantages, without learning: for several updates, or without a critic."""
        return self._estimate(critic, rows, reference_logprobs, start_logprobs)

    def learn_critic_on_arrival(
        self,
        critic: Params,
        gradients: Gradients,
        rows: DeviceRows,
        reference_logprobs: Float[Array, "rows len"] | None,
    ) -> tuple[Gradients, Prepared, Tally]:
        """`estimate`, and the critic's gradient from the same forward pass. `gradients` is donated.

        For a single update, in which the old values are the values.
        """
        return self._learn_critic_on_arrival(critic, gradients, rows, reference_logprobs)

    def learn_critic(
        self, critic: Params, gradients: Gradients, prepared: Prepared
    ) -> tuple[Gradients, Tally]:
        """Adds the critic's gradient of a prepared micro-batch. `gradients` is donated."""
        return self._learn_critic(critic, gradients, prepared)

    def learn_actor(
        self, actor: Params, gradients: Gradients, prepared: Prepared, whitening: Whitening
    ) -> tuple[Gradients, Tally, Float[Array, "rows len"]]:
        """Adds the actor's gradient of a prepared micro-batch. `gradients` is donated.

        Returns:
            The accumulator, the metrics, and the current policy's log-probs for the agreement check.
        """
        return self._learn_actor(actor, gradients, prepared, whitening)

    def apply(
        self,
        state: TrainState,
        gradients: Accumulators,
        *,
        learn_actor: bool = True,
    ) -> tuple[TrainState, Accumulators, UpdateReport]:
        """Divides by the global denominators and takes one optimizer step.

        `state` and `gradients` are donated.

        A loss or gradient that is not finite refuses the update: the state comes back as it was, and the
        report says `training/update_refused` = 1. Where the actor has no token to learn from, it stays as it was too,
        and `training/update_empty` is 1. The critic has more: it also learns from tokens that a correction rejected.

        Args:
            state: Where training stands.
            gradients: What was accumulated, with its size.
            learn_actor: False while only the critic learns.

        Returns:
            The new state, accumulators of zeros, and norms and rates of this update.
        """
        return self._apply(state, gradients, learn_actor)

    def finite(self, gradients: Accumulators) -> bool:
        """Whether all accumulated sums and gradients are finite. Compiled when it is first asked: after a refusal."""
        return bool(self._finite(gradients))

    def warm_up(self, state: TrainState, reference: Params | None, shape: BatchShape) -> TrainState:
        """Compiles what an iteration will call, by running it on padding.

        Args:
            state: Donated.
            reference: The reference's parameters, if it is used.
            shape: The row shapes to compile for.

        Returns:
            The state, unchanged.
        """
        for each in shape.shapes:
            actor_sum, critic_sum = self.zero_gradients()
            rows = self.place(empty_rows(each.rows, each.row_len))
            if self.cfg.trainer.max_staleness:  # `AgreementGate.probe` will score
                self.score_to_host(state.actor.params, rows)
            known = None if reference is None else self.score(reference, rows)
            start = self.score(state.actor.params, rows) if self.cfg.scores_first else None
            if state.critic is None or critic_sum is None:
                prepared, _ = self.estimate(None, rows, known, start)
            elif self.cfg.single_update:
                critic_sum, prepared, _ = self.learn_critic_on_arrival(
                    state.critic.params, critic_sum, rows, known
                )
            else:
                prepared, _ = self.estimate(state.critic.params, rows, known, start)
                critic_sum, _ = self.learn_critic(state.critic.params, critic_sum, prepared)
            actor_sum, _, _ = self.learn_actor(state.actor.params, actor_sum, prepared, Whitening())
            state, _, _ = self.apply(state, (actor_sum, critic_sum))  # of nothing: the state stays as it is
        return jax.block_until_ready(state)

    # ----------------------------------------------------- bodies of the programs

    def _score_body(self, params: Params, rows: DeviceRows) -> Array:
        return self._objective.logprobs(params, rows)[0]

    def _estimate_body(
        self,
        critic: Params | None,
        rows: DeviceRows,
        reference_logprobs: Array | None,
        start_logprobs: Array | None,
    ) -> tuple[Prepared, Tally]:
        values = None if critic is None else self._objective.values(critic, rows)
        return self._objective.estimate(rows, reference_logprobs, start_logprobs, values)

    def _learn_critic_on_arrival_body(
        self, critic: Params, gradients: Gradients, rows: DeviceRows, reference_logprobs: Array | None
    ) -> tuple[Gradients, Prepared, Tally]:
        def loss(params: Params) -> tuple[Array, tuple[Prepared, Tally]]:
            values = self._objective.values(params, rows)
            prepared, seen = self._objective.estimate(rows, reference_logprobs, None, values)
            total, learned = self._objective.value_loss(values, prepared)
            return total, (prepared, Tally(seen.means | learned.means, seen.spreads))

        (total, (prepared, tally)), gradient = jax.value_and_grad(loss, has_aux=True)(critic)
        return add(gradients, gradient, total, _size(rows)), prepared, tally

    def _learn_critic_body(
        self, critic: Params, gradients: Gradients, prepared: Prepared
    ) -> tuple[Gradients, Tally]:
        def loss(params: Params) -> tuple[Array, Tally]:
            return self._objective.value_loss(self._objective.values(params, prepared.rows), prepared)

        (total, tally), gradient = jax.value_and_grad(loss, has_aux=True)(critic)
        return add(gradients, gradient, total, _size(prepared.rows)), tally

    def _learn_actor_body(
        self, actor: Params, gradients: Gradients, prepared: Prepared, whitening: Whitening
    ) -> tuple[Gradients, Tally, Array]:
        def loss(params: Params) -> tuple[Array, tuple[Tally, Array]]:
            return self._objective.policy_loss(params, prepared, whitening)

        (total, (tally, logp)), gradient = jax.value_and_grad(loss, has_aux=True)(actor)
        return add(gradients, gradient, total, tally.size), tally, logp

    def _finite_body(self, gradients: Accumulators) -> Bool[Array, ""]:
        return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]).all()

    def _zeros_body(self) -> Accumulators:
        critic = self._abstract.critic
        return zeros(self._abstract.actor.params), None if critic is None else zeros(critic.params)

    def _apply_body(
        self,
        state: TrainState,
        gradients: Accumulators,
        learn_actor: Bool[Array, ""],
    ) -> tuple[TrainState, Accumulators, UpdateReport]:
        actor_sum, critic_sum = gradients
        denominator = self._objective.aggregation.denominator(actor_sum.size)
        actor, finite, report = take_step(self._actor_optimizer, state.actor, actor_sum, denominator)
        report = {f"actor/{name}": value for name, value in report.items()}
        critic, values_kept = state.critic, jnp.bool_(False)
        if state.critic is not None and critic_sum is not None:
            critic, critic_finite, more = take_step(
                self._critic_optimizer, state.critic, critic_sum, critic_sum.size.tokens
            )
            finite &= critic_finite
            values_kept = jnp.asarray(critic_sum.size.tokens) > 0
            report |= {f"critic/{name}": value for name, value in more.items()}
        kept = jnp.asarray(actor_sum.size.tokens) > 0
        report["training/update_refused"] = 1.0 - finite.astype(jnp.float32)
        report["training/update_empty"] = 1.0 - kept.astype(jnp.float32)
        new = TrainState(
            actor=choose(finite & kept & learn_actor, actor, state.actor),
            critic=choose(finite & values_kept, critic, state.critic),
            updates=state.updates + (finite & kept).astype(jnp.int32),
            advantages=state.advantages,
        )
        return new, jax.tree.map(jnp.zeros_like, gradients), report


def _size(rows: DeviceRows) -> Size:
    return size_of(rows.response_mask, rows.segment_ids)
