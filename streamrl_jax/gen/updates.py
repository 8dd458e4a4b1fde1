"""Weight updates of one instance: one at a time, in order, and never half."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamrl_jax.bridge.blob import NoRoom
from streamrl_jax.gen.protocol import Engine, EngineFailed
from streamrl_jax.gen.sources import Blob, SourceRefused, Sources
from streamrl_jax.types import Fence, Manifest, UpdateReport, WeightSource

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 300.0
"""Bound on an update whose request names none."""


class Updates:
    """Takes versions to the engine.

    Call order: `apply` by any number of callers, who wait for each other; `forget` when another life of the
    run takes the instance over.

    Invariant: within one life versions only grow; a repeated request for what is served succeeds without
    work.

    Args:
        engine: loads them.
        instance: name that reports carry.
        holder: gives the fence that holds the instance.
        sources: opens what callers name; None: a path is handed on as it is, to an engine that reads nothing.
        on_failure: takes the reason when the engine must be restarted.
    """

    def __init__(
        self,
        engine: Engine,
        instance: str,
        holder: Callable[[], Fence | None],
        sources: Sources | None,
        on_failure: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._instance = instance
        self._holder = holder
        self._sources = sources
        self._on_failure = on_failure
        self._served: Manifest | None = None
        self._lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether one is going on."""
        return self._lock.locked()

    def forget(self) -> None:
        """What is served belongs to another life."""
        self._served = None

    def refused(self, reason: str) -> UpdateReport:
        """The report of an update that changed nothing."""
        return UpdateReport(self._instance, False, self._engine.version, reason)

    def fault(self, manifest: Manifest, source: WeightSource, *, local_caller: bool) -> str:
        """Why a version may not be taken from there; empty: it may.

        Args:
            manifest: what it consists of.
            source: where its bytes are said to lie.
            local_caller: whether who says so is on this machine.
        """
        most = self._engine.limits.weight_bytes
        if most and manifest.total_bytes > most:
            return (
                f"manifest.total_bytes = {manifest.total_bytes}, and this model's weights take {most}: the version is "
                "of another model"
            )
        if self._sources is None:
            return ""
        try:
            self._sources.check(source, manifest, local_caller=local_caller)
        except SourceRefused as error:
            return str(error)
        return ""

    async def apply(
        self, manifest: Manifest, source: WeightSource, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        """Loads a version whose source has no `fault`.

        Args:
            manifest: what it consists of.
            source: where its bytes lie.
            in_flight: keep what runs, else let it finish first.
            timeout_s: bound on the whole; 0: `DEFAULT_TIMEOUT_S`.

        Returns:
            What became of it. It is never raised for: who asked reads the reason, and the old version
            serves on.
        """
        deadline = time.monotonic() + (timeout_s or DEFAULT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s or DEFAULT_TIMEOUT_S):
                await self._lock.acquire()
        except TimeoutError:
            return self.refused("another update did not end in time")
        try:
            if (decided := self._decide(manifest)) is not None:
                return decided
            report = await self._load(manifest, source, in_flight, deadline)
            if report.accepted and manifest.fence == self._holder():
                self._served = manifest
            elif (
                report.accepted
            ):  # another life took over meanwhile: it must not take these weights for its own
                await self._engine.forget_version()
                return self.refused(f"{manifest.fence} was superseded by {self._holder()}")
        finally:
            self._lock.release()
        if report.quarantined:
            self._on_failure(f"quarantined by a failed update to version {manifest.version}: {report.reason}")
        return replace(report, instance=self._instance)

    def _decide(self, manifest: Manifest) -> UpdateReport | None:
        """What is clear before any byte is read."""
        if manifest.fence != self._holder():
            return self.refused(f"{manifest.fence} was superseded by {self._holder()}")
        if self._served is None or manifest.version > self._served.version:
            return None
        if manifest == self._served:
            return UpdateReport(self._instance, True, self._served.version)
        return self.refused(
            f"version {manifest.version} is not newer than {self._served.version}, served here"
        )

    async def _load(
        self, manifest: Manifest, source: WeightSource, in_flight: bool, deadline: float
    ) -> UpdateReport:
        blob: Blob | None = None
        try:
            if self._sources is not None:
                blob = await self._sources.open(source, manifest, deadline - time.monotonic())
            else:
                blob = Blob(Path(source.path), own=False)
            return await self._engine.update_weights(
                manifest, blob.path, in_flight=in_flight, timeout_s=max(0.0, deadline - time.monotonic())
            )
        except (EngineFailed, NoRoom) as error:  # without room for weights it cannot serve this run
            self._on_failure(str(error))
            return self.refused(str(error))
        except Exception as error:
            log.exception("update to version %d failed before it began", manifest.version)
            return self.refused(f"{type(error).__name__}: {error}")
        finally:
            if blob is not None and blob.own:
                blob.path.unlink(missing_ok=True)
