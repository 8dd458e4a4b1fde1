"""What one stream has still to send, and in which order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc

from streamrl_jax.proto import streamrl_pb2 as pb


class Outbox:
    """The sending side of one open stream.

    Call order: `post`, `post_answer`, `owe`, `beat`, `grant`, `drained` in any order while one consumer
    iterates over `messages`; `end` once, after which the iteration stops and what was not sent is left to
    the next stream.

    Invariant: answers leave in the order they were posted, none without credit once the receiver has given
    any; a slow receiver makes neither heartbeats nor credits pile up.

    Args:
        heartbeat: makes the message at the moment it is sent, so that it is never stale.
    """

    def __init__(self, heartbeat: Callable[[], pb.GenerateResponse]) -> None:
        self._heartbeat = heartbeat
        self._posted: deque[pb.GenerateResponse] = deque()
        self._answers: deque[pb.Finished] = deque()
        self._credit: int | None = None  # None: the receiver does not use credits
        self._owed = 0
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

    def grant(self, count: int) -> None:
        """The receiver takes ``count`` more answers; the first grant switches credits on."""
        self._credit = (self._credit or 0) + count
        self._wake.set()

    def owe(self, count: int) -> None:
        """This side takes ``count`` more assignments; several are told in one message."""
        self._owed += count
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
        """What to send next, until `end`."""
        while self.ended is None:
            message = self._next()
            if message is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            self._sent += 1
            if message.WhichOneof("kind") == "finished":
                message.finished.sequence = self._sent
            yield message

    def _next(self) -> pb.GenerateResponse | None:
        if self._posted:
            return self._posted.popleft()
        if self._beat_due:
            self._beat_due = False
            return self._heartbeat()
        if self._answers and self._credit != 0:
            if self._credit is not None:
                self._credit -= 1
            return pb.GenerateResponse(finished=self._answers.popleft())
        if self._owed:
            owed, self._owed = self._owed, 0
            return pb.GenerateResponse(credit=pb.Credit(count=owed))
        if self._drained is not None and not self._answers:
            message, self._drained = self._drained, None
            return message
        return None
