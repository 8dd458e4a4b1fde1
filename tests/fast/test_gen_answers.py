"""Answers in the making: what is told of them while they run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from streamrl_jax.control.partials import extend
from streamrl_jax.gen.answers import Answers, Result
from streamrl_jax.types import Assignment, Generation, Partial, Progress, Sampling, VersionRun
from tests.fakes import FakeEngine, fake_logprob, fake_token

PROMPT = np.asarray([1, 2, 3], np.int32)
SAMPLING = Sampling(1.0, 60, (0,))


def carried(length: int) -> Partial:
    ids = np.asarray([fake_token(PROMPT, index) for index in range(length)], np.int32)
    return Partial(
        ids, np.asarray([fake_logprob(token) for token in ids], np.float32), (VersionRun(2, length),)
    )


async def told(answers: Answers, posted: list[Result], assignment: Assignment, interrupted: bool) -> None:
    """Runs an answer of 50 tokens; half-way another stream takes over, if so asked."""
    answers.report(0.01)
    answers.take(assignment)
    while len(posted) < 3:
        await asyncio.sleep(0.002)
    if interrupted:
        posted.clear()
        answers.report(0.01)
    while not posted or not isinstance(posted[-1], Generation):
        await asyncio.sleep(0.002)


def results(assignment: Assignment, interrupted: bool = False) -> list[Result]:
    engine, posted = FakeEngine(tokens_per_s=400, length=lambda asked: 50, version=3), []
    answers = Answers(engine, "a", posted.append, lambda reason: None)
    asyncio.run(told(answers, posted, assignment, interrupted))
    return posted


def assembled(posted: list[Result], known: Partial | None = None) -> Partial:
    for piece in posted:
        if isinstance(piece, Progress):
            known = extend(known, piece)
    assert known is not None
    return known


def test_a_new_stream_is_told_everything_again() -> None:
    """What the broken one was told may be lost, and after a gap nothing more of an answer would be kept."""
    posted = results(Assignment("s", 0, PROMPT, SAMPLING), interrupted=True)
    first = posted[0]
    assert isinstance(first, Progress) and first.offset == 0 and len(first.token_ids) > 3
    known = assembled(posted)
    assert known.token_ids.tolist() == [fake_token(PROMPT, index) for index in range(len(known.token_ids))]


def test_a_continued_answer_tells_what_is_new_and_is_returned_whole() -> None:
    """Its limit counts the whole, and what was carried keeps its log-probs and versions."""
    start = carried(20)
    posted = results(Assignment("s", 1, PROMPT, replace(SAMPLING, max_new_tokens=30), resumed=start))
    first, answer = posted[0], posted[-1]
    assert isinstance(first, Progress) and first.offset == 20
    assert isinstance(answer, Generation) and len(answer.token_ids) == 30
    assert answer.token_ids.tolist() == [fake_token(PROMPT, index) for index in range(30)]
    np.testing.assert_allclose(
        answer.logprobs, [fake_logprob(token) for token in answer.token_ids], rtol=1e-6
    )
    assert answer.versions == (VersionRun(2, 20), VersionRun(3, 10))
    known = assembled(posted, start)
    np.testing.assert_array_equal(known.token_ids, answer.token_ids[: len(known.token_ids)])
