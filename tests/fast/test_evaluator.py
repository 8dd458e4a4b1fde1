"""Evaluation: pass@k against every possible draw, the summary against a loop, and which versions are evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import Job
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.train.evaluator import Evaluation, Evaluator, evaluation_sampling, pass_at_k, summarise
from streamrl_jax.types import FinishReason, Generation, Prompt, Sample, Sampling, VersionRun


def sample(prompt: int, index: int, reward: float, length: int = 3) -> Sample:
    sample_id = f"eval/2/{prompt}/{index}"
    ids, logprobs = np.zeros(length, np.int32), np.zeros(length, np.float32)
    runs = (VersionRun(2, length),)
    generation = Generation(sample_id, 0, ids, logprobs, runs, FinishReason.STOP, "a")
    return Sample(sample_id, 2, Prompt(str(prompt), np.ones(2, np.int32), {}), index, generation, reward)


@pytest.mark.parametrize("answers", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(answers: int) -> None:
    for correct in range(answers + 1):
        right = [index < correct for index in range(answers)]
        for k in range(1, answers + 1):
            draws = list(combinations(right, k))
            assert pass_at_k(answers, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_summary_of_an_evaluation() -> None:
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.0, 0.0, 0.5, 0.0], 2: [1.0, 1.0, 1.0, 1.0]}
    samples = [sample(p, i, r, length=1 + i) for p, group in rewards.items() for i, r in enumerate(group)]
    found = summarise(2, samples[::-1], n=4, seconds=1.5)
    assert found.accuracy == pytest.approx((2.0 + 0.5 + 4.0) / 12)
    assert found.pass_at_k == {
        1: pytest.approx((0.5 + 0 + 1) / 3),
        2: pytest.approx((5 / 6 + 0 + 1) / 3),
        4: pytest.approx(2 / 3),
    }
    assert (found.version, found.length, found.count, found.seconds) == (2, 2.5, 12, 1.5)
    assert found.metrics() == {
        "val/accuracy": found.accuracy,
        "val/response_length/mean": 2.5,
        "timing_s/testing": 1.5,
        **{f"val/pass@{k}": value for k, value in found.pass_at_k.items()},
    }
    assert summarise(2, [sample(0, 0, 1.0)], n=1, seconds=1.0).pass_at_k == {}


def test_evaluation_may_bend_the_distribution_and_training_is_not_asked() -> None:
    cfg = Config.model_validate({"eval": {"temperature": 0.5, "top_p": 0.9, "top_k": 20}, "run": {"seed": 3}})
    wanted = Sampling(0.5, 512, (1,), seed=3, evaluation=True, top_p=0.9, top_k=20)
    assert evaluation_sampling(cfg, (1,)) == wanted
    assert evaluation_sampling(Config(), (1,)) == Sampling(0.0, 512, (1,), seed=0, evaluation=True)


class Controller:
    """Answers every prompt at once."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def samples(self, job_id: str, timeout_s: float) -> Iterator[Sample]:
        job = self.jobs[-1]
        assert job.job_id == job_id
        for prompt in job.prompts:
            yield from (sample(int(prompt.prompt_id), index, 1.0) for index in range(job.n))


class Faulty(Controller):
    """Its second score is no number."""

    def samples(self, job_id: str, timeout_s: float) -> Iterator[Sample]:
        for place, found in enumerate(super().samples(job_id, timeout_s)):
            yield replace(found, reward=math.nan) if place == 1 else found


class Observer:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def evaluating(self, version: int) -> None:
        self.seen.append(version)

    def evaluation(self, result: Evaluation) -> None:
        self.seen.append(result)


def evaluator(
    trainer: dict[str, Any],
    *,
    prompts: int = 3,
    evaluated: bool = False,
    controller: Controller | None = None,
    **evaluation: Any,
) -> tuple[Evaluator, Controller, Observer]:
    cfg = Config.model_validate({"trainer": trainer, "eval": evaluation})
    held_out = [Prompt(str(row), np.ones(2, np.int32), {}) for row in range(prompts)]
    controller, observer = controller or Controller(), Observer()
    sampling, stop = evaluation_sampling(cfg, (1,)), StopSignal()
    door: Any = controller
    return Evaluator(cfg, door, held_out, sampling, observer, stop, evaluated), controller, observer


def test_which_versions_are_evaluated() -> None:
    def due(freq: int, prompts: int = 3) -> list[int]:
        found, _, _ = evaluator({"test_freq": freq, "total_training_steps": 7}, prompts=prompts)
        return [version for version in range(1, 8) if found.due(version)]

    assert due(3) == [3, 6, 7], "the last one too"
    assert due(7) == [7]
    assert due(0) == due(3, prompts=0) == []


@pytest.mark.parametrize(
    ("version", "evaluated", "before_train", "due"),
    [
        (0, False, True, True),
        (0, False, False, False),
        (0, True, True, False),
        (4, False, True, True),  # a signal came between the update and its evaluation
        (4, True, True, False),
        (5, False, True, False),  # nothing was due
    ],
)
def test_the_version_that_a_run_starts_from(
    version: int, evaluated: bool, before_train: bool, due: bool
) -> None:
    settings = {"test_freq": 4, "total_training_steps": 9, "val_before_train": before_train}
    found, _, _ = evaluator(settings, evaluated=evaluated)
    assert found.due_at_start(version) is due
    never, _, _ = evaluator(settings | {"test_freq": 0}, evaluated=evaluated)
    assert not never.due_at_start(version)


def test_an_evaluation_asks_the_version_for_the_first_prompts() -> None:
    found, controller, observer = evaluator({}, max_prompts=2, n=2)
    result = found.evaluate(5)
    (job,) = controller.jobs
    assert job.evaluation and job.min_version == job.iteration == 5 and job.n == 2
    assert [prompt.prompt_id for prompt in job.prompts] == ["0", "1"]
    assert job.priority < -(2**20), "before training, and before a probe"
    assert result is not None and result.count == 4 and found.results == [result]
    assert observer.seen == [5, result]
    nothing, idle, _ = evaluator({}, prompts=0)
    assert nothing.evaluate(5) is None and not idle.jobs


def test_a_score_that_is_not_finite_stops_the_run_with_the_samples_name() -> None:
    found, _, observer = evaluator({}, controller=Faulty(), n=2)
    with pytest.raises(
        UserError, match=r"version 5 has no accuracy: 1 of 6 scores.*eval/2/0/1 \(nan\).*skip"
    ):
        found.evaluate(5)
    assert found.results == [] and observer.seen == [5]


def test_or_leaves_the_accuracy_out(caplog: pytest.LogCaptureFixture) -> None:
    found, _, observer = evaluator({"on_non_finite": "skip"}, controller=Faulty(), n=2)
    result = found.evaluate(5)
    assert result is not None and math.isnan(result.accuracy) and result.count == 6
    assert observer.seen == [5, result]
    assert "1 of 6 scores are not finite: eval/2/0/1 (nan)" in caplog.text
