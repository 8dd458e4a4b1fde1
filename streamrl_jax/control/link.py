"""The stream to one living instance, opened again when it breaks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import grpc

from streamrl_jax.control.faults import InstanceLost
from streamrl_jax.control.tasks import until_one_ends
from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import Granted, InstanceClient, InstanceError, InstanceStream, StreamEvent
from streamrl_jax.types import Assignment, Generation, Hello, InstanceInfo

_FIRST_WAIT_S = 0.05  # between two attempts to reconnect; doubles up to the last
_LAST_WAIT_S = 1.0
_NOT_OURS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
_BAD_MESSAGE = frozenset(
    {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
)


def user_error(name: str, error: InstanceError) -> UserError | None:
    """What the user reads when an instance refuses this run: another holds it, or the token differs."""
    return UserError(f"instance {name}: {error}") if error.code in _NOT_OURS else None


ANSWERS: Final = 1024
"""Answers that an instance may send beyond what was taken in; given back by halves."""

MOST_TOGETHER: Final = 64
"""Assignments, and acknowledgements, that travel as one message."""

ENOUGH_TOKENS: Final = 64 << 10
"""Of assignments that travel as one message; the last one may go beyond."""


class Link:
    """Sends and receives over whatever stream is open now.

    Call order: ``open`` once, then ``run`` as a task; ``assign`` and ``acknowledge`` at any time (they only
    queue); ``close`` once.

    What waits is sent together, as one message: at thousands of samples a second each one costs more than its contents.

    Invariant: after a break everything that the instance owes is asked for again under the same attempt
    numbers, which the instance takes once; what was not acknowledged it sends again. So nothing is lost, and
    what comes twice is dropped by the ledger. An assignment leaves only within the credit that the instance has given
    on this stream, and an instance that sends more answers than it was granted is lost: so what waits here, and what
    is under way, is bounded whatever the other side does.

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
        self._hello = replace(hello, answers=ANSWERS)
        self._receive = receive
        self._owed = owed
        self._version = version
        self._reconnected = reconnected
        self._patience_s = patience_s
        self._stream: InstanceStream | None = None
        self._assignments: deque[Assignment] = deque()
        self._acknowledged: deque[tuple[str, int]] = deque()
        self._wake = asyncio.Event()
        self._credit = 0  # assignments that the instance takes, beyond what was sent
        self._answers = ANSWERS  # that it may send
        self._taken = 0  # answers since it was last granted some
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

    @property
    def credit(self) -> int:
        """Further samples that the instance takes."""
        return max(0, self._credit - len(self._assignments))

    def assign(self, assignment: Assignment) -> None:
        """Hands out a sample."""
        self._assignments.append(assignment)
        self._wake.set()

    def acknowledge(self, sample_id: str, attempt: int) -> None:
        """Lets the instance forget an answer."""
        self._acknowledged.append((sample_id, attempt))
        self._wake.set()

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
        self._assignments.clear()
        self._acknowledged.clear()
        self._credit, self._answers, self._taken = 0, ANSWERS, 0
        for assignment in self._owed():
            self.assign(assignment)
        self._reconnected(broken)
        return stream

    async def _read(self, stream: InstanceStream) -> None:
        async for event in stream.events():
            if isinstance(event, Granted):
                self._credit += event.count
                self._wake.set()
            elif isinstance(event, Generation):
                self._answers -= 1
                self._taken += 1
                if self._answers < 0:
                    raise InstanceLost(f"it sent more than the {ANSWERS} answers that it was granted")
            self._receive(event)

    async def _write(self, stream: InstanceStream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (acknowledged := self._next_acknowledged()) or self._sendable:
                await stream.hand_over(self._next_assignments(), acknowledged)
            if self._taken >= ANSWERS // 2:
                taken, self._taken = self._taken, 0
                self._answers += taken
                await stream.grant(taken)

    @property
    def _sendable(self) -> bool:
        return bool(self._assignments) and self._credit > 0

    def _next_acknowledged(self) -> list[tuple[str, int]]:
        count = min(MOST_TOGETHER, len(self._acknowledged))
        return [self._acknowledged.popleft() for _ in range(count)]

    def _next_assignments(self) -> list[Assignment]:
        found: list[Assignment] = []
        tokens = 0
        while self._sendable and len(found) < MOST_TOGETHER and tokens < ENOUGH_TOKENS:
            found.append(self._assignments.popleft())
            self._credit -= 1
            resumed = found[-1].resumed
            tokens += len(found[-1].prompt_ids) + (len(resumed.token_ids) if resumed else 0)
        return found
