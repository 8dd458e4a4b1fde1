"""Rows from where they lie: .jsonl and .parquet files, and built-in tasks. Every error names file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import TASK_PREFIX, load_task

Split = Literal["train", "test"]


@dataclass(frozen=True)
class SourceRow:
    """A row as it was read.

    Attributes:
        number: Its place in the source, from 0; blank lines do not count.
        where: What an error calls it ("prompts.jsonl, line 12").
        columns: The row.
    """

    number: int
    where: str
    columns: Mapping[str, Any]


def read_rows(source: str, field: str, split: Split, task_arguments: Mapping[str, Any]) -> list[SourceRow]:
    """Reads all rows of a source.

    Args:
        source: A .jsonl or .parquet file, or "task:NAME".
        field: The configuration key that named the source, for errors.
        split: Which rows of a task; a file is all of one.
        task_arguments: Arguments of the task (`data.task`).

    Returns:
        The rows in order, at least one.

    Raises:
        UserError: The source does not exist, cannot be read, or holds no row.
    """
    if source.startswith(TASK_PREFIX):
        task = load_task(source, task_arguments)
        found = task.train_rows() if split == "train" else task.test_rows()
        rows = [SourceRow(number, f"{source}, row {number}", row) for number, row in enumerate(found)]
    else:
        rows = _read_file(Path(source), field)
    if not rows:
        raise UserError(f"{field} = {source!r} holds no row; at least one prompt is needed")
    return rows


def _read_file(path: Path, field: str) -> list[SourceRow]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(
            f"{field} = '{path}': a file that ends in {' or '.join(_READERS)} is needed, or 'task:NAME'; "
            "convert other formats to JSON lines, one object a line"
        )
    if not path.is_file():
        raise UserError(
            f"{field} = '{path}': there is no such file (looked for {path.absolute()}); correct the path"
        )
    return reader(path)


def _read_jsonl(path: Path) -> list[SourceRow]:
    rows: list[SourceRow] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                rows.append(SourceRow(len(rows), where, _parse_line(line, where)))
    return rows


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        start = line.decode("utf-8").strip()[:60]
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}; the line begins {start!r}); "
            "each line must be one whole JSON object: correct or remove the line"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: a JSON object is needed, found {type(value).__name__}; each line must look like "
            '{"prompt": "…", "answer": "…"}'
        )
    return value


def _read_parquet(path: Path) -> list[SourceRow]:
    import pyarrow  # here, so that runs on JSON lines do not load it
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet ({error}); write the file again") from error
    return [
        SourceRow(number, f"{path}, row {number}", columns)
        for number, columns in enumerate(table.to_pylist())
    ]


_READERS: Final[Mapping[str, Callable[[Path], list[SourceRow]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
