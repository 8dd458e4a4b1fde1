"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl_jax.errors import UserError


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step; after a crash it holds either what it held before, or `data`.

    Args:
        path: The file; its directory exists.
        data: Its new content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def check_replaceable(path: Path, option: str) -> None:
    """Says before the work, and not after it, that its file cannot be written. One that is there will be replaced.

    Args:
        path: The file.
        option: That names it, for the message.

    Raises:
        UserError: Nothing can be written there.
    """
    if not path.name:
        raise UserError(f"{option} names no file; give one")
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            raise UserError(f"{option} {path} is no regular file, and would be replaced; name another file")
        with probe.open("wb"):
            pass
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error


def sync_directory(path: Path) -> None:
    """Makes new and renamed entries of a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an error of the operating system say which file it met: that of a full disk names none by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
