"""The file that holds a version's bytes on one host: written once, sealed, mapped by its readers, unlinked.

It lies in shared memory (``/dev/shm``), or, where that is too small (a container's default is 64 MiB), in a
directory given for the purpose. A blob is written under a name that no reader looks for and gets its own
name only when it is whole. Each name carries its owner (process and start time), so that what a killed
process left behind is told from what a living one still serves.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from streamrl_jax.errors import UserError
from streamrl_jax.types import Fence

SHARED_MEMORY = Path("/dev/shm")

_UNSEALED = ".part"
_SEALED = ".bin"
_NAME = re.compile(
    r"streamrl-.+-v\d+\.(?P<namespace>\d+)\.(?P<pid>\d+)\.(?P<start>\d+)\.[0-9a-f]+(\.bin|\.part)", re.ASCII
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one that got the same number."""

    namespace: int  # inode of its pid namespace: containers that share /dev/shm may not share pids
    pid: int
    start: int  # clock ticks from boot to its start

    @staticmethod
    def current() -> Owner:
        """This process."""
        pid = os.getpid()
        start = _start_ticks(pid)
        if start is None:
            raise RuntimeError("/proc/self/stat cannot be read")
        return Owner(_pid_namespace(), pid, start)

    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False where that cannot be seen from here."""
        return self.namespace == _pid_namespace() and _start_ticks(self.pid) != self.start


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write under ``directory``."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def choose_directory(
    nbytes: int, candidates: Sequence[Path], free: Callable[[Path], int] = free_bytes
) -> Path:
    """Picks the first directory with room for a blob.

    Args:
        nbytes: bytes of the blob.
        candidates: existing directories, the best one first.
        free: gives the free bytes of one.

    Returns:
        The directory.

    Raises:
        NoRoom: none has room; names each with its free bytes.
    """
    room = {directory: free(directory) for directory in candidates}
    for directory, available in room.items():
        if available >= nbytes:
            return directory
    listed = ", ".join(f"{directory} ({available} bytes free)" for directory, available in room.items())
    raise NoRoom(
        f"A version of the weights needs {nbytes} bytes of shared memory or disk, and there is no room in "
        f"{listed}. Enlarge /dev/shm (docker: --shm-size), or put the run directory on a larger disk."
    )


def blob_stem(fence: Fence, version: int) -> str:
    """How the name of every blob of a version begins; a dot and its owner's mark follow."""
    return f"streamrl-{quote(fence.run_id, safe='')}-{fence.incarnation}-v{version}"


class NoRoom(UserError):
    """A blob's room could not be reserved, or not be filled."""


class BlobWriter:
    """Writes one blob: ``write`` in any order, then ``seal``; leaving the context unsealed removes it.

    Invariant: a file that carries a blob's name is whole. The room is reserved at once, so that a full disk
    shows here as an error, and never later in a reader as a fault of the memory bus.

    Args:
        directory: where the blob will lie.
        fence: the life of the run it belongs to.
        version: the policy version.
        nbytes: its size.

    Raises:
        NoRoom: names the path, the bytes needed and the bytes free. Nothing is left behind.
    """

    def __init__(self, directory: Path, fence: Fence, version: int, nbytes: int) -> None:
        owner = Owner.current()
        mine = f"{owner.namespace}.{owner.pid}.{owner.start}.{secrets.token_hex(4)}"
        stem = f"{blob_stem(fence, version)}.{mine}"
        self.path = directory / f"{stem}{_SEALED}"
        self._unsealed = directory / f"{stem}{_UNSEALED}"
        self._nbytes = nbytes
        self._fd: int | None = os.open(
            self._unsealed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self.discard()
            raise self._explained(error) from error

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes bytes at their place.

        Args:
            offset: bytes from the start of the blob.
            data: contiguous bytes.

        Raises:
            ValueError: they would lie outside the blob.
            NoRoom: after all; it was reserved.
        """
        view = memoryview(data).cast("B")
        if offset < 0 or offset + view.nbytes > self._nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + view.nbytes} lie outside a blob of {self._nbytes} bytes"
            )
        try:
            while view.nbytes:
                written = os.pwrite(self._open_fd(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._explained(error) from error

    def mapped(self) -> memoryview:
        """What has been written so far, read-only, for a check before ``seal``."""
        return _map(self._unsealed)

    def seal(self) -> Path:
        """Gives the blob its name: from here on readers see it, and nothing more is written.

        Returns:
            Its path.
        """
        os.close(self._open_fd())
        self._fd = None
        self._unsealed.rename(self.path)
        return self.path

    def discard(self) -> None:
        """Removes the blob if it was not sealed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._unsealed.unlink(missing_ok=True)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is sealed or discarded")
        return self._fd

    def _explained(self, error: OSError) -> Exception:
        if error.errno not in _NO_SPACE:
            return error
        return NoRoom(
            f"{self.path}: no room for the weights, {self._nbytes} bytes needed and "
            f"{free_bytes(self.path.parent)} free. Enlarge /dev/shm (docker: --shm-size), or put the run "
            "directory on a larger disk."
        )


def open_blob(
    directories: Sequence[Path],
    fence: Fence,
    version: int,
    nbytes: int,
    free: Callable[[Path], int] = free_bytes,
) -> BlobWriter:
    """Opens a blob in the first directory with room; where another process was quicker, in the next.

    Args:
        directories: existing ones, the best first.
        fence: as for `BlobWriter`, like ``version`` and ``nbytes``.
        version: the policy version.
        nbytes: its size.
        free: gives the free bytes of a directory.

    Returns:
        The writer.

    Raises:
        UserError: none has room.
    """
    left = list(directories)
    while True:
        directory = choose_directory(nbytes, left, free)
        try:
            return BlobWriter(directory, fence, version, nbytes)
        except NoRoom:
            left.remove(directory)
            if not left:
                raise


def map_blob(path: Path, nbytes: int) -> memoryview:
    """Maps a sealed blob.

    Args:
        path: as its publisher gave it.
        nbytes: the size it must have.

    Returns:
        Its bytes, read-only. The mapping lives as long as the view, or an array made of it, also when the
        file is unlinked meanwhile.

    Raises:
        ValueError: it is no regular file, or of another size.
        OSError: it cannot be opened.
    """
    view = _map(path)
    if view.nbytes != nbytes:
        raise ValueError(f"{path} has {view.nbytes} bytes, expected {nbytes}")
    return view


def sweep(directories: Iterable[Path]) -> list[Path]:
    """Removes the blobs of processes that have ended.

    Files of other users, of other pid namespaces and of living processes are left alone.

    Args:
        directories: where to look; one that does not exist is passed over.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            continue
        for entry in os.scandir(directory):
            owner = _owner_of(entry)
            if owner is not None and owner.is_gone():
                path = Path(entry.path)
                path.unlink(missing_ok=True)  # another process may sweep at the same time
                removed.append(path)
    return removed


def _owner_of(entry: os.DirEntry[str]) -> Owner | None:
    """Who made a blob; None if it is none, or another user's."""
    match = _NAME.fullmatch(entry.name)
    if match is None:
        return None
    try:
        mine = (
            entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        )
    except FileNotFoundError:
        return None
    return Owner(int(match["namespace"]), int(match["pid"]), int(match["start"])) if mine else None


def _map(path: Path) -> memoryview:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, counted from behind the command, which may hold anything; None: ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
