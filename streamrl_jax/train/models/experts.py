"""The experts' part of a mixture: SwiGLU over rows sorted by expert, block by block.

XLA's ragged product is not used. On a CPU, and as JAX 0.10.2 lowers it without further flags perhaps on a GPU too, it
is one dense product over all experts with the others' rows set to zero: memory and work grow with rows times experts.
Here they grow with the rows. Neither has been measured on a GPU.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK: Final = 512
"""Largest number of rows of one product: enough to keep matrix units busy, few beside an expert's share of a batch."""


class Kernels(NamedTuple):
    """The matrices of all experts of a device."""

    gate: Float[Array, "experts embed mlp"]
    up: Float[Array, "experts embed mlp"]
    down: Float[Array, "experts mlp embed"]


class _Block(NamedTuple):
    """Consecutive rows of one expert."""

    expert: Int[Array, ""]
    start: Int[Array, ""]
    inside: Bool[Array, "block 1"]  # the rows from `start` on that are the expert's


@jax.custom_vjp
def grouped_swiglu(
    rows: Float[Array, "pairs embed"], kernels: Kernels, sizes: Int[Array, " experts"]
) -> Float[Array, "pairs embed"]:
    """down_e(silu(gate_e(x)) * up_e(x)) of each row x, with the expert e to whose group the row belongs.

    A loop over blocks of at most `BLOCK` rows of one expert, as many as there are: a device to which few pairs belong
    does little. The backward pass computes the inner states again and keeps none; it adds up the kernels' gradients in
    float32, in the order of the blocks. Products are of the dtype of `rows`, summed in float32.

    Args:
        rows: States, the groups one after the other; rows behind the last group belong to none.
        kernels: In the dtype of `rows`.
        sizes: Rows of each expert's group.

    Returns:
        float32; 0 for rows of no group.
    """
    block = _block_size(rows)

    def step(index: Int[Array, ""], out: Array) -> Array:
        where = _block(index, sizes, block)
        gate, up, down = (kernel[where.expert] for kernel in kernels)
        _, _, hidden = _inner(_cut(padded, where, block), gate, up)
        return _put(out, _dot(hidden, down), where)

    padded = _with_surplus(rows, block)
    out = jax.lax.fori_loop(0, _blocks(sizes, block), step, jnp.zeros_like(padded, jnp.float32))
    return out[: len(rows)]


def _forward(rows: Array, kernels: Kernels, sizes: Array) -> tuple[Array, tuple[Array, Kernels, Array]]:
    return grouped_swiglu(rows, kernels, sizes), (rows, kernels, sizes)


def _backward(kept: tuple[Array, Kernels, Array], cotangent: Array) -> tuple[Array, Kernels, None]:
    rows, kernels, sizes = kept
    block = _block_size(rows)
    padded, cotangents = _with_surplus(rows, block), _with_surplus(cotangent.astype(rows.dtype), block)

    def step(index: Int[Array, ""], done: tuple[Array, Kernels]) -> tuple[Array, Kernels]:
        where = _block(index, sizes, block)
        gate, up, down = (kernel[where.expert] for kernel in kernels)
        # Rows of another expert must add nothing to this one's gradient.
        x = jnp.where(where.inside, _cut(padded, where, block), 0)
        out = jnp.where(where.inside, _cut(cotangents, where, block), 0)
        gated, upped, hidden = _inner(x, gate, up)
        d_hidden = _dot(out, down.T)
        _, transpose = jax.vjp(lambda gated, upped: jax.nn.silu(gated) * upped, gated, upped)
        d_gated, d_upped = (part.astype(x.dtype) for part in transpose(d_hidden))
        added = Kernels(_dot(x.T, d_gated), _dot(x.T, d_upped), _dot(hidden.T, out))
        d_rows = (_dot(d_gated, gate.T) + _dot(d_upped, up.T)).astype(x.dtype)
        sums = Kernels(
            *(total.at[where.expert].add(part) for total, part in zip(done[1], added, strict=True))
        )
        return _put(done[0], d_rows, where), sums

    nothing = jnp.zeros_like(padded), Kernels(*(jnp.zeros_like(kernel, jnp.float32) for kernel in kernels))
    d_rows, sums = jax.lax.fori_loop(0, _blocks(sizes, block), step, nothing)
    d_kernels = Kernels(*(total.astype(kernel.dtype) for total, kernel in zip(sums, kernels, strict=True)))
    return d_rows[: len(rows)], d_kernels, None


grouped_swiglu.defvjp(_forward, _backward)


def _inner(
    x: Float[Array, "block embed"], gate: Float[Array, "embed mlp"], up: Float[Array, "embed mlp"]
) -> tuple[Float[Array, "block mlp"], Float[Array, "block mlp"], Float[Array, "block mlp"]]:
    """Both products, float32, and the hidden state, in the dtype of `x`."""
    gated, upped = _dot(x, gate), _dot(x, up)
    return gated, upped, (jax.nn.silu(gated) * upped).astype(x.dtype)


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _block_size(rows: Float[Array, "pairs embed"]) -> int:
    return min(BLOCK, len(rows))


def _blocks(sizes: Int[Array, " experts"], block: int) -> Int[Array, ""]:
    return jnp.sum(-(-sizes // block))


def _block(index: Int[Array, ""], sizes: Int[Array, " experts"], block: int) -> _Block:
    """The block of this index: an expert's blocks follow one another, and so do the experts."""
    ends = jnp.cumsum(-(-sizes // block))
    expert = jnp.sum(ends <= index)
    place = (index - (ends - -(-sizes // block))[expert]) * block  # within the expert's group
    start = (jnp.cumsum(sizes) - sizes)[expert] + place
    return _Block(expert, start, (jnp.arange(block) < sizes[expert] - place)[:, None])


def _with_surplus(rows: Float[Array, "pairs embed"], block: int) -> Float[Array, "more embed"]:
    """A block that begins near the end is cut out whole; a slice would else be moved to fit."""
    return jnp.pad(rows, ((0, block), (0, 0)))


def _cut(rows: Float[Array, "more embed"], where: _Block, block: int) -> Float[Array, "block embed"]:
    return jax.lax.dynamic_slice_in_dim(rows, where.start, block)


def _put(
    rows: Float[Array, "more embed"], values: Float[Array, "block embed"], where: _Block
) -> Float[Array, "more embed"]:
    """Replaces the block's own rows; those of the next expert, behind them, stay."""
    kept = _cut(rows, where, len(values))
    return jax.lax.dynamic_update_slice_in_dim(rows, jnp.where(where.inside, values, kept), where.start, 0)
