"""Observed lengths of answers: what the ranker learns from, and what recorded lengths are replayed from.

A file is JSON lines, one prompt each::

    {"prompt_id": "17", "prompt": "118+24=", "token_ids": [4, 4, …], "lengths": [171, 203], "cut": [false, false]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from streamrl_jax.errors import UserError
from streamrl_jax.files import write_atomically
from streamrl_jax.types import FinishReason, TokenIds

_LARGEST: Final = np.iinfo(np.int32).max
_REMEDY: Final = "collect the lengths again with streamrl rank collect"


@dataclass(frozen=True, eq=False)
class ObservedLengths:
    """How long the answers to one prompt were.

    Attributes:
        prompt_id: As in the prompt set.
        token_ids: The prompt.
        lengths: Tokens of each answer, its stop token included; at least one answer.
        cut: Whether the limit ended it: its length is then a lower bound.
        prompt: Its text, for reading alone.
    """

    prompt_id: str
    token_ids: TokenIds
    lengths: tuple[int, ...]
    cut: tuple[bool, ...]
    prompt: str = ""

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.cut) or min(self.lengths) < 1:
            raise ValueError(
                f"prompt {self.prompt_id}: {len(self.lengths)} lengths {self.lengths[:8]} and {len(self.cut)} marks "
                "of a cut: one of each an answer is needed, and every length is 1 or more"
            )

    @property
    def mean(self) -> float:
        """Mean tokens of an answer."""
        return sum(self.lengths) / len(self.lengths)


def write_lengths(path: Path, rows: Iterable[ObservedLengths]) -> None:
    """Writes a file of lengths; it is whole or not there.

    Args:
        path: The file; its directory exists.
        rows: One a prompt.
    """
    write_atomically(path, "".join(map(as_line, rows)).encode())


def as_line(row: ObservedLengths) -> str:
    """A row as a line of a file, with the line's end."""
    fields = {
        "prompt_id": row.prompt_id,
        "prompt": row.prompt,
        "token_ids": row.token_ids.tolist(),
        "lengths": row.lengths,
        "cut": row.cut,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def read_lengths(path: Path) -> list[ObservedLengths]:
    """Reads a file of lengths.

    Args:
        path: From `write_lengths`; files that were joined line by line are read too.

    Returns:
        Its rows in order, at least one. A prompt may be there twice: see `merged`.

    Raises:
        UserError: It is not there, holds no row, or a line is not of this form; names file, line and field.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: the file of lengths cannot be read ({error.strerror}); give one that streamrl rank collect wrote"
        ) from error
    rows = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} holds no row; {_REMEDY}")
    return rows


def merged(rows: Iterable[ObservedLengths]) -> list[ObservedLengths]:
    """Joins rows of the same prompt.

    Args:
        rows: Of one file or several. Prompts are the same where their tokens are.

    Returns:
        One row a prompt, in the order of first appearance; it keeps the first one's id and text, and all answers in
        order.
    """
    found: dict[bytes, ObservedLengths] = {}
    for row in rows:
        key = row.token_ids.tobytes()
        old = found.get(key)
        found[key] = (
            replace(old, lengths=old.lengths + row.lengths, cut=old.cut + row.cut) if old is not None else row
        )
    return list(found.values())


def lengths_of_run(run_dir: Path) -> list[ObservedLengths]:
    """Reads how long the answers were that a run has consumed.

    Args:
        run_dir: The run directory; the run may go on meanwhile.

    Returns:
        A row a prompt in the order of first use, its answers in the order of their consumption. Every policy version
        of the run is among them.

    Raises:
        UserError: Nothing is recorded there, or a file is damaged.
    """
    from streamrl_jax.samples_log import read_columns, recorded_iterations

    folder = run_dir / "samples"
    iterations = recorded_iterations(folder) if folder.is_dir() else []
    if not iterations:
        raise UserError(
            f"{run_dir} has no recorded samples (looked for {folder / 'iteration_000000.parquet'}); give the directory "
            "of a run that has completed an iteration"
        )
    columns = ("prompt_id", "prompt_text", "prompt_ids", "token_ids", "finish_reason")
    return merged(
        _observed(row) for iteration in iterations for row in read_columns(run_dir, iteration, columns)
    )


def _observed(row: Mapping[str, Any]) -> ObservedLengths:
    """One recorded answer. Where an iteration drew a prompt twice, the second one's id has a suffix ("17.1")."""
    return ObservedLengths(
        prompt_id=row["prompt_id"].partition(".")[0],
        token_ids=np.asarray(row["prompt_ids"], np.int32),
        lengths=(len(row["token_ids"]),),
        cut=(row["finish_reason"] == FinishReason.LENGTH.value,),
        prompt=row["prompt_text"],
    )


def _parse(line: bytes, where: str) -> ObservedLengths:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON, or of UTF-8; nested too deeply
        raise UserError(
            f"{where}: no valid JSON ({error}); the file was cut short or edited: {_REMEDY}"
        ) from error
    if not isinstance(fields, dict):
        raise UserError(
            f"{where}: a JSON object is needed, found {type(fields).__name__}; see docs/ranker.md"
        )
    lengths = _entries(fields, "lengths", where, lambda value: _is_whole(value, 1), "whole numbers from 1 on")
    cut = _entries(
        fields, "cut", where, lambda value: isinstance(value, bool), "true or false for each length"
    )
    token_ids = _entries(fields, "token_ids", where, lambda value: _is_whole(value, 0), "token ids")
    if len(cut) != len(lengths):
        raise UserError(f"{where}: {len(lengths)} lengths, but {len(cut)} in `cut`; {_REMEDY}")
    prompt_id, prompt = fields.get("prompt_id"), fields.get("prompt", "")
    for name, value in (("prompt_id", prompt_id), ("prompt", prompt)):
        if not isinstance(value, str):
            raise UserError(f"{where}: field {name!r} is {value!r}; a text is needed: {_REMEDY}")
    return ObservedLengths(str(prompt_id), np.array(token_ids, np.int32), tuple(lengths), tuple(cut), prompt)


def _entries(
    fields: Mapping[str, Any], name: str, where: str, fits: Callable[[Any], bool], wanted: str
) -> list[Any]:
    values = fields.get(name)
    if not isinstance(values, list) or not values or not all(map(fits, values)):
        shown = repr(values)
        raise UserError(
            f"{where}: field {name!r} is {shown if len(shown) < 80 else shown[:80] + '…'}; a list of {wanted} is "
            f"needed, at least one: {_REMEDY}"
        )
    return values


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
