"""Prompts: read once, tokenised once, and drawn by iteration number.

The prompts of iteration i are a pure function of the set, the seed and i. So what a run has consumed is one
number, and a resumed run continues with the same prompts (DESIGN rule 7).
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamrl_jax.config import DataSection
from streamrl_jax.data.sources import SourceRow, Split, read_rows
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.types import Prompt, TokenIds

if TYPE_CHECKING:
    import grain

_GRAIN_SEEDS = 2**32
_MIXED_BYTES = 4  # of a seed made of several numbers


@dataclass(frozen=True)
class Order:
    """An endless walk over row numbers: one permutation of all of them after the other, with random access.

    Attributes:
        count: Rows.
        seed: Of the permutations; None walks in the source's order.
    """

    count: int
    seed: int | None

    def __getitem__(self, place: int) -> int:
        row = self._walk[place]
        assert row is not None, place  # grain gives None for what a filter removed; here is none
        return row

    @cached_property
    def _walk(self) -> grain.MapDataset[int]:
        # Imported only now: grain imports JAX, and prompts are read before its devices' environment is set.
        import grain

        walk = grain.MapDataset.range(self.count)
        if self.seed is not None:
            walk = walk.seed(self.seed % _GRAIN_SEEDS).shuffle()
        return walk.repeat()


@dataclass(frozen=True, eq=False)
class PromptSet:
    """A tokenised prompt set with random access by iteration.

    Attributes:
        source: Where the prompts came from.
        prompts: All of them, in the source's order.
        order: In which they are drawn.
        batch_size: Prompts per iteration.
        dropped: Rows left out because they were too long.
    """

    source: str
    prompts: tuple[Prompt, ...]
    order: Order
    batch_size: int
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def all(self) -> tuple[Prompt, ...]:
        """Every prompt once, in the source's order."""
        return self.prompts

    def iteration(self, i: int) -> tuple[Prompt, ...]:
        """Draws the prompts of an iteration.

        Iterations follow one another through a permutation of the set, then through the next epoch's
        permutation, and so on; an iteration may straddle epochs, or hold several of them if the set is
        smaller than the batch.

        Args:
            i: From 0.

        Returns:
            `batch_size` prompts. One that occurs a second time within the iteration is called "<row>.1", a
            third time "<row>.2", so that sample ids stay unique.
        """
        seen: Counter[str] = Counter()
        drawn: list[Prompt] = []
        for place in self._places(i):
            prompt = self.prompts[self.order[place]]
            again = seen[prompt.prompt_id]
            seen[prompt.prompt_id] += 1
            drawn.append(replace(prompt, prompt_id=f"{prompt.prompt_id}.{again}") if again else prompt)
        return tuple(drawn)

    def further(self, i: int) -> Iterator[Prompt]:
        """Draws the prompts that may take the place of some of an iteration's own.

        Like the iteration's own they are a pure function of the set, the seed and i, so that a resumed run asks the
        same ones. They come from a permutation of their own: the other iterations' prompts stay what they are, and
        what was consumed stays one number. An unshuffled set goes on where the iteration ended.

        Args:
            i: From 0.

        Yields:
            Each prompt that is not among the iteration's own, once.
        """
        own = {self.order[place] for place in self._places(i)}
        walk, first = self.order, (i + 1) * self.batch_size
        if self.order.seed is not None:
            walk, first = Order(self.order.count, _mixed(self.order.seed, i)), 0
        for place in range(first, first + self.order.count):
            row = walk[place]
            if row not in own:
                yield self.prompts[row]

    def _places(self, i: int) -> range:
        return range(i * self.batch_size, (i + 1) * self.batch_size)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal hash of rows and token ids; with the same digest and seed two runs see the same prompts."""
        hasher = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            columns = repr(_canonical(prompt.columns)).encode()
            for part in (prompt.prompt_id.encode(), columns, prompt.token_ids.tobytes()):
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        return hasher.hexdigest()


def load_prompts(data: DataSection, tokenizer: Tokenizer, which: Split, seed: int) -> PromptSet:
    """Reads and tokenises the training or the held-out prompts.

    Args:
        data: The configuration's section.
        tokenizer: Of the policy's checkpoint.
        which: "train" or "test"; held-out prompts are never shuffled.
        seed: `run.seed`.

    Returns:
        The prompt set.

    Raises:
        UserError: Source, row or field are wrong; or a prompt is over the limit and `data.overlong_prompts`
            is "error".
    """
    field = f"data.{which}"
    source = data.train if which == "train" else data.test
    if not source:
        raise UserError(f"{field} is empty; give a .jsonl or .parquet file, or 'task:NAME'")
    rows = read_rows(source, field, which, data.task)
    encoded = encode_rows(rows, data, tokenizer)
    kept: list[Prompt] = []
    for row, token_ids in zip(rows, encoded, strict=True):
        if len(token_ids) <= data.max_prompt_length:
            columns = {**row.columns, "prompt": row.columns[data.prompt_key]}
            kept.append(Prompt(str(row.number), token_ids, columns))
    if len(kept) < len(rows):
        _check_overlong(rows, encoded, data, none_left=not kept)
    return PromptSet(
        source=source,
        prompts=tuple(kept),
        order=Order(len(kept), seed if data.shuffle and which == "train" else None),
        batch_size=data.train_batch_size,
        dropped=len(rows) - len(kept),
    )


def encode_rows(rows: Sequence[SourceRow], data: DataSection, tokenizer: Tokenizer) -> list[TokenIds]:
    """Tokenises the prompts of rows, through the chat template if `data.apply_chat_template` says so.

    Returns:
        The ids of each row's prompt; at least one id each.

    Raises:
        UserError: The prompt field is missing or of a wrong kind, or has characters that the vocabulary
            lacks.
    """
    if data.system_prompt and not data.apply_chat_template:
        raise UserError(
            "data.system_prompt is set, but data.apply_chat_template = false, so it would go unheard; set "
            "data.apply_chat_template = true, or put the text into the prompts"
        )
    prompts = [_prompt_of(row, data.prompt_key) for row in rows]
    if data.apply_chat_template:
        encoded = [tokenizer.encode_chat(_messages(prompt, data.system_prompt)) for prompt in prompts]
    else:
        encoded = tokenizer.encode_prompts(
            [_plain_text(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        )
    for row, token_ids in zip(rows, encoded, strict=True):
        check_known(row.where, data.prompt_key, token_ids, tokenizer)
        if not len(token_ids):
            raise UserError(
                f"{row.where}: field {data.prompt_key!r} is empty; give it a text or remove the row"
            )
    return encoded


def check_known(where: str, field: str, token_ids: TokenIds, tokenizer: Tokenizer) -> None:
    """Refuses a text whose characters the vocabulary lacks: they would all become the same unknown token.

    Raises:
        UserError: The unknown token is among the ids.
    """
    if tokenizer.unk_id is not None and (token_ids == tokenizer.unk_id).any():
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        raise UserError(
            f"{where}: field {field!r} has characters that the vocabulary of {tokenizer.where} lacks (it "
            f"reads them as {text[:80]!r}); change the text or take a model that knows them"
        )


def _prompt_of(row: SourceRow, key: str) -> str | list[Mapping[str, Any]]:
    if key not in row.columns:
        close = difflib.get_close_matches(key, row.columns, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"{row.where}: field {key!r} is missing, found {sorted(row.columns)}; {hint}Name the field that "
            "holds the prompt in data.prompt_key, or add it to the row"
        )
    value = row.columns[key]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return value
    raise UserError(
        f"{row.where}: field {key!r} is {_shorten(value)}; a string is needed, or a list of chat messages "
        "such as "
        '[{"role": "user", "content": "…"}]'
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and "content" in item


def _messages(prompt: str | list[Mapping[str, Any]], system_prompt: str) -> list[Mapping[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # A row that brings a system message of its own keeps it: most templates refuse a second one.
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return list(messages)


def _plain_text(prompt: str | list[Mapping[str, Any]], row: SourceRow) -> str:
    if isinstance(prompt, str):
        return prompt
    raise UserError(
        f"{row.where}: the prompt is a list of chat messages, but data.apply_chat_template = false; set it "
        "to true, or give the prompt as a string"
    )


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=_MIXED_BYTES).digest()
    return int.from_bytes(digest, "little")


def _canonical(value: Any) -> Any:
    """The same for equal values, whatever the order of their keys."""
    if isinstance(value, Mapping):
        return sorted((repr(key), _canonical(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return [_canonical(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def _check_overlong(
    rows: Sequence[SourceRow], encoded: Sequence[TokenIds], data: DataSection, *, none_left: bool
) -> None:
    limit = data.max_prompt_length
    overlong = [(row, len(ids)) for row, ids in zip(rows, encoded, strict=True) if len(ids) > limit]
    longest = max(tokens for _, tokens in overlong)
    row, tokens = overlong[0]
    if data.overlong_prompts == "error":
        raise UserError(
            f"{row.where}: the prompt has {tokens} tokens, more than data.max_prompt_length = {limit} "
            f"({len(overlong)} of {len(rows)} prompts are over it, the longest has {longest} tokens); raise "
            "data.max_prompt_length, or set data.overlong_prompts = 'drop' to leave them out. Prompts are "
            "never cut"
        )
    if none_left:
        raise UserError(
            f"{row.where}: the prompt has {tokens} tokens, and so have all {len(rows)} prompts more than "
            f"data.max_prompt_length = {limit}: none is left after dropping; raise data.max_prompt_length"
        )


def _shorten(value: Any, limit: int = 80) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= limit else text[:limit] + "…"
