"""A mixture of experts in place of the dense feed-forward layer: no token is dropped, no shape depends on the data."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from streamrl_jax.train.arch import Arch
from streamrl_jax.train.mesh import RULES
from streamrl_jax.train.models.experts import Kernels, grouped_swiglu
from streamrl_jax.train.models.layers import Linear, weight
from streamrl_jax.train.segments import segment_sums


class ExpertLinear(nnx.Module):
    """The matrices [in, out] of all experts, stacked."""

    def __init__(
        self, experts: int, inputs: dict[str, int], outputs: dict[str, int], *, rngs: nnx.Rngs
    ) -> None:
        """Creates kernel [experts, *inputs, *outputs]."""
        shape = (experts, *inputs.values(), *outputs.values())
        self.kernel = weight(rngs, shape, ("experts", *inputs, *outputs), math.prod(inputs.values()))


class Mixture(nnx.Module):
    """sum over the k experts e of largest p_e of w_e(x) * SwiGLU_e(x), with p = softmax(router(x)).

    w is p at those k, scaled to sum to 1 where the architecture says so (Qwen3, arXiv 2505.09388). The router's
    weights, product and softmax are float32 in any compute dtype: a choice must not flip with the rounding.
    """

    def __init__(self, arch: Arch, *, rngs: nnx.Rngs) -> None:
        """Creates the router and the experts."""
        embed, mlp = {"embed": arch.embed}, {"expert_mlp": arch.mlp}
        self.arch = arch
        self.router = Linear(embed, {"router": arch.experts}, rngs=rngs)
        self.gate = ExpertLinear(arch.experts, embed, mlp, rngs=rngs)
        self.up = ExpertLinear(arch.experts, embed, mlp, rngs=rngs)
        self.down = ExpertLinear(arch.experts, mlp, embed, rngs=rngs)

    def __call__(
        self, x: Float[Array, "rows len embed"], segment_ids: Int[Array, "rows len"], mesh: Mesh
    ) -> tuple[Float[Array, "rows len embed"], Float[Array, "rows len"]]:
        """Applies the layer.

        Args:
            x: Normalised states.
            segment_ids: Which packed sequence a token belongs to; padding, id 0, is given to no expert.
            mesh: Experts are split over its tensor axis, whose size divides their number.

        Returns:
            The layer's output, zero for padding; and the tokens' shares of `balance_losses`.
        """
        router = self.router.kernel[...]
        logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        probs = jax.nn.softmax(logits, axis=-1)
        weights, chosen = jax.lax.top_k(probs, self.arch.experts_per_token)
        if self.arch.normalise_experts:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        balance = balance_losses(probs, chosen, segment_ids)
        chosen = jnp.where(segment_ids[..., None] > 0, chosen, self.arch.experts)
        return self._apply_experts(x, chosen, weights, mesh), balance

    def _apply_experts(
        self,
        x: Float[Array, "rows len embed"],
        chosen: Int[Array, "rows len k"],
        weights: Float[Array, "rows len k"],
        mesh: Mesh,
    ) -> Float[Array, "rows len embed"]:
        """Each device takes its own rows through its own experts; the sum over the devices of a row is the result."""
        rows, experts = PartitionSpec(RULES["batch"]), PartitionSpec(RULES["experts"])

        def on_device(
            x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array
        ) -> Float[Array, "rows len embed"]:
            # A device's cotangents of x and of the kernels are parts of the whole. The sums over the devices are the
            # transposes of these casts; that of x was missing where the cast was left to JAX (0.10.2).
            x, chosen, weights = jax.lax.pcast((x, chosen, weights), RULES["experts"], to="varying")
            kernels = Kernels(*jax.lax.pcast((gate, up, down), RULES["batch"], to="varying"))
            first = jax.lax.axis_index(RULES["experts"]) * gate.shape[0]
            flat = apply_experts(
                x.reshape(-1, x.shape[-1]),
                chosen.reshape(-1, chosen.shape[-1]) - first,
                weights.reshape(-1, weights.shape[-1]),
                kernels,
            )
            return jax.lax.psum(flat, RULES["experts"]).reshape(x.shape)

        split = jax.shard_map(on_device, mesh=mesh, in_specs=(*[rows] * 3, *[experts] * 3), out_specs=rows)
        kernels = (module.kernel[...].astype(x.dtype) for module in (self.gate, self.up, self.down))
        return split(x, chosen, weights, *kernels).astype(x.dtype)


def apply_experts(
    x: Float[Array, "tokens embed"],
    chosen: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    kernels: Kernels,
) -> Float[Array, "tokens embed"]:
    """Sums, for each token, the weighed outputs of its experts, as far as they are among these.

    The tokens * k pairs of token and expert are sorted by expert, so that each expert's rows are contiguous
    (`grouped_swiglu`). Their number is fixed, whatever the router chose.

    Args:
        x: States.
        chosen: Index into the experts; a pair whose index is none of theirs contributes nothing.
        weights: Of the pairs, float32.
        kernels: Of gate, up and down, in the dtype of `x`.

    Returns:
        float32 sums.
    """
    experts, (tokens, per_token) = kernels.gate.shape[0], chosen.shape
    pairs = chosen.reshape(-1)
    keys = jnp.where((pairs >= 0) & (pairs < experts), pairs, experts)
    order = jnp.argsort(keys, stable=True)
    sizes = jnp.sum(keys[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    # Permutations of all pairs, so that the transposes are permutations too and add nothing in an unknown order.
    rows = jnp.repeat(x, per_token, axis=0).at[order].get(unique_indices=True)
    outputs = grouped_swiglu(rows, kernels, sizes)
    back = outputs.at[jnp.argsort(order)].get(unique_indices=True)
    return jnp.einsum("tke,tk->te", back.reshape(tokens, per_token, -1), weights)


def balance_losses(
    probs: Float[Array, "rows len experts"],
    chosen: Int[Array, "rows len k"],
    segment_ids: Int[Array, "rows len"],
) -> Float[Array, "rows len"]:
    """Each token's share of its sequence's load-balance loss; the sum over a sequence is its loss.

    The sequence-wise loss of DeepSeek-V2 (arXiv 2405.04434, section 2.1.3) and V3 (2412.19437, equations 17 to 20):
    loss = sum over experts e of f_e P_e, where f_e = E / (k L) times the number of the sequence's tokens that chose e,
    and P_e is the mean of p_e over its L tokens. It is 1 when all experts are chosen alike. f has no gradient. All
    tokens of a sequence count, the prompt's too; padding counts nothing. A loss over the batch's own loads (as in
    Switch, arXiv 2101.03961) would depend on how the batch is cut into micro-batches; this one does not.

    Args:
        probs: The router's softmax, float32.
        chosen: The experts of each token.
        segment_ids: Which packed sequence a token belongs to, 0 for padding.

    Returns:
        float32; 0 for padding.
    """
    experts, per_token = probs.shape[-1], chosen.shape[-1]
    picked = jnp.sum(jax.nn.one_hot(chosen, experts), axis=-2)
    counts = jax.vmap(segment_sums, in_axes=(-1, None), out_axes=-1)(picked, segment_ids)
    lengths = jnp.sum(counts, axis=-1, keepdims=True) / per_token  # each token has chosen so many
    loads = counts * (experts / per_token) / lengths
    shares = jnp.sum(jax.lax.stop_gradient(loads / lengths) * probs, axis=-1)
    return jnp.where(segment_ids > 0, shares, 0.0)
