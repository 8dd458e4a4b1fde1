"""The admin service of a run's pool: list, add, drain, and announcements of instances that dial in."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc

from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.guests import Guest, Guests, Word
from streamrl_jax.errors import UserError
from streamrl_jax.gen import codec
from streamrl_jax.gen.codec import wire
from streamrl_jax.gen.launch.fleet import Fleet
from streamrl_jax.proto import pool_pb2 as pb
from streamrl_jax.proto import pool_pb2_grpc as rpc

MAX_ADDED: Final = 1024
"""Instances that one call adds at most."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_WORDS: Final = {
    Word.STAY: pb.AnnounceReply.STAY,
    Word.WAIT: pb.AnnounceReply.WAIT,
    Word.LEAVE: pb.AnnounceReply.LEAVE,
    Word.OVER: pb.AnnounceReply.OVER,
}


def add_pool_admin(core: ControllerCore, server: grpc.aio.Server) -> Callable[[], None]:
    """Adds the service to a server that is not started yet.

    Args:
        core: the controller; its loop runs the server.
        server: where calls come in.

    Returns:
        To be called when the run is over: whoever dialled in is told so.
    """
    service = PoolAdminService(core)
    rpc.add_PoolAdminServicer_to_server(service, server)
    return service.close


class PoolAdminService(rpc.PoolAdminServicer):
    """Answers `streamrl pool` and instances that dial in, on the controller's loop.

    Args:
        core: the controller.
    """

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._pool = core.pool
        self._fleet = core.launcher if isinstance(core.launcher, Fleet) else None
        self._guests = Guests(core.pool, self._fleet) if self._fleet is not None else None
        if self._guests is not None:
            core.spawn(self._guests.watch(), name="guests")

    def close(self) -> None:
        """The run is over."""
        if self._guests is not None:
            self._guests.close()

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListInstancesReply:
        """Every instance, and those that have left."""
        reply = pb.ListInstancesReply(
            fence=codec.fence_to_proto(self._core.fence), version=self._pool.shelf.version
        )
        for view in self._pool.views():
            entry = reply.instances.add(
                name=view.name,
                address=view.address,
                state=view.state.value,
                version=view.version,
                slots=view.slots,
                held=view.held,
                running=view.running,
                waiting=view.waiting,
                tokens_per_s=view.tokens_per_s,
                restarts=view.restarts,
            )
            if self._fleet is not None:
                place = self._fleet.place(view.name)
                entry.device, entry.host, entry.joined = place.device, place.host, place.joined
        for name, why in self._pool.gone().items():
            reply.left.add(name=name, why=why[: wire.MAX_TEXT])
        return reply

    async def AddInstances(
        self, request: pb.AddInstancesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AddInstancesReply:
        """Starts further instances; returns before they are up."""
        names: list[str] = []
        try:
            self._add(request, names)
        except (UserError, ValueError) as error:
            for name in names:
                self._core.launcher.forget(name)
            await _refuse(context, error)
        for name in names:
            self._pool.add(name, founding=False)
        return pb.AddInstancesReply(names=names)

    async def DrainInstances(
        self, request: pb.DrainInstancesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainInstancesReply:
        """Lets instances go; returns before they have left."""
        try:
            if not request.names:
                raise ValueError("no instance is named")
            self._pool.drain(*request.names, at_once=request.at_once)
        except (UserError, ValueError) as error:
            await _refuse(context, error)
        return pb.DrainInstancesReply()

    async def Announce(
        self, request: pb.AnnounceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AnnounceReply]:
        """Takes an instance in, and tells it whose it is for as long as it stays."""
        try:
            self._growing()
            guest = Guest(
                _guests_name(request.name),
                wire.name("life", request.life),
                wire.name("address", request.address),
                wire.name("host", request.host),
            )
            assert self._guests is not None, "it can grow"
            fence = codec.fence_to_proto(self._core.fence)
            async for word, text in self._guests.attend(guest):
                yield pb.AnnounceReply(word=_WORDS[word], text=text[: wire.MAX_TEXT], fence=fence)
        except (UserError, ValueError) as error:
            await _refuse(context, error)

    def _add(self, request: pb.AddInstancesRequest, names: list[str]) -> None:
        fleet = self._growing()
        if request.endpoint:
            names.append(fleet.endpoint(wire.name("endpoint", request.endpoint)))
            return
        for device in _devices(request.devices, request.count):
            names.append(fleet.grow(request.pool, device))

    def _growing(self) -> Fleet:
        self._core.check()
        if self._fleet is None:
            raise UserError("this run was given its instances by a program and cannot take others")
        return self._fleet


def _devices(devices: Sequence[str], count: int) -> Sequence[str]:
    """An entry for each instance to add; empty: what is free.

    Raises:
        ValueError: the two do not fit together.
    """
    if devices and count and count != len(devices):
        raise ValueError(
            f"{len(devices)} entries of devices were given for {count} instances; give one an instance"
        )
    if count > MAX_ADDED:
        raise ValueError(f"{count} instances were asked for; at most {MAX_ADDED} are added at once")
    return devices or [""] * (count or 1)


def _guests_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name = {name[:80]!r}; an instance's name has letters, digits, dots, dashes, at most 128"
        )
    return name


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    code = (
        grpc.StatusCode.FAILED_PRECONDITION
        if isinstance(error, UserError)
        else grpc.StatusCode.INVALID_ARGUMENT
    )
    await context.abort(code, str(error))
    raise AssertionError("context.abort returned")
