"""The decoder as Flax NNX modules: embedding, stacked blocks, final norm, and one of two heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from streamrl_jax.train.arch import Arch
from streamrl_jax.train.families import Head
from streamrl_jax.train.mesh import batch_sharding, named_sharding
from streamrl_jax.train.models.attention import Attention
from streamrl_jax.train.models.layers import RMSNorm, SwiGLU, rope_tables, weight, zeros
from streamrl_jax.train.models.mixture import Mixture

Remat = Literal["none", "full", "dots"]
ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Compute:
    """How a forward pass is computed; none of it changes the parameters.

    Attributes:
        dtype: Of activations and of the weights inside products; the masters stay float32.
        remat: What the backward pass computes again: "none" keeps every activation, "dots" keeps the results
            of the weight products, "full" keeps only the input of each block.
        attention_block: Rows longer than this are attended in blocks of so many queries.
    """

    dtype: ComputeDtype = "float32"
    remat: Remat = "full"
    attention_block: int = 512


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, arch: Arch, *, rngs: nnx.Rngs) -> None:
        """Creates the block's parameters."""
        self.attention_norm = RMSNorm(arch.embed, arch.norm_eps)
        self.attention = Attention(arch, rngs=rngs)
        self.mlp_norm = RMSNorm(arch.embed, arch.norm_eps)
        self.mlp = Mixture(arch, rngs=rngs) if arch.experts else SwiGLU(arch, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "rows len embed"],
        cos: Float[Array, "rows len half"],
        sin: Float[Array, "rows len half"],
        segment_ids: Int[Array, "rows len"],
        attention_block: int,
        mesh: Mesh,
    ) -> tuple[Float[Array, "rows len embed"], Float[Array, "rows len"] | None]:
        """Adds attention and feed-forward to the residual stream; beside it, a mixture's balance losses."""
        x = x + self.attention(self.attention_norm(x), cos, sin, segment_ids, attention_block)
        normalised, balance = self.mlp_norm(x), None
        if isinstance(self.mlp, Mixture):
            added, balance = self.mlp(normalised, segment_ids, mesh)
        else:
            added = self.mlp(normalised)
        return x + added, balance


class VocabTable(nnx.Module):
    """A matrix [vocab, embed]: the embedding, and the untied output head."""

    def __init__(self, arch: Arch, *, rngs: nnx.Rngs) -> None:
        """Creates the table; its scale suits its use as an output head, whose fan-in is `embed`."""
        self.weight = weight(rngs, (arch.vocab_size, arch.embed), ("vocab", "embed"), arch.embed)


class ValueHead(nnx.Module):
    """embed -> 1, all zero at the start, so that a new critic predicts 0."""

    def __init__(self, arch: Arch) -> None:
        """Creates kernel [embed] and a scalar bias."""
        self.kernel = zeros((arch.embed,), ("norm",))
        self.bias = zeros((), ())

    def __call__(self, x: Float[Array, "rows len embed"]) -> Float[Array, "rows len"]:
        """One float32 number for each token."""
        return x.astype(jnp.float32) @ self.kernel[...] + self.bias[...]


class Decoder(nnx.Module):
    """The decoder up to the final norm, with the parameters of its head."""

    def __init__(self, arch: Arch, head: Head, *, rngs: nnx.Rngs) -> None:
        """Creates the parameters; those of the blocks have a leading "layers" dimension."""
        self.arch = arch
        self.embedding = VocabTable(arch, rngs=rngs)
        self.layers = _stacked_blocks(arch, rngs)
        self.norm = RMSNorm(arch.embed, arch.norm_eps)
        if head == "value":
            self.value_head = ValueHead(arch)
        elif not arch.tied:
            self.lm_head = VocabTable(arch, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "rows len"],
        positions: Int[Array, "rows len"],
        segment_ids: Int[Array, "rows len"],
        compute: Compute,
        mesh: Mesh,
    ) -> tuple[Float[Array, "rows len embed"], Float[Array, "rows len"]]:
        """The hidden states after the final norm, in the compute dtype, and the mean of the layers' balance losses."""

        def pin(x: Array) -> Array:
            # Parameters are split over fsdp along "embed"; left alone, the partitioner may split activations
            # the same way and then gather them at each norm.
            return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))

        cos, sin = rope_tables(positions, self.arch.rope.frequencies(self.arch.head_dim))
        graphdef, stacked = nnx.split(self.layers)

        def block(
            x: Array, layer: Any, cos: Array, sin: Array, segment_ids: Array
        ) -> tuple[Array, Array | None]:
            module = nnx.merge(graphdef, layer)
            x, balance = module(x, cos, sin, segment_ids, compute.attention_block, mesh)
            return pin(x), balance

        block = _rematerialised(block, compute.remat)
        x = pin(self._embed(tokens, mesh).astype(compute.dtype))
        x, balances = jax.lax.scan(lambda x, layer: block(x, layer, cos, sin, segment_ids), x, stacked)
        balance = jnp.zeros(tokens.shape, jnp.float32) if balances is None else jnp.mean(balances, axis=0)
        return self.norm(x), balance

    def _embed(self, tokens: Int[Array, "rows len"], mesh: Mesh) -> Float[Array, "rows len embed"]:
        table = self.embedding.weight[...]
        # A lookup cannot have both its result's rows and the table's columns split over fsdp: gather the columns.
        lookup = named_sharding(("vocab", "norm"), table.shape, mesh)
        return jax.lax.with_sharding_constraint(table, lookup)[tokens]


def _stacked_blocks(arch: Arch, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=arch.layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None, "axes": "layers"})
    def make(rngs: nnx.Rngs) -> Block:
        return Block(arch, rngs=rngs)

    return make(rngs)


def _rematerialised(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    # Inside a scan nothing can be merged across iterations, so the barriers against that would only cost time.
    return jax.checkpoint(block, prevent_cse=False, policy=policy)
