"""The punishment of answers near the length limit, against DAPO's equation written out case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.rewards import overlong_penalty


def equation_13(length: int, longest: int, cache: int) -> float:
    """The paper's three cases."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(
    length=st.integers(1, 300),
    limit=st.integers(1, 200),
    share=st.floats(0.01, 1.0),
    factor=st.floats(0.1, 10.0),
)
def test_it_is_the_papers_equation_times_the_factor(
    length: int, limit: int, share: float, factor: float
) -> None:
    buffer_len = max(1, int(limit * share))
    wanted = factor * equation_13(length, limit, buffer_len)
    assert overlong_penalty(length, limit, buffer_len, factor) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (15, 0.0), (16, 0.0), (17, -0.125), (18, -0.25), (19, -0.375), (20, -0.5), (21, -0.5)],
)
def test_it_grows_in_the_buffer_alone_and_stops_at_the_limit(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, buffer_len=4, factor=0.5) == penalty


def test_a_longer_answer_is_never_better() -> None:
    penalties = [overlong_penalty(length, limit=64, buffer_len=64, factor=1.0) for length in range(80)]
    assert penalties == sorted(penalties, reverse=True)
    assert penalties[0] == 0.0
    assert penalties[64] == -1.0


def test_without_a_buffer_no_length_is_punished() -> None:
    assert [overlong_penalty(length, limit=8, buffer_len=0, factor=1.0) for length in (1, 8, 9)] == [0.0] * 3
