"""Metrics of an iteration, where numbers could mislead."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl_jax.train.aggregate import Aggregation, Size
from streamrl_jax.train.moments import Moments
from streamrl_jax.train.objective import Tally
from streamrl_jax.train.report import loss_metrics


def moments_of(values: np.ndarray) -> Moments:
    mean = float(values.mean())
    m2 = float(((values.astype(np.float64) - mean) ** 2).sum())
    return Moments(float(values.size), mean, m2, float(values.min()), float(values.max()))


def explained(values: np.ndarray, returns: np.ndarray) -> float | None:
    spreads = {"values": values, "returns": returns, "value_errors": returns - values}
    tally = Tally(
        {}, {f"critic/{name}": moments_of(array) for name, array in spreads.items()}, {}, Size(len(values), 1)
    )
    return loss_metrics([tally], Aggregation("token-mean")).get("critic/vf_explained_var")


def test_the_explained_variance_is_one_minus_the_share_that_is_left() -> None:
    rng = np.random.default_rng(0)
    values, returns = (rng.normal(size=200).astype(np.float32) for _ in range(2))
    expected = 1 - np.var(returns.astype(np.float64) - values) / np.var(returns.astype(np.float64))
    assert explained(values, returns) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 30.0])
def test_returns_that_are_equal_but_for_rounding_leave_no_variance_to_explain(scale: float) -> None:
    # All answers wrong, no discount: every advantage is the value's negative, and the sum is 0 up to float32.
    values = (scale * np.random.default_rng(0).normal(size=200)).astype(np.float32)
    returns = (-values * np.float32(1.1) / np.float32(1.1)) + values
    assert returns.any()
    assert explained(values, returns) is None
