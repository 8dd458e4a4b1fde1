"""Beginnings of answers: kept in pieces, gone on from by the next attempt, freed with their sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.control.faults import InstanceLost
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.ledger import Verdict
from streamrl_jax.control.partials import ending, extend, resumable
from streamrl_jax.control.placing import Room
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.work import Work
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Fence,
    FinishReason,
    Partial,
    Progress,
    Prompt,
    Sampling,
    VersionRun,
    expand_runs,
    group_runs,
)

LIFE = Fence("run", 0)
ROOMS = [Room("a", 3, 8, 0)]
PROMPT = Prompt("17", np.asarray([1], np.int32), {"answer": "4"})


def work() -> Work:
    """Without rewards: what would compute one is closed unstarted."""
    rewards = RewardWorkers(lambda *_: RewardResult(0.0), str, 1.0, 1)
    return Work(LIFE, rewards, HeldQueue(), 3, Intake(1000), lambda coroutine, name: coroutine.close())


def train(n: int) -> Job:
    return Job("train/3", [PROMPT], n, Sampling(1.0, 8, (0,), seed=1), 3, 3)


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 6), st.data())
def test_progress_in_any_pieces_gives_a_prefix(offsets: list[int], width: int, data: st.DataObject) -> None:
    """Pieces may overlap, repeat or leave a gap: what is known is always a true beginning of the answer."""
    answer, versions = np.arange(100, 118, dtype=np.int32), [index // 5 for index in range(18)]
    known: Partial | None = None
    reached = 0
    for offset in offsets:
        end = offset + width
        piece = Progress(
            "s", 0, offset, answer[offset:end], -answer[offset:end].astype(np.float32) / 100,
            group_runs(versions[offset:end]),
        )  # fmt: skip
        known = extend(known, piece)
        reached = max(reached, end) if offset <= reached else reached
    assert (0 if known is None else len(known.token_ids)) == reached
    if known is not None:
        np.testing.assert_array_equal(known.token_ids, answer[:reached])
        np.testing.assert_array_equal(known.logprobs, -answer[:reached].astype(np.float32) / 100)
        assert list(expand_runs(known.versions)) == versions[:reached]


def beginning(tokens: list[int], version: int = 2) -> Partial:
    return Partial(
        np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), (VersionRun(version, len(tokens)),)
    )


@pytest.mark.parametrize(
    ("tokens", "limit", "forced", "whole"),
    [
        ([5, 6, 7], 10, None, None),
        ([5, 6, 7], 3, None, ([5, 6, 7], FinishReason.LENGTH)),
        ([5, 6, 9], 10, None, ([5, 6, 9], FinishReason.STOP)),
        ([5, 9, 7], 10, None, ([5, 9], FinishReason.STOP)),
        ([5, 6, 9], 3, None, ([5, 6, 9], FinishReason.STOP)),
        ([9], 10, None, ([9], FinishReason.STOP)),
        ([5, 9, 7], 10, 8, None),  # recorded lengths ignore stops
        ([5, 9, 7], 10, 3, ([5, 9, 7], FinishReason.LENGTH)),
    ],
)
def test_a_beginning_that_is_the_whole_answer(
    tokens: list[int], limit: int, forced: int | None, whole: tuple[list[int], FinishReason] | None
) -> None:
    sampling = Sampling(1.0, limit, (9,), forced_length=forced, evaluation=forced is not None)
    found = ending(beginning(tokens), sampling)
    assert (None if found is None else (found[0].token_ids.tolist(), found[1])) == whole
    if found is not None:
        assert (
            sum(run.length for run in found[0].versions) == len(found[0].token_ids) == len(found[0].logprobs)
        )


def test_a_beginning_with_a_token_that_is_too_old_is_not_gone_on_from() -> None:
    """Versions grow along an answer: the first token is the oldest, and nothing after it can stand alone."""
    known = Partial(np.asarray([5, 6, 7], np.int32), np.zeros(3, np.float32), group_runs([2, 3, 3]))
    assert resumable(known, 2) is known
    assert resumable(known, 3) is None
    assert resumable(None, 0) is None


def piece(offset: int, tokens: list[int], attempt: int = 0, version: int = 3) -> Progress:
    start = beginning(tokens, version)
    return Progress("train/3/17/0", attempt, offset, start.token_ids, start.logprobs, start.versions)


def test_progress_of_a_stale_attempt_is_dropped() -> None:
    jobs = work()
    jobs.submit(train(n=1))
    jobs.take(ROOMS)
    jobs.lost("a")
    piece = Progress(
        "train/3/17/0", 0, 0, np.asarray([5], np.int32), np.zeros(1, np.float32), (VersionRun(3, 1),)
    )
    assert jobs.progress(LIFE, piece, "a") is Verdict.STALE_ATTEMPT
    assert jobs.sizes()["partials"] == 0


def test_a_beginning_is_gone_on_from_with_another_seed_and_the_limits_of_the_whole_answer() -> None:
    jobs = work()
    jobs.submit(train(n=1))
    [(_, first)] = jobs.take(ROOMS)
    jobs.progress(LIFE, piece(0, [5, 6]), "a")
    jobs.progress(LIFE, piece(2, [7]), "a")
    jobs.lost("a")
    [(_, second)] = jobs.take(ROOMS)
    assert second.attempt == 1 and second.resumed is not None
    assert second.resumed.token_ids.tolist() == [5, 6, 7]
    assert second.sampling.seed != first.sampling.seed, (
        "the noise of its first tokens must not be drawn again"
    )
    assert second.sampling.max_new_tokens == first.sampling.max_new_tokens
    counts = jobs.ledger.counts()
    assert (counts["continued"], counts["tokens_kept"], counts["taken_back"]) == (1, 3, 1)
    jobs.ledger.check()


def test_without_a_beginning_the_seed_stays() -> None:
    jobs = work()
    jobs.submit(train(n=1))
    [(_, first)] = jobs.take(ROOMS)
    jobs.lost("a")
    [(_, second)] = jobs.take(ROOMS)
    assert second.resumed is None and second.sampling.seed == first.sampling.seed


def test_a_beginning_that_is_too_old_is_forgotten_before_the_next_attempt_writes() -> None:
    """Were it kept, the tokens of the next attempt, which starts at the prompt, would be appended to it."""
    jobs = work()
    jobs.submit(train(n=1))
    jobs.take(ROOMS)
    jobs.progress(LIFE, piece(0, [5, 6, 7], version=2), "a")
    jobs.lost("a")
    [(_, second)] = jobs.take(ROOMS)
    assert second.resumed is None and jobs.sizes()["partials"] == 0
    jobs.progress(LIFE, piece(0, [1, 2, 4, 8], attempt=1), "a")
    jobs.lost("a")
    [(_, third)] = jobs.take(ROOMS)
    assert third.resumed is not None and third.resumed.token_ids.tolist() == [1, 2, 4, 8]


def test_progress_that_holds_the_stop_token_is_the_answer() -> None:
    """The message that says so may be lost with the instance; the last token is not drawn a second time."""

    jobs = work()
    jobs.submit(train(n=1))
    [(_, assignment)] = jobs.take(ROOMS)
    stop = assignment.sampling.stop_token_ids[0]
    jobs.progress(LIFE, piece(0, [5, 6]), "a")
    assert jobs.progress(LIFE, piece(2, [stop]), "a") is Verdict.ACCEPTED
    assert jobs.progress(LIFE, piece(2, [stop]), "a") is Verdict.DUPLICATE
    assert jobs.lost("a") == []
    assert jobs.ledger.counts()["finished"] == 1 and jobs.sizes()["partials"] == 0
    jobs.ledger.check()


def test_progress_past_the_limit_costs_the_instance() -> None:
    jobs = work()
    jobs.submit(train(n=1))
    jobs.take(ROOMS)
    with pytest.raises(InstanceLost, match="has passed the 8 tokens"):
        jobs.progress(LIFE, piece(0, [5] * 9), "a")


def test_tokens_that_are_known_already_are_no_sign_of_work() -> None:
    """An instance that repeats itself for ever would never be found dead."""
    jobs = work()
    jobs.submit(Job("train/3", [PROMPT], 1, Sampling(1.0, 8, (0,), seed=1), 3, 3))
    ((_, assignment),) = jobs.take(ROOMS)
    ids, logprobs = np.asarray([5, 6], np.int32), np.zeros(2, np.float32)
    first = Progress(assignment.sample_id, 0, 0, ids, logprobs, (VersionRun(3, 2),))
    assert jobs.progress(LIFE, first, "a") is Verdict.ACCEPTED
    assert jobs.progress(LIFE, first, "a") is Verdict.DUPLICATE
    assert jobs.progress(LIFE, replace(first, offset=1), "a") is Verdict.ACCEPTED
    assert jobs.progress(LIFE, replace(first, offset=7), "a") is Verdict.ACCEPTED, (
        "a gap: new, though of no use"
    )
