"""An instance that dials in: it announces itself to a run's controller, which then connects to it as to any other.

Hostnames are not known beforehand under a scheduler, so the instance finds the run, not the run the instance. It says
where it answers for as long as it lives; when the controller is started anew (a resume), it says so again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.options import JoinSpec
from streamrl_jax.gen.whereabouts import find_controller
from streamrl_jax.proto import pool_pb2 as pb
from streamrl_jax.proto import pool_pb2_grpc as rpc

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
"""Between two attempts to reach the controller."""

SILENT_S: Final = 15.0
"""A controller that says nothing for so long is called anew; it speaks every two seconds."""

_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


@dataclass(frozen=True)
class Myself:
    """What an instance says of itself."""

    name: str
    address: str  # that it bound
    slots: int
    max_model_len: int


class Announcer:
    """Announces an instance until it is not needed any more.

    Args:
        join: whom to announce it to.
        myself: the instance.
        access: token and TLS of the run.
    """

    def __init__(self, join: JoinSpec, myself: Myself, access: net.Access) -> None:
        self._join = join
        self._myself = myself
        self._access = access
        self._life = uuid.uuid4().hex
        self._welcome = False
        self._heard = time.monotonic()

    async def run(self) -> str:
        """Announces the instance, again and again.

        Returns:
            Why it should end: the run is over, it was drained, or the controller is gone for too long.

        Raises:
            UserError: the controller refuses it, or there was none all the time.
        """
        while True:
            address = self._controller()
            if address is None and self._welcome:
                return "the run is over"
            if address is not None and (why := await self._attend(address)) is not None:
                return why
            if time.monotonic() - self._heard > self._join.patience_s:
                what = f"the controller at {address}" if address else f"a controller of {self._join.run_dir}"
                why = f"{what} did not answer for {self._join.patience_s:g} s"
                if not self._welcome:
                    raise UserError(
                        f"{why}, and never did: see whether the run goes on, or give a longer --patience"
                    )
                return why
            await asyncio.sleep(AGAIN_S)

    def _controller(self) -> str | None:
        if self._join.address:
            return self._join.address
        found = find_controller(Path(self._join.run_dir))
        return found.address if found else None

    async def _attend(self, address: str) -> str | None:
        """One announcement. Returns why the instance should end, or None: call again."""
        try:  # in a thread: a name server may take its time
            own = await asyncio.to_thread(advertised, self._myself.address, self._join.advertise, address)
        except OSError as error:  # it may come back, as the controller may
            log.info("the way to the controller at %s is not known: %s", address, error)
            return None
        request = pb.AnnounceRequest(
            name=self._myself.name,
            life=self._life,
            address=own,
            host=socket.gethostname(),
            slots=self._myself.slots,
            max_model_len=self._myself.max_model_len,
        )
        channel = net.open_channel(address, self._access)
        call = rpc.PoolAdminStub(channel).Announce(request, metadata=self._access.metadata)
        try:
            return await self._listen(call)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise UserError(
                    f"the controller at {address} refuses this instance: {error.details()}"
                ) from error
            log.info("the controller at %s: %s: %s", address, error.code().name, error.details())
            return None
        except TimeoutError:
            log.info("the controller at %s has said nothing for %g s", address, SILENT_S)
            return None
        finally:
            call.cancel()
            await channel.close()

    async def _listen(self, call: Any) -> str | None:
        while True:
            async with asyncio.timeout(SILENT_S):
                reply = await call.read()
            if not isinstance(reply, pb.AnnounceReply):  # it ended the stream in good order
                return None
            self._heard = time.monotonic()
            match reply.word:
                case pb.AnnounceReply.OVER:
                    return "the run is over"
                case pb.AnnounceReply.LEAVE:
                    return f"the run does not need it any more: {reply.text}"
                case pb.AnnounceReply.WAIT:
                    log.info("%s", reply.text)
                case _ if not self._welcome:
                    self._welcome = True
                    log.info("announced to run %s as %s", reply.fence.run_id, self._myself.name)
                case _:
                    pass


def advertised(bound: str, host: str, controller: str) -> str:
    """The address that others reach an instance by.

    Args:
        bound: ``host:port`` that it listens on.
        host: in the place of that host; empty: found out.
        controller: ``host:port`` of the controller.

    Returns:
        ``host:port``. An instance that listens on all of its addresses names the one from which it reaches the
        controller.
    """
    own, port = net.split_address(bound)
    host = host or (own if own not in ("0.0.0.0", "::") else _way_to(net.split_address(controller)[0]))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _way_to(host: str) -> str:
    """This machine's address on the way to a host. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
