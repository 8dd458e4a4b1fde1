"""Writes TOML: the few value types that a configuration holds (the standard library only reads it)."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """Writes one value on one line.

    Args:
        value: A string, number, truth value, date or time, or a list or mapping of these.

    Returns:
        TOML that reads back as an equal value.

    Raises:
        TypeError: TOML has no such value (None, for one).
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return (
            repr(value) if math.isfinite(value) else {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(value)]
        )
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"TOML cannot hold {value!r} ({type(value).__name__})")


def toml_key(name: str) -> str:
    """Writes one part of a key, quoted where it must be."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def toml_document(table: Mapping[str, Any]) -> str:
    """Writes a whole document, a `[table]` for each nested mapping.

    Args:
        table: Nested mappings of what `toml_value` writes.

    Returns:
        A document that reads back as an equal table.

    Raises:
        TypeError: TOML has no such value; the message names its dotted key.
    """
    return "\n\n".join(_blocks(table, ())) + "\n"


def _blocks(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """The table's own lines under its header, then one block for each table inside."""
    lines = []
    for key, value in table.items():
        if not isinstance(value, Mapping):
            try:
                lines.append(f"{toml_key(key)} = {toml_value(value)}")
            except TypeError as error:
                raise TypeError(f"{'.'.join((*path, key))}: {error}") from error
    nested = [
        block
        for key, value in table.items()
        if isinstance(value, Mapping)
        for block in _blocks(value, (*path, key))
    ]
    # A header alone is written only where nothing inside would imply the table.
    if path and (lines or not nested):
        lines.insert(0, f"[{'.'.join(map(toml_key, path))}]")
    return ["\n".join(lines), *nested] if lines else nested
