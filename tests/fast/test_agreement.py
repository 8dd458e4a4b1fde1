"""The policy on trainer and generator's agreement, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamrl_jax.config import AgreementSection
from streamrl_jax.train.agreement import Comparison, Disagreement, Verdict, explain, judge


@pytest.mark.parametrize(
    ("history", "window", "policy", "verdict"),
    [
        ([], 1, "stop", Verdict.AGREES),
        ([0.5, 0.01], 1, "stop", Verdict.AGREES),  # the bound itself is within
        ([0.011], 1, "stop", Verdict.STOP),
        ([0.011], 1, "warn", Verdict.WARN),
        ([0.5, 0.001, 0.5], 2, "stop", Verdict.WATCH),
        ([0.5], 3, "stop", Verdict.WATCH),
        ([0.0, 0.5, 0.5, 0.5], 3, "stop", Verdict.STOP),
        ([float("inf")], 1, "stop", Verdict.STOP),
        ([float("nan")], 1, "stop", Verdict.STOP),
    ],
)
def test_the_policy_applies_after_a_window_of_steps_over_the_bound(
    history: list[float], window: int, policy: Any, verdict: Verdict
) -> None:
    assert judge(history, AgreementSection(max_logprob_diff=0.01, window=window, policy=policy)) is verdict


def test_the_differences_are_measured_as_log_probs_and_as_probabilities() -> None:
    behaviour = np.log([0.5, 0.25, 0.1, 0.9])
    trainer = np.log([0.5, 0.20, 0.1, 0.9])
    metrics = Comparison(behaviour, trainer, other_version=3).metrics()
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.05 / 4)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.05)
    assert metrics["training/rollout_logprobs_diff_mean"] == pytest.approx(np.log(1.25) / 4)
    assert metrics["training/rollout_logprobs_diff_max"] == pytest.approx(np.log(1.25))
    assert metrics["training/rollout_logprobs_diff_p50"] == 0.0
    assert (
        metrics["training/rollout_tokens_compared"],
        metrics["training/rollout_tokens_other_version"],
    ) == (4, 3)


def test_a_quantile_is_a_value_that_occurred_and_what_is_no_number_is_infinite() -> None:
    trainer = np.array([-1.0, -1.1, -1.2, np.nan])
    comparison = Comparison(np.full(4, -1.0), trainer)
    assert comparison.quantile(0.5) == pytest.approx(0.1)
    assert comparison.quantile(1.0) == np.inf
    nothing = Comparison(np.zeros(0), np.zeros(0), other_version=9)
    assert nothing.quantile(0.99) is None
    assert nothing.metrics()["training/rollout_tokens_compared"] == 0


def test_the_explanation_names_token_version_and_instance() -> None:
    worst = Disagreement("4/17/2", "instance-1", 6, 321, 4, -1.5, -1.25)
    text = explain(Comparison(np.array([-1.5]), np.array([-1.25]), worst=worst), AgreementSection())
    for part in ("token 321", "position 6", "4/17/2", "version 4", "instance-1", "-1.5", "-1.25", "0.250000"):
        assert part in text
