"""Primitives of the wire: packed arrays and checks of values that another process sent.

A check returns the value or raises a `ValueError` that names the field and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from streamrl_jax.types import NO_VERSION, Logprobs, TokenIds

MAX_TOKENS: Final = 1 << 20
"""Longest array of tokens that is taken from the wire."""

MAX_NAME: Final = 1024
"""Longest identifier, characters."""

MAX_TEXT: Final = 1 << 16
"""Longest reason or description, characters; a sender cuts, a receiver refuses."""

MAX_COUNT: Final = 1 << 20
"""Largest number of samples, slots or credits."""

MAX_VERSION: Final = (1 << 31) - 1
"""Versions of tokens are kept as int32."""

MAX_TOTAL: Final = 1 << 53
"""Largest total of tokens; beyond it a float, as in a rate, would be off."""

MAX_BYTES: Final = 1 << 50
"""Largest size of a version, bytes: far above any, far below where sums overflow int64."""

MAX_SECONDS: Final = 1e9
"""Longest duration."""

K = TypeVar("K")
V = TypeVar("V")


def name(field: str, value: str, *, empty: bool = False) -> str:
    """An identifier: not empty unless ``empty`` allows it, at most `MAX_NAME` characters."""
    if not value and not empty:
        raise ValueError(f"{field} is empty")
    if len(value) > MAX_NAME:
        raise ValueError(f"{field} has {len(value)} characters; at most {MAX_NAME} are taken")
    if not value.isprintable():
        raise ValueError(f"{field} = {value[:80]!r} holds characters that cannot be printed")
    return value


def text(field: str, value: str) -> str:
    """A reason or description: at most `MAX_TEXT` characters, of any kind."""
    if len(value) > MAX_TEXT:
        raise ValueError(f"{field} has {len(value)} characters; at most {MAX_TEXT} are taken")
    return value


def cut(value: str) -> str:
    """What a sender makes of a text that is too long for `text`."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def count(field: str, value: int, high: int = MAX_COUNT, *, low: int = 0) -> int:
    """A whole number in [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{field} = {value} is not in [{low}, {high}]")
    return value


def seconds(field: str, value: float, high: float = MAX_SECONDS) -> float:
    """A duration in [0, high]."""
    return finite(field, value, 0.0, high)


def finite(field: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """A number in [low, high], neither NaN nor infinite."""
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{field} = {value} is not a finite number in [{low}, {high}]")
    return value


def version(field: str, value: int) -> int:
    """A policy version: -1 (none) or more."""
    return count(field, value, MAX_VERSION, low=NO_VERSION)


def lookup(field: str, table: Mapping[K, V], key: K) -> V:
    """The table's entry."""
    if key not in table:
        raise ValueError(f"{field} = {key} is unknown; known are {', '.join(sorted(map(str, table)))}")
    return table[key]


def ids_to_bytes(ids: TokenIds | Sequence[int]) -> bytes:
    """Packs token ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def logprobs_to_bytes(logprobs: Logprobs | Sequence[float]) -> bytes:
    """Packs log-probs as little-endian float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def ids_from_bytes(field: str, data: bytes) -> TokenIds:
    """Unpacks token ids.

    Args:
        field: named in the error.
        data: little-endian int32.

    Returns:
        A read-only view of the bytes.

    Raises:
        ValueError: not whole numbers of 4 bytes, too many, or a negative id.
    """
    ids = _unpack(field, data, "<i4")
    if ids.size and (low := int(ids.min())) < 0:
        raise ValueError(f"{field} holds the negative token id {low} at index {int(ids.argmin())}")
    return ids


def logprobs_from_bytes(field: str, data: bytes, tokens: int) -> Logprobs:
    """Unpacks the log-probs of ``tokens`` tokens.

    Args:
        field: named in the error.
        data: little-endian float32.
        tokens: how many there must be.

    Returns:
        A read-only view of the bytes.

    Raises:
        ValueError: another count, or one that is NaN, infinite or above 0 by more than rounding.
    """
    logprobs = _unpack(field, data, "<f4")
    if logprobs.size != tokens:
        raise ValueError(f"{field} holds {logprobs.size} log-probs for {tokens} tokens")
    # A NaN is both the smallest and the largest: two looks suffice, and only a fault is looked for element by element.
    if tokens and not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):
        bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > 1e-3))
        raise ValueError(f"{field}[{bad[0]}] = {logprobs[bad[0]]} is no log-prob")
    return logprobs


def _unpack(field: str, data: bytes, dtype: str) -> np.ndarray:
    if len(data) % 4:
        raise ValueError(f"{field} has {len(data)} bytes, which is no multiple of 4")
    if len(data) // 4 > MAX_TOKENS:
        raise ValueError(f"{field} holds {len(data) // 4} elements; at most {MAX_TOKENS} are taken")
    return np.frombuffer(data, dtype=dtype)
