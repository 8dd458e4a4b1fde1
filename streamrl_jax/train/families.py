"""The supported families of checkpoints: one table of what each has beyond the common decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final, Literal

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class Family:
    """What sets a family apart.

    Attributes:
        qkv_bias: Query, key and value projections carry a bias.
        qk_norm: Queries and keys pass an RMSNorm over the width of a head, before the rotary embedding.
        experts: The feed-forward layers are mixtures of experts.
        head_dim: Width of a head where config.json leaves it out; None: hidden_size / num_attention_heads.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    head_dim: int | None = None


@dataclass(frozen=True)
class HeadKind:
    """What a checkpoint has above the final norm.

    Attributes:
        head: "lm" (one logit for each entry of the vocabulary) or "value" (one number for each token).
        bias: Whether it has a bias.
    """

    head: Head
    bias: bool = False


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "Qwen2": Family(qkv_bias=True),
        "Llama": Family(),
        "Qwen3": Family(qk_norm=True, head_dim=128),
        "Qwen3Moe": Family(qk_norm=True, experts=True),
    }
)

HEADS: Final[Mapping[str, HeadKind]] = MappingProxyType(
    {
        "ForCausalLM": HeadKind("lm"),
        "ForTokenClassification": HeadKind("value", bias=True),
        "ForSequenceClassification": HeadKind("value"),
    }
)

ARCHITECTURES: Final[Mapping[str, tuple[Family, HeadKind]]] = MappingProxyType(
    {family + head: (FAMILIES[family], HEADS[head]) for head, family in product(HEADS, FAMILIES)}
)
"""Hugging Face's class name -> family and head."""
