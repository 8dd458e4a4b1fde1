"""The gRPC edge of one SGS instance: `StreamGeneration` of `streamrl.proto` over an `Engine`.

One controller at a time holds the instance, named by its fence::

    Hello ──▶ Welcome                     a newer incarnation takes over: all work of the older one is dropped
    Assign ──▶ Progress* ──▶ Finished     or Rejected; exactly one of the two per (sample, attempt)
    Acknowledge                           until then a Finished is sent again on each new stream of the
    same fence UpdateWeights                         staged behind running work, applied between two tokens

After a broken stream the controller says Hello again with the same fence and repeats the Assign of
everything it counts as outstanding here: what is at work stays at work, what is finished is sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from streamrl_jax.gen import codec
from streamrl_jax.gen.admission import refusal
from streamrl_jax.gen.answers import Answers, Result
from streamrl_jax.gen.condition import Condition, Identity
from streamrl_jax.gen.outbox import CreditExceeded, Outbox
from streamrl_jax.gen.protocol import Engine, EngineFailed
from streamrl_jax.gen.pulse import Pulse
from streamrl_jax.gen.sources import Sources, local_peer
from streamrl_jax.gen.updates import Updates
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    Assignment,
    Fence,
    Generation,
    InstanceStatus,
    Progress,
    Rejection,
    RejectReason,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
"""A stream whose Hello does not come within this is ended."""

MOST_TOLD: Final = 1000
"""Characters of a call's error: it travels as metadata, which is bounded."""

MOST_HELD: Final = 64
"""Answers that are kept for one life of a run, as a multiple of what the instance grants."""


class FenceRefused(Exception):
    """The caller belongs to another run, or to an earlier life of this one."""


class GenerationService(rpc.StreamGenerationServicer):
    """Serves an engine to one controller.

    Call order: construct, add to a server and start that, then await `run`, which brings the engine up
    while calls are already answered and returns only by an error.

    Invariant: nothing that carries one fence is ever sent to a stream of another, nor labelled with its
    versions.
    """

    def __init__(self, engine: Engine, identity: Identity, sources: Sources | None = None) -> None:
        self._engine = engine
        self._identity = identity
        self._fence = identity.fence
        self._pulse = Pulse(engine)
        self._condition = Condition(engine, identity, self._pulse, self._beat_now)
        fail = self._condition.fail
        self._updates = Updates(engine, identity.name, lambda: self._fence, sources, fail)
        self._answers = Answers(engine, identity.name, self._deliver, fail)
        self._outbox: Outbox | None = None
        self._binding = asyncio.Lock()

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Starts the engine and watches it.

        Raises:
            EngineFailed: it did not come up, died, or must be restarted. The reason stays visible in the
            status.
        """
        try:
            await self._engine.start(self._condition.say)
            self._condition.ready()
            pulse = asyncio.create_task(self._pulse.run())
            failed = asyncio.create_task(self._condition.failed.wait())
            try:
                await asyncio.wait((pulse, failed), return_when=asyncio.FIRST_COMPLETED)
                if pulse.done():
                    pulse.result()
                raise EngineFailed(self._condition.failure)
            finally:
                pulse.cancel()
                failed.cancel()
        except EngineFailed as error:
            self._condition.fail(str(error))
            raise

    @property
    def serving(self) -> bool:
        """Whether it can take work: loaded, and neither failed nor draining."""
        return self._condition.serving

    @property
    def status(self) -> InstanceStatus:
        """What the instance is doing."""
        return self._condition.status(self._answers, self._updates)

    def _beat_now(self) -> None:
        if self._outbox is not None:
            self._outbox.beat()

    # ---------------------------------------------------------------- fences

    async def _bind(self, fence: Fence) -> None:
        """Makes ``fence`` the holder of the instance.

        Raises:
            FenceRefused: the instance belongs to another run, or to a later life of this one.
        """
        async with self._binding:
            held = self._fence
            if held == fence:
                return
            if held is not None:
                self._check_takeover(held, fence)
            self._fence = fence
            self._updates.forget()
            self._answers.drop_all()
            self._condition.draining = False
            if self._outbox is not None:
                self._outbox.end(grpc.StatusCode.ABORTED, f"{fence} took over from {held}")
            if self._condition.is_ready:
                await self._engine.forget_version()
            if self._condition.paused:
                await self._engine.resume()
                self._condition.paused = False

    def _check_takeover(self, held: Fence, fence: Fence) -> None:
        if held.run_id == fence.run_id:
            if fence.incarnation < held.incarnation:
                raise FenceRefused(f"{fence} is an earlier life of {held}, which holds {self._identity.name}")
        elif self._identity.fence is not None or self._outbox is not None:
            raise FenceRefused(
                f"{self._identity.name} belongs to run {held.run_id!r}; run {fence.run_id!r} must use another"
            )

    async def _bind_or_abort(self, message: pb.Fence, context: grpc.aio.ServicerContext) -> Fence:
        try:
            fence = codec.fence_from_proto(message)
            await self._bind(fence)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _told(error))
        except FenceRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _told(error))
        else:
            return fence
        raise AssertionError("context.abort returned")

    # ---------------------------------------------------------------- the stream

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Takes assignments and sends answers until a side ends the stream or another Hello takes over."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(request_iterator)
            hello = codec.hello_from_proto(first.hello)
        except (TimeoutError, StopAsyncIteration, ValueError, DecodeError) as error:
            reason = _told(error) or f"no Hello within {HELLO_TIMEOUT_S} s"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            return
        fence = await self._bind_or_abort(first.hello.fence, context)
        outbox = self._open(fence, hello.answers)
        self._answers.report(hello.progress_interval_s)
        tasks = (
            asyncio.create_task(self._read(request_iterator, outbox)),
            asyncio.create_task(self._beat(outbox, hello.heartbeat_interval_s)),
        )
        try:
            async for message in outbox.messages():
                yield message
        finally:
            for task in tasks:
                task.cancel()
            if self._outbox is outbox:
                self._outbox = None
        if outbox.ended is not None and outbox.ended[0] is not grpc.StatusCode.OK:
            await context.abort(*outbox.ended)

    def _open(self, fence: Fence, answers: int) -> Outbox:
        """A new outbox in the place of the older stream's: Welcome first, then what was not acknowledged."""
        if self._outbox is not None:
            self._outbox.end(grpc.StatusCode.ABORTED, "a newer Hello of the same fence took over")
        counted = self._engine.tokens_total

        def heartbeat() -> pb.GenerateResponse:
            nonlocal counted
            total = self._engine.tokens_total
            status = replace(self.status, tokens_since_last=total - counted)
            counted = total
            return pb.GenerateResponse(heartbeat=codec.heartbeat_to_proto(fence, status))

        outbox = Outbox(heartbeat, self._engine.limits.slots + self._identity.lookahead, answers)
        self._outbox = outbox
        outbox.post(pb.GenerateResponse(welcome=codec.info_to_proto(self._condition.info())))
        for generation in self._answers.unacknowledged():
            outbox.post_answer(codec.generation_to_proto(fence, generation))
        self._report_drained()
        return outbox

    async def _beat(self, outbox: Outbox, interval_s: float) -> None:
        while True:
            outbox.beat()
            await asyncio.sleep(interval_s)

    async def _read(self, requests: AsyncIterator[pb.GenerateRequest], outbox: Outbox) -> None:
        try:
            async for request in requests:
                if outbox.ended is not None:
                    return
                await self._handle(request, outbox)
        except (ValueError, DecodeError) as error:
            outbox.end(grpc.StatusCode.INVALID_ARGUMENT, _told(error))
        except CreditExceeded as error:
            outbox.end(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Exception as error:
            log.exception("reading the stream failed")
            outbox.end(grpc.StatusCode.INTERNAL, repr(error)[:MOST_TOLD])
        else:
            outbox.end(grpc.StatusCode.OK, "the controller closed the stream")

    async def _handle(self, request: pb.GenerateRequest, outbox: Outbox) -> None:
        match request.WhichOneof("kind"):
            case "assign":
                self._assign(request.assign, outbox)
            case "abort":
                await self._answers.abort(*codec.key_from_proto(request.abort))
            case "acknowledge":
                self._answers.acknowledge(*codec.key_from_proto(request.acknowledge))
            case "credit":
                outbox.grant(codec.credit_from_proto(request.credit))
            case "several":
                for one in codec.together("request.several", request.several.requests):
                    if one.WhichOneof("kind") == "several":
                        raise ValueError("request.several is nested")
                    await self._handle(one, outbox)
            case kind:
                raise ValueError(f"the stream is open and {kind or 'an unknown message'} has no place in it")

    def _assign(self, message: pb.Assign, outbox: Outbox) -> None:
        named = message.sample_id[: codec.MAX_NAME]
        outbox.spend(named, message.attempt)
        try:
            assignment = codec.assignment_from_proto(message)
        except ValueError as error:
            refused = RejectReason.INVALID, str(error)
        else:
            refused = None if self._answers.has(named, message.attempt) else self._refused(assignment)
            if refused is None:
                self._answers.take(assignment)
                return
        self._deliver(Rejection(named, message.attempt, *refused))

    def _refused(self, assignment: Assignment) -> tuple[RejectReason, str] | None:
        """Why an assignment that is not here yet is not taken."""
        condition, limits = self._condition, self._engine.limits
        return (
            condition.not_up()
            or self._full()
            or refusal(assignment, limits, self._engine.version, draining=condition.draining)
        )

    def _full(self) -> tuple[RejectReason, str] | None:
        """Why nothing more is kept: a controller that opens streams again and again gets new credit each time."""
        held = self._answers.active + len(self._answers.unacknowledged())
        most = MOST_HELD * (self._engine.limits.slots + self._identity.lookahead)
        if held < most:
            return None
        message = f"{held} answers are at work or not acknowledged, and {most} are kept at most"
        return RejectReason.INVALID, message

    def _deliver(self, result: Result) -> None:
        """Hands a result to the open stream, if there is one; answers are sent on the next one otherwise."""
        if self._outbox is None or self._fence is None:
            return
        match result:
            case Generation():
                self._outbox.post_answer(codec.generation_to_proto(self._fence, result))
            case Rejection():
                self._outbox.refuse(codec.rejection_to_proto(self._fence, result))
            case Progress():
                self._outbox.post(pb.GenerateResponse(progress=codec.progress_to_proto(self._fence, result)))
        self._report_drained()

    def _report_drained(self) -> None:
        if self._outbox is None or self._fence is None:
            return
        if self._condition.draining and not self._answers.active:
            message = pb.Drained(fence=codec.fence_to_proto(self._fence))
            self._outbox.drained(pb.GenerateResponse(drained=message))

    # ---------------------------------------------------------------- unary calls

    def _reply(self) -> pb.StatusReply:
        return codec.status_to_proto(self.status, self._condition.info())

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        """Answers at once in every state."""
        return self._reply()

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        """Takes nothing new; Drained follows on the stream after the last answer. Resume takes it back."""
        await self._bind_or_abort(request.fence, context)
        self._condition.draining = True
        self._report_drained()
        return self._reply()

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        """Stops sampling; returns when it has stopped."""
        await self._bind_or_abort(request.fence, context)
        if not self._condition.is_ready or self._condition.failure:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, self._condition.failure or f"still {self._condition.phase}"
            )
        self._condition.paused = True  # also if the caller does not wait for the end of it
        await self._engine.pause(keep=request.keep)
        return self._reply()

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        """Takes back Pause and Drain."""
        await self._bind_or_abort(request.fence, context)
        if self._condition.paused:
            await self._engine.resume()
            self._condition.paused = False
        self._condition.draining = False
        return self._reply()

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        """Loads a version; the reply tells whether it is served. An update that began runs to its end, or
        to its bound, also when the caller has gone."""
        try:
            manifest = codec.manifest_from_proto(request.manifest)
            asked = codec.update_from_proto(request)
        except ValueError as error:
            return codec.report_to_proto(self._updates.refused(str(error)))
        await self._bind_or_abort(request.manifest.fence, context)
        if (down := self._condition.not_up()) is not None:
            return codec.report_to_proto(self._updates.refused(down[1]))
        local = local_peer(context.peer())
        if fault := self._updates.fault(manifest, asked.source, local_caller=local):
            return codec.report_to_proto(self._updates.refused(fault))
        update = asyncio.create_task(
            self._updates.apply(manifest, asked.source, in_flight=asked.in_flight, timeout_s=asked.timeout_s),
            name=f"update to {manifest.version}",
        )
        return codec.report_to_proto(await asyncio.shield(update))


def _told(error: Exception) -> str:
    """An error as the detail of a call."""
    return str(error)[:MOST_TOLD]
