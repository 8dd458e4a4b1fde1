"""What a checkpoint's `config.json` says about the model, checked, as a frozen record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from streamrl_jax.errors import UserError

# Architecture -> whether query, key and value projections carry a bias.
SUPPORTED: Final[Mapping[str, bool]] = {"Qwen2ForCausalLM": True, "LlamaForCausalLM": False}

# transformers' own default where config.json leaves the base of the rotary embedding out.
_DEFAULT_ROPE_THETA: Final = 10000.0


@dataclass(frozen=True)
class Arch:
    """A decoder-only transformer: grouped-query attention, RoPE, RMSNorm, SwiGLU.

    Attributes:
        architecture: The Hugging Face class name, e.g. "Qwen2ForCausalLM".
        vocab_size: Rows of the embedding (may exceed the tokenizer's vocabulary).
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key/value heads; divides `heads`.
        head_dim: Width of a head, even.
        mlp: Width of the feed-forward layer.
        rope_theta: Base of the rotary embedding.
        norm_eps: Epsilon inside RMSNorm.
        qkv_bias: Whether query, key and value projections have a bias.
        tied: Whether the output head is the embedding itself.
        max_positions: Longest sequence the checkpoint was made for.
        hf_config_json: The whole original configuration, to be written back by an export.
    """

    architecture: str
    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    tied: bool
    max_positions: int
    hf_config_json: str

    @property
    def hf_config(self) -> dict[str, Any]:
        """A fresh copy of the configuration this architecture was read from."""
        return json.loads(self.hf_config_json)

    def same_body(self, other: Arch) -> bool:
        """Whether two checkpoints' decoders have the same parameters, whatever their heads."""
        return replace(self, tied=other.tied, hf_config_json="") == replace(other, hf_config_json="")


def arch_from_hf(config: Mapping[str, Any], where: str = "config.json") -> Arch:
    """Reads a Hugging Face configuration and refuses, by name, what the trainer does not implement.

    Both ways of writing the rotary embedding are understood: `rope_theta` and `rope_scaling` (transformers 4)
    and `rope_parameters` (transformers 5).

    Args:
        config: The parsed config.json.
        where: What to call the source in an error, usually the file's path.

    Returns:
        The architecture.

    Raises:
        UserError: A field is missing, has a wrong type, or asks for something that is not supported.
    """
    reader = _Reader(config, where)
    architecture = _architecture(reader)
    _refuse_unsupported(reader)
    embed, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    kv_heads = reader.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    if config.get("head_dim") is None and embed % heads:
        raise reader.error(
            "hidden_size", f"without head_dim it must be a multiple of num_attention_heads = {heads}"
        )
    head_dim = reader.positive("head_dim", embed // heads)
    if head_dim % 2:
        raise reader.error("head_dim", "the rotary embedding needs an even width of a head")
    return Arch(
        architecture=architecture,
        vocab_size=reader.positive("vocab_size"),
        embed=embed,
        layers=reader.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=reader.positive("intermediate_size"),
        rope_theta=_rope_theta(reader),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        qkv_bias=SUPPORTED[architecture],
        tied=reader.boolean("tie_word_embeddings", False),
        max_positions=reader.positive("max_position_embeddings"),
        hf_config_json=json.dumps(dict(config)),
    )


@dataclass(frozen=True)
class _Reader:
    """Typed access to config.json; its errors name file, field and value."""

    config: Mapping[str, Any]
    where: str

    def error(self, field: str, remedy: str) -> UserError:
        value = json.dumps(self.config[field]) if field in self.config else "missing"
        return UserError(f"{self.where}: field {field!r} is {value}: {remedy}")

    def positive(self, field: str, default: int | None = None) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "a positive whole number is needed")
        return value

    def number(self, field: str, default: float) -> float:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(field, "a positive number is needed")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value

    def _get(self, field: str, default: object) -> object:
        value = self.config.get(field)
        return default if value is None else value


def _architecture(reader: _Reader) -> str:
    names = reader.config.get("architectures")
    supported = ", ".join(SUPPORTED)
    if not isinstance(names, list) or len(names) != 1:
        raise reader.error("architectures", f"a list of one name is needed; supported are {supported}")
    if names[0] not in SUPPORTED:
        raise reader.error("architectures", f"this architecture is not supported; supported are {supported}")
    return names[0]


def _refuse_unsupported(reader: _Reader) -> None:
    config = reader.config
    if config.get("quantization_config") is not None:
        raise reader.error(
            "quantization_config", "quantized checkpoints cannot be trained; give the original weights"
        )
    if config.get("hidden_act") != "silu":
        raise reader.error("hidden_act", 'only "silu" (SwiGLU) is supported')
    if config.get("use_sliding_window"):
        raise reader.error("use_sliding_window", "sliding-window attention is not supported")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise reader.error("layer_types", 'only "full_attention" layers are supported')
    if config.get("mlp_bias"):
        raise reader.error("mlp_bias", "biases in the feed-forward layer are not supported")
    # Llama's switch also puts a bias on the output projection; Qwen2 has the three biases without any switch.
    if config.get("attention_bias"):
        raise reader.error("attention_bias", "only Qwen2's biases (query, key and value) are supported")


def _rope_theta(reader: _Reader) -> float:
    parameters = reader.config.get("rope_parameters")
    scaling = reader.config.get("rope_scaling")
    for field, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is None:
            continue
        if not isinstance(value, dict):
            raise reader.error(field, "an object is needed")
        if value.get("rope_type", value.get("type", "default")) != "default":
            raise reader.error(field, "scaled rotary embeddings are not supported")
        if value.get("partial_rotary_factor", 1.0) != 1.0:
            raise reader.error(field, "a partial rotary embedding is not supported")
    if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        return _Reader(parameters, f"{reader.where}, rope_parameters").number(
            "rope_theta", _DEFAULT_ROPE_THETA
        )
    return reader.number("rope_theta", _DEFAULT_ROPE_THETA)
