"""Examples for the supervised warm start: prompts with the answers to imitate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl_jax.config import Config
from streamrl_jax.data.prompts import Order, check_known, encode_rows
from streamrl_jax.data.sources import SourceRow, read_rows
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.tasks import TASK_PREFIX, Row, load_task
from streamrl_jax.types import TokenIds


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt and the answer to imitate."""

    name: str  # where it came from
    prompt_ids: TokenIds
    answer_ids: TokenIds  # the EOS that ends it included


@dataclass(frozen=True)
class ExampleSet:
    """Examples by step.

    Attributes:
        source: Where they come from.
        batch: The examples of a step, a pure function of the step.
        stop_set: What greedy accuracy is measured on to stop early; empty for files.
    """

    source: str
    batch: Callable[[int], tuple[Example, ...]]
    stop_set: tuple[Example, ...]


def load_examples(cfg: Config, tokenizer: Tokenizer) -> ExampleSet:
    """Opens the examples of `sft.data`.

    A task redraws them at each step; a file is read through in seeded permutations, epoch after epoch.

    Args:
        cfg: `sft`, `data` and `run.seed` are read.
        tokenizer: Of the checkpoint to train.

    Returns:
        The examples.

    Raises:
        UserError: The source or a row is wrong, an example is over the limits, or `sft.stop_accuracy` is set
            for a file, which has no stop set.
    """
    source = cfg.sft.data
    if not source:
        raise UserError(
            "sft.data is empty; give a .jsonl or .parquet file with prompts and answers, or 'task:NAME'"
        )
    if source.startswith(TASK_PREFIX):
        return _task_examples(cfg, tokenizer)
    if cfg.sft.stop_accuracy < 1.0:
        raise UserError(
            f"sft.stop_accuracy = {cfg.sft.stop_accuracy}, but {source!r} has no stop set (only tasks do); "
            "set it to 1.0, which trains for sft.steps"
        )
    examples = _encode(read_rows(source, "sft.data", "train", {}), cfg, tokenizer)
    order, size = Order(len(examples), cfg.run.seed), cfg.sft.batch_size
    return ExampleSet(
        source,
        lambda step: tuple(examples[order[place]] for place in range(step * size, (step + 1) * size)),
        (),
    )


def _task_examples(cfg: Config, tokenizer: Tokenizer) -> ExampleSet:
    source = cfg.sft.data
    task = load_task(source, cfg.data.task)

    def batch(step: int) -> tuple[Example, ...]:
        rows = task.example_rows(cfg.run.seed, step, cfg.sft.batch_size)
        return _encode(_numbered(rows, f"{source}, step {step}"), cfg, tokenizer)

    return ExampleSet(
        source, batch, _encode(_numbered(task.stop_rows(), f"{source}, stop set"), cfg, tokenizer)
    )


def _numbered(rows: Sequence[Row], where: str) -> list[SourceRow]:
    return [SourceRow(number, f"{where}, row {number}", row) for number, row in enumerate(rows)]


def _encode(rows: Sequence[SourceRow], cfg: Config, tokenizer: Tokenizer) -> tuple[Example, ...]:
    prompts = encode_rows(rows, cfg.data, tokenizer)
    examples = []
    for row, prompt_ids in zip(rows, prompts, strict=True):
        # Encoded apart from the prompt, as the policy's own answer is: it begins where the prompt's last token ends.
        words = tokenizer.encode(_answer_of(row, cfg.sft.answer_key), special_tokens=False)
        check_known(row.where, cfg.sft.answer_key, words, tokenizer)
        answer_ids = np.append(words, tokenizer.eos_ids[0]).astype(np.int32)
        if len(prompt_ids) + len(answer_ids) > cfg.longest_sample:
            raise UserError(
                f"{row.where}: prompt and answer have {len(prompt_ids)} + {len(answer_ids)} tokens, more "
                f"than data.max_prompt_length + data.max_response_length = {cfg.longest_sample}; raise the "
                "limits or leave the row out"
            )
        examples.append(Example(row.where, prompt_ids, answer_ids))
    return tuple(examples)


def _answer_of(row: SourceRow, key: str) -> str:
    value = row.columns.get(key)
    if isinstance(value, str):
        return value
    found = f"is {value!r}" if key in row.columns else f"is missing, found {sorted(row.columns)}"
    raise UserError(
        f"{row.where}: field {key!r} {found}; the answer to imitate must be a string: name its field in "
        "sft.answer_key"
    )
