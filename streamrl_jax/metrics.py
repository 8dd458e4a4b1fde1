"""Metric records and where they go: `metrics.jsonl` always, TensorBoard by option, the screen (`progress`).

Names are those of `metric_names.py`. A value is a finite number, or `Missing` with the reason: never a silent
NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from streamrl_jax.errors import UserError
from streamrl_jax.files import naming, write_atomically
from streamrl_jax.tensorboard import EventFile


@dataclass(frozen=True)
class Missing:
    """A metric that has no finite value at this step.

    Attributes:
        reason: Why: "nan", "inf", "no peak known for this device".
    """

    reason: str


Value = float | Missing


@dataclass(frozen=True)
class MetricRecord:
    """The metrics of one step.

    Attributes:
        step: Iterations completed; 0 is the evaluation before training.
        time: Seconds since the epoch.
        metrics: Name -> value.
    """

    step: int
    time: float
    metrics: Mapping[str, Value] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """The metric's value; None when it is missing or was not measured at this step."""
        value = self.metrics.get(name)
        return None if value is None or isinstance(value, Missing) else value


def record(step: int, time: float, metrics: Mapping[str, Value | None]) -> MetricRecord:
    """Builds a record from raw numbers.

    Args:
        step: Iterations completed.
        time: Seconds since the epoch.
        metrics: Name -> anything that `float` takes; None counts as not measured and is left out, and what is
            not finite becomes `Missing`.

    Returns:
        The record, its names in alphabetical order.
    """
    kept = {name: value for name, value in sorted(metrics.items()) if value is not None}
    return MetricRecord(step, time, {name: _checked(value) for name, value in kept.items()})


class MetricSink(Protocol):
    """Takes the record of each step, in order."""

    def write(self, record: MetricRecord) -> None:
        """Takes one record; a file has it when this returns."""
        ...

    def close(self) -> None:
        """Writes what is still held back."""
        ...


class JsonlSink:
    """One JSON object a line, on disk when `write` returns.

    `{"step": 3, "time": 1.7e9, "metrics": {"a": 1.0, "b": null}, "missing": {"b": "nan"}}`

    Args:
        path: The file; made if it is not there.
        restored_step: On a resume the step of the checkpoint: later lines, of steps that are done again, and
            a line torn by a kill are cut off. None: a new run.

    Raises:
        UserError: The file is damaged elsewhere than at its end.
    """

    def __init__(self, path: Path, restored_step: int | None = None) -> None:
        if restored_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line.step <= restored_step]
            write_atomically(path, "".join(map(_encode, kept)).encode())
        self._path = path
        self._stream = path.open("a", encoding="utf-8")

    def write(self, record: MetricRecord) -> None:
        """Appends one line and flushes it."""
        with naming(self._path):
            self._stream.write(_encode(record))
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Closes the file."""
        with naming(self._path):
            self._stream.close()


class TensorBoardSink:
    """Event files for TensorBoard.

    Args:
        folder: Where they go.
        restored_step: On a resume the step of the checkpoint; what was logged after it leaves the curves.
    """

    def __init__(self, folder: Path, restored_step: int | None = None) -> None:
        self._file = EventFile(folder, None if restored_step is None else restored_step + 1)

    def write(self, record: MetricRecord) -> None:
        """Adds one point a metric; missing ones leave a gap."""
        finite = {name: value for name, value in record.metrics.items() if not isinstance(value, Missing)}
        self._file.add(record.step, record.time, finite)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Sinks:
    """Several sinks as one.

    Args:
        sinks: Each gets every record, in this order.
    """

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: MetricRecord) -> None:
        """Hands the record to each."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes each, also when one of them fails.

        Raises:
            ExceptionGroup: What failed.
        """
        failures: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("metric sinks failed to close", failures)


def read_metrics(path: Path) -> list[MetricRecord]:
    """Reads `metrics.jsonl`, also while a run writes it.

    Args:
        path: The file.

    Returns:
        Its records. A last line without its end, as a kill leaves it, is left out.

    Raises:
        UserError: A line is damaged; names it.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    *lines, _torn = text.split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_decode(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}, is not a metric record ({error}): {line[:80]!r}. Remove the line."
            ) from error
    return records


def _checked(value: Value) -> Value:
    if isinstance(value, Missing):
        return value
    number = float(value)
    return number if math.isfinite(number) else Missing(str(number))


def _encode(record: MetricRecord) -> str:
    plain = {name: None if isinstance(value, Missing) else value for name, value in record.metrics.items()}
    missing = {name: value.reason for name, value in record.metrics.items() if isinstance(value, Missing)}
    line: dict[str, Any] = {"step": record.step, "time": record.time, "metrics": plain}
    if missing:
        line["missing"] = missing
    return json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"


def _decode(line: dict[str, Any]) -> MetricRecord:
    missing = line.get("missing", {})
    metrics = {
        name: Missing(missing[name]) if value is None else float(value)
        for name, value in line["metrics"].items()
    }
    return MetricRecord(int(line["step"]), float(line["time"]), metrics)
