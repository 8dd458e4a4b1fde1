"""Scores become tokens by a function that grows, fits, and stays within what was observed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.calibrate import Calibration, calibrate, isotonic

Points = st.lists(
    st.tuples(st.floats(-50, 50), st.integers(1, 5000), st.integers(1, 8)), min_size=1, max_size=60
)


@given(Points)
def test_pooling_is_the_isotonic_regression(points: list[tuple[float, int, int]]) -> None:
    values, weights = np.array([p[1] for p in points], float), np.array([p[2] for p in points], float)
    expected = isotonic_regression(values, weights=weights).x
    np.testing.assert_allclose(isotonic(values, weights), expected, rtol=1e-9)


@given(Points, st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_a_higher_score_never_gives_fewer_tokens_and_all_lie_within_the_observed(
    points: list[tuple[float, int, int]], asked: list[float]
) -> None:
    scores, lengths, weights = (np.array(column, float) for column in zip(*points, strict=True))
    found = calibrate(scores, lengths, weights)
    tokens = found.lengths(np.sort(np.array(asked)))
    assert (np.diff(tokens) >= 0).all()
    assert tokens.min() >= lengths.min() * (1 - 1e-6) and tokens.max() <= lengths.max() * (1 + 1e-6)


@given(Points)
def test_the_order_of_the_points_does_not_matter(points: list[tuple[float, int, int]]) -> None:
    scores, lengths, weights = (np.array(column, float) for column in zip(*points, strict=True))
    back = calibrate(scores[::-1], lengths[::-1], weights[::-1])
    there = calibrate(scores, lengths, weights)
    np.testing.assert_allclose(back.scores, there.scores, atol=1e-9)
    np.testing.assert_allclose(back.tokens, there.tokens, rtol=1e-9)


def test_it_finds_the_expected_length_and_keeps_the_order_where_it_is_flat() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=4000)
    expected = 100 * np.exp(np.maximum(scores, 0.0))  # flat below 0
    found = calibrate(scores, expected * rng.gamma(4.0, 0.25, 4000))
    asked = np.linspace(-1.5, 1.5, 50)
    truth = 100 * np.exp(np.maximum(asked, 0.0))
    np.testing.assert_allclose(found.lengths(asked), truth, rtol=0.15)
    beyond = found.lengths(np.array([-9.0, -8.0, 8.0, 9.0]))
    assert (np.diff(beyond) > 0).all()


def test_scores_that_told_nothing_give_every_prompt_the_same() -> None:
    """The higher score had the shorter answers: one pool is left, and no order is made of the scores."""
    found = calibrate(np.array([1.0, 2.0, 3.0, 4.0]), np.array([400.0, 300.0, 200.0, 100.0]))
    np.testing.assert_array_equal(found.tokens, [250.0])
    np.testing.assert_array_equal(found.lengths(np.array([-5.0, 1.0, 2.5, 9.0])), np.full(4, 250.0))


def test_it_is_read_back_as_it_was() -> None:
    found = calibrate(np.array([0.1, 0.2, 0.3]), np.array([3.0, 2.0, 9.0]))
    again = Calibration.from_json(json.loads(json.dumps(found.to_json())), "x")
    np.testing.assert_array_equal(again.scores, found.scores)
    np.testing.assert_array_equal(again.tokens, found.tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"scores": [1.0]},
        {"scores": [1.0, 0.0], "tokens": [1.0, 2.0]},
        {"scores": [0.0, 1.0], "tokens": [2.0, 1.0]},
        {"scores": [0.0, float("nan")], "tokens": [1.0, 2.0]},
        {"scores": [], "tokens": []},
        {"scores": "x", "tokens": [1.0]},
    ],
)
def test_a_damaged_one_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"ranker\.json: field 'calibration' is damaged"):
        Calibration.from_json(fields, "ranker.json")


@pytest.mark.parametrize(("scores", "lengths"), [([], []), ([np.nan], [1.0]), ([1.0], [np.inf])])
def test_what_is_not_finite_is_refused(scores: list[float], lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="finite scores and lengths"):
        calibrate(np.array(scores), np.array(lengths))
