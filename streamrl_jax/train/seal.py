"""The last mark on a checkpoint: the size and digest of each of its files.

Orbax writes a checkpoint under a temporary name and renames it when it is complete, which a killed process
cannot break. What a full disk, a lost page cache or a copy that was cut do to the files afterwards is seen by
their digests. A directory without a seal is not a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

SEAL: Final = "checksums.json"
"""File within the directory that is sealed."""


def write_seal(directory: Path) -> None:
    """Records every file of a directory that is complete; the record appears whole or not at all.

    Args:
        directory: where nothing is written any more.
    """
    files = {str(path.relative_to(directory)): _describe(path, threads=1) for path in _files(directory)}
    unfinished = directory / f"{SEAL}.part"
    with unfinished.open("w") as stream:
        json.dump({"files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(directory / SEAL)


def is_sealed(directory: Path) -> bool:
    """Whether the record is there; what it says is checked by ``faults``."""
    return (directory / SEAL).is_file()


def faults(directory: Path) -> list[str]:
    """Holds a directory against its record, each byte of it.

    Args:
        directory: as given to ``write_seal``.

    Returns:
        One line a fault; empty when all is as it was.
    """
    if not is_sealed(directory):
        return [f"it was never completed ({SEAL} is missing)"]
    try:
        recorded = json.loads((directory / SEAL).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"{SEAL} cannot be read ({type(error).__name__}: {error})"]
    if not isinstance(recorded, dict) or not recorded:
        return [f"{SEAL} names no files"]
    found: list[str] = []
    for name, wanted in recorded.items():
        if not isinstance(wanted, dict) or "bytes" not in wanted:
            found.append(f"{SEAL} does not say what {name} holds")
            continue
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif (size := path.stat().st_size) != wanted["bytes"]:
            found.append(f"{name} has {size} bytes instead of {wanted['bytes']}")
        elif _describe(path, threads=blake3.AUTO) != wanted:
            found.append(f"{name} does not match its digest")
    return found


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != f"{SEAL}.part")


def _describe(path: Path, threads: int) -> dict[str, Any]:
    digest = blake3(max_threads=threads).update_mmap(path).hexdigest()
    return {"bytes": path.stat().st_size, "blake3": digest}
