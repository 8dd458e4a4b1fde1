"""What is measured of an iteration beside the losses, each against a hand-made case."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.control.events import Activity, InstanceView
from streamrl_jax.metric_names import undeclared
from streamrl_jax.metrics import Missing, Value
from streamrl_jax.train.recorder import dispatch_metrics, extras_metrics, generator_metrics, staleness_metrics
from streamrl_jax.train.report import overlap_metrics
from streamrl_jax.types import FinishReason, Generation, InstanceState, Prompt, Sample, VersionRun


def sample(*runs: VersionRun) -> Sample:
    length = sum(run.length for run in runs)
    ids, logprobs = np.zeros(length, np.int32), np.zeros(length, np.float32)
    generation = Generation("train/5/0/0", 0, ids, logprobs, runs, FinishReason.STOP, "a")
    return Sample("train/5/0/0", 5, Prompt("0", np.ones(2, np.int32), {}), 0, generation, 0.0)


def test_staleness_counts_tokens_and_not_answers() -> None:
    samples = [sample(VersionRun(4, 6), VersionRun(5, 2)), sample(VersionRun(5, 2))]
    assert staleness_metrics(samples, 5) == {"training/staleness/mean": 0.6, "training/staleness/max": 1.0}


def test_what_a_reward_tells_beside_the_score_is_its_mean_over_those_that_tell_it() -> None:
    told = [{"format": 1.0, "parsed": 1.0}, {"format": 0.0}, {"format": 0.5, "parsed": math.nan}]
    found = extras_metrics([replace(sample(VersionRun(5, 2)), reward_extras=extras) for extras in told])
    assert found.pop("reward/format/mean") == 0.5
    assert math.isnan(found.pop("reward/parsed/mean")) and not found
    assert extras_metrics([sample(VersionRun(5, 2))]) == {}


def view(name: str, idle: float, busy: float, tokens: int) -> InstanceView:
    seconds = {**dict.fromkeys(Activity, 0.0), Activity.IDLE: idle, Activity.BUSY: busy}
    return InstanceView(name, "", InstanceState.IDLE, 7, 0, 0, 0, 0.0, tokens, 0, seconds)


def test_idle_shares_and_speeds_are_those_of_the_step() -> None:
    before = {"a": view("a", idle=10.0, busy=20.0, tokens=1000)}
    after = [view("a", idle=11.0, busy=23.0, tokens=1400), view("b", idle=3.0, busy=1.0, tokens=40)]
    assert generator_metrics(before, after, seconds=4.0) == {
        "gen/a/idle_ratio": 0.25,
        "gen/a/tokens_per_s": 100.0,
        "gen/a/version": 7.0,
        "gen/b/idle_ratio": 0.75,  # it joined in the step
        "gen/b/tokens_per_s": 10.0,
        "gen/b/version": 7.0,
        "rollouter/idle_ratio": 0.5,
        "perf/gen_tokens_per_s": 110.0,
    }
    assert generator_metrics({}, [], seconds=4.0) == {"perf/gen_tokens_per_s": 0.0}


def test_an_iteration_tells_how_it_was_dispatched_as_far_as_it_was() -> None:
    def told(job: Dispatched) -> dict[str, Value | None]:
        return dispatch_metrics(
            [replace(job, job_id="train/4", actual_s=9.0), job, replace(job, job_id="eval/5")], 5
        )

    arrival = Dispatched("train/5", "arrival", 64, 0.0, 3.0, False, 0, 0)
    assert told(arrival) == {"dispatch/actual_s": 3.0}
    shared = told(replace(arrival, policy="lpt"))
    assert isinstance(shared.pop("dispatch/planned_s"), Missing)
    assert shared == {"dispatch/actual_s": 3.0, "dispatch/in_lines": 0.0}
    lines = replace(arrival, policy="skewness", planned_s=2.5, in_lines=True, steals=4, as_planned=48)
    assert told(lines) == {
        "dispatch/actual_s": 3.0, "dispatch/planned_s": 2.5, "dispatch/in_lines": 1.0, "dispatch/steals": 4.0,
        "dispatch/as_planned": 0.75,
    }  # fmt: skip
    assert dispatch_metrics([], 5) == {}
    assert not undeclared(told(lines))


@pytest.mark.parametrize(("last", "share"), [(0.0, 0.0), (2.5, 0.5), (9.0, 1.0)])
def test_overlap_is_the_share_that_did_not_wait_for_the_last_sample(last: float, share: float) -> None:
    assert overlap_metrics([1.0, 2.0, 3.0, 4.0], last) == {"training/overlapped": share}
