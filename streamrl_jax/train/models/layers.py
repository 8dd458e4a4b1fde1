"""The decoder's small parts: linear map, RMSNorm, rotary embedding, SwiGLU.

Every parameter is created in float32 and carries its logical axes (`streamrl_jax.train.mesh.RULES`) as
metadata.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from streamrl_jax.train.arch import Arch


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int
) -> nnx.Param[jax.Array]:
    """A normally distributed parameter of standard deviation fan_in^-0.5."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, axes=axes)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[jax.Array]:
    """A parameter that starts at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """A linear map between shaped features, e.g. (embed,) -> (heads, head_dim).

    Heads have a dimension of their own, so that sharding can only ever cut between heads.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Creates kernel [*inputs, *outputs] and, if asked for, a zero bias [*outputs].

        Args:
            inputs: Logical axis and size of each input dimension, in order.
            outputs: The same for the output.
            bias: Whether there is a bias.
            rngs: Source of randomness.
        """
        self.contracted = len(inputs)
        shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
        self.kernel = weight(rngs, shape, axes, math.prod(inputs.values()))
        self.bias = zeros(tuple(outputs.values()), tuple(outputs)) if bias else None

    def __call__(self, x: Float[Array, "rows len *inputs"]) -> Float[Array, "rows len *outputs"]:
        """Applies the map in the dtype of `x`."""
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.contracted)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (arXiv 1910.07467), computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        """Creates a scale of ones [size]."""
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        """Normalises the last dimension."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]).astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, arch: Arch, *, rngs: nnx.Rngs) -> None:
        """Creates the three projections."""
        embed, mlp = {"embed": arch.embed}, {"mlp": arch.mlp}
        self.gate = Linear(embed, mlp, rngs=rngs)
        self.up = Linear(embed, mlp, rngs=rngs)
        self.down = Linear(mlp, embed, rngs=rngs)

    def __call__(self, x: Float[Array, "rows len embed"]) -> Float[Array, "rows len embed"]:
        """Applies the feed-forward layer."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rope_tables(
    positions: Int[Array, "rows len"], frequencies: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "rows len half"], Float[Array, "rows len half"]]:
    """Cosines and sines of the rotary angles, float32: position times frequency (`streamrl_jax.train.rope`)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "rows len heads head_dim"],
    cos: Float[Array, "rows len half"],
    sin: Float[Array, "rows len half"],
) -> Float[Array, "rows len heads head_dim"]:
    """Applies the rotary embedding; pair i is (x[i], x[i + head_dim / 2]), as Hugging Face lays it out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
