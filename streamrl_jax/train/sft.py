"""Supervised training on given answers, with the trainer's own machinery: the warm start before RL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.config import Config
from streamrl_jax.train.aggregate import masked_sum, size_of
from streamrl_jax.train.answer import Answer
from streamrl_jax.train.batcher import empty_rows, pack_all
from streamrl_jax.train.logprob import predicted
from streamrl_jax.train.mesh import batch_sharding, batch_shards, replicated
from streamrl_jax.train.models import Arch, Model, Params
from streamrl_jax.train.models.decoder import Compute
from streamrl_jax.train.objective import policy_logprobs
from streamrl_jax.train.optim import make_optimizer
from streamrl_jax.train.shapes import BatchShape, plan_shape
from streamrl_jax.train.state import (
    DeviceRows,
    Gradients,
    Network,
    abstract_network,
    add,
    choose,
    init_network,
    place,
    shardings,
    take_step,
    zeros,
)


class SupervisedTrainer:
    """Minimises the mean cross-entropy of the answers' tokens; prompts are read, not imitated.

    Call order: `warm_up` once (optional), then `update` for each batch; `greedy_accuracy` whenever.

    Attributes:
        network: Parameters and optimizer; replaced by `update`.
    """

    def __init__(
        self,
        arch: Arch,
        mesh: Mesh,
        cfg: Config,
        params: Params,
        *,
        longest: int,
        vocab_limit: int | None = None,
    ) -> None:
        """Starts from parameters.

        Args:
            arch: The architecture.
            mesh: From `make_mesh`.
            cfg: `sft`, `model` and `actor.ppo_max_token_len_per_gpu` are read.
            params: Where it starts; donated by the first update.
            longest: Tokens of the longest prompt with its answer.
            vocab_limit: From `Tokenizer.vocab_limit`: neither taught nor counted in `greedy_accuracy`.
        """
        compute = Compute(cfg.model.compute_dtype, cfg.model.remat, cfg.model.attention_block)
        self._model = Model(arch, mesh, "lm", compute)
        self._mesh = mesh
        self._chunk = cfg.model.logprob_chunk
        self._vocab_limit = vocab_limit
        self._optimizer = make_optimizer(
            cfg.sft.optim, grad_clip=cfg.sft.grad_clip, total_steps=cfg.sft.steps
        )
        abstract = abstract_network(self._model, self._optimizer)
        self.network = init_network(self._optimizer, params, abstract)
        self.shape: BatchShape = plan_shape(
            longest=longest,
            samples=cfg.sft.batch_size,
            budget_per_shard=cfg.actor.ppo_max_token_len_per_gpu,
            shards=batch_shards(mesh),
        )
        network = shardings(abstract)
        rows: Any = batch_sharding(mesh)
        whole: Any = replicated(mesh)
        sums = Gradients(network.params, whole, whole)
        self._gradients = jax.jit(lambda: zeros(abstract.params), out_shardings=sums)()
        self._accumulate = jax.jit(
            self._accumulate_body,
            in_shardings=(network.params, sums, rows),
            out_shardings=sums,
            donate_argnums=1,
        )
        self._apply = jax.jit(
            self._apply_body,
            in_shardings=(network, sums),
            out_shardings=(network, sums, whole),
            donate_argnums=(0, 1),
        )
        self._hits = jax.jit(self._hits_body, in_shardings=(network.params, rows), out_shardings=whole)

    def warm_up(self) -> None:
        """Compiles for all row shapes, by running on padding; an empty batch changes nothing."""
        for each in self.shape.shapes:
            rows = place(empty_rows(each.rows, each.row_len), self._mesh)
            gradients = self._accumulate(self.network.params, self._gradients, rows)
            self.network, self._gradients, _ = self._apply(self.network, gradients)
            jax.block_until_ready((self.network, self._hits(self.network.params, rows)))

    def update(self, examples: Sequence[Answer]) -> dict[str, float]:
        """Takes one optimizer step on a batch (`answer.taught_answer`).

        Returns:
            `sft/loss` (nats per token), `sft/grad_norm`, `sft/lr`, `sft/tokens`, and `sft/update_refused`: 1
            if something was not finite, and the parameters are as they were.
        """
        gradients = self._gradients
        for micro in pack_all(examples, self.shape):
            gradients = self._accumulate(self.network.params, gradients, place(micro.rows, self._mesh))
        self.network, self._gradients, report = self._apply(self.network, gradients)
        return {f"sft/{name}": float(value) for name, value in jax.device_get(report).items()}

    def greedy_accuracy(self, examples: Sequence[Answer]) -> float:
        """Share of the examples whose whole answer greedy decoding would write.

        It does so exactly if each token of the answer is the most likely one after the tokens before it, so
        one forward pass tells, and nothing need be generated.
        """
        right = 0
        for micro in pack_all(examples, self.shape):
            hits = np.asarray(self._hits(self.network.params, place(micro.rows, self._mesh)))
            right += sum(bool(hits[placement.response].all()) for placement in micro.placements)
        return right / len(examples)

    def _accumulate_body(self, params: Params, gradients: Gradients, rows: DeviceRows) -> Gradients:
        def loss(params: Params) -> Float[Array, ""]:
            logp, _, _ = policy_logprobs(
                self._model,
                params,
                rows,
                temperature=1.0,
                chunk=self._chunk,
                vocab_limit=self._vocab_limit,
            )
            return masked_sum(-logp, rows.response_mask)

        total, gradient = jax.value_and_grad(loss)(params)
        return add(gradients, gradient, total, size_of(rows.response_mask, rows.segment_ids))

    def _apply_body(
        self, network: Network, gradients: Gradients
    ) -> tuple[Network, Gradients, dict[str, Float[Array, ""]]]:
        tokens = jnp.asarray(gradients.size.tokens)
        new, finite, report = take_step(self._optimizer, network, gradients, tokens)
        report |= {
            "loss": gradients.loss / jnp.maximum(tokens, 1),
            "tokens": tokens.astype(jnp.float32),
            "update_refused": 1.0 - finite.astype(jnp.float32),
        }
        kept = choose(finite & (tokens > 0), new, network)
        return kept, jax.tree.map(jnp.zeros_like, gradients), report

    def _hits_body(self, params: Params, rows: DeviceRows) -> Bool[Array, "rows len"]:
        hidden = self._model.hidden_states(params, rows.tokens, rows.positions, rows.segment_ids)
        head = self._model.head_weight(params).astype(hidden.dtype)[: self._vocab_limit]

        def column(state_and_token: tuple[Float[Array, "rows embed"], Int[Array, " rows"]]) -> Array:
            state, token = state_and_token
            logits = jnp.einsum("re,ve->rv", state, head, preferred_element_type=jnp.float32)
            return jnp.argmax(logits, axis=-1) == token

        # Column by column: the logits of a whole row would be len x vocab.
        states = jnp.moveaxis(jnp.roll(hidden, 1, axis=1), 1, 0)
        hits = jax.lax.map(column, (states, rows.tokens.T))
        return hits.T & predicted(rows.segment_ids)
