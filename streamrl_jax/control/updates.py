"""Bringing one version to one instance: from where, and what its answer means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import grpc

from streamrl_jax.control.faults import ControlError, InstanceLost
from streamrl_jax.control.link import user_error
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication, Shelf
from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.host import host_id
from streamrl_jax.types import InstanceInfo, InstanceState, Manifest, UpdateReport, WeightSource

_AGAIN_S = 0.5  # after a connection broke during an update


def pick_source(
    source: WeightSource, info: InstanceInfo, transport: Literal["auto", "shm", "grpc"]
) -> WeightSource:
    """Chooses how an instance gets the bytes.

    Args:
        source: where they lie.
        info: says whether the instance shares this host's memory.
        transport: ``bridge.transport``.

    Returns:
        A source with either a path or an address.

    Raises:
        UserError: the way that is left does not exist.
    """
    same_host = info.same_host_weights and info.host_id == host_id()
    if transport == "shm" or (transport == "auto" and same_host and source.path):
        if not same_host:
            raise UserError(
                f"bridge.transport = 'shm', but instance {info.name} does not share this host's memory "
                "(another host, or another mount of /dev/shm); set bridge.transport to 'auto' or 'grpc'"
            )
        return WeightSource(path=source.path)
    if not source.address:
        raise UserError(
            f"instance {info.name} takes weights over gRPC (bridge.transport = {transport!r}), but no weight "
            "store is open; set bridge.listen"
        )
    return WeightSource(address=source.address)


async def load_current(
    name: str,
    client: InstanceClient,
    info: InstanceInfo,
    shelf: Shelf,
    settings: ControlSettings,
    released: Callable[[int], None],
) -> tuple[UpdateReport, Publication]:
    """Loads the newest version into an instance; its source is kept until that has ended, however it ends.

    Args:
        name: of the instance.
        client: its calls.
        info: what it said of itself.
        shelf: holds a version that the instance has not.
        settings: bounds.
        released: told of each version that nobody needs any more.

    Returns:
        The report of an accepted update, and what was loaded.

    Raises:
        Exception: as `pick_source` and `push`.
    """
    publication = shelf.borrow()
    assert publication is not None, "its version is newer than that of the instance"
    try:
        source = pick_source(publication.source, info, settings.transport)
        report = await push(name, client, publication.manifest, source, settings)
    finally:
        for version in shelf.give_back(publication):
            released(version)
    return report, publication


async def push(
    name: str,
    client: InstanceClient,
    manifest: Manifest,
    source: WeightSource,
    settings: ControlSettings,
) -> UpdateReport:
    """Loads a version into an instance. The instance stages it while what runs goes on.

    Args:
        name: of the instance.
        client: its calls.
        manifest: what the version consists of.
        source: from `pick_source`.
        settings: bounds.

    Returns:
        The report of an accepted update.

    Raises:
        ControlError: the instance refused the version; names every fault. A version that does not match its
            digests always stops the run.
        InstanceLost: the instance must be started anew.
        UserError: another run holds the instance.
    """
    end = time.monotonic() + settings.longest_update_s
    while True:
        try:
            report = await client.update(
                manifest, source, in_flight=settings.in_flight, timeout_s=max(0.1, end - time.monotonic())
            )
            break
        except InstanceError as error:
            if refused := user_error(name, error):
                raise refused from error
            # A broken connection: the same request again is harmless. The lease ends this for the dead.
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise InstanceLost(f"its update to version {manifest.version} failed: {error}") from error
            await asyncio.sleep(_AGAIN_S)
    if report.accepted:
        return replace(report, instance=name)
    what = f"update to version {manifest.version}: {report.reason}"
    if report.quarantined:
        raise InstanceLost(f"it was quarantined by a failed {what}")
    if await _failed(client):
        raise InstanceLost(f"its engine failed in its {what}")
    raise ControlError(
        f"instance {name} refused version {manifest.version} and goes on serving {report.version}: "
        f"{report.reason}"
    )


async def _failed(client: InstanceClient) -> bool:
    try:
        status, _ = await client.status()
    except InstanceError:
        return True  # no answer any more
    return status.state is InstanceState.FAILED
