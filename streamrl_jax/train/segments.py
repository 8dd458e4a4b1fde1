"""Sums over the tokens of one packed sequence, given to each of its tokens. Nothing crosses a segment.

By segmented scans, which are log(len) deep and elementwise: they need no bound on the segments of a row, and the
partitioner splits them over rows as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def first_of_segment(segment_ids: Int[Array, "rows len"]) -> Bool[Array, "rows len"]:
    """True at the first token of each segment (padding, id 0, is one too)."""
    return segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def last_of_segment(segment_ids: Int[Array, "rows len"]) -> Bool[Array, "rows len"]:
    """True at the last token of each segment."""
    return segment_ids != jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def carry_from_right(
    factors: Float[Array, "rows len"], terms: Float[Array, "rows len"], last: Bool[Array, "rows len"]
) -> Float[Array, "rows len"]:
    """x_t = terms_t + factors_t x_{t+1}, beginning anew at the last token of each segment."""
    return _carry(factors, terms, last, reverse=True)


def segment_sums(
    values: Float[Array, "rows len"], segment_ids: Int[Array, "rows len"]
) -> Float[Array, "rows len"]:
    """The sum of the values over a token's whole segment, at each token; float32.

    Args:
        values: What is added up; 0 where a token is to count nothing.
        segment_ids: Which packed sequence a token belongs to; the tokens of one are contiguous.
    """
    wide = values.astype(jnp.float32)
    ones = jnp.ones_like(wide)
    before = _carry(ones, wide, first_of_segment(segment_ids), reverse=False)
    onwards = _carry(ones, wide, last_of_segment(segment_ids), reverse=True)
    return before + onwards - wide


def segment_means(
    values: Float[Array, "rows len"], mask: Bool[Array, "rows len"], segment_ids: Int[Array, "rows len"]
) -> Float[Array, "rows len"]:
    """The mean of the values over the kept tokens of a token's segment, at each token; float32.

    Args:
        values: 0 outside the mask.
        mask: The kept tokens. The mean of a segment without one is 0.
        segment_ids: Which packed sequence a token belongs to; the tokens of one are contiguous.
    """
    count = segment_sums(mask.astype(jnp.float32), segment_ids)
    return segment_sums(values, segment_ids) / jnp.maximum(count, 1.0)


def first_kept(mask: Bool[Array, "rows len"], segment_ids: Int[Array, "rows len"]) -> Bool[Array, "rows len"]:
    """True at the first token of the mask in each segment that has one: one mark a sequence that is trained on."""
    kept = mask.astype(jnp.float32)
    before = _carry(jnp.ones_like(kept), kept, first_of_segment(segment_ids), reverse=False)
    return mask & (before == 1.0)


def _carry(
    factors: Float[Array, "rows len"],
    terms: Float[Array, "rows len"],
    begins: Bool[Array, "rows len"],
    *,
    reverse: bool,
) -> Float[Array, "rows len"]:
    def compose(done: tuple[Array, Array], new: tuple[Array, Array]) -> tuple[Array, Array]:
        return new[0] * done[0], new[0] * done[1] + new[1]

    pair = (jnp.where(begins, 0.0, factors), terms)
    _, result = jax.lax.associative_scan(compose, pair, reverse=reverse, axis=1)
    return result
