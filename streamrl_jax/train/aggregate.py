"""How per-token numbers become one: weights of the tokens, and the denominator of the global batch.

    loss = ( sum over all tokens of  weight_t * x_t ) / denominator

A token's weight follows from its own sequence; the denominator is known only when the last sample is. So gradients of
*sums* are accumulated while samples arrive, with the size of what they cover, and the division happens once, in the
update (DESIGN rule 2). With N kept tokens in S sequences, sequence i having n_i of them, and L a fixed number of
tokens (the names are verl's; arXiv 2503.14476 argues for the first, arXiv 2402.03300 uses the second, arXiv 2503.20783
argues for the last):

    mode                      weight_t   denominator   loss
    token-mean                1          N             mean over tokens
    seq-mean-token-mean       1 / n_i    S             mean over sequences of their mean
    seq-mean-token-sum        1          S             mean over sequences of their sum
    seq-mean-token-sum-norm   1 / L      S             mean over sequences of their sum over L

Masking: a token that is not kept (a prompt's, a left-out answer's, one that a correction masked) counts in neither
numerator nor denominator, and a sequence without a kept token is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.config import Config
from streamrl_jax.train.segments import first_kept, segment_sums

AggregationMode = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]

Count = Int[Array, ""] | int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Size:
    """How much a (mini-)batch holds; sums over micro-batches give that of the whole.

    Attributes:
        tokens: Kept tokens.
        sequences: Sequences with at least one of them.
    """

    tokens: Count = 0
    sequences: Count = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.sequences + other.sequences)


def size_of(mask: Bool[Array, "rows len"], segment_ids: Int[Array, "rows len"]) -> Size:
    """What a micro-batch holds, on the device; int32, so that counts of a large batch stay exact."""
    sequences = first_kept(mask, segment_ids)
    return Size(jnp.sum(mask, dtype=jnp.int32), jnp.sum(sequences, dtype=jnp.int32))


@dataclass(frozen=True)
class Aggregation:
    """A mode with its constant.

    Attributes:
        mode: See the table of the module.
        scale: L, tokens.
    """

    mode: AggregationMode
    scale: int = 1

    @classmethod
    def of(cls, cfg: Config) -> Aggregation:
        """What the configuration asks for: `actor.loss_agg_mode` and `actor.loss_scale_factor`."""
        return cls(cfg.actor.loss_agg_mode, cfg.loss_scale)

    def weights(
        self, mask: Bool[Array, "rows len"], segment_ids: Int[Array, "rows len"]
    ) -> Float[Array, "rows len"]:
        """The weight of each token, 0 outside the mask; see the table of the module."""
        kept = mask.astype(jnp.float32)
        match self.mode:
            case "token-mean" | "seq-mean-token-sum":
                return kept
            case "seq-mean-token-mean":
                return kept / jnp.maximum(segment_sums(kept, segment_ids), 1.0)
            case "seq-mean-token-sum-norm":
                return kept / self.scale
            case _:
                assert_never(self.mode)

    def denominator(self, size: Size) -> Count:
        """What the weighted sum over the global batch is divided by; see the table of the module."""
        return size.tokens if self.mode == "token-mean" else size.sequences


def masked_sum(
    values: Float[Array, "rows len"],
    mask: Bool[Array, "rows len"],
    weights: Float[Array, "rows len"] | None = None,
) -> Float[Array, ""]:
    """Sum of values (times weights) over the tokens of the mask, float32.

    What stands at a masked token, be it infinite, touches neither the sum nor the gradient.
    """
    kept = jnp.where(mask, values.astype(jnp.float32), 0.0)
    return jnp.sum(kept if weights is None else kept * weights)
