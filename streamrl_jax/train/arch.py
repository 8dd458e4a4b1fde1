"""What a checkpoint's `config.json` says about the model, checked, as a frozen record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamrl_jax.errors import UserError
from streamrl_jax.train.families import ARCHITECTURES, Family, Head
from streamrl_jax.train.hf_fields import Fields
from streamrl_jax.train.rope import Rope, read_rope


@dataclass(frozen=True)
class Arch:
    """A decoder-only transformer: grouped-query attention, RoPE, RMSNorm, SwiGLU or a mixture of SwiGLU experts.

    Attributes:
        architecture: The Hugging Face class name, e.g. "Qwen2ForCausalLM".
        vocab_size: Rows of the embedding (may exceed the tokenizer's vocabulary).
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key/value heads; divides `heads`.
        head_dim: Width of a head, even.
        mlp: Width of the feed-forward layer; in a mixture, of each expert.
        experts: Experts of each feed-forward layer; 0: the layers are dense.
        experts_per_token: How many of them work on a token; 0 in a dense model.
        normalise_experts: Whether the weights of a token's experts are scaled to sum to 1.
        rope: The rotary embedding.
        norm_eps: Epsilon inside RMSNorm.
        qkv_bias: Whether query, key and value projections have a bias.
        qk_norm: Whether each head's queries and keys are normalised.
        tied: Whether the output head is the embedding itself.
        head: "lm", or "value" for a checkpoint with a scalar head (a critic's).
        head_bias: Whether the scalar head of the checkpoint has a bias.
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
    experts: int
    experts_per_token: int
    normalise_experts: bool
    rope: Rope
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    head: Head
    head_bias: bool
    max_positions: int
    hf_config_json: str

    @property
    def hf_config(self) -> dict[str, Any]:
        """A fresh copy of the configuration this architecture was read from."""
        return json.loads(self.hf_config_json)

    def same_body(self, other: Arch) -> bool:
        """Whether two checkpoints' decoders have the same parameters, whatever their heads."""
        return self._body() == other._body()

    def check_expert_shards(self, shards: int) -> None:
        """Sees to it that each device along the mesh's tensor axis gets as many experts.

        Raises:
            UserError: They cannot be shared out evenly.
        """
        if self.experts % shards:
            raise UserError(
                f"trainer.mesh.tensor = {shards} does not divide the model's num_experts = {self.experts}; choose one "
                f"that does, since each device along that axis holds its share of the experts"
            )

    def _body(self) -> Arch:
        return replace(self, architecture="", tied=False, head="lm", head_bias=False, hf_config_json="")


def arch_from_hf(config: Mapping[str, Any], where: str = "config.json", *, critic: bool = False) -> Arch:
    """Reads a Hugging Face configuration and refuses, by name, what the trainer does not implement.

    Args:
        config: The parsed config.json.
        where: What to call the source in an error, usually the file's path.
        critic: Whether a scalar head over the decoder is allowed too.

    Returns:
        The architecture.

    Raises:
        UserError: A field is missing, has a wrong type, or asks for something that is not supported.
    """
    fields = Fields(config, where)
    architecture = _architecture(fields, critic)
    family, head = ARCHITECTURES[architecture]
    _refuse_unsupported(fields)
    if head.head == "value":
        _refuse_several_labels(fields)
    embed, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    experts, per_token = _experts(fields) if family.experts else (0, 0)
    return Arch(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        embed=embed,
        layers=fields.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, family, embed, heads),
        mlp=fields.positive("moe_intermediate_size" if family.experts else "intermediate_size"),
        experts=experts,
        experts_per_token=per_token,
        normalise_experts=family.experts and fields.boolean("norm_topk_prob", False),
        rope=read_rope(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied=fields.boolean("tie_word_embeddings", False),
        head=head.head,
        head_bias=head.bias,
        max_positions=fields.positive("max_position_embeddings"),
        hf_config_json=json.dumps(dict(config)),
    )


def _architecture(fields: Fields, critic: bool) -> str:
    found = fields.config.get("architectures")
    allowed = [name for name, (_, head) in ARCHITECTURES.items() if critic or head.head == "lm"]
    supported = ", ".join(allowed)
    if not isinstance(found, list) or len(found) != 1:
        raise fields.error("architectures", f"a list of one name is needed; supported are {supported}")
    if found[0] in allowed:
        return found[0]
    if found[0] in ARCHITECTURES:
        raise fields.error(
            "architectures",
            f"a scalar head makes no policy, it is for model.critic_path; supported here are {supported}",
        )
    raise fields.error("architectures", f"this architecture is not supported; supported are {supported}")


def _refuse_unsupported(fields: Fields) -> None:
    config = fields.config
    if config.get("quantization_config") is not None:
        raise fields.error(
            "quantization_config", "quantized checkpoints cannot be trained; give the original weights"
        )
    if config.get("hidden_act") != "silu":
        raise fields.error("hidden_act", 'only "silu" (SwiGLU) is supported')
    if config.get("use_sliding_window"):
        raise fields.error("use_sliding_window", "sliding-window attention is not supported")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.error("layer_types", 'only "full_attention" layers are supported')
    if config.get("mlp_bias"):
        raise fields.error("mlp_bias", "biases in the feed-forward layer are not supported")
    # The switch also puts a bias on the output projection; Qwen2 has its three biases without any switch.
    if config.get("attention_bias"):
        raise fields.error("attention_bias", "only Qwen2's biases (query, key and value) are supported")


def _refuse_several_labels(fields: Fields) -> None:
    """transformers writes the number of labels as the length of `id2label`, and means 2 where both are absent."""
    field = "num_labels" if fields.config.get("num_labels") is not None else "id2label"
    value = fields.config.get(field)
    if field == "id2label":
        value = len(value) if isinstance(value, dict) else 2
    if value != 1:
        raise fields.error(field, "a critic's head gives one number; only num_labels = 1 is supported")


def _head_dim(fields: Fields, family: Family, embed: int, heads: int) -> int:
    default = family.head_dim
    if default is None:
        if fields.config.get("head_dim") is None and embed % heads:
            raise fields.error(
                "hidden_size", f"without head_dim it must be a multiple of num_attention_heads = {heads}"
            )
        default = embed // heads
    head_dim = fields.positive("head_dim", default)
    if head_dim % 2:
        raise fields.error("head_dim", "the rotary embedding needs an even width of a head")
    return head_dim


def _experts(fields: Fields) -> tuple[int, int]:
    """Experts, and experts of a token; the layers must be alike, since they are stacked."""
    if fields.positive("decoder_sparse_step", 1) != 1:
        raise fields.error("decoder_sparse_step", "only models whose layers are all mixtures are supported")
    if fields.config.get("mlp_only_layers"):
        raise fields.error("mlp_only_layers", "only models whose layers are all mixtures are supported")
    # transformers 5 writes the same number under another name.
    names = [name for name in ("num_experts", "num_local_experts") if fields.config.get(name) is not None]
    counts = {fields.positive(name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise fields.error("num_local_experts", "it differs from num_experts; leave one of them out")
    experts, per_token = counts.pop(), fields.positive("num_experts_per_tok")
    if per_token > experts:
        raise fields.error("num_experts_per_tok", f"there are only {experts} experts")
    return experts, per_token
