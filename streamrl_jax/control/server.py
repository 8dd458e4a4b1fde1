"""Where a controller serves: `RunControl` for the trainer processes, and whatever else serves over the same core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from streamrl_jax.control.admin import add_pool_admin
from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.fencing import FenceInterceptor
from streamrl_jax.control.service import RunControlService
from streamrl_jax.gen import net
from streamrl_jax.proto import control_pb2_grpc as rpc
from streamrl_jax.types import Fence

__all__ = ["RunControlService", "Serving", "serve", "write_control_file"]

_LAST_EVENTS_S: Final = 0.05  # gRPC still ends its handlers

Added = Callable[[ControllerCore, grpc.aio.Server], Callable[[], None]]
"""Adds a servicer to a server that is not started yet; what it returns is called when the server ends."""

SERVICES: Final[tuple[Added, ...]] = (add_pool_admin,)
"""What is served over the core beside `RunControl`."""


@dataclass(frozen=True)
class Serving:
    """Where a controller serves.

    Attributes:
        access: Token and TLS.
        listen: ``host:port``; port 0 takes a free one.
        file: Where the address is written for those who look for it; None: nowhere.
    """

    access: net.Access
    listen: str = "127.0.0.1:0"
    file: Path | None = None


@contextlib.asynccontextmanager
async def serve(service: RunControlService, core: ControllerCore, serving: Serving) -> AsyncIterator[str]:
    """Serves on the loop that runs now, for as long as the context lasts.

    Args:
        service: for trainer processes.
        core: for the other `SERVICES`.
        serving: where.

    Yields:
        ``host:port`` that was bound.

    Raises:
        UserError: the address cannot be bound.
    """
    server = net.make_server(serving.access, FenceInterceptor(core.fence))
    rpc.add_RunControlServicer_to_server(service, server)
    closing = [add(core, server) for add in SERVICES]
    address = net.bind(server, serving.listen, serving.access)
    await server.start()
    try:
        if serving.file is not None:
            write_control_file(serving.file, address, core.fence)
        yield address
    finally:
        if serving.file is not None:
            _remove_control_file(serving.file, address)
        for close in closing:
            close()
        await server.stop(0.5)
        await asyncio.sleep(_LAST_EVENTS_S)


def write_control_file(path: Path, address: str, fence: Fence) -> None:
    """Writes where the controller is found, whole or not at all, readable by its owner only."""
    text = json.dumps(
        {
            "address": address,
            "pid": os.getpid(),
            "run_id": fence.run_id,
            "incarnation": fence.incarnation,
        }
    )
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    part.rename(path)


def _remove_control_file(path: Path, address: str) -> None:
    """Unless a later life of the run has written its own."""
    with contextlib.suppress(FileNotFoundError):
        told = json.loads(path.read_text())
        if (told["pid"], told["address"]) == (os.getpid(), address):
            path.unlink()
