"""Where an instance takes weights from: what its caller names is checked before anything is opened or called."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from streamrl_jax.bridge.blob import blob_stem
from streamrl_jax.bridge.pull import pull
from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import Access, split_address
from streamrl_jax.types import Manifest, WeightSource

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)

_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
"""What systems call their loopback; any other name is for ``security.stores`` to allow."""
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*", re.ASCII)


@dataclass(frozen=True)
class Blob:
    """A version's bytes as a file."""

    path: Path
    own: bool  # fetched for this update: removed after it


class SourceRefused(Exception):
    """What the caller named is no place that weights may come from."""


class Sources:
    """Opens the sources of weights that a caller may name.

    Invariant: no file is read but one that has the name, the size and the owner of the version that is announced, in a
    directory that was allowed at the start; no address is called but a weight store's, with the run's token and, beyond
    loopback, its certificates.

    Args:
        access: token and TLS of the run.
        shared: where blobs of this host's publisher may lie.
        scratch: where fetched ones may lie, the best first.
        stores: patterns (``*``, ``?``) of hosts that a store may be on; empty: any that is no special address.
    """

    def __init__(
        self, access: Access, shared: Sequence[Path], scratch: Sequence[Path], stores: Sequence[str] = ()
    ) -> None:
        self._access = access
        self._shared = tuple(Path(os.path.realpath(directory)) for directory in shared)
        self._scratch = tuple(scratch)
        self._stores = tuple(stores)

    def check(self, source: WeightSource, manifest: Manifest, *, local_caller: bool) -> None:
        """Looks at what a caller named.

        Args:
            source: path or address.
            manifest: of the version that is said to lie there.
            local_caller: the caller is on this machine: only then may the store be on its loopback.

        Raises:
            SourceRefused: names the value and the remedy.
        """
        if source.path:
            self._check_path(Path(source.path), manifest)
        else:
            self._check_address(source.address, local_caller=local_caller)

    async def open(self, source: WeightSource, manifest: Manifest, timeout_s: float) -> Blob:
        """Gives the bytes as a file: the named one, or one that was fetched.

        Args:
            source: passed `check`.
            manifest: of the version.
            timeout_s: bound on the transfer.

        Raises:
            PullError: it could not be fetched.
            UserError: no room, or the store may not be called in plain text.
        """
        if source.path:
            return Blob(Path(source.path), own=False)
        fetched = await pull(
            source.address, manifest, timeout_s, access=self._access, directories=self._scratch
        )
        return Blob(fetched, own=True)

    def _check_path(self, path: Path, manifest: Manifest) -> None:
        if path.parent not in self._shared:  # compared as text: neither ".." nor a link gets through
            allowed = ", ".join(map(str, self._shared))
            raise SourceRefused(
                f"same_host.path = {str(path)!r} is not in a directory that blobs may lie in ({allowed}); enlarge "
                "/dev/shm, or set bridge.transport to 'grpc'"
            )
        stem = blob_stem(manifest.fence, manifest.version)
        if not (path.name.startswith(f"{stem}.") and path.suffix == ".bin"):
            raise SourceRefused(
                f"same_host.path = {str(path)!r} has not the name of version {manifest.version}: {stem}.….bin"
            )
        try:
            found = path.lstat()
        except OSError as error:
            raise SourceRefused(f"same_host.path = {str(path)!r} cannot be read: {error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise SourceRefused(f"same_host.path = {str(path)!r} is no regular file")
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise SourceRefused(
                f"same_host.path = {str(path)!r} belongs to user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):o}; only this user ({os.getuid()}) may be able to write it"
            )
        if found.st_size != manifest.total_bytes:
            raise SourceRefused(
                f"same_host.path = {str(path)!r} has {found.st_size} bytes, expected manifest.total_bytes = "
                f"{manifest.total_bytes}"
            )

    def _check_address(self, address: str, *, local_caller: bool) -> None:
        try:
            host, port = split_address(address)
        except UserError as error:
            raise SourceRefused(f"store.{error}") from error
        what = f"store.address = {address!r}"
        number = _number(host)
        if port == 0 or (number is None and not _is_host_name(host)):
            raise SourceRefused(f"{what} is no host and port of a weight store")
        if self._stores and not any(fnmatchcase(host, pattern) for pattern in self._stores):
            raise SourceRefused(f"{what} is not among security.stores = {list(self._stores)}")
        if _is_this_machine(host, number):
            if not local_caller:
                raise SourceRefused(
                    f"{what} is on this machine, and the caller is not; set bridge.listen and bridge.advertise of the "
                    "run to an address that this host reaches"
                )
        elif number is not None and (number.is_link_local or number.is_multicast or number.is_reserved):
            raise SourceRefused(f"{what} is a special address, where no weight store can be")


def local_peer(peer: str) -> bool:
    """Whether a caller, as gRPC names it, is on this machine (by loopback, or by one of its own addresses)."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    number = _number(rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]"))
    if number is None:
        return False
    family = socket.AF_INET if number.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(number), 0))  # which only an address of this machine allows
        except OSError:
            return False
    return True


def _is_this_machine(host: str, number: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if number is not None:
        return number.is_loopback or number.is_unspecified
    host = host.lower()
    return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def _is_host_name(host: str) -> bool:
    """A name, and no number in a notation of C's: ``127.1`` and ``0x7f000001`` are resolved as addresses too."""
    return _HOST.fullmatch(host) is not None and _NUMBER.fullmatch(host.rpartition(".")[2]) is None


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found
