"""The stream to one living instance, opened again when it breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import grpc

from streamrl_jax.control.faults import InstanceLost
from streamrl_jax.control.tasks import until_one_ends
from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import InstanceClient, InstanceError, InstanceStream, StreamEvent
from streamrl_jax.types import Assignment, Hello, InstanceInfo

_FIRST_WAIT_S = 0.05  # between two attempts to reconnect; doubles up to the last
_LAST_WAIT_S = 1.0
_NOT_OURS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
_BAD_MESSAGE = frozenset({grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT})


def user_error(name: str, error: InstanceError) -> UserError | None:
    """What the user reads when an instance refuses this run: another holds it, or the token differs."""
    return UserError(f"instance {name}: {error}") if error.code in _NOT_OURS else None


class Link:
    """Sends and receives over whatever stream is open now.

    Call order: ``open`` once, then ``run`` as a task; ``assign`` and ``acknowledge`` at any time (they only
    queue); ``close`` once.

    Invariant: after a break everything that the instance owes is asked for again under the same attempt
    numbers, which the instance takes once; what was not acknowledged it sends again. So nothing is lost, and
    what comes twice is dropped by the ledger.

    Args:
        name: of the instance, for messages.
        client: its calls.
        hello: how the stream is opened.
        receive: takes each event.
        owed: what the instance holds of ours.
        version: what it is known to serve; one that comes back with less is another process.
        reconnected: told of each new stream.
        patience_s: bound on a break.
    """

    def __init__(
        self,
        name: str,
        client: InstanceClient,
        hello: Hello,
        receive: Callable[[StreamEvent], None],
        owed: Callable[[], Iterable[Assignment]],
        version: Callable[[], int],
        reconnected: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self._name = name
        self._client = client
        self._hello = hello
        self._receive = receive
        self._owed = owed
        self._version = version
        self._reconnected = reconnected
        self._patience_s = patience_s
        self._stream: InstanceStream | None = None
        self._outgoing: asyncio.Queue[Assignment | tuple[str, int]] = asyncio.Queue()
        self._dropped = 0
        self.connected = False

    @property
    def other_fence_dropped(self) -> int:
        """Messages of another life that were dropped on the way in."""
        return self._dropped + (self._stream.other_fence_dropped if self._stream else 0)

    async def open(self) -> InstanceInfo:
        """Opens the first stream.

        Raises:
            UserError: the instance refuses this run.
            InstanceLost: it does not answer as it should.
        """
        try:
            self._stream = await self._client.open(self._hello)
        except InstanceError as error:
            raise user_error(self._name, error) or InstanceLost(str(error)) from error
        return self._stream.info

    def assign(self, assignment: Assignment) -> None:
        """Hands out a sample."""
        self._outgoing.put_nowait(assignment)

    def acknowledge(self, sample_id: str, attempt: int) -> None:
        """Lets the instance forget an answer."""
        self._outgoing.put_nowait((sample_id, attempt))

    async def run(self) -> None:
        """Sends and receives, over as many streams as it takes.

        Raises:
            UserError: the instance refuses this run.
            InstanceLost: it is gone, was started anew elsewhere, or sends what cannot be read.
        """
        assert self._stream is not None, "open comes first"
        while True:
            self.connected = True
            try:
                await until_one_ends(self._read(self._stream), self._write(self._stream))
                broken = "the instance ended the stream"
            except InstanceError as error:
                if error.code in _BAD_MESSAGE:
                    raise InstanceLost(str(error)) from error
                broken = str(error)
            self.connected = False
            self._dropped += self._stream.other_fence_dropped
            self._stream = await self._reopen(broken)

    async def close(self) -> None:
        """Ends the stream."""
        if self._stream:
            await self._stream.close()

    async def _reopen(self, broken: str) -> InstanceStream:
        end, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        while True:
            await asyncio.sleep(wait_s)  # also at first: one that greets and breaks off again must not spin
            try:
                stream = await self._client.open(self._hello)
                break
            except InstanceError as error:
                if refused := user_error(self._name, error):
                    raise refused from error
                if time.monotonic() + wait_s > end:
                    raise InstanceLost(
                        f"its stream broke ({broken}) and could not be opened again within "
                        f"{self._patience_s:g} s: {error}"
                    ) from error
            wait_s = min(2 * wait_s, _LAST_WAIT_S)
        if stream.info.version < self._version():
            await stream.close()
            raise InstanceLost(
                f"it serves version {stream.info.version} after {self._version()}: it was started anew"
            )
        self._outgoing = asyncio.Queue()
        for assignment in self._owed():
            self.assign(assignment)
        self._reconnected(broken)
        return stream

    async def _read(self, stream: InstanceStream) -> None:
        async for event in stream.events():
            self._receive(event)

    async def _write(self, stream: InstanceStream) -> None:
        outgoing = self._outgoing
        while True:
            item = await outgoing.get()
            if isinstance(item, Assignment):
                await stream.assign(item)
            else:
                await stream.acknowledge(*item)
