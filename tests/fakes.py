"""Fakes for fault injection and the order of events: an engine that counts, a service that misbehaves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from streamrl_jax.gen.protocol import Delta, EngineFailed, EngineLimits
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    NO_VERSION,
    Assignment,
    FinishReason,
    Manifest,
    Timings,
    UpdateReport,
    VersionRun,
)


def fake_token(prompt_ids: np.ndarray, index: int) -> int:
    """The token that `FakeEngine` writes at ``index`` of an answer, whatever the attempt."""
    return (int(prompt_ids.sum()) * 31 + index * 7) % 1000


def fake_logprob(token: int) -> float:
    """Its log-prob."""
    return -0.5 - token / 1000


@dataclass
class FakeEngine:
    """Writes predictable answers at a set pace. Keeps the contract of `Engine`; faults are switched on.

    One token a running answer each ``1 / tokens_per_s`` seconds; at most ``slots`` run, lower priority
    first. An answer's length is ``length(assignment)``, cut to its limit; `fake_token` and `fake_logprob`
    give its contents.
    """

    slots: int = 4
    max_model_len: int = 512
    tokens_per_s: float = 1000.0
    length: Callable[[Assignment], int] = lambda assignment: 5
    start_s: float = 0.0
    update_s: float = 0.0
    version: int = NO_VERSION
    reject_update: str = ""  # the reason with which updates are refused
    quarantine_update: str = ""  # the reason with which an update fails after it began
    start_failure: str = ""
    tokens_total: int = 0
    steps_total: int = 0
    kv_tokens: int = 4096
    # Hangs by itself with so many tokens, and is hit there however slow the machine is; 0: never.
    hang_at: int = 0
    hung_s: float = math.inf  # when it did so last, on the monotonic clock
    excused_until_s: float = 0.0
    log: list[str] = field(
        default_factory=list
    )  # what happened, in order: "start s/0", "finish s/0", "update 1" ...
    updates: list[tuple[Manifest, Path, bool]] = field(default_factory=list)
    _waiting: list[tuple[int, int, asyncio.Event]] = field(default_factory=list)
    _running: int = 0
    _arrivals: int = 0
    _aborted: set[tuple[str, int]] = field(default_factory=set)
    _crash: str = ""
    _hung: bool = False
    _go: asyncio.Event = field(default_factory=asyncio.Event)
    _tick: int = -1

    def __post_init__(self) -> None:
        self._go.set()

    # ---- faults

    def hang(self) -> None:
        """Like a stopped EngineCore: no token and no answer to a ping until `thaw`."""
        self._hung = True
        self.hung_s = time.monotonic()
        self._go.clear()

    def thaw(self) -> None:
        """Ends `hang`."""
        self._hung = False
        self._go.set()

    def crash(self, reason: str = "engine core died") -> None:
        """All work and all pings fail from now on."""
        self._crash = reason
        self._go.set()

    # ---- Engine

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.slots, self.max_model_len, "fake", kv_tokens=self.kv_tokens)

    async def start(self, report: Callable[[str], None]) -> None:
        report("counting to start")
        await asyncio.sleep(self.start_s)
        if self.start_failure:
            raise EngineFailed(self.start_failure)

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        key = (assignment.sample_id, assignment.attempt)
        done = len(assignment.resumed.token_ids) if assignment.resumed else 0
        limit = assignment.sampling.forced_length or assignment.sampling.max_new_tokens
        total = assignment.sampling.forced_length or min(self.length(assignment), limit)
        queued = time.monotonic()
        await self._take_slot(assignment)
        started = time.monotonic()
        self.log.append(f"start {key[0]}/{key[1]}")
        try:
            for index in range(done, max(total, done + 1)):
                await asyncio.sleep(1 / self.tokens_per_s)
                await self._go.wait()
                self._fail_if_crashed()
                if key in self._aborted:
                    self._aborted.discard(key)
                    yield Delta(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
                    return
                timings = Timings(started - queued, 0.0, 0.0)
                delta = self._delta(assignment, index, index + 1 >= total, total >= limit, timings)
                if delta.finish_reason is not None:
                    self.log.append(f"finish {key[0]}/{key[1]}")
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._free_slot()

    def _delta(self, assignment: Assignment, index: int, last: bool, full: bool, timings: Timings) -> Delta:
        token = fake_token(assignment.prompt_ids, index)
        self._count()
        return Delta(
            np.array([token], np.int32),
            np.array([fake_logprob(token)], np.float32),
            (VersionRun(self.version, 1),),
            (FinishReason.LENGTH if full else FinishReason.STOP) if last else None,
            timings,
        )

    def _count(self) -> None:
        """A token; those of one tick, of whatever answers, are of one step."""
        self.tokens_total += 1
        if self.tokens_total == self.hang_at:
            self.hang()
        tick = int(time.monotonic() * self.tokens_per_s)
        self.steps_total += tick > self._tick
        self._tick = max(tick, self._tick)

    async def abort(self, sample_id: str, attempt: int) -> None:
        self._aborted.add((sample_id, attempt))

    async def update_weights(
        self, manifest: Manifest, blob: Path, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        if self.reject_update:
            return UpdateReport("", False, self.version, self.reject_update)
        if not in_flight:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await asyncio.sleep(0.005)
        await asyncio.sleep(self.update_s)
        if self.quarantine_update:
            return UpdateReport("", False, self.version, self.quarantine_update, quarantined=True)
        self.version = manifest.version
        self.updates.append((manifest, blob, in_flight))
        self.log.append(f"update {manifest.version}")
        return UpdateReport("", True, self.version, applied_s=self.update_s)

    async def forget_version(self) -> None:
        self.version = NO_VERSION
        self.log.append("forget")

    async def pause(self, *, keep: bool) -> None:
        while not keep and self._running:
            await asyncio.sleep(0.005)
        self._go.clear()

    async def resume(self) -> None:
        self._go.set()

    async def ping(self) -> None:
        if self._hung:  # one that is paused answers
            await self._go.wait()
        self._fail_if_crashed()

    async def close(self) -> None:
        self.log.append("close")

    # ---- slots

    async def _take_slot(self, assignment: Assignment) -> None:
        self._arrivals += 1
        if self._running < self.slots:
            self._running += 1
            return
        entry = (assignment.priority, self._arrivals, asyncio.Event())
        self._waiting.append(entry)
        try:
            await entry[2].wait()
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        if not self._waiting:
            self._running -= 1
            return
        entry = min(self._waiting, key=lambda waiting: waiting[:2])
        self._waiting.remove(entry)
        entry[2].set()

    def _fail_if_crashed(self) -> None:
        if self._crash:
            raise EngineFailed(self._crash)


async def one_by_one(messages: AsyncIterator[pb.GenerateResponse]) -> AsyncIterator[pb.GenerateResponse]:
    """What a service sends, each message for itself."""
    async for message in messages:
        together = message.WhichOneof("kind") == "several"
        for one in message.several.responses if together else (message,):
            yield one


@dataclass
class FaultyStream(rpc.StreamGenerationServicer):
    """A service whose finished answers are repeated or swapped on their way out."""

    inner: rpc.StreamGenerationServicer
    duplicate: bool = False  # every answer twice
    reorder: bool = False  # every two answers swapped (the last waits for a heartbeat)
    cut_after: int = 0  # breaks the stream after so many answers, once

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        held: pb.GenerateResponse | None = None
        answers = 0
        async for message in one_by_one(self.inner.Generate(request_iterator, context)):
            kind = message.WhichOneof("kind")
            if kind == "finished" and self.reorder and held is None:
                held = message
                continue
            yield message
            if kind == "finished" and self.duplicate:
                yield message
            if held is not None and kind in ("finished", "heartbeat"):
                yield held
                held = None
            answers += kind == "finished"
            if self.cut_after and answers >= self.cut_after:
                self.cut_after = 0
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        return await self.inner.UpdateWeights(request, context)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return await self.inner.Pause(request, context)

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return await self.inner.Resume(request, context)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return await self.inner.Drain(request, context)

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return await self.inner.GetStatus(request, context)
