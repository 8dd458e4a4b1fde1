"""Reading and writing one safetensors file.

The format: 8 bytes, the length N of the header (little-endian); N bytes of JSON, name -> dtype, shape and
[begin, end) counted from the end of the header; then the tensors' bytes, row-major and without gaps. Reading
maps the file and copies nothing. (The `safetensors` package has no bfloat16 for NumPy, which real checkpoints
use.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from streamrl_jax.errors import UserError

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES: Final = 100_000_000


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Opens a file as arrays that are read from disk when they are touched.

    Args:
        path: A .safetensors file.

    Returns:
        name -> read-only array in the file's own dtype (float32, float16 or bfloat16).

    Raises:
        UserError: The file cannot be read, is truncated, its header is broken, or a dtype is not a float.
    """
    header, start, size = _read_header(path)
    if not header:
        raise UserError(f"{path}: the file holds no tensors; copy the checkpoint again")
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=(size - start,))
    return {name: _view(path, data, name, entry) for name, entry in header.items()}


def write_tensors(
    path: Path, layout: Mapping[str, tuple[int, ...]], dtype: str, arrays: Iterable[Any]
) -> None:
    """Writes a file, one tensor in memory at a time.

    Args:
        path: The file to create.
        layout: name -> shape, in the order of `arrays`.
        dtype: "float32" or "bfloat16"; float32 arrays are rounded to nearest even.
        arrays: One array for each name; consumed lazily.

    Raises:
        ValueError: An array has not the shape that was announced, or their number differs.
    """
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for name, shape in layout.items():
        begin, end = end, end + math.prod(shape) * target.itemsize
        header[name] = {"dtype": _CODES[target], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), array in zip(layout.items(), arrays, strict=True):
            if tuple(array.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(array.shape)} instead of {shape}")
            file.write(np.ascontiguousarray(array, dtype=target).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header without its metadata, where the data starts, and the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _broken(path, f"it announces a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _broken(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _view(path: Path, data: np.ndarray, name: str, entry: Any) -> np.ndarray:
    try:
        code, shape = entry["dtype"], tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the entry of tensor {name!r} is {json.dumps(entry)}") from error
    if code not in DTYPES:
        raise UserError(
            f"{path}: tensor {name!r} has dtype {code!r}; only {', '.join(DTYPES)} can be read. Give the "
            f"original, unquantized weights."
        )
    dtype = DTYPES[code]
    if not 0 <= begin <= end <= len(data):
        raise _broken(path, f"tensor {name!r} ends at byte {end} of {len(data)} (truncated?)")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _broken(path, f"tensor {name!r}, {code} of shape {list(shape)}, has {end - begin} bytes")
    return data[begin:end].view(dtype).reshape(shape)


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"{path}: not a whole safetensors file: {what}. Copy or download it again.")
