"""Instances that say one thing and do another, over real streams: found out, and the samples come all the same."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import pytest

from streamrl_jax.control.events import EventKind
from streamrl_jax.proto import streamrl_pb2 as pb
from tests.fakes import FakeEngine, FaultyStream, one_by_one

from .control_world import HASTY, SETTINGS, World, job, running


def slow(name: str, life: int) -> FakeEngine:
    return FakeEngine(tokens_per_s=100)


def test_a_stopped_engine_behind_a_living_endpoint_gets_nothing_until_it_answers() -> None:
    """Nobody may restart it; were it greeted again at once, it would take samples at each lease and lose them."""
    world = World(("a", "b"), slow, managed=False)
    with running(world, HASTY) as run:
        run.controller.submit(job(0, count=60, n=4))
        world.now("a").hang()
        run.wait_for(lambda: run.seen(EventKind.LOST, "a"))
        lost = time.monotonic()
        while time.monotonic() < lost + 2 * HASTY.lease_s:
            assert run.controller.pool()[0].held == 0
            time.sleep(0.05)
        assert len(run.seen(EventKind.LOST, "a")) == 1
        assert any("engine does not answer" in event.text for event in run.seen(EventKind.PHASE, "a"))
        world.loop.call_soon_threadsafe(world.now("a").engine.thaw)
        run.wait_for(lambda: len(run.seen(EventKind.READY, "a")) == 2)
        assert len(list(run.controller.samples("train/0", 60))) == 240


@dataclass
class Liar(FaultyStream):
    """Keeps every answer to itself, and claims something in its place.

    One that floods is honest otherwise, and so is one without a claim.
    """

    claim: str = ""

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        if not self.claim:
            async for message in self.inner.Generate(request_iterator, context):
                yield message
            return
        beats = 0
        async for message in one_by_one(self.inner.Generate(request_iterator, context)):
            if message.WhichOneof("kind") == "heartbeat":
                beats += 1
                if self.claim != "flood":
                    self._lie(message.heartbeat, beats)
                again = pb.GenerateResponse(heartbeat=message.heartbeat)
                again.heartbeat.tokens_since_last = 0  # it repeats itself, and claims nothing
                for _ in range(2000 if self.claim == "flood" else 0):
                    yield again
            if message.WhichOneof("kind") not in ("finished", "progress") or self.claim == "flood":
                yield message

    def _lie(self, beat: pb.Heartbeat, beats: int) -> None:
        beat.engine_age_s, beat.tokens_since_last = 0.0, 0
        match self.claim:
            case "idle":
                beat.state = pb.IDLE
            case "flickers":
                beat.state = pb.IDLE if beats % 2 else pb.GENERATING
            case "paused" | "updating":
                beat.state = pb.PAUSED if self.claim == "paused" else pb.UPDATING
            case "makes tokens":
                beat.state, beat.tokens_since_last = pb.GENERATING, 100


REASONS = {
    "idle": "no token for its",
    "flickers": "no token for its",
    "paused": "it was paused and made no token",
    "updating": "it was updating and made no token",
    "makes tokens": "and nothing arrived",
    "flood": "it floods",
}


@pytest.mark.parametrize("claim", list(REASONS))
def test_a_claim_does_not_stand_in_for_answers(claim: str) -> None:
    """Whatever it says in its heartbeats, its samples go to the other one within the bounds of `control.lease`."""
    world = World(("a", "b"), slow, lambda name, life: {"claim": claim if name == "a" else ""}, Liar)
    # A flood is counted in messages. On a busy machine it holds up the tokens behind it, which is not to be seen first.
    control = SETTINGS if claim == "flood" else replace(HASTY, update_timeout_s=5.0)
    with running(world, control) as run:
        run.controller.submit(job(0, count=10, n=4))
        began = time.monotonic()
        assert len(list(run.controller.samples("train/0", 120))) == 40
        run.wait_for(lambda: run.seen(EventKind.LOST, "a"), 120)
        lost = run.seen(EventKind.LOST, "a")
        assert REASONS[claim] in lost[0].text
        bound_s = 2 * control.lease_s + 1.0 + control.update_timeout_s
        assert time.monotonic() - began < bound_s + 30.0, "and 30 s for a busy machine"
