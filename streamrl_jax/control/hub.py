"""What a trainer process is to be told, kept until it has it: events, reports of versions, the end of the run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from streamrl_jax.control.codec import error_to_proto, event_to_proto
from streamrl_jax.control.events import ControlEvent
from streamrl_jax.gen import codec
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.types import UpdateReport

_EVENTS_KEPT: Final = 1000  # of what happened before the leader could listen, or while its stream was broken


class Mailbox:
    """Messages to one trainer process, in order, each kept until it said that it has it.

    Call order: ``put`` at any time; per stream ``after`` what was seen, then ``wait``; ``seen`` as the reader tells.
    """

    def __init__(self) -> None:
        self._kept: deque[pb.AttachReply] = deque()
        self._last = 0
        self._more = asyncio.Event()

    def put(self, message: pb.AttachReply) -> None:
        """Adds a message."""
        self._last += 1
        message.sequence = self._last
        self._kept.append(message)
        self._more.set()

    def seen(self, sequence: int) -> None:
        """Forgets what the reader has."""
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept.popleft()

    def after(self, sequence: int) -> list[pb.AttachReply]:
        """Messages behind this one."""
        self._more.clear()
        return [message for message in self._kept if message.sequence > sequence]

    async def wait(self, timeout_s: float) -> None:
        """Returns when there may be more, or after the bound."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._more.wait()
        except TimeoutError:
            return

    def bound(self, most: int) -> None:
        """Drops the oldest events beyond so many; what else there is stays."""
        excess = len(self._kept) - most
        for message in list(self._kept):
            if excess <= 0:
                return
            if message.WhichOneof("kind") == "event":
                self._kept.remove(message)
                excess -= 1


class Hub:
    """Tells the trainer processes what happens. Lives on the controller's loop.

    Args:
        readers: trainer processes; events, reports and releases are for the leader alone.
        also: takes events too, as they happen.
    """

    def __init__(self, readers: int, also: Callable[[ControlEvent], None] = lambda event: None) -> None:
        self.mailboxes = [Mailbox() for _ in range(readers)]
        self._also = also

    def event(self, event: ControlEvent) -> None:
        """Something happened."""
        self._also(event)
        self.mailboxes[0].put(pb.AttachReply(event=event_to_proto(event)))
        self.mailboxes[0].bound(_EVENTS_KEPT)

    def updated(self, version: int, reports: list[UpdateReport]) -> None:
        """Every instance has a version, or is lost."""
        rows = [
            pb.Report(instance=report.instance, response=codec.report_to_proto(report)) for report in reports
        ]
        self.mailboxes[0].put(pb.AttachReply(updated=pb.Updated(version=version, reports=rows)))

    def not_updated(self, version: int, error: BaseException) -> None:
        """A version will not reach every instance."""
        told = pb.Updated(version=version, error=error_to_proto(error))
        self.mailboxes[0].put(pb.AttachReply(updated=told))

    def released(self, version: int) -> None:
        """Nobody needs a version's source any more."""
        self.mailboxes[0].put(pb.AttachReply(released=version))

    def failed(self, error: BaseException) -> None:
        """The run has ended."""
        for mailbox in self.mailboxes:
            mailbox.put(pb.AttachReply(failure=error_to_proto(error)))
