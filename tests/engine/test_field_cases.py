"""Faults seen in the field that only a real engine can show, each with its right value (docs/field_cases.md).

The other cases are in `tests/fast/test_field_cases.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from streamrl_jax.types import Assignment, Generation, Sampling
from tests.engine.conftest import (
    VOCABULARY,
    Rig,
    make_model,
    reference_logprobs,
)

TRAINING = Sampling(temperature=1.0, max_new_tokens=32, stop_token_ids=())
GREEDY = Sampling(temperature=0.0, max_new_tokens=16, stop_token_ids=(), evaluation=True)


def ask(rig: Rig, sampling: Sampling, count: int, length: int = 6) -> list[tuple[list[int], Generation]]:
    """Prompts of random ids, the same ones at each call, with their answers."""
    draw = np.random.default_rng(length)
    given = [
        Assignment(rig.sample_id(), 0, draw.integers(3, VOCABULARY, length).astype(np.int32), sampling)
        for _ in range(count)
    ]
    return [(a.prompt_ids.tolist(), answer) for a, answer in zip(given, rig.answer(given), strict=True)]


@torch.no_grad()
def share_of_padding(rig: Rig, prompt: list[int], answer: Generation) -> float:
    """The probability that the model itself gives to ids that pad its vocabulary, mean over an answer."""
    assert rig.model is not None
    logits = rig.model(torch.tensor([[*prompt, *answer.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
    return float(torch.softmax(logits, dim=-1)[:, VOCABULARY:].sum(dim=-1).mean())


def disagreement(rig: Rig, answered: list[tuple[list[int], Generation]]) -> float:
    """The largest difference to Hugging Face's log-probs among the tokenizer's ids."""
    assert rig.model is not None
    return max(
        float(
            np.abs(
                reference_logprobs(rig.model, prompt, answer.token_ids.tolist(), 1.0) - answer.logprobs
            ).max()
        )
        for prompt, answer in answered
    )


@pytest.mark.parametrize("pushed", [False, True])
def test_case_14_ids_that_pad_the_vocabulary_are_never_sampled(rig: Rig, pushed: bool) -> None:
    """The model would write them more often than all others together; before and after an update."""
    if pushed:
        rig.push(make_model(rig.version + 1))
    answered = ask(rig, TRAINING, 16)
    assert np.mean([share_of_padding(rig, prompt, answer) for prompt, answer in answered]) > 0.5
    assert max(int(answer.token_ids.max()) for _, answer in answered) < VOCABULARY
    worst = disagreement(rig, answered)
    print(f"\nlargest log-prob difference among the tokenizer's ids {worst:.2e}")
    assert worst < 1e-5
    for sampling in (GREEDY, replace(TRAINING, evaluation=True, top_p=0.9, top_k=5)):
        assert max(int(answer.token_ids.max()) for _, answer in ask(rig, sampling, 8)) < VOCABULARY


@pytest.mark.parametrize("in_flight", [False, True])
def test_case_16_a_cached_prompt_is_answered_by_the_new_weights(rig: Rig, in_flight: bool) -> None:
    """The same prompt before and after an update: what comes is what the new weights give from nothing."""
    assert rig.model is not None
    length = 150  # more than a block of the cache, which holds whole blocks only
    old = rig.model
    before = ask(rig, GREEDY, 2, length)
    again = ask(rig, GREEDY, 2, length)
    for (_, first), (_, second) in zip(before, again, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
    rig.push(make_model(rig.version + 1), in_flight=in_flight)
    after = ask(rig, GREEDY, 2, length)
    assert disagreement(rig, after) < 1e-5
    for prompt, answer in after:
        with_old = reference_logprobs(old, prompt, answer.token_ids.tolist(), 1.0)
        assert np.abs(with_old - answer.logprobs).max() > 0.1, "the two versions can be told apart"
        assert {run.version for run in answer.versions} == {rig.version}
