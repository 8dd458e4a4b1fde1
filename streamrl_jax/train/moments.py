"""Count, mean and spread of masked tokens, in a form that merges exactly over any split of a batch.

Sums of squares would cancel where the spread is small beside the mean; centred moments do not (Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Scalar = Float[Array, ""] | np.ndarray | float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Scalars: arrays inside a jitted function, Python floats once merged on the host.

    Attributes:
        count: Number of values, or their total weight.
        mean: Their mean; 0 if there are none.
        m2: Sum of squared deviations from the mean.
        low: The smallest; +inf if there are none.
        high: The largest; -inf if there are none.
    """

    count: Scalar = 0.0
    mean: Scalar = 0.0
    m2: Scalar = 0.0
    low: Scalar = math.inf
    high: Scalar = -math.inf

    @property
    def variance(self) -> float:
        """m2 / count, of merged moments; 0 if there are none."""
        return float(self.m2) / float(self.count) if float(self.count) > 0 else 0.0


def moments(values: Float[Array, "rows len"], mask: Bool[Array, "rows len"]) -> Moments:
    """The moments of the values where the mask is true, float32."""
    wide = values.astype(jnp.float32)
    count = jnp.sum(mask, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(mask, wide, 0.0)) / jnp.maximum(count, 1.0)
    m2 = jnp.sum(jnp.where(mask, jnp.square(wide - mean), 0.0))
    low = jnp.min(jnp.where(mask, wide, jnp.inf))
    high = jnp.max(jnp.where(mask, wide, -jnp.inf))
    return Moments(count, mean, m2, low, high)


def merge(parts: Iterable[Moments]) -> Moments:
    """The moments of all values together, on the host in double precision."""
    return reduce(_merge_two, parts, Moments())


def faded(past: Moments, factor: float) -> Moments:
    """The same mean and variance with `factor` times the weight in a later merge."""
    return replace(past, count=float(past.count) * factor, m2=float(past.m2) * factor)


def _merge_two(first: Moments, second: Moments) -> Moments:
    n1, n2 = float(first.count), float(second.count)
    if n1 + n2 == 0.0:
        return first
    delta = float(second.mean) - float(first.mean)
    return Moments(
        count=n1 + n2,
        mean=float(first.mean) + delta * n2 / (n1 + n2),
        m2=float(first.m2) + float(second.m2) + delta * delta * n1 * n2 / (n1 + n2),
        low=min(float(first.low), float(second.low)),
        high=max(float(first.high), float(second.high)),
    )
