"""The ranking losses against NumPy loops; what no order says must not move them."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.ranker.loss import LOSSES, ListLoss, known_longer

SIZE = 6  # one shape, so that each loss compiles once

Lists = st.tuples(
    st.lists(st.floats(-5, 5, width=32), min_size=SIZE, max_size=SIZE),
    st.lists(st.integers(1, 5), min_size=SIZE, max_size=SIZE),
    st.lists(st.booleans(), min_size=SIZE, max_size=SIZE),
)
List = tuple[list[float], list[int], list[bool]]

JITTED: dict[str, ListLoss] = {name: jax.jit(loss) for name, loss in LOSSES.items()}
RANKING = ("plackett_luce", "shortest_first", "pairwise")


def compute(name: str, scores: list[float], tokens: list[int], cut: list[bool]) -> float:
    arrays = jnp.array(scores, jnp.float32), jnp.array(tokens, jnp.float32), jnp.array(cut)
    return float(JITTED[name](*arrays))


def longer(i: int, j: int, tokens: list[int], cut: list[bool]) -> bool:
    return not cut[j] and (tokens[i] > tokens[j] or (tokens[i] == tokens[j] and cut[i]))


def by_loop(name: str, scores: list[float], tokens: list[int], cut: list[bool]) -> float:
    terms: list[float] = []
    for i in range(len(scores)):
        below = [j for j in range(len(scores)) if longer(i, j, tokens, cut)]
        above = [j for j in range(len(scores)) if longer(j, i, tokens, cut)]
        if name == "plackett_luce" and below:
            terms.append(math.log(sum(math.exp(scores[j]) for j in [i, *below])) - scores[i])
        if name == "shortest_first" and above:
            terms.append(math.log(sum(math.exp(-scores[j]) for j in [i, *above])) + scores[i])
        if name == "pairwise":
            terms += [math.log1p(math.exp(scores[j] - scores[i])) for j in below]
        if name == "regression":
            error = scores[i] - math.log(tokens[i])
            terms.append(0.0 if cut[i] and error > 0 else error**2)
    return float(np.mean(terms)) if terms else 0.0


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None)  # the first example compiles
@given(Lists)
def test_a_loss_is_that_of_a_loop(name: str, drawn: List) -> None:
    assert compute(name, *drawn) == pytest.approx(by_loop(name, *drawn), rel=1e-4, abs=1e-5)


def test_plackett_luce_is_a_distribution_over_orders() -> None:
    """The likelihoods of all orders of four prompts, exp(-loss * terms), sum to 1."""
    scores = [0.3, -1.2, 2.0, 0.7]
    for name in ("plackett_luce", "shortest_first"):
        total = 0.0
        for lengths in itertools.permutations([10, 20, 30, 40]):
            drawn = scores, list(lengths), [False] * 4
            loss = compute(name, *drawn)
            assert loss == pytest.approx(by_loop(name, *drawn), rel=1e-5)
            total += math.exp(-3 * loss)
        assert total == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None)  # the first example compiles
@given(Lists, st.permutations(range(SIZE)))
def test_the_order_of_the_list_does_not_matter(name: str, drawn: List, order: list[int]) -> None:
    scores, tokens, cut = drawn
    moved = [scores[i] for i in order], [tokens[i] for i in order], [cut[i] for i in order]
    assert compute(name, *moved) == pytest.approx(compute(name, *drawn), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", RANKING)
@settings(deadline=None)  # the first example compiles
@given(Lists, st.floats(-20, 20))
def test_a_number_added_to_all_scores_changes_nothing(name: str, drawn: List, shift: float) -> None:
    scores, tokens, cut = drawn
    moved = compute(name, [score + shift for score in scores], tokens, cut)
    assert moved == pytest.approx(compute(name, *drawn), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", RANKING)
@settings(deadline=None)  # the first example compiles
@given(Lists)
def test_only_the_order_of_the_lengths_counts(name: str, drawn: List) -> None:
    scores, tokens, cut = drawn
    stretched = [10 * length**2 for length in tokens]
    assert compute(name, scores, stretched, cut) == pytest.approx(compute(name, *drawn))


@pytest.mark.parametrize("name", RANKING)
def test_a_list_without_a_known_order_says_nothing(name: str) -> None:
    for tokens, cut in (([7] * SIZE, [False] * SIZE), ([7] * SIZE, [True] * SIZE)):
        loss, gradient = jax.value_and_grad(LOSSES[name])(  # pyright: ignore[reportArgumentType]
            jnp.arange(SIZE, dtype=jnp.float32), jnp.array(tokens, jnp.float32), jnp.array(cut)
        )
        assert float(loss) == 0.0 and not np.any(gradient)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None)  # the first example compiles
@given(Lists)
def test_gradients_are_finite(name: str, drawn: List) -> None:
    scores, tokens, cut = drawn
    arrays = jnp.array(scores, jnp.float32), jnp.array(tokens, jnp.float32), jnp.array(cut)
    gradient = jax.grad(JITTED[name])(*arrays)
    assert np.isfinite(gradient).all()


def test_of_two_cut_answers_neither_is_known_to_be_longer() -> None:
    tokens, cut = jnp.array([50.0, 100.0, 100.0, 100.0]), jnp.array([True, True, True, False])
    found = np.asarray(known_longer(tokens, cut))
    assert found.tolist() == [
        [False, False, False, False],  # cut at 50: it may have become anything
        [False, False, False, True],
        [False, False, False, True],
        [False, False, False, False],
    ]
