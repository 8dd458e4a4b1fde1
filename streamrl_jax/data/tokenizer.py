"""The checkpoint's tokenizer, by the `tokenizers` library alone.

The trainer never imports transformers (it would import torch). Ids equal those of Hugging Face's
`AutoTokenizer` for strings and chats; prompts differ in one wish: exactly one BOS where the checkpoint writes
one, and never an EOS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from streamrl_jax.data.chat_template import ChatTemplate, Message, read_chat_template
from streamrl_jax.errors import UserError
from streamrl_jax.types import TokenIds

_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        backend: The tokenizer of tokenizer.json.
        eos_ids: Every id that ends an answer; the first is the one that examples are taught to end with.
        pad_id: Fills arrays; may be an EOS id, so masks come from lengths and never from comparing ids with
            it.
        bos_id: What the checkpoint writes before a text, or None.
        unk_id: Stands for what the vocabulary lacks, or None (byte-level vocabularies lack nothing).
        vocab_size: The highest id and one.
        model_vocab_size: Rows of the model's embedding; may be more.
        chat_template: None if the checkpoint has none.
        where: The checkpoint directory.
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    unk_id: int | None
    vocab_size: int
    model_vocab_size: int
    chat_template: ChatTemplate | None
    where: Path

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint directory.

        Args:
            model_dir: Directory with tokenizer.json and, where they exist, tokenizer_config.json,
                config.json, generation_config.json and chat_template.jinja.

        Raises:
            UserError: A file is missing or broken, or no EOS id is to be found.
        """
        where = Path(model_dir)
        config, special = _read_json(where / "config.json"), _special_tokens(where)
        backend = _read_backend(where)
        highest = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        rows = config.get("vocab_size", highest)
        if not isinstance(rows, int) or rows < highest:
            raise UserError(
                f"{where / 'config.json'}: field 'vocab_size' is {rows!r}, but {where / 'tokenizer.json'} "
                f"has ids up to {highest - 1}; the two files are not of the same model"
            )
        ids = {name: _token_id(backend, where, name, text) for name, text in special.items()}
        eos_ids = _eos_ids(where, config, ids.get("eos_token"))
        source = read_chat_template(where, _read_json(where / "tokenizer_config.json"))
        return cls(
            backend=backend,
            eos_ids=eos_ids,
            pad_id=ids.get("pad_token", eos_ids[0]),
            bos_id=_written_bos(backend),
            unk_id=_unknown_id(backend),
            vocab_size=highest,
            model_vocab_size=rows,
            chat_template=ChatTemplate.compile(source[0], special, source[1]) if source else None,
            where=where,
        )

    def vocab_limit(self, *, masked: bool) -> int | None:
        """Where the ids end that a policy with this tokenizer may sample.

        A checkpoint's vocabulary is often padded beyond its tokenizer's ids. Generator and trainer must leave the same
        ids out of their distribution, so both sides are told this one number.

        Args:
            masked: `rollout.mask_padded_vocab`.

        Returns:
            The number of ids (added tokens included); None if the model has no others, or they are not to be masked.

        Raises:
            UserError: No EOS id would be left to end an answer with.
        """
        if not masked or self.vocab_size == self.model_vocab_size:
            return None
        if min(self.eos_ids) >= self.vocab_size:
            raise UserError(
                f"{self.where}: the end-of-sequence ids {list(self.eos_ids)} are none of the tokenizer's "
                f"{self.vocab_size} ids, and rollout.mask_padded_vocab = true keeps all others from being sampled; "
                "answers would never end. Correct 'eos_token_id' in generation_config.json, or set it to false"
            )
        return self.vocab_size

    def encode(self, text: str, special_tokens: bool = True) -> TokenIds:
        """Encodes a text as Hugging Face does, with the BOS and EOS that the checkpoint writes, or without."""
        return np.asarray(self.backend.encode(text, add_special_tokens=special_tokens).ids, np.int32)

    def encode_prompt(self, text: str) -> TokenIds:
        """Encodes a text that an answer is to follow.

        Returns:
            The ids, with exactly one BOS in front where the checkpoint writes one (also when the text brings
            its own), and without the EOS that some checkpoints append.
        """
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encodes many prompts at once, each as `encode_prompt` does."""
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(self._with_one_bos(one.ids), np.int32) for one in encoded]

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Renders chat messages through the checkpoint's template.

        Raises:
            UserError: There is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(
                f"{self.where}: this checkpoint has no chat template (neither chat_template.jinja nor "
                "'chat_template' in tokenizer_config.json); set data.apply_chat_template = false and give "
                "prompts as strings, or add one"
            )
        return self.chat_template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> TokenIds:
        """Encodes chat messages. The template writes the special tokens, so the tokenizer adds none."""
        return self.encode(self.render_chat(messages, add_generation_prompt), special_tokens=False)

    def decode(self, token_ids: TokenIds | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Gives the text of ids; ids that the tokenizer lacks (padded vocabulary) have none."""
        return self.backend.decode(
            [int(token) for token in token_ids], skip_special_tokens=skip_special_tokens
        )

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]


def _read_backend(where: Path) -> tokenizers.Tokenizer:
    path = where / "tokenizer.json"
    if not where.is_dir():
        raise UserError(
            f"model.path: {where} is no directory; give a checkpoint directory with tokenizer.json"
        )
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; a checkpoint needs it. Checkpoints with tokenizer.model alone can be "
            "converted: load them with transformers' AutoTokenizer and save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer: {error}; fetch the file again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _written_bos(backend: tokenizers.Tokenizer) -> int | None:
    """The id that the post-processor puts before a text, if it puts one."""
    encoding = backend.encode("a", add_special_tokens=True)
    return encoding.ids[0] if encoding.special_tokens_mask[0] else None


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    # The model's own, not the name in tokenizer_config.json: byte-level vocabularies are given one that never stands.
    text = getattr(backend.model, "unk_token", None)
    return backend.token_to_id(text) if isinstance(text, str) else None


def _special_tokens(where: Path) -> dict[str, str]:
    """Text of the named special tokens; tokenizer_config.json comes before the older special_tokens_map.json."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _read_json(where / file)
        for name in _NAMED_TOKENS:
            entry = config.get(name)
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str) and text:
                found.setdefault(name, text)
    return found


def _token_id(backend: tokenizers.Tokenizer, where: Path, name: str, text: str) -> int:
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise UserError(
            f"{where / 'tokenizer_config.json'}: field {name!r} is {text!r}, which "
            f"{where / 'tokenizer.json'} does not have; the two files are not of the same tokenizer"
        )
    return token_id


def _eos_ids(where: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's own, and what the generation config adds (else the model config)."""
    source = "generation_config.json"
    entry = _read_json(where / source).get("eos_token_id")
    if entry is None:
        source, entry = "config.json", config.get("eos_token_id")
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise UserError(
            f"{where / source}: field 'eos_token_id' is {entry!r}; an id or a list of ids is needed"
        )
    if tokenizer_eos is not None:
        ids = [tokenizer_eos, *ids]
    if not ids:
        raise UserError(
            f"{where}: no end-of-sequence id in generation_config.json, config.json or "
            "tokenizer_config.json; answers would never end. Add 'eos_token_id' to generation_config.json"
        )
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file is empty: only tokenizer.json is indispensable."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: an object is needed, found {type(content).__name__}")
    return content
