"""The per-token latency: monotone whatever it was fitted to, its inverse, its fit and its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import (
    FLAT,
    Conditions,
    HeldOut,
    PrefillPoint,
    Profile,
    Ramp,
    StepPoint,
    TokenLatency,
    read_cost,
    write_cost,
)
from streamrl_jax.ranker.cost_fit import fit, held_out_error, least_squares_from_zero_up

ROUNDING = 1e-12
KNOWN = TokenLatency(
    Ramp(0.004, (1.0, 8.0, 64.0), (1e-5, 1e-4, 4e-4)), 2e-8, Ramp(0.003, (1.0, 512.0), (2e-6, 2e-5))
)
PROMPTS = np.array([1, 300, 2000])
GRID = [(batch, context) for batch in (1, 4, 8, 32, 64, 128, 256) for context in (64, 1024, 4096)]

# Float64 tells slopes and contexts from 0 beside the seconds of a step.
slopes = st.just(0.0) | st.floats(1e-9, 1e-2)
costs = st.builds(
    lambda start, knots, slopes, kv: TokenLatency(
        Ramp(start, (1.0, *sorted(knots)), tuple(slopes[: len(knots) + 1])), kv, FLAT.prefill
    ),
    st.floats(1e-4, 1.0),
    st.sets(st.floats(2, 5000), max_size=4),
    st.lists(slopes, min_size=5, max_size=5),
    st.just(0.0) | st.floats(1e-9, 1e-4),
)
measured = st.lists(
    st.builds(StepPoint, st.integers(1, 500), st.integers(0, 10**6).map(float), st.floats(1e-5, 10.0)),
    min_size=1,
    max_size=20,
)


def points(cost: TokenLatency, noise: Callable[[], float] = lambda: 1.0, repeats: int = 1) -> list[StepPoint]:
    return [
        StepPoint(batch, batch * context, float(cost.ptl(batch, context)) * noise())
        for batch, context in GRID
        for _ in range(repeats)
    ]


@given(costs, st.lists(st.floats(0, 10**4), min_size=2, max_size=20))
def test_it_never_falls_in_batch_or_context(cost: TokenLatency, values: list[float]) -> None:
    rising = np.sort(values)
    for seconds in (
        cost.ptl(rising, 100.0),
        cost.ptl(7, rising),
        cost.step_s(rising, 5),
        cost.prefill_s(rising),
    ):
        assert (np.diff(seconds) >= -ROUNDING * seconds[1:]).all()


@given(measured)
@settings(max_examples=60, deadline=None)
def test_a_fit_never_falls_whatever_was_measured(rows: list[StepPoint]) -> None:
    # Two further points make any list one that determines the model.
    cost = fit([*rows, StepPoint(501, 0.0, 0.5), StepPoint(502, 0.0, 0.4), StepPoint(502, 900.0, 0.3)])
    batches, contexts = np.meshgrid(np.geomspace(1, 2000, 40), np.geomspace(1, 1e5, 40), indexing="ij")
    seconds = cost.ptl(batches, contexts)
    assert (seconds >= 0).all() and np.isfinite(seconds).all()
    for axis in (0, 1):
        assert (np.diff(seconds, axis=axis) >= -ROUNDING * seconds.max()).all()


def test_a_step_of_the_known_model_costs_what_its_formula_says() -> None:
    # 4 ms + 7 sequences at 10 us + 24 at 100 us + 32 · 1,000 tokens at 20 ns
    assert KNOWN.ptl(32, 1000) == pytest.approx(0.004 + 7e-5 + 24e-4 + 32_000 * 2e-8, rel=1e-12)
    # beyond the last knot, at 64, the last slope goes on
    assert KNOWN.step_s(264, 0) - KNOWN.step_s(64, 0) == pytest.approx(200 * 4e-4, rel=1e-12)
    assert KNOWN.prefill_s(1024) == pytest.approx(0.003 + 511 * 2e-6 + 512 * 2e-5, rel=1e-12)


def test_arguments_broadcast() -> None:
    assert KNOWN.ptl(np.array([[1], [2]]), np.array([10, 20, 30])).shape == (2, 3)


def test_the_flat_model_counts_steps() -> None:
    np.testing.assert_array_equal(FLAT.ptl(np.array([1, 10, 1000]), np.array([5, 50, 5000])), np.ones(3))


def test_a_fit_finds_the_model_that_made_the_points() -> None:
    cost = fit(points(KNOWN), [PrefillPoint(n, float(KNOWN.prefill_s(n))) for n in (1, 512, 1024, 4096)])
    batches, contexts = np.meshgrid(np.geomspace(1, 1000, 30), np.geomspace(16, 8192, 30))
    # The grid has the model's knots, 1, 8 and 64, among its batches.
    np.testing.assert_allclose(cost.ptl(batches, contexts), KNOWN.ptl(batches, contexts), rtol=1e-6)
    np.testing.assert_allclose(cost.prefill_s(PROMPTS), KNOWN.prefill_s(PROMPTS), rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_move_a_fit_by_less_than_the_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def noise() -> float:
        """10 % about the truth; one repeat in 10 takes five times as long."""
        return float(rng.lognormal(0.0, 0.1)) * (5.0 if rng.random() < 0.1 else 1.0)

    cost = fit(points(KNOWN, noise, repeats=7))
    error = held_out_error(
        cost, [StepPoint(b, b * c, float(KNOWN.ptl(b, c))) for b in (2, 16, 100) for c in (300, 2000)]
    )
    assert error.points == 6
    assert error.median < 0.05 and error.largest < 0.15


def test_a_low_quantile_keeps_out_what_other_work_adds_to_most_repeats() -> None:
    rng = np.random.default_rng(0)

    def disturbed() -> float:
        """2 % about the truth, and for 6 of 10 repeats up to six times as long."""
        return float(rng.lognormal(0.0, 0.02)) * (1.0 + 5.0 * rng.random() * (rng.random() < 0.6))

    rows = points(KNOWN, disturbed, repeats=15)
    truth = [StepPoint(b, b * c, float(KNOWN.ptl(b, c))) for b in (2, 16, 100) for c in (300, 2000)]
    assert held_out_error(fit(rows, quantile=0.1), truth).largest < 0.1
    assert held_out_error(fit(rows), truth).median > 0.2, "most repeats are off, and so is their median"


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_least_squares_from_zero_up_keeps_the_conditions_of_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    found = least_squares_from_zero_up(features, target)
    gradient = features.T @ (features @ found - target)
    assert (found >= 0).all()
    assert (gradient >= -1e-9).all(), "no unknown that would lower the error by rising"
    np.testing.assert_allclose(gradient[found > 0], 0, atol=1e-9)


@pytest.mark.parametrize(
    ("rows", "prefill", "said"),
    [
        ([], [], "no batch at all"),
        ([StepPoint(4, 100, 1.0), StepPoint(4, 200, 1.1)], [], "with batch 4 only: .* two different batches"),
        (
            [StepPoint(1, 100, 1.0), StepPoint(2, 200, 1.1)],
            [],
            r"one number of context tokens only \(1: 100, 2: 200\): .* measure batch 2 with another context too",
        ),
        (points(KNOWN), [PrefillPoint(64, 0.1)], "prompts of 64 tokens only: two lengths"),
        ([StepPoint(1, 1, 0.0)], [], r"StepPoint\(batch=1, .*seconds = 0.0 is no measured time"),
        ([StepPoint(1, 1, float("nan"))], [], "seconds = nan is no measured time"),
        ([StepPoint(0, 1, 1.0)], [], "a step has 1 sequence at least"),
        (points(KNOWN), [PrefillPoint(0, 1.0)], "a prompt has 1 token at least"),
    ],
)
def test_points_that_do_not_determine_a_model_are_refused_by_what_is_missing(
    rows: list[StepPoint], prefill: list[PrefillPoint], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        fit(rows, prefill)


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ((-1.0, (1.0,), (0.0,)), "start: -1.0"),
        ((1.0, (1.0,), (-0.5,)), "slopes: -0.5"),
        ((1.0, (1.0,), (float("inf"),)), "slopes: inf"),
        ((1.0, (2.0, 2.0), (0.0, 0.0)), r"knots: \[2.0, 2.0\] do not rise"),
        ((1.0, (), ()), "one at least"),
        ((1.0, (1.0, 2.0), (0.0,)), "2 and 1 numbers"),
    ],
)
def test_a_ramp_that_could_fall_is_refused(ramp: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ramp(*ramp)


PROFILE = Profile(
    KNOWN,
    Conditions(
        "toy",
        "float32",
        "cpu:0",
        1,
        "vllm 0.32.0",
        "2026-11-30T03:00:00+00:00",
        "another core was busy",
        shape={"layers": 2, "embed": 64},
    ),
    tuple(points(KNOWN)),
    (PrefillPoint(10, 0.5),),
    HeldOut(7, 0.01, 0.04),
)


@given(costs)
def test_a_model_survives_json(cost: TokenLatency) -> None:
    assert TokenLatency.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    write_cost(tmp_path / "cost.json", PROFILE)
    assert read_cost(tmp_path / "cost.json") == PROFILE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.pop("format"), "field 'format' is missing: a whole number is needed"),
        (lambda data: data.update(format=2), "field 'format' is 2; this version reads 1"),
        (lambda data: data["cost"].pop("batch"), "cost: field 'batch' is missing: an object"),
        (lambda data: data["cost"]["batch"].update(slopes=[1, 2]), "cost: batch: knots and slopes: 3 and 2"),
        (lambda data: data["cost"]["batch"].update(start=-1), "batch: field 'start' holds -1"),
        (
            lambda data: data["cost"]["batch"].update(knots=[2, 8, 64]),
            r"batch.knots: the first is 2.0, not 1",
        ),
        (lambda data: data["cost"].update(kv_token_s=float("inf")), "field 'kv_token_s' holds inf"),
        (
            lambda data: data["cost"].update(kv_token_s=10**400),
            "field 'kv_token_s' holds a number beyond all bounds",
        ),
        (lambda data: data["cost"].update(kv_token_s=True), "field 'kv_token_s' is true: a number is needed"),
        (lambda data: data["conditions"].update(model=3), "conditions: field 'model' is 3: a text is needed"),
        (
            lambda data: data["conditions"]["shape"].update(layers="2"),
            "conditions: shape: field 'layers' is \"2\": a whole number is needed",
        ),
        (lambda data: data["conditions"].update(shape=3), "field 'shape' is 3: an object is needed"),
        (lambda data: data["points"].append(7), r"points\[21\]: 7 stands where an object is needed"),
        (
            lambda data: data["points"][2].update(batch=1.5),
            r"points\[2\]: field 'batch' is 1.5: a whole number",
        ),
        (lambda data: data["cost"].update(kv_token_s=1e300), ": it must take time, and end"),
        (
            lambda data: data["cost"].update(batch={"start": 0, "knots": [1], "slopes": [0]}, kv_token_s=0),
            "a step takes from 0 s to 0 s: it must take time",
        ),
        (lambda data: data.update(held_out=[]), r"field 'held_out' is \[\]: an object"),
    ],
)
def test_a_bad_file_is_refused_by_file_field_and_value(
    change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path
) -> None:
    data = {"format": 1, **json.loads(json.dumps(dataclasses.asdict(PROFILE)))}
    change(data)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"cost\.json: .*{said}"):
        read_cost(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "an object is needed"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"cost\.json: .*{said}"):
        read_cost(path)
