"""A prompt's own past as a predictor, and the measured choice between it and the ranker."""

from __future__ import annotations

import io
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.ranker.history import EDGES, Choice, LengthHistory, LengthPredictor, Recalled

Events = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "ü", "17.1"]),
        st.lists(st.integers(1, 900), min_size=1, max_size=4),
        st.integers(0, 9),
    ),
    max_size=30,
)


@given(Events, st.sampled_from([1.0, 0.9, 0.5]))
def test_the_history_is_the_decayed_mean_in_whatever_order_it_came(
    events: list[tuple[str, list[int], int]], decay: float
) -> None:
    history = LengthHistory(decay=decay, prior=0.0)
    weights: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for prompt, lengths, iteration in events:
        history.observe(prompt, lengths, iteration)
        weights[prompt] += [(decay ** (9 - iteration), length) for length in lengths]
    found = history.recall(["a", "b", "ü", "17.1", "never"], 9)
    everything = [pair for pairs in weights.values() for pair in pairs]
    for place, prompt in enumerate(["a", "b", "ü", "17.1", "never"]):
        pairs = weights.get(prompt, [])
        assert found.weight[place] == pytest.approx(sum(weight for weight, _ in pairs), rel=1e-5)
        if everything:
            assert found.tokens[place] == pytest.approx(weighted_mean(pairs or everything), rel=1e-4)


def weighted_mean(pairs: list[tuple[float, int]]) -> float:
    return sum(weight * length for weight, length in pairs) / sum(weight for weight, _ in pairs)


def test_few_observations_are_drawn_to_the_mean_of_all() -> None:
    history = LengthHistory(decay=1.0, prior=1.0)
    for prompt in range(50):
        history.observe(str(prompt), [100, 100], 0)
    history.observe("long", [400], 0)
    once = float(history.recall(["long"], 0).tokens[0])
    assert once == pytest.approx(np.sqrt(400 * 102.97), rel=1e-3)  # halfway, of the logarithms
    for _ in range(9):
        history.observe("long", [400], 0)
    assert once < float(history.recall(["long"], 0).tokens[0]) < 400


def test_the_history_never_holds_more_than_its_capacity_and_forgets_the_oldest() -> None:
    history = LengthHistory(capacity=100)
    for prompt in range(250):
        history.observe(str(prompt), [prompt + 1], prompt)
        assert len(history) <= 100
    found = history.recall([str(prompt) for prompt in range(250)], 250)
    assert (found.weight[-90:] > 0).all() and not found.weight[:150].any()


def test_a_prompt_takes_twenty_bytes_and_its_id_in_a_checkpoint() -> None:
    history = LengthHistory()
    for prompt in range(1000):
        history.observe(f"{prompt:06}", [5], 3)
    assert sum(array.nbytes for array in history.to_arrays().values()) == 1000 * (20 + 6 + 8) + 24


def predictions(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, Recalled]:
    """Expected lengths, and a history that knows nothing of them, of random weights."""
    truth = np.exp(rng.normal(5, 1, prompts))
    weight = rng.uniform(0.1, 40, prompts).astype(np.float32)
    return truth, Recalled(np.exp(rng.normal(5, 1, prompts)).astype(np.float32), weight)


# The smallest class has about 375 of 10,000 prompts. The standard deviation of its share is 0.3 (the chance in what is
# observed) / (1.4 (how far the predictors are apart) * sqrt(375)) = 0.011; the pseudo-observations move it by 0.009.
BOUND = 0.075


@given(st.integers(0, 10_000))
def test_beside_a_perfect_ranker_a_noisy_history_is_not_used(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, recalled = predictions(rng, 10_000)
    choice = Choice()
    choice.learn(recalled, truth, truth * np.exp(rng.normal(0, 0.3, len(truth))))
    assert (choice.shares() < BOUND).all()


@given(st.integers(0, 10_000))
def test_beside_a_perfect_history_a_noisy_ranker_is_not_used(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, noise = predictions(rng, 10_000)
    recalled = Recalled(truth.astype(np.float32), noise.weight)
    choice = Choice()
    choice.learn(recalled, noise.tokens, truth * np.exp(rng.normal(0, 0.3, len(truth))))
    assert (choice.shares() > 1 - BOUND).all()


@given(st.integers(0, 10_000), st.floats(0.1, 2.0), st.floats(0.1, 2.0))
def test_the_choice_is_at_least_as_good_as_the_better_one(seed: int, a: float, b: float) -> None:
    """Over what was learned, class by class, without the pseudo-observations."""
    rng = np.random.default_rng(seed)
    truth, noise = predictions(rng, 500)
    recalled = Recalled((truth * np.exp(rng.normal(0, a, 500))).astype(np.float32), noise.weight)
    ranker = (truth * np.exp(rng.normal(0, b, 500))).astype(np.float32)
    observed = truth * np.exp(rng.normal(0, 0.5, 500))
    choice = Choice(pseudo=0.0)
    choice.learn(recalled, ranker, observed)
    classes = np.searchsorted(EDGES, recalled.weight, side="right")
    for number in range(len(EDGES) + 1):
        of = classes == number
        errors = [
            float(np.mean(np.log(tokens[of] / observed[of]) ** 2))
            for tokens in (choice.combine(recalled, ranker), recalled.tokens, ranker)
        ]
        assert errors[0] <= min(errors[1:]) + 1e-4
        np.testing.assert_allclose(choice.errors()[number, 1:], np.sqrt(errors[1:]), rtol=1e-3)


def test_more_observations_are_trusted_more() -> None:
    """Beside a fair ranker the history wins where it has seen a prompt often, and not where it has seen it once."""
    rng = np.random.default_rng(3)
    truth = np.exp(rng.normal(5, 0.7, 300))
    ranker = (truth * np.exp(rng.normal(0, 0.3, 300))).astype(np.float32)
    predictor = LengthPredictor(LengthHistory(decay=1.0))
    ids = [str(prompt) for prompt in range(300)]
    seen = rng.permutation(300)
    for iteration in range(40):
        chosen = seen[: 300 if iteration % 4 == 0 else 150]  # half of the prompts come four times as often
        predictor.predict([ids[place] for place in chosen], ranker[chosen], iteration)
        for place in chosen:
            answers = np.maximum(truth[place] * rng.gamma(1.5, 1 / 1.5, 1), 1).astype(int)
            predictor.observe(ids[place], answers.tolist(), iteration)
    shares = predictor.choice.shares()
    assert shares[0] < 0.3 < 0.6 < shares[-1]
    assert (np.diff(shares) > -0.1).all()


def test_only_what_was_said_before_is_measured() -> None:
    predictor = LengthPredictor()
    predictor.observe("a", [10], 0)  # nobody asked
    predictor.predict(["a", "new"], np.array([20.0, 30.0], np.float32), 1)
    predictor.observe("a", [40], 1)
    predictor.observe("a", [40], 1)  # a second time: no prediction is left
    predictor.observe("new", [40], 1)  # had no history to be measured
    assert predictor.choice.errors()[:, 0].sum() == 1
    assert predictor.choice.errors()[0, 1:] == pytest.approx([np.log(4), np.log(2)])


def test_without_a_history_the_rankers_own_tokens_come_back_and_without_a_ranker_the_historys() -> None:
    predictor = LengthPredictor()
    ranker = np.array([20.0, 30.0], np.float32)
    np.testing.assert_allclose(predictor.predict(["a", "b"], ranker, 0), ranker, rtol=1e-6)
    predictor.observe("a", [100], 0)
    alone = predictor.predict(["a", "b"], None, 1)
    np.testing.assert_array_equal(alone, predictor.history.recall(["a", "b"], 1).tokens)


def test_predictions_that_nobody_observes_do_not_pile_up() -> None:
    predictor = LengthPredictor()
    for iteration in range(100):
        predictor.predict(["a", "b"], np.ones(2, np.float32), iteration)
    assert len(predictor.to_arrays()["pending_said"]) == 2 * 16


@given(Events, Events)
def test_a_restored_predictor_goes_on_as_the_first_one(
    before: list[tuple[str, list[int], int]], after: list[tuple[str, list[int], int]]
) -> None:
    first, second = LengthPredictor(), LengthPredictor()
    ids, ranker = ["a", "b", "ü"], np.array([50.0, 100.0, 200.0], np.float32)
    first.predict(ids, ranker, 3)
    for event in before:
        first.observe(*event)
    first.predict(ids, ranker, 4)
    file = io.BytesIO()
    np.savez(file, **first.to_arrays())  # pyright: ignore[reportArgumentType]
    file.seek(0)
    second.restore(np.load(file, allow_pickle=False))
    for predictor in (first, second):
        for event in after:
            predictor.observe(*event)
    np.testing.assert_array_equal(first.predict(ids, ranker, 9), second.predict(ids, ranker, 9))
    np.testing.assert_array_equal(first.choice.errors(), second.choice.errors())


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    history = LengthHistory()
    history.observe("a", [1], 0)
    arrays = history.to_arrays()
    for changed in (
        {"seen": np.zeros(2, np.int32)},
        {"text": np.zeros(9, np.uint8)},
        {"ends": np.array([5, 1])},
    ):
        with pytest.raises(ValueError, match=r"history of|do not end"):
            LengthHistory().restore(arrays | changed)
    with pytest.raises(ValueError, match="a choice of shape"):
        Choice().restore({"choice": np.zeros((2, 4))})


@pytest.mark.parametrize("wrong", [{"decay": 0.0}, {"decay": 1.1}, {"prior": -1.0}, {"capacity": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 < decay <= 1"):
        LengthHistory(**wrong)  # pyright: ignore[reportArgumentType]
