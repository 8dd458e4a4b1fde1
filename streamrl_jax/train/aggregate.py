"""How per-token numbers become one: weights of the tokens, and the denominator of the global batch.

    loss = ( sum over all tokens of  weight_t * x_t ) / denominator

A token's weight is known as soon as its sample is; the denominator only when the last sample is. So
gradients of *sums* are accumulated while samples arrive, and the division happens once, in the update
(DESIGN rule 2). With N kept tokens in S sequences, sequence i having n_i of them (the names are verl's;
arXiv 2503.14476 argues for the first, arXiv 2402.03300 uses the second, arXiv 2503.20783 argues for the
third up to a constant):

    mode                   weight_t   denominator   loss
    token-mean             1          N             mean over tokens
    seq-mean-token-mean    1 / n_i    S             mean over sequences of their mean
    seq-mean-token-sum     1          S             mean over sequences of their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@dataclass(frozen=True)
class Size:
    """How much a (mini-)batch holds; sums over micro-batches give that of the whole.

    Attributes:
        tokens: Tokens that are trained on; masked ones do not count.
        sequences: Sequences with at least one such token.
    """

    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.sequences + other.sequences)


def token_weight(mode: AggregationMode, tokens: int) -> float:
    """The weight of each kept token of a sequence.

    Args:
        mode: The aggregation.
        tokens: Kept tokens of the sequence, n_i; at least 1.

    Returns:
        The weight; see the table of the module.
    """
    return 1.0 / tokens if mode == "seq-mean-token-mean" else 1.0


def denominator(mode: AggregationMode, size: Size) -> int:
    """What the weighted sum over the global batch is divided by; see the table of the module."""
    match mode:
        case "token-mean":
            return size.tokens
        case "seq-mean-token-mean" | "seq-mean-token-sum":
            return size.sequences
        case _:
            assert_never(mode)


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
