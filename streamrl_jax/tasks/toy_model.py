"""The checkpoint that the demos start from: a small Qwen2-architecture model with a character tokenizer, untrained.

    python -m streamrl_jax.tasks.toy_model --out models/toy --seed 0

The tokenizer has to read the same everywhere. `AutoTokenizer` (and so `vllm serve`) may rebuild the tokenizer
of a Qwen2 checkpoint with Qwen2's own pre-tokenizer; a byte-level vocabulary without merges gives one id a
character under either.
"""

from __future__ import annotations

import argparse
import json
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from jaxtyping import Float32
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from streamrl_jax.errors import UserError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_SPECIAL: Final = (PAD, EOS, UNKNOWN)
CHARACTERS: Final = string.digits + string.ascii_lowercase + " \n+-*/=%^,.:;!?()[]<>|'\"#"
"""What the tokenizer knows besides the special tokens: 64 ids in all."""

# Messages are put behind one another as they are: the model knows no roles, but a chat client can ask it a sum.
_CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class ToyShape:
    """Sizes of the model.

    Attributes:
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key/value heads.
        mlp: Width of the feed-forward layer.
        max_positions: Longest sequence, tokens.
    """

    embed: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    max_positions: int = 1024


def write_toy_checkpoint(out: str | Path, seed: int, shape: ToyShape | None = None) -> Path:
    """Writes the untrained checkpoint in Hugging Face's layout; it appears whole or not at all.

    Args:
        out: Directory to make.
        seed: Of the initial weights.
        shape: Sizes; the default has 0.27 million parameters.

    Returns:
        `out` as a path.

    Raises:
        UserError: `out` exists.
    """
    target = Path(out)
    if target.exists():
        raise UserError(f"{target} exists; remove it, or give another directory for the untrained model")
    shape = shape or ToyShape()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        directory = Path(scratch) / "checkpoint"
        directory.mkdir()
        save_file(_initial_weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)  # written for its owner alone
        character_tokenizer().save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
        for name, content in _json_files(shape).items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        directory.rename(target)
    return target


def character_tokenizer() -> tokenizers.Tokenizer:
    """Builds the tokenizer: special tokens first, then one id for each of `CHARACTERS`."""
    alphabet = [_byte_level(character) for character in CHARACTERS]
    vocabulary = {text: number for number, text in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _byte_level(character: str) -> str:
    """How byte-level vocabularies write an ASCII character: printable ones as themselves."""
    ((text, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        character
    )
    return text


def _json_files(shape: ToyShape) -> dict[str, dict[str, Any]]:
    pad, eos = _SPECIAL.index(PAD), _SPECIAL.index(EOS)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(_SPECIAL) + len(CHARACTERS),
        "hidden_size": shape.embed,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.mlp,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": shape.embed**-0.5,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        "pad_token_id": pad,
        "use_cache": True,
    }
    tokenizer_config = {
        # The class that takes tokenizer.json as it is, in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
    }
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [eos], "pad_token_id": pad},
        "tokenizer_config.json": tokenizer_config,
    }


def _initial_weights(shape: ToyShape, seed: int) -> dict[str, np.ndarray]:
    """Normal with standard deviation fan-in^-0.5 (0.02 is too small for this width), norms 1, biases 0."""
    rng = np.random.default_rng(seed)
    head_dim = shape.embed // shape.heads

    def linear(rows: int, columns: int) -> Float32[np.ndarray, "rows columns"]:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": linear(len(_SPECIAL) + len(CHARACTERS), shape.embed)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            weights[f"{at}self_attn.{name}_proj.weight"] = linear(heads * head_dim, shape.embed)
            weights[f"{at}self_attn.{name}_proj.bias"] = np.zeros(heads * head_dim, np.float32)
        weights[f"{at}self_attn.o_proj.weight"] = linear(shape.embed, shape.heads * head_dim)
        weights[f"{at}mlp.gate_proj.weight"] = linear(shape.mlp, shape.embed)
        weights[f"{at}mlp.up_proj.weight"] = linear(shape.mlp, shape.embed)
        weights[f"{at}mlp.down_proj.weight"] = linear(shape.embed, shape.mlp)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = np.ones(shape.embed, np.float32)
    weights["model.norm.weight"] = np.ones(shape.embed, np.float32)
    return weights


def main() -> None:
    """Writes the checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="Writes the untrained model that the demos start from.")
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    arguments = parser.parse_args()
    print(write_toy_checkpoint(arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
