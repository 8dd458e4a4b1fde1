"""Which published versions are still needed. Pure: the sources themselves live elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from streamrl_jax.types import NO_VERSION, Manifest, WeightSource


@dataclass(frozen=True, eq=False)
class Publication:
    """A version that instances can load."""

    manifest: Manifest
    source: WeightSource
    release: Callable[[], None]  # called once, when nobody needs the source any more
    published_s: float  # monotonic

    @property
    def version(self) -> int:
        """The policy version."""
        return self.manifest.version


class Shelf:
    """Keeps the newest publication, for updates and restarts, and older ones while an instance loads them.

    Call order: ``put`` by the trainer; ``borrow`` and ``give_back`` around each load. A publication is
    released once it is neither the newest nor borrowed.
    """

    def __init__(self) -> None:
        self.current: Publication | None = None
        self._held: dict[int, Publication] = {}
        self._borrowed: Counter[int] = Counter()

    @property
    def version(self) -> int:
        """The newest version; ``NO_VERSION`` before the first."""
        return self.current.version if self.current else NO_VERSION

    def put(self, publication: Publication) -> list[int]:
        """Makes a newer version the current one; returns the versions that this released."""
        if publication.version <= self.version:
            raise ValueError(f"version {publication.version} is published after version {self.version}")
        self.current = publication
        self._held[publication.version] = publication
        return self._release_unneeded()

    def borrow(self) -> Publication | None:
        """The current publication, kept until it is given back."""
        if self.current:
            self._borrowed[self.current.version] += 1
        return self.current

    def give_back(self, publication: Publication) -> list[int]:
        """Ends a load; returns the versions that this released."""
        self._borrowed[publication.version] -= 1
        return self._release_unneeded()

    def clear(self) -> list[int]:
        """Releases everything, at the end of the run."""
        self.current = None
        self._borrowed.clear()
        return self._release_unneeded()

    def _release_unneeded(self) -> list[int]:
        unneeded = [v for v in sorted(self._held) if v != self.version and not self._borrowed[v]]
        for version in unneeded:
            del self._borrowed[version]
            self._held.pop(version).release()
        return unneeded
