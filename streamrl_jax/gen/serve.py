"""One instance as a process: a server that answers at once, and behind it an engine that loads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Final

from streamrl_jax.bridge.blob import SHARED_MEMORY, sweep
from streamrl_jax.gen import net
from streamrl_jax.gen.health import add_health
from streamrl_jax.gen.host import host_id
from streamrl_jax.gen.join import Announcer, Myself
from streamrl_jax.gen.options import NO_ADDRESS_EXIT_CODE, InstanceSpec
from streamrl_jax.gen.protocol import Engine, EngineFailed
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.gen.sources import Sources
from streamrl_jax.proto import streamrl_pb2_grpc as rpc

log = logging.getLogger(__name__)

LINGER_S: Final = 5.0
"""So long a failed instance still answers, so that its controller reads why."""

CLOSE_S: Final = 10.0
"""Bound on the engine's orderly end."""


async def serve(spec: InstanceSpec, engine: Engine) -> int:
    """Serves one instance until it is told to end or its engine fails.

    Args:
        spec: of the instance.
        engine: not yet started.

    Returns:
        Exit code: 0 when told to end, 1 when the engine failed, `NO_ADDRESS_EXIT_CODE` when nobody could be told
        where it answers.

    Raises:
        UserError: the address cannot be bound, the token not be read, or the run that it dials in to refuses it.
    """
    access = net.Access.from_files(spec.access)
    scratch = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    sweep(scratch)
    shared = (*scratch, *map(Path, spec.blob_directories))
    sources = Sources(access, shared, scratch, spec.stores)
    identity = Identity(spec.name, spec.lookahead, host_id(), fence=spec.fence)
    service = GenerationService(engine, identity, sources)
    server = net.make_server(access)
    rpc.add_StreamGenerationServicer_to_server(service, server)
    add_health(server, lambda: service.serving)
    address = net.bind(server, spec.listen, access)
    told = _told_to_end()
    await server.start()
    log.info("%s answers at %s", spec.name, address)
    if spec.address_file and not _announce(address, Path(spec.address_file)):
        await server.stop(None)
        return NO_ADDRESS_EXIT_CODE
    life = asyncio.create_task(service.run())
    announcing = asyncio.create_task(_announcing(spec, address, access, told))
    try:
        code = await _until_the_end(life, told)
        if announcing.done():
            announcing.result()
        return code
    finally:
        announcing.cancel()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineFailed):
            await life
        await server.stop(0.5)
        await _close(engine)


def _told_to_end() -> asyncio.Event:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


async def _announcing(spec: InstanceSpec, address: str, access: net.Access, told: asyncio.Event) -> None:
    """Announces an instance that dials in; ends it when it is not needed any more, or refused."""
    if spec.join is None:
        return
    myself = Myself(spec.name, address, spec.engine.max_num_seqs, spec.engine.max_model_len)
    try:
        log.info("%s; it ends", await Announcer(spec.join, myself, access).run())
    finally:
        told.set()


async def _until_the_end(life: asyncio.Task[None], told: asyncio.Event) -> int:
    end = asyncio.create_task(told.wait())
    try:
        await asyncio.wait((life, end), return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            log.info("told to end")
            return 0
        try:
            life.result()
        except EngineFailed as error:
            log.error("%s; ends in %.0f s", error, LINGER_S)
        await asyncio.wait((end,), timeout=LINGER_S)
        return 1
    finally:
        end.cancel()


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await engine.close()
    except TimeoutError:
        log.warning("the engine did not end within %.0f s; it ends with this process", CLOSE_S)


def _announce(address: str, path: Path) -> bool:
    """Writes where the instance answers; whole or not at all. Returns whether it could."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        part.rename(path)
    except OSError as error:
        log.error("%s could not be written: %s", path, error)
        return False
    return True
