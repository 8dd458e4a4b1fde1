"""What one stream has still to send, and in which order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from streamrl_jax.proto import streamrl_pb2 as pb

MOST_TOGETHER: Final = 64
"""Messages that travel as one."""

ENOUGH_BYTES: Final = 256 << 10
"""What is as large as this goes on its way; a message is never much larger than its largest part and this."""


class CreditExceeded(Exception):
    """The other side sent more than it was granted."""


class Outbox:
    """The sending side of one open stream, and the credit of both sides.

    Call order: `post`, `post_answer`, `refuse`, `spend`, `beat`, `grant`, `drained` in any order while one
    consumer iterates over `messages`; `end` once, after which the iteration stops and what was not sent is left to the
    next stream.

    Invariant: answers leave in the order they were posted, none without credit once the receiver has given
    any; a slow receiver makes neither heartbeats nor credits pile up. Assignments of this stream whose answer has not
    left are never more than what was granted: so what an instance holds, unsent answers included, is bounded however
    slowly the receiver reads.

    Args:
        heartbeat: makes the message at the moment it is sent, so that it is never stale.
        credit: assignments that are granted at once.
        answers: that may leave before the receiver grants more; 0: any number, until it grants some.
    """

    def __init__(
        self, heartbeat: Callable[[], pb.GenerateResponse], credit: int = 0, answers: int = 0
    ) -> None:
        self._heartbeat = heartbeat
        self._posted: deque[pb.GenerateResponse] = deque()
        self._answers: deque[pb.Finished] = deque()
        self._credit: int | None = answers or None  # None: the receiver does not use credits
        self._granted = credit  # assignments that may still come
        self._owed = credit  # of them, those that the other side was not told of
        self._unsettled: dict[
            str, int
        ] = {}  # assignments of this stream whose answer has not left; newest attempt
        self._beat_due = False
        self._drained: pb.GenerateResponse | None = None
        self._sent = 0
        self._wake = asyncio.Event()
        self.ended: tuple[grpc.StatusCode, str] | None = None

    def post(self, message: pb.GenerateResponse) -> None:
        """Sends as soon as possible."""
        self._posted.append(message)
        self._wake.set()

    def post_answer(self, answer: pb.Finished) -> None:
        """Sends when the receiver has credit for it."""
        self._answers.append(answer)
        self._wake.set()

    def refuse(self, rejected: pb.Rejected) -> None:
        """Sends a refusal as soon as possible."""
        self.post(pb.GenerateResponse(rejected=rejected))

    def spend(self, sample_id: str, attempt: int) -> None:
        """An assignment came. One of a sample of which this stream brought one before costs nothing.

        Raises:
            CreditExceeded: it was not granted.
        """
        if not self._granted:
            raise CreditExceeded(
                f"{len(self._unsettled)} assignments are unanswered and no more was granted: "
                f"{sample_id[:80]!r} is too many"
            )
        self._granted -= 1
        known = self._unsettled.get(sample_id)
        if known is not None:
            self._owe()
        if known is None or attempt > known:
            self._unsettled[sample_id] = attempt

    def grant(self, count: int) -> None:
        """The receiver takes ``count`` more answers; the first grant switches credits on."""
        self._credit = (self._credit or 0) + count
        self._wake.set()

    def _settle(self, sample_id: str, attempt: int) -> None:
        """The answer leaves: its assignment's credit is given back."""
        if self._unsettled.get(sample_id) == attempt:
            del self._unsettled[sample_id]
            self._owe()

    def _owe(self) -> None:
        """This side takes one more assignment; several are told in one message."""
        self._granted += 1
        self._owed += 1
        self._wake.set()

    def beat(self) -> None:
        """A heartbeat is due."""
        self._beat_due = True
        self._wake.set()

    def drained(self, message: pb.GenerateResponse) -> None:
        """Sends once every answer has gone."""
        self._drained = message
        self._wake.set()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """Ends the stream; the first call counts."""
        if self.ended is None:
            self.ended = (code, reason)
        self._wake.set()

    async def messages(self) -> AsyncIterator[pb.GenerateResponse]:
        """What to send next, several messages as one if they are ready, until `end`."""
        while self.ended is None:
            ready = self._ready()
            if not ready:
                await self._wake.wait()
                self._wake.clear()
            elif len(ready) == 1:
                yield ready[0]
            else:
                yield pb.GenerateResponse(several=pb.GenerateResponses(responses=ready))

    def _ready(self) -> list[pb.GenerateResponse]:
        ready: list[pb.GenerateResponse] = []
        nbytes = 0
        most = MOST_TOGETHER if self._sent else 1  # the greeting is a message of its own
        while len(ready) < most and nbytes < ENOUGH_BYTES and (message := self._next()) is not None:
            self._sent += 1
            nbytes += message.ByteSize()
            if message.WhichOneof("kind") == "finished":
                message.finished.sequence = self._sent
            ready.append(message)
        return ready

    def _next(self) -> pb.GenerateResponse | None:
        if self._posted:
            message = self._posted.popleft()
            if message.WhichOneof("kind") == "rejected":
                self._settle(message.rejected.sample_id, message.rejected.attempt)
            return message
        if self._beat_due:
            self._beat_due = False
            return self._heartbeat()
        if self._answers and self._credit != 0:
            if self._credit is not None:
                self._credit -= 1
            answer = self._answers.popleft()
            self._settle(answer.sample_id, answer.attempt)
            return pb.GenerateResponse(finished=answer)
        if self._owed:
            owed, self._owed = self._owed, 0
            return pb.GenerateResponse(credit=pb.Credit(count=owed))
        if self._drained is not None and not self._answers:
            message, self._drained = self._drained, None
            return message
        return None
