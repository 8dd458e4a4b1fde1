"""Typed access to a checkpoint's `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl_jax.errors import UserError


@dataclass(frozen=True)
class Fields:
    """The object and what to call it; errors name file, field and value.

    Attributes:
        config: The parsed object.
        where: Its name in an error, usually the file's path.
    """

    config: Mapping[str, Any]
    where: str

    def error(self, field: str, remedy: str) -> UserError:
        """The error about a field, to be raised."""
        value = json.dumps(self.config[field]) if field in self.config else "missing"
        return UserError(f"{self.where}: field {field!r} is {value}: {remedy}")

    def positive(self, field: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "a positive whole number is needed")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(field, "a positive number is needed")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value

    def part(self, field: str) -> Fields | None:
        """An object within this one; None where it is absent or null."""
        value = self.config.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(field, "an object is needed")
        return Fields(value, f"{self.where}, {field}")

    def _get(self, field: str, default: object) -> object:
        value = self.config.get(field)
        return default if value is None else value
