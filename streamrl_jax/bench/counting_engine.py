"""An instance without a model: ``python -m streamrl_jax.bench.counting_engine --spec FILE``.

Everything around the engine is the real thing: process, gRPC service, weights' calls, heartbeats. The engine itself
hands out the same tokens again and again, as fast as it is told to, and stamps each answer with the moment at which it
was finished. Beside it, on a port of its own, the process serves the bare stream: the same messages, no service.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np

from streamrl_jax.gen import codec, net
from streamrl_jax.gen.protocol import Delta, EngineLimits
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import (
    NO_VERSION,
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Manifest,
    Timings,
    UpdateReport,
    VersionRun,
)

BARE_SUFFIX: Final = ".bare"
"""Of the file, beside the address file, that says where the bare stream is served."""

LONGEST: Final = 1 << 20
_CATCH_UP_S: Final = 0.25  # what is later than this is not made up for


@dataclass(frozen=True)
class Pace:
    """How the engine answers; travels as a JSON file, named where a real engine's spec names the model.

    Attributes:
        tokens: Of each answer; an assignment's limit may cut it.
        per_s: Answers a second, evenly spaced (open loop: what is late is made up for); 0: at once.
        pieces: Deltas that an answer comes in; more than one make Progress messages possible.
        core: The processor core that the process is bound to; negative: none.
        load_s: What loading takes.
    """

    tokens: int = 512
    per_s: float = 0.0
    pieces: int = 1
    core: int = -1
    load_s: float = 0.0


class CountingEngine:
    """Keeps the contract of `Engine` and computes nothing.

    The moment at which an answer was finished (`time.monotonic`, which all processes of a host share) is put into its
    ``timings.queued_s``, and the moment at which the engine was loaded into ``timings.prefill_s``.

    Args:
        pace: how fast.
        slots: answers at once.
    """

    excused_until_s = 0.0

    def __init__(self, pace: Pace, slots: int) -> None:
        self.limits = EngineLimits(slots, LONGEST, "counting")
        self.version = NO_VERSION
        self.tokens_total = 0
        self.steps_total = 0
        self.loaded_s = 0.0
        self._pace = pace
        self._due_s = 0.0
        self._ids = np.arange(1, pace.tokens + 1, dtype=np.int32)  # 0 would be a stop token
        self._logprobs = np.full(pace.tokens, -0.5, np.float32)
        self._running = 0
        self._go = asyncio.Event()
        self._go.set()

    async def start(self, report: Callable[[str], None]) -> None:
        """Takes its time."""
        report("counting")
        await asyncio.sleep(self._pace.load_s)
        self.loaded_s = time.monotonic()

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        """The first ``tokens`` numbers, in ``pieces``."""
        pace = self._pace
        done = len(assignment.resumed.token_ids) if assignment.resumed else 0
        end = min(pace.tokens, assignment.sampling.longest)
        bounds = np.linspace(done, end, pace.pieces + 1).astype(int)
        finish_s = self._turn()
        began_s = time.monotonic()
        self._running += 1
        try:
            for piece in range(pace.pieces):
                share = (piece + 1) / pace.pieces
                await asyncio.sleep(began_s + (finish_s - began_s) * share - time.monotonic())
                await self._go.wait()
                yield self._delta(int(bounds[piece]), int(bounds[piece + 1]), last=piece + 1 == pace.pieces)
        finally:
            self._running -= 1

    def _turn(self) -> float:
        """When the next answer is to be finished."""
        now = time.monotonic()
        if not self._pace.per_s:
            return now
        self._due_s = (self._due_s if self._due_s > now - _CATCH_UP_S else now) + 1 / self._pace.per_s
        return self._due_s

    def _delta(self, first: int, end: int, *, last: bool) -> Delta:
        self.tokens_total += end - first
        self.steps_total += end - first
        return Delta(
            self._ids[first:end],
            self._logprobs[first:end],
            (VersionRun(self.version, end - first),),
            FinishReason.LENGTH if last else None,
            Timings(queued_s=time.monotonic(), prefill_s=self.loaded_s) if last else Timings(),
        )

    async def abort(self, sample_id: str, attempt: int) -> None:
        """Nobody aborts in the benchmark."""

    async def update_weights(
        self, manifest: Manifest, blob: Path, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        """Takes the number of the version; the bytes are not read."""
        async with asyncio.timeout(timeout_s):
            while self._running and not in_flight:
                await asyncio.sleep(0.005)
        self.version = manifest.version
        return UpdateReport("", True, self.version)

    async def forget_version(self) -> None:
        """Tokens carry no version until the next one."""
        self.version = NO_VERSION

    async def pause(self, *, keep: bool) -> None:
        """Stops."""
        self._go.clear()

    async def resume(self) -> None:
        """Goes on."""
        self._go.set()

    async def ping(self) -> None:
        """Lives."""

    async def close(self) -> None:
        """Has nothing to close."""


class BareStream(rpc.StreamGenerationServicer):
    """Answers each Assign with its Finished at once, as fast as gRPC allows: no service, no queue, no checks."""

    def __init__(self, pace: Pace) -> None:
        self._engine = CountingEngine(pace, 1)

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One Finished an Assign; everything else is read and left."""
        fence = Fence("bare", 0)
        async for request in request_iterator:
            if request.WhichOneof("kind") != "assign":
                continue
            async for delta in self._engine.generate(codec.assignment_from_proto(request.assign)):
                runs = (VersionRun(0, len(delta.token_ids)),)
                answer = Generation(
                    request.assign.sample_id, 0, delta.token_ids, delta.logprobs, runs, FinishReason.LENGTH,
                    "bare", delta.timings,
                )  # fmt: skip
                yield pb.GenerateResponse(finished=codec.generation_to_proto(fence, answer))


async def _serve(spec_file: Path) -> int:
    from streamrl_jax.gen.options import read_spec
    from streamrl_jax.gen.serve import serve

    spec = read_spec(spec_file)
    pace = Pace(**json.loads(Path(spec.engine.model).read_text()))
    if pace.core >= 0:
        os.sched_setaffinity(0, {pace.core})
    bare = grpc.aio.server(options=net.SERVER_OPTIONS)
    rpc.add_StreamGenerationServicer_to_server(BareStream(dataclasses.replace(pace, pieces=1)), bare)
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    Path(spec.address_file + BARE_SUFFIX).write_text(f"127.0.0.1:{port}")
    return await serve(spec, CountingEngine(pace, spec.engine.max_num_seqs))


def main() -> None:
    """Serves until it is told to end."""
    from streamrl_jax.gen.parentage import be_parent

    logging.basicConfig(level=logging.INFO)
    be_parent()
    code = asyncio.run(_serve(Path(sys.argv[sys.argv.index("--spec") + 1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
