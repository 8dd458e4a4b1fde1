"""A prompt's columns as JSON, and back, without loss.

Rows come from TOML, JSON, CSV and parquet. What JSON cannot hold is written as an object with the one key ``~``, whose
value names the type: ``{"~": ["bytes", "AAE="]}``. A table of the row's own that has the key ``~``, or keys that are no
strings, is written as a list of pairs. So every value comes back equal and with its type:

    JSON's own, integers of any size, NaN and infinities, tuples, sets, bytes, dates, times, date-times, durations,
    decimals, NumPy's scalars and arrays (but those of objects).

Anything else is refused by name: what travels must mean the same on both sides, and nothing is pickled.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import numpy as np

from streamrl_jax.errors import UserError

_MARK: Final = "~"


def columns_to_json(columns: Mapping[str, Any], prompt_id: str) -> bytes:
    """A row for the wire.

    Args:
        columns: the row as read.
        prompt_id: named in errors.

    Raises:
        UserError: a value can be none of the types that travel; names prompt, column and type.
    """
    found: dict[str, Any] = {}
    for name, value in columns.items():
        try:
            found[name] = _write(value)
        except TypeError as error:
            raise UserError(
                f"prompt {prompt_id}, column {name!r}: {error}, which cannot travel to the controller's process; "
                "store it as text, numbers, lists or tables, or set control.process = false"
            ) from error
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()


def columns_from_json(text: bytes) -> Mapping[str, Any]:
    """Reads a row.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__} in place of a table")
        return {name: _read(value) for name, value in found.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"prompt.columns: {error}") from error


def _write(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_MARK: ["float", repr(value)]}
    if kind is list:
        return [_write(item) for item in value]
    if kind is dict and _MARK not in value and all(type(key) is str for key in value):
        return {key: _write(item) for key, item in value.items()}
    for name, (of, write, _) in _TYPES.items():
        if kind is of:
            return {_MARK: [name, write(value)]}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        kept = [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]
        return {_MARK: ["array" if isinstance(value, np.ndarray) else "scalar", kept]}
    if isinstance(value, Mapping):
        return _write(dict(value))
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: _read(item) for key, item in value.items()}
    name, kept = value[_MARK]
    if name in ("array", "scalar"):
        dtype, shape, packed = kept
        array = np.frombuffer(base64.b64decode(packed, validate=True), _dtype(dtype)).reshape(shape).copy()
        return array if name == "array" else array[()]
    if name not in _TYPES:
        raise ValueError(f"a value of the unknown type {name!r}")
    return _TYPES[name][2](kept)


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"an array of type {name!r}")
    return dtype


def _write_all(values: Any) -> list[Any]:
    return [_write(item) for item in values]


def _read_all(values: list[Any]) -> list[Any]:
    return [_read(item) for item in values]


_TYPES: Final[Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "float": (float, repr, float),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), lambda t: base64.b64decode(t, validate=True)),
    "datetime": (datetime.datetime, lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda v: v.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: v.isoformat(), datetime.time.fromisoformat),
    "duration": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda t: datetime.timedelta(t[0], t[1], t[2]),
    ),
    "decimal": (Decimal, str, Decimal),
    "tuple": (tuple, _write_all, lambda t: tuple(_read_all(t))),
    "set": (set, _write_all, lambda t: set(_read_all(t))),
    "table": (
        dict,
        lambda v: [[_write(key), _write(item)] for key, item in v.items()],
        lambda t: {_read(key): _read(item) for key, item in t},
    ),
}
"""Name on the wire: type, to JSON, from JSON."""
