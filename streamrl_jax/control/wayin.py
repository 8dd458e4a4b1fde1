"""One job's samples on their way into a trainer process: the stream, opened again when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc

from streamrl_jax.control.codec import error_from_proto, sample_from_proto
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.inbox import Inbox
from streamrl_jax.control.outbox import Batch, End, Failed, Stop
from streamrl_jax.control.usage import Meter
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.types import Prompt, Sample

log = logging.getLogger(__name__)

FINAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Answers of a controller that are the same at the next attempt."""

_AGAIN_S: Final = 0.2  # between two attempts to open the stream
# How far the controller's picture of what was taken lags behind: its buffer is bounded by what it knows of, and a
# message a sample would cost it as much as the sample.
_TELL_EVERY: Final = 16  # samples
_TELL_S: Final = 0.005  # once the trainer waits


class WayIn:
    """Receives a job's samples into an inbox. Lives on the client's loop.

    Call order: ``run`` once, as a task; ``taken`` as the trainer goes; ``grow``, in any thread, for each job that is
    added. ``run`` ends with the last delivery, or when it is cancelled.

    Invariant: what goes into the inbox has no gap, and its end comes behind the last sample; a controller that sends
    otherwise ends the run.

    Args:
        stub: of the service `RunControl`.
        metadata: of each call.
        reader: this trainer process.
        job_id: whose samples.
        prompts: of the job.
        n: answers to each.
        meter: takes latencies.
    """

    def __init__(
        self,
        stub: Any,
        metadata: tuple[tuple[str, str], ...],
        reader: int,
        job_id: str,
        prompts: Iterable[Prompt],
        n: int,
        meter: Meter,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._reader = reader
        self._job_id = job_id
        self._prompts: dict[str, Prompt] = {}
        self._size = 0
        self._news = (0, False)  # (taken, waits), the newest
        self._told = 0  # taken, as the controller knows it
        self._soon: asyncio.TimerHandle | None = None
        self._at = 0  # everything before it was sent to here
        self._changed = asyncio.Event()
        self._grown = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.inbox = Inbox(job_id, 0, meter)
        self.shift_s = 0.0
        """Brings the controller's clock to this process's."""
        self.grow(prompts, n)

    def grow(self, prompts: Iterable[Prompt], n: int) -> None:
        """Makes room for the samples of one more job."""
        count = 0
        for prompt in prompts:
            self._prompts[prompt.prompt_id] = prompt
            count += n
        self._size += count
        self.inbox.grow(count)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._grown.set)

    def taken(self, position: int, waits: bool) -> None:
        """The trainer has everything before ``position``; ``waits``: and wants more."""
        self._news = (position, waits)
        if position - self._told >= _TELL_EVERY or (waits and position >= self._size):
            self._changed.set()
        elif waits and self._soon is None and self._loop is not None:
            self._soon = self._loop.call_later(_TELL_S, self._tell)

    def _tell(self) -> None:
        self._soon = None
        self._changed.set()

    async def run(self) -> None:
        """Receives until the end."""
        self._loop = asyncio.get_running_loop()
        while True:
            over: list[bool] = []
            call = self._stub.Samples(self._requests(over), metadata=self._metadata)
            try:
                async for reply in call:
                    last = self._last(reply)
                    if last is not None:
                        self.inbox.put(last)
                        return
                    await self._deliver(reply)
            except ValueError as error:
                what = f"the controller sent something else than samples of {self._job_id}: {error}"
                self.inbox.put(Failed(ControlError(what)))
                return
            except grpc.aio.AioRpcError as error:
                if error.code() in FINAL_CODES:
                    what = f"the controller refuses to send samples of {self._job_id}: {error.details()}"
                    self.inbox.put(Failed(ControlError(what)))
                    return
                log.warning("the samples of %s broke off: %s", self._job_id, error.details())
            finally:
                over.append(True)
                self._changed.set()
                call.cancel()
            await asyncio.sleep(_AGAIN_S)  # a controller that does not come back is the client's to notice

    async def _requests(self, over: list[bool]) -> AsyncIterator[pb.SamplesRequest]:
        """What one stream tells the controller; ``over`` gets an entry when the stream has ended."""
        job_id = self._job_id
        self._changed.set()
        while True:
            await self._changed.wait()
            if over:
                return
            self._changed.clear()
            self._told, waits = self._news
            yield pb.SamplesRequest(reader=self._reader, job_id=job_id, taken=self._told, waits=waits)
            job_id = ""

    def _last(self, reply: pb.SamplesReply) -> End | Stop | Failed | None:
        """What ends the stream in good order, if this is it."""
        if reply.HasField("error"):
            error = error_from_proto(reply.error)
            if isinstance(error, ControlError) and self._news == (self._size, True):
                return End()  # the stream broke between the end and its being read
            return Failed(error)
        if reply.end:
            if self._at != self._size:
                raise ValueError(f"the end comes behind sample {self._at} of {self._size}")
            return End()
        return Stop(reply.stop) if reply.stop else None

    async def _deliver(self, reply: pb.SamplesReply) -> None:
        """Hands samples over. One whose prompt another reader was quicker to add waits until this one adds it too."""
        if reply.position > self._at or reply.next < reply.position + len(reply.samples):
            raise ValueError(
                f"samples {reply.position} to {reply.next}, {len(reply.samples)} of them, follow sample {self._at}"
            )
        self._at = max(self._at, reply.next)
        position, samples = reply.position, list[Sample]()
        for message in reply.samples:
            while message.prompt_id not in self._prompts:
                self._grown.clear()
                self._put(position, samples, position + len(samples))
                position, samples = position + len(samples), []
                await self._grown.wait()
            samples.append(sample_from_proto(message, self._prompts, self.shift_s))
        self._put(position, samples, reply.next)

    def _put(self, position: int, samples: list[Sample], then: int) -> None:
        if then > position:
            self.inbox.put(Batch(position, samples, then))
