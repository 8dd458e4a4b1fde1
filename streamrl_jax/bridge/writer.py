"""Host arrays of one version become its blob and manifest; what each part of that costs is measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from streamrl_jax.bridge.blob import BlobWriter, open_blob
from streamrl_jax.bridge.manifest import blob_size, build_manifest, digest_bytes
from streamrl_jax.types import Fence, Manifest, TensorSpec


@dataclass(frozen=True)
class WriteSeconds:
    """Where the time of writing a version went, seconds."""

    copy: float = 0.0  # waiting for the bytes to reach the host
    digest: float = 0.0
    write: float = 0.0  # reserving the room included


class VersionWriter:
    """Writes one version: ``open``, ``add`` some tensors at a time, ``finish``; or ``discard`` at any time.

    Args:
        fence: the life of this run.
        version: its number.
        architecture: as in the checkpoint's configuration.
        layout: the place of each tensor, by name.
        directories: where the blob may lie, the best first.
    """

    def __init__(
        self,
        fence: Fence,
        version: int,
        architecture: str,
        layout: Mapping[str, TensorSpec],
        directories: Sequence[Path],
    ) -> None:
        self._fence, self._version, self._architecture = fence, version, architecture
        self._layout, self._directories = layout, directories
        self._blob: BlobWriter | None = None
        self._digests: dict[str, bytes] = {}
        self.seconds = WriteSeconds()

    def open(self) -> None:
        """Reserves the room.

        Raises:
            UserError: there is none.
        """
        begun = time.monotonic()
        nbytes = blob_size(tuple(self._layout.values()))
        self._blob = open_blob(self._directories, self._fence, self._version, nbytes)
        self._spend(write=time.monotonic() - begun)

    def add(self, tensors: Iterable[tuple[str, ArrayLike]]) -> None:
        """Digests and writes tensors.

        Args:
            tensors: name and array; an array on a device is copied to the host when it is its turn.
        """
        begun = time.monotonic()
        for name, array in tensors:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            copied = time.monotonic()
            self._digests[name] = digest_bytes(data)
            digested = time.monotonic()
            self._opened().write(self._layout[name].offset, data)
            written = time.monotonic()
            self._spend(copied - begun, digested - copied, written - digested)
            begun = written  # what gives the tensors may itself wait for the next one

    def finish(self) -> tuple[Manifest, Path]:
        """Seals the blob.

        Returns:
            Manifest and path of the version.
        """
        tensors = [replace(spec, digest=self._digests[name]) for name, spec in self._layout.items()]
        manifest = build_manifest(self._fence, self._version, self._architecture, tensors)
        return manifest, self._opened().seal()

    def discard(self) -> None:
        """Removes what was written."""
        if self._blob is not None:
            self._blob.discard()

    def _opened(self) -> BlobWriter:
        if self._blob is None:
            raise ValueError("open() comes first")
        return self._blob

    def _spend(self, copy: float = 0.0, digest: float = 0.0, write: float = 0.0) -> None:
        spent = self.seconds
        self.seconds = WriteSeconds(spent.copy + copy, spent.digest + digest, spent.write + write)
