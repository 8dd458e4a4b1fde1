"""What lies between queue and trainer: jobs at work, partial answers, the way out, rewards."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.control.core import PROBE_PRIORITY
from streamrl_jax.control.faults import ControlError, InstanceLost, RewardError
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job, engine_priority
from streamrl_jax.control.ledger import Verdict
from streamrl_jax.control.placing import Room
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.tasks import until_one_ends
from streamrl_jax.control.work import Work
from streamrl_jax.errors import UserError
from streamrl_jax.rewards import RewardFn, RewardResult
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Prompt,
    Rejection,
    RejectReason,
    Sample,
    Sampling,
    VersionRun,
)

PROMPT = Prompt("17", np.asarray([1], np.int32), {"answer": "4"})


def generation(sample_id: str = "train/3/17/0") -> Generation:
    return Generation(
        sample_id, 0, np.asarray([52, 50], np.int32), np.zeros(2, np.float32), (VersionRun(0, 2),),
        FinishReason.STOP, "a",
    )  # fmt: skip


def sample(name: str) -> Sample:
    return Sample(name, 3, PROMPT, 0, generation(name), 1.0)


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


# ---------------------------------------------------------------- jobs at work

LIFE = Fence("run", 0)
ROOMS = [Room("a", 3, 8, 0)]


def work(max_attempts: int = 3) -> Work:
    """Without rewards: what would compute one is closed unstarted."""
    rewards = RewardWorkers(lambda *_: RewardResult(0.0), decode, 1.0, 1)
    return Work(
        LIFE, rewards, HeldQueue(), max_attempts, Intake(1000), lambda coroutine, name: coroutine.close()
    )


def train(n: int = 2, **rest: Any) -> Job:
    sampling = Sampling(1.0, 8, (0,), seed=1)
    return Job("train/3", [PROMPT], n, sampling, 3, 3, **rest)


def answer(assignment: Assignment, version: int = 3, reason: FinishReason = FinishReason.STOP) -> Generation:
    return Generation(
        assignment.sample_id, assignment.attempt, np.asarray([52, 0], np.int32), np.zeros(2, np.float32),
        (VersionRun(version, 2),), reason, "a",
    )  # fmt: skip


def test_an_answer_that_was_cut_off_is_asked_for_again_first() -> None:
    jobs = work()
    jobs.submit(train())
    (_, first), (_, second) = jobs.take(ROOMS)
    assert jobs.finished(LIFE, answer(second, reason=FinishReason.ABORT), "a") is Verdict.ACCEPTED
    assert jobs.finished(LIFE, answer(second, reason=FinishReason.ABORT), "a") is Verdict.STALE_ATTEMPT
    ((_, again),) = jobs.take([Room("a", 3, 8, 1)])
    assert (again.sample_id, again.attempt) == (second.sample_id, 1)
    assert again.sampling == second.sampling, "the same seed: short answers are not favoured"
    assert again.sampling != first.sampling
    assert jobs.finished(LIFE, answer(second), "a") is Verdict.STALE_ATTEMPT


@pytest.mark.parametrize("reason", [RejectReason.WRONG_VERSION, RejectReason.DRAINING])
def test_what_an_instance_refuses_for_now_is_bounded(reason: RejectReason) -> None:
    jobs = work(max_attempts=3)
    jobs.submit(train(n=1))
    for attempt in range(2):
        ((_, assignment),) = jobs.take(ROOMS)
        assert assignment.attempt == attempt
        jobs.rejected(LIFE, Rejection(assignment.sample_id, attempt, reason, "later"), "a")
    ((_, assignment),) = jobs.take(ROOMS)
    with pytest.raises(
        ControlError, match=rf"train/3/17/0 was refused \({reason}: later\), at its attempt number 3"
    ):
        jobs.rejected(LIFE, Rejection(assignment.sample_id, 2, reason, "later"), "a")


@pytest.mark.parametrize("reason", [RejectReason.TOO_LONG, RejectReason.INVALID])
def test_what_no_instance_takes_is_the_users_to_mend(reason: RejectReason) -> None:
    jobs = work()
    jobs.submit(train(n=1))
    ((_, assignment),) = jobs.take(ROOMS)
    with pytest.raises(UserError, match=r"instance a refuses sample train/3/17/0 .*: the remedy"):
        jobs.rejected(LIFE, Rejection(assignment.sample_id, 0, reason, "the remedy"), "a")


def test_tokens_older_than_asked_for_stop_the_run() -> None:
    jobs = work()
    jobs.submit(train(n=1))
    ((_, assignment),) = jobs.take(ROOMS)
    with pytest.raises(
        ControlError, match="sample train/3/17/0 with tokens of version 2; version 3 or newer"
    ):
        jobs.finished(LIFE, answer(assignment, version=2), "a")


def test_engine_priority_puts_earlier_iterations_first_and_probes_before_all() -> None:
    order = [
        engine_priority(replace(train(), iteration=iteration, priority=priority))
        for priority, iteration in [(PROBE_PRIORITY, 9), (-1, 8), (0, 3), (0, 4), (1, 0)]
    ]
    assert order == sorted(order)
    assert all(-(2**63) <= number < 2**63 for number in order)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 99), st.floats(1, 1e6)), min_size=2, max_size=9))
def test_engine_priority_puts_longer_answers_first_within_an_iteration(
    jobs: list[tuple[int, int, float]],
) -> None:
    """Priority, then iteration, then length in steps of 0.34 %; what is late or not predicted before those."""

    def number(priority: int, iteration: int, length: float | None) -> int:
        predicted = None if length is None else [length]
        return engine_priority(replace(train(), priority=priority, iteration=iteration, predicted=predicted))

    for first, second in pairwise(jobs):
        (priority, iteration, length), (other_priority, other_iteration, other) = first, second
        assert number(priority, iteration, None) == (priority << 32) + (iteration << 12)
        assert number(priority, iteration, None) <= number(*first) < number(priority, iteration + 1, None)
        late = replace(train(), priority=priority, iteration=iteration, predicted=[length])
        assert engine_priority(late, late=True) == number(priority, iteration, None)
        if (priority, iteration) != (other_priority, other_iteration):
            wanted = (priority, iteration) < (other_priority, other_iteration)
            assert (number(*first) < number(*second)) == wanted
        elif length > 1.004 * other:
            assert number(*first) < number(*second)
        if (priority, iteration) != (other_priority, other_iteration):
            older = (priority, iteration) < (other_priority, other_iteration)
            assert (number(*first) < number(*second[:2], None)) == older


def test_engine_priority_saturates_and_fits_64_bits() -> None:
    largest = (1 << 31) - 1
    for priority in (-largest, PROBE_PRIORITY, largest):
        at_most = [
            engine_priority(replace(train(), priority=priority, iteration=iteration, predicted=[length]))
            for iteration, length in [(-1, 2.0**53), (0, 2.0**21), (2**20 - 1, 1.0), (largest, 1.0)]
        ]
        assert at_most[0] == at_most[1] == priority << 32 and at_most[2] == at_most[3]
        assert priority << 32 <= at_most[2] < (priority + 1) << 32
        assert all(-(2**63) <= number < 2**63 for number in at_most)


def test_a_forced_length_is_its_samples_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = work()
    job = replace(train(n=2), job_id="eval/3", evaluation=True, forced=[2, 7])
    jobs.submit(job)
    (_, first), (_, second) = jobs.take(ROOMS)
    assert (first.sampling.forced_length, second.sampling.forced_length) == (2, 7)
    assert first.sampling.seed != second.sampling.seed
    with monkeypatch.context() as patched:  # no record is copied for it
        patched.setattr("streamrl_jax.control.work.limits_of", None)
        assert jobs.longest("a") == 8
    for count in (3, 1):
        with pytest.raises(InstanceLost, match=rf"has {count} tokens; 2 were asked for"):
            jobs.finished(LIFE, replace(answer(first), token_ids=np.ones(count, np.int32)), "a")
    cut = replace(answer(second, reason=FinishReason.ABORT), token_ids=np.ones(1, np.int32))
    assert jobs.finished(LIFE, cut, "a") is Verdict.ACCEPTED, "what was cut off is continued elsewhere"
    assert jobs.finished(LIFE, answer(first), "a") is Verdict.ACCEPTED


def test_what_a_job_comes_to_is_bounded() -> None:
    with pytest.raises(
        ValueError, match=r"1 prompts with n = 1048576000 are 1048576000 samples; at most 16777216"
    ):
        train(n=1000 * 2**20)
    assert train(n=2**20).size == 2**20


def test_a_job_whose_only_instance_is_gone_is_forgotten() -> None:
    """What it answered before counts; where it answered nothing there is nothing to tell."""
    jobs = work()
    for job_id, n in (("train/4", 2), ("train/5", 1)):
        jobs.submit(replace(train(n=n), job_id=job_id, pinned="a"))
    (_, first), *others = jobs.take(ROOMS)
    assert len(others) == 2
    jobs.finished(LIFE, answer(first), "a")
    jobs.lost("a")
    jobs.gone("a")
    assert len(jobs.accounts) == 0
    assert [(told.job_id, told.samples) for told in jobs.accounts.finished] == [("train/4", 1)]


# ---------------------------------------------------------------- rewards


def run_rewards(
    function: RewardFn, scenario: Callable[[RewardWorkers], Awaitable[object]], timeout_s: float = 5.0
) -> object:
    workers = RewardWorkers(function, decode, timeout_s, workers=2)

    async def main() -> object:
        workers.start()
        workers.attach()
        return await scenario(workers)

    try:
        return asyncio.run(main())
    finally:
        workers.close(1.0)


async def one_reward(workers: RewardWorkers) -> RewardResult:
    done: asyncio.Future[RewardResult | BaseException] = asyncio.get_running_loop().create_future()
    workers.order(PROMPT, generation(), done.set_result)
    if isinstance(outcome := await done, BaseException):
        raise outcome
    return outcome


def test_reward_gets_prompt_text_and_generation() -> None:
    def score(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        return RewardResult(
            float(text.startswith(prompt.columns["answer"])), {"length": len(answer.token_ids)}
        )

    result = run_rewards(score, lambda workers: one_reward(workers))
    assert result == RewardResult(1.0, {"length": 2})


def test_calls_run_beside_each_other_and_beside_the_loop() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def meet(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        barrier.wait()
        return RewardResult(0.0, {})

    async def both(workers: RewardWorkers) -> object:
        return await asyncio.gather(*(one_reward(workers) for _ in range(2)))

    assert len(run_rewards(meet, both)) == 2  # pyright: ignore[reportArgumentType]


def test_reward_that_raises_names_sample_prompt_answer_and_line() -> None:
    def broken(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        raise KeyError("ground_truth")

    with pytest.raises(RewardError) as caught:
        run_rewards(broken, lambda workers: one_reward(workers))
    message = str(caught.value)
    for part in (
        "reward function raised KeyError", "train/3/17/0", "prompt 17", "'42'", "in broken", "ground_truth",
    ):  # fmt: skip
        assert part in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_goes_to_the_trainer_as_it_is(value: float) -> None:
    result = run_rewards(lambda *_: RewardResult(value, {}), lambda workers: one_reward(workers))
    assert isinstance(result, RewardResult) and repr(result.score) == repr(value)


def test_reward_that_hangs_is_named_and_does_not_keep_anything_waiting() -> None:
    release = threading.Event()

    def hang(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        release.wait(30)
        return RewardResult(0.0, {})

    async def watch(workers: RewardWorkers) -> object:
        task = asyncio.create_task(one_reward(workers))
        for _ in range(100):
            await asyncio.sleep(0.02)
            workers.check()
        return task

    began = time.monotonic()
    with pytest.raises(
        RewardError, match=r"did not return within 0.2 s \(reward.timeout_s\) for sample train/3/17/0"
    ):
        run_rewards(hang, watch, timeout_s=0.2)
    assert time.monotonic() - began < 20
    release.set()


# ---------------------------------------------------------------- several coroutines as one


async def fails(error: Exception, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise error


async def fails_when_cancelled() -> None:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        raise InstanceLost("stream broke") from None


def test_the_first_error_ends_all_and_is_raised() -> None:
    with pytest.raises(KeyError):
        asyncio.run(until_one_ends(asyncio.sleep(30), fails(KeyError("a")), fails(ValueError("b"), 30)))


def test_an_error_that_ends_the_run_goes_before_a_loss() -> None:
    with pytest.raises(ControlError):
        asyncio.run(until_one_ends(fails(InstanceLost("a")), fails(ControlError("b"))))


def test_a_cancellation_is_not_taken_for_a_loss() -> None:
    async def main() -> None:
        task = asyncio.create_task(until_one_ends(fails_when_cancelled()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
