"""The frequencies of the rotary embedding: how a checkpoint writes them down, and their values. No JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float

from streamrl_jax.errors import UserError
from streamrl_jax.train.hf_fields import Fields

# transformers' own default where config.json leaves the base out.
_DEFAULT_THETA: Final = 10000.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low frequencies (`rope_type` "llama3").

    Attributes:
        factor: What frequencies of long waves are divided by.
        low_freq_factor: Waves longer than original_positions / low_freq_factor are stretched by the whole factor.
        high_freq_factor: Waves shorter than original_positions / high_freq_factor stay; in between it blends.
        original_positions: Context of the pre-training before the stretch, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Rope:
    """The rotary embedding (arXiv 2104.09864).

    Attributes:
        theta: Its base.
        scaling: How the frequencies are stretched; None: not at all.
    """

    theta: float
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> Float[np.ndarray, " half"]:
        """Radians per position of each pair: theta^(-2i / head_dim), stretched; float32.

        Every step is rounded to float32 as transformers and vLLM do it: at position 30,000 one last bit would be 0.002
        of an angle. The stretch is Llama 3.1's: with the wave length w = 2 pi / f and the original context L,
        f / factor where w > L / low, f where w < L / high, and between them (1 - s) f / factor + s f with
        s = (L / w - low) / (high - low).

        Args:
            head_dim: Width of a head, even.

        Returns:
            One frequency for each pair.
        """
        # The power rounded to float32, then its float32 reciprocal.
        powers = (self.theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
        plain = np.float32(1) / powers
        if self.scaling is None:
            return plain
        stretch, one = self.scaling, np.float32(1)
        low, high = np.float32(stretch.low_freq_factor), np.float32(stretch.high_freq_factor)
        context, factor = np.float32(stretch.original_positions), np.float32(stretch.factor)
        waves = np.float32(2 * math.pi) / plain
        share = (context / waves - low) / np.float32(stretch.high_freq_factor - stretch.low_freq_factor)
        blended = (one - share) * plain / factor + share * plain
        stretched = np.where(waves > context / low, plain / factor, blended)
        return np.where(waves < context / high, plain, stretched)


def read_rope(fields: Fields) -> Rope:
    """Reads the rotary embedding from config.json.

    Both ways of writing it are understood: `rope_theta` and `rope_scaling` (transformers 4), and `rope_parameters`
    (transformers 5).

    Args:
        fields: The whole configuration.

    Returns:
        The embedding.

    Raises:
        UserError: It is of a kind that is not supported, partial, or written twice with different values.
    """
    _refuse_partial("partial_rotary_factor", fields, fields)
    found = {name: part for name in ("rope_parameters", "rope_scaling") if (part := fields.part(name))}
    scalings = {name: _scaling(name, part, fields) for name, part in found.items()}
    if len(set(scalings.values())) > 1:
        raise fields.error("rope_scaling", "it differs from rope_parameters; leave one of them out")
    # transformers 5 looks for the base in the object first, whichever of the two names that has.
    written = next((part for part in found.values() if part.config.get("rope_theta") is not None), fields)
    return Rope(written.number("rope_theta", _DEFAULT_THETA), next(iter(scalings.values()), None))


def _scaling(name: str, part: Fields, fields: Fields) -> Llama3Scaling | None:
    _refuse_partial(name, part, fields)
    kind = part.config.get("rope_type", part.config.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unsupported(name, kind, fields)
    scaling = Llama3Scaling(
        factor=part.number("factor"),
        low_freq_factor=part.number("low_freq_factor"),
        high_freq_factor=part.number("high_freq_factor"),
        original_positions=part.positive("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise part.error(
            "high_freq_factor", f"it must be above low_freq_factor = {scaling.low_freq_factor:g}"
        )
    return scaling


def _refuse_partial(name: str, part: Fields, fields: Fields) -> None:
    if part.config.get("partial_rotary_factor") not in (None, 1):
        raise fields.error(name, "a partial rotary embedding is not supported")


def _unsupported(name: str, kind: object, fields: Fields) -> UserError:
    return fields.error(
        name, f'the rotary embedding {kind!r} is not supported; supported are "default" and "llama3"'
    )
