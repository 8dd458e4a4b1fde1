"""What one sample costs the controller, stage by stage: each stage alone, in a loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count, cycle

import numpy as np

from streamrl_jax.control.ledger import Ledger
from streamrl_jax.control.partials import extend
from streamrl_jax.control.placing import Room, Waiting
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.gen import codec
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Partial,
    Progress,
    Prompt,
    Sampling,
    TokenIds,
    VersionRun,
)

FENCE = Fence("bench", 0)
REPEATS = 2000
PIECE = 64
_PROMPT = Prompt("0", np.arange(64, dtype=np.int32), {})


def unit_costs(tokens: int) -> Mapping[str, float]:
    """Microseconds of processor time a sample, by stage.

    Args:
        tokens: of each answer.
    """
    answer = Generation(
        "train/0/0/0", 0, np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32),
        (VersionRun(0, tokens),), FinishReason.STOP, "instance-0",
    )  # fmt: skip
    message = pb.GenerateResponse(finished=codec.generation_to_proto(FENCE, answer))
    wire = message.SerializeToString()
    assignment = Assignment("train/0/0/0", 0, _PROMPT.token_ids, Sampling(1.0, tokens, (0,), seed=1))
    return {
        "answer: bytes to message": _timed(lambda: pb.GenerateResponse.FromString(wire)),
        "answer: message to record, every value checked": _timed(
            lambda: codec.generation_from_proto(message.finished)
        ),
        f"a Progress of {PIECE} tokens: message to record, and kept": _progress(),
        "account: all moves of a sample": _account(),
        "queue: one place among 2 instances": _places(2),
        "queue: one place among 128 instances": _places(128),
        "queue: one place among 1,000 instances": _places(1000),
        "reward: to a thread and back": asyncio.run(_reward(answer)),
        "assignment: record to bytes": _timed(
            lambda: pb.GenerateRequest(assign=codec.assignment_to_proto(assignment)).SerializeToString()
        ),
    }


def _timed(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The best of five, microseconds of processor time a call: a busy machine must not count."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(repeats // 5):
            work()
        best = min(best, time.thread_time() - began)
    return best / (repeats // 5) * 1e6


def _progress() -> float:
    """An answer of 8 pieces, over and over."""
    runs = (VersionRun(0, PIECE),)
    ids, logprobs = np.arange(PIECE, dtype=np.int32), np.full(PIECE, -0.5, np.float32)
    messages = cycle(
        codec.progress_to_proto(FENCE, Progress("train/0/0/0", 0, PIECE * piece, ids, logprobs, runs))
        for piece in range(8)
    )
    known: Partial | None = None

    def take() -> None:
        nonlocal known
        progress = codec.progress_from_proto(next(messages))
        known = extend(None if progress.offset == 0 else known, progress)

    return _timed(take)


def _account() -> float:
    ledger, numbers = Ledger(FENCE), count()
    ledger.open("job", REPEATS + 1)

    def moves() -> None:
        sample = f"job/{next(numbers)}/0"
        ledger.admit("job", sample)
        attempt = ledger.dispatch(sample, "a")
        ledger.judge(FENCE, sample, attempt, "a")
        ledger.accept(FENCE, sample, attempt, "a")
        ledger.rewarded(sample)
        ledger.deliver(sample)

    return _timed(moves)


def _places(instances: int) -> float:
    """An instance has room for one, as after each answer."""
    queue, turn = HeldQueue(), count()
    names = [f"instance-{number}" for number in range(instances)]
    size = 72 * instances + REPEATS + 1

    def waiting() -> Iterable[Waiting]:
        for number in range(size):
            yield Waiting(f"job/{number}/0", f"job/{number // 8}", 0, (0, 0, number))

    queue.add("job", iter(waiting()), size)
    queue.take([Room(name, 0, 72, 0) for name in names])
    return _timed(lambda: queue.take([Room(names[next(turn) % instances], 0, 72, 71)]))


async def _reward(answer: Generation) -> float:
    """All of them ordered at once: what a reward costs beside a loop that has other work."""

    def score(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
        return RewardResult(1.0)

    def decode(ids: TokenIds) -> str:
        return ""

    workers = RewardWorkers(score, decode, 30.0, 2)
    workers.start()
    workers.attach()
    best = min([await _rewards(workers, answer) for _ in range(5)])
    workers.close(1.0)
    return best / REPEATS * 1e6


async def _rewards(workers: RewardWorkers, answer: Generation) -> float:
    left, done = REPEATS, asyncio.Event()

    def arrived(outcome: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    began = time.process_time()
    for _ in range(REPEATS):
        workers.order(_PROMPT, answer, arrived)
    await done.wait()
    return time.process_time() - began
