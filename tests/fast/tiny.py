"""Tiny models and packed batches that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Arch, Model, Params, arch_from_hf

Sequences = Sequence[Sequence[np.ndarray]]

MODEL_TYPES = {"Qwen2": "qwen2", "Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Packed(NamedTuple):
    """A batch of packed rows, as the trainer's model takes it."""

    tokens: Any
    positions: Any
    segment_ids: Any


def hf_config(architecture: str = "Qwen2ForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json of a model small enough to compile in a second."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture.partition("For")[0], "other"),
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if architecture.startswith("Qwen3Moe"):
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        }
    return config | changes


def tiny_arch(architecture: str = "Qwen2ForCausalLM", *, critic: bool = False, **changes: Any) -> Arch:
    """The architecture of `hf_config`."""
    return arch_from_hf(hf_config(architecture, **changes), critic=critic)


def tiny_model(arch: Arch, mesh_shape: tuple[int, int, int] = (1, 1, 1), **fields: Any) -> Model:
    """A model on the first devices."""
    count = int(np.prod(mesh_shape))
    return Model(arch, make_mesh(*mesh_shape, devices=jax.devices()[:count]), **fields)


def random_params(model: Model, seed: int) -> Params:
    """Parameters drawn by NumPy, so that nothing is compiled; all of them random, biases and norms too."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
        value = rng.normal(size=struct.shape) * 0.2 + ("scale" in jax.tree_util.keystr(path))
        return jax.device_put(value.astype(np.float32), struct.sharding)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params())


def shardings(tree: Any) -> Any:
    """The sharding of each leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def random_sequences(seed: int, lengths: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """For each row, sequences of the given lengths."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 48, n).astype(np.int32) for n in row] for row in lengths]


def pack(sequences: Sequences, length: int, *, left_padding: int = 0) -> Packed:
    """Puts each row's sequences side by side; the rest of the row is padding (token 0, segment 0)."""
    shape = (len(sequences), length)
    packed = Packed(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    for row, parts in enumerate(sequences):
        start = left_padding
        for segment, part in enumerate(parts, start=1):
            where = slice(start, start + len(part))
            packed.tokens[row, where] = part
            packed.positions[row, where] = np.arange(len(part))
            packed.segment_ids[row, where] = segment
            start += len(part)
    return packed


def unpack(values: Any, sequences: Sequences, *, left_padding: int = 0) -> list[np.ndarray]:
    """Cuts [rows, len, ...] into one array for each sequence, in the order of `sequences`."""
    host = np.asarray(values)
    pieces = []
    for row, parts in enumerate(sequences):
        start = left_padding
        for part in parts:
            pieces.append(host[row, start : start + len(part)])
            start += len(part)
    return pieces
