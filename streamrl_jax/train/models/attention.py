"""Grouped-query attention over packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.train.arch import Arch
from streamrl_jax.train.models.layers import Linear, RMSNorm, rotate

# Finite, so that a query without any key (the padding of the last block) gives a number that is dropped, not NaN.
_MASKED = -1e30


class Attention(nnx.Module):
    """Projections, norms of the heads, rotary embedding, causal attention within each segment, output projection."""

    def __init__(self, arch: Arch, *, rngs: nnx.Rngs) -> None:
        """Creates the four projections and, where the architecture has them, the norms of queries and keys."""
        embed = {"embed": arch.embed}
        queries = {"heads": arch.heads, "head_dim": arch.head_dim}
        keys = {"kv_heads": arch.kv_heads, "head_dim": arch.head_dim}
        self.query = Linear(embed, queries, bias=arch.qkv_bias, rngs=rngs)
        self.key = Linear(embed, keys, bias=arch.qkv_bias, rngs=rngs)
        self.value = Linear(embed, keys, bias=arch.qkv_bias, rngs=rngs)
        self.out = Linear(queries, embed, rngs=rngs)
        self.query_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.key_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "rows len embed"],
        cos: Float[Array, "rows len half"],
        sin: Float[Array, "rows len half"],
        segment_ids: Int[Array, "rows len"],
        block: int,
    ) -> Float[Array, "rows len embed"]:
        """Attends; see `attend` for the masking rule and for `block`."""
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return self.out(attend(query, key, self.value(x), segment_ids, block))


def attend(
    query: Float[Array, "rows len heads head_dim"],
    key: Float[Array, "rows len kv_heads head_dim"],
    value: Float[Array, "rows len kv_heads head_dim"],
    segment_ids: Int[Array, "rows len"],
    block: int,
) -> Float[Array, "rows len heads head_dim"]:
    """softmax(q k / sqrt(head_dim)) v, causal within a segment; query head h reads key/value head h // group.

    Position s is visible from t where s <= t and both have the same segment id (padding, id 0, sees only
    padding). Rows longer than `block` are worked off in blocks of queries under a rematerialised scan, so
    that scores take O(len * block) memory in both passes instead of O(len^2). Scores and softmax are float32
    in any case.

    Args:
        query: Queries, rotated.
        key: Keys, rotated.
        value: Values.
        segment_ids: Which packed sequence a token belongs to, 0 for padding.
        block: Largest number of queries whose scores exist at once.

    Returns:
        The attended values, in the dtype of `query`.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    # Folding a group's query heads into the rows of the product makes it large enough for the matrix units.
    folded = scaled.reshape(rows, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    keys, values = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    if length <= block:
        attended = _attend_block(folded, keys, values, _visible(segment_ids, segment_ids, jnp.arange(length)))
    else:
        attended = _attend_in_blocks(folded, keys, values, segment_ids, block)
    return attended.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)


def _attend_in_blocks(
    query: Float[Array, "rows kv_heads group len head_dim"],
    key: Float[Array, "rows kv_heads len head_dim"],
    value: Float[Array, "rows kv_heads len head_dim"],
    segment_ids: Int[Array, "rows len"],
    block: int,
) -> Float[Array, "rows kv_heads group len head_dim"]:
    rows, kv_heads, group, length, head_dim = query.shape
    blocks = -(-length // block)
    surplus = blocks * block - length
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, surplus), (0, 0)))
    padded_ids = jnp.pad(segment_ids, ((0, 0), (0, surplus)))
    query_blocks = jnp.moveaxis(padded.reshape(rows, kv_heads, group, blocks, block, head_dim), 3, 0)
    id_blocks = jnp.moveaxis(padded_ids.reshape(rows, blocks, block), 1, 0)

    @jax.checkpoint
    def body(start: Int[Array, ""], queries: Array, ids: Array) -> Array:
        return _attend_block(queries, key, value, _visible(ids, segment_ids, start + jnp.arange(block)))

    def step(start: Int[Array, ""], slices: tuple[Array, Array]) -> tuple[Int[Array, ""], Array]:
        return start + block, body(start, *slices)

    _, attended = jax.lax.scan(step, jnp.int32(0), (query_blocks, id_blocks))
    merged = jnp.moveaxis(attended, 0, 3).reshape(rows, kv_heads, group, blocks * block, head_dim)
    return merged[:, :, :, :length]


def _visible(
    query_ids: Int[Array, "rows queries"],
    key_ids: Int[Array, "rows len"],
    query_index: Int[Array, " queries"],
) -> Bool[Array, "rows queries len"]:
    causal = query_index[:, None] >= jnp.arange(key_ids.shape[1])[None, :]
    return causal & (query_ids[:, :, None] == key_ids[:, None, :])


def _attend_block(
    query: Float[Array, "rows kv_heads group queries head_dim"],
    key: Float[Array, "rows kv_heads len head_dim"],
    value: Float[Array, "rows kv_heads len head_dim"],
    visible: Bool[Array, "rows queries len"],
) -> Float[Array, "rows kv_heads group queries head_dim"]:
    rows, kv_heads, group, queries, head_dim = query.shape
    length = key.shape[2]
    flat = query.reshape(rows, kv_heads, group * queries, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, kv_heads, group, queries, length)
    probs = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED), axis=-1).astype(value.dtype)
    attended = jnp.einsum("bkqs,bksd->bkqd", probs.reshape(rows, kv_heads, group * queries, length), value)
    return attended.reshape(rows, kv_heads, group, queries, head_dim)
