"""Recall of the longest, Kendall's tau and the concordance against plain loops and scipy."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from streamrl_jax.ranker import metrics

Numbers = st.lists(st.integers(0, 12), min_size=2, max_size=40)


def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    predicted = draw(Numbers)
    observed = draw(st.lists(st.integers(1, 9), min_size=len(predicted), max_size=len(predicted)))
    return np.array(predicted, float), np.array(observed, float)


def tau_of_scipy(predicted: np.ndarray, observed: np.ndarray) -> float:
    result: Any = stats.kendalltau(predicted, observed, variant="b")
    return float(result.statistic)


Pairs = st.composite(pairs)()


def test_recall_counts_the_longest_that_were_predicted_longest() -> None:
    observed = np.array([5, 90, 7, 80, 6, 70, 8, 60, 9, 50], float)
    predicted = np.array([0, 9, 8, 7, 0, 1, 0, 6, 0, 2], float)
    # The longest three are 1, 3, 5; predicted longest are 1, 2, 3.
    assert metrics.recall_at(0.3, predicted, observed) == pytest.approx(2 / 3)
    assert metrics.recall_at(0.1, predicted, observed) == 1.0


def test_any_of_the_observed_ties_counts() -> None:
    """Four answers were cut at the limit and there are two places: whichever two are named are right."""
    observed = np.array([100, 100, 100, 100, 1, 1, 1, 1, 1, 1], float)
    assert metrics.recall_at(0.2, np.array([0, 0, 9, 9, 1, 1, 1, 1, 1, 1], float), observed) == 1.0
    assert metrics.recall_at(0.2, np.array([0, 0, 0, 9, 9, 1, 1, 1, 1, 1], float), observed) == 0.5


def test_predicted_ties_share_the_places() -> None:
    observed = np.array([100, 90, 3, 2, 1], float)
    assert metrics.recall_at(0.4, np.array([7, 7, 7, 7, 0], float), observed) == pytest.approx(0.5)


def test_ties_on_both_sides_are_drawn_by_chance() -> None:
    """Two of four are drawn: the longest in half of the draws, one of the two fives at least in five of six."""
    observed = np.array([9, 5, 5, 1], float)
    assert metrics.recall_at(0.5, np.zeros(4), observed) == pytest.approx((1 / 2 + 5 / 6) / 2)


Few = st.integers(2, 8).flatmap(
    lambda count: st.tuples(
        *[st.lists(st.integers(0, 3), min_size=count, max_size=count)] * 2, st.sampled_from([0.2, 0.4, 0.7])
    )
)


@given(Few)
def test_recall_is_the_mean_over_all_draws_of_the_predicted_ties(
    drawn: tuple[list[int], list[int], float],
) -> None:
    predicted, observed, share = drawn
    prompts = range(len(observed))
    places = max(1, round(share * len(observed)))
    last, least = sorted(predicted)[-places], sorted(observed)[-places]
    chosen = [place for place in prompts if predicted[place] > last]
    tied = [place for place in prompts if predicted[place] == last]
    longest = sum(observed[place] > least for place in prompts)
    hits = 0
    for further in combinations(tied, places - len(chosen)):
        named = [observed[place] for place in (*chosen, *further)]
        hits += sum(length > least for length in named) + min(named.count(least), places - longest)
    expected = hits / comb(len(tied), places - len(chosen)) / places
    found = metrics.recall_at(share, np.array(predicted, float), np.array(observed, float))
    assert found == pytest.approx(expected)


def test_many_ties_are_no_trouble() -> None:
    """The chances of a draw among thousands are far below what a float holds, one by one."""
    observed = np.repeat([9.0, 5.0, 1.0], [1000, 4000, 5000])
    found = metrics.recall_at(0.2, np.zeros(10_000), observed)
    # 2,000 are drawn: 200 of the longest in the mean, and 800 or so of those tied for the other 1,000 places.
    assert found == pytest.approx((200 + 800) / 2000, rel=1e-6)


@given(Pairs, st.sampled_from([0.05, 0.1, 0.2, 0.5]))
def test_recall_knows_no_order_of_the_prompts_and_no_scale(
    pair: tuple[np.ndarray, np.ndarray], share: float
) -> None:
    predicted, observed = pair
    order = np.random.default_rng(len(observed)).permutation(len(observed))
    found = metrics.recall_at(share, predicted, observed)
    assert 0.0 <= found <= 1.0
    assert metrics.recall_at(share, predicted[order], observed[order]) == pytest.approx(found)
    assert metrics.recall_at(share, 3 * predicted + 7, observed) == pytest.approx(found)
    assert metrics.recall_at(share, observed, observed) == pytest.approx(1.0)


@given(st.lists(st.integers(1, 10_000), min_size=5, max_size=60, unique=True))
def test_a_constant_prediction_gets_what_chance_gets(lengths: list[int]) -> None:
    observed = np.array(lengths, float)
    places = max(1, round(0.2 * len(lengths)))
    found = metrics.recall_at(0.2, np.zeros(len(lengths)), observed)
    assert found == pytest.approx(places / len(lengths))


@given(Pairs)
def test_tau_is_scipys(pair: tuple[np.ndarray, np.ndarray]) -> None:
    predicted, observed = pair
    expected = tau_of_scipy(predicted, observed)
    assert metrics.kendall_tau(predicted, observed) == pytest.approx(
        0.0 if np.isnan(expected) else expected, abs=1e-9
    )


def test_tau_in_blocks_of_rows_is_scipys() -> None:
    rng = np.random.default_rng(0)
    observed = rng.integers(1, 300, 1500).astype(float)
    predicted = observed + rng.normal(0, 80, 1500)
    expected = tau_of_scipy(predicted, observed)
    assert metrics.kendall_tau(predicted, observed) == pytest.approx(expected, abs=1e-6)


def test_the_ceiling_is_the_mean_over_both_directions_and_all_pairs() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.integers(1, 99, (30, 2)).astype(float), rng.integers(1, 99, (30, 3)).astype(float)

    def recall(predicted: np.ndarray, observed: np.ndarray) -> float:
        return metrics.recall_at(0.2, predicted, observed)

    by_hand = [recall(a, b) for a in first.T for b in second.T] + [
        recall(b, a) for a in first.T for b in second.T
    ]
    assert metrics.ceiling(recall, first, second, of_means=False) == pytest.approx(np.mean(by_hand))
    means = first.mean(axis=1), second.mean(axis=1)
    both = (recall(*means) + recall(*means[::-1])) / 2
    assert metrics.ceiling(recall, first, second, of_means=True) == pytest.approx(both)


def test_the_bootstrap_covers_a_mean_as_theory_says() -> None:
    values = np.random.default_rng(2).normal(3.0, 1.0, 400)
    found = metrics.bootstrap(lambda drawn: float(values[drawn].mean()), 400, seed=0)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    again = metrics.bootstrap(lambda drawn: float(values[drawn].mean()), 400, seed=0)
    assert again == found


Answers = st.lists(
    st.tuples(
        st.integers(0, 3), st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3)
    ),
    min_size=2,
    max_size=6,
)


@given(Answers)
def test_the_concordance_is_that_of_a_loop(prompts: list[tuple[int, list[tuple[int, bool]]]]) -> None:
    right = known = 0.0
    for (score, answers), (other_score, others) in combinations(prompts, 2):
        for tokens, cut in answers:
            for other_tokens, other_cut in others:
                longer = not other_cut and (tokens > other_tokens or (tokens == other_tokens and cut))
                shorter = not cut and (other_tokens > tokens or (other_tokens == tokens and other_cut))
                if longer or shorter:
                    gap = (score - other_score) * (1 if longer else -1)
                    known += 1
                    right += 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0
    found = metrics.concordance(
        np.array([score for score, _ in prompts], float),
        [[tokens for tokens, _ in answers] for _, answers in prompts],
        [[cut for _, cut in answers] for _, answers in prompts],
    )
    assert found == pytest.approx(right / known if known else 0.5)


@pytest.mark.parametrize(
    ("predicted", "observed", "said"),
    [
        ([1.0, np.nan], [1.0, 2.0], "predicted: 1 of 2 numbers are NaN"),
        ([1.0], [1.0, 2.0], "one of each a prompt"),
        ([], [], "one of each a prompt"),
    ],
)
def test_what_has_no_order_is_refused(predicted: list[float], observed: list[float], said: str) -> None:
    for measure in (lambda p, o: metrics.recall_at(0.2, p, o), metrics.kendall_tau):
        with pytest.raises(ValueError, match=said):
            measure(np.array(predicted), np.array(observed))
