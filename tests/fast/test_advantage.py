"""Advantages against loops that a reader can check by eye."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.train.advantage import (
    GroupAdvantage,
    Whitening,
    gae,
    group_advantages,
    leave_one_out_advantages,
    whitening,
)
from streamrl_jax.train.answer import Answer, sampled_answer
from streamrl_jax.train.groups import Groups
from streamrl_jax.train.moments import Moments, faded, merge, moments

from .tiny_training import samples


def gae_by_loop(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """GAE of one sequence in double precision, from its last token to its first."""
    advantages = np.zeros(len(rewards))
    next_value = next_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = advantages[t] = delta + gamma * lam * next_advantage
            next_value = values[t]
    return advantages


def measured(values: np.ndarray, mask: np.ndarray) -> Moments:
    return jax.device_get(moments(jnp.asarray(values), jnp.asarray(mask)))


def one_row(*columns: list[float]) -> list[jax.Array]:
    return [jnp.array([column], jnp.float32) for column in columns]


@pytest.mark.parametrize(
    ("mask", "rewards", "values", "lam", "right"),
    [
        ([1, 1, 0], [0, 1, 0], [0, 0, 100], 0.95, [0.95, 1, 0]),
        ([1, 0, 1], [0, 0, 1], [0.5, 9, 0.5], 1.0, [0.5, 0, 0.5]),
        ([1, 0, 1], [0, 0, 1], [0.5, 9, 0.5], 0.95, [0.475, 0, 0.5]),
    ],
)
def test_masked_tokens_are_passed_over(
    mask: list[float], rewards: list[float], values: list[float], lam: float, right: list[float]
) -> None:
    kept, reward_row, value_row = one_row(mask, rewards, values)
    advantages, returns = gae(
        reward_row, value_row, kept.astype(bool), jnp.ones((1, 3), jnp.int32), gamma=1.0, lam=lam
    )
    np.testing.assert_allclose(advantages[0], right, rtol=1e-6)
    np.testing.assert_allclose(returns[0], np.array(right) + np.array(values) * mask, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)]),
)
def test_packed_rows_equal_a_loop_over_each_sequence(
    lengths: list[int], seed: int, discount: tuple[float, float]
) -> None:
    gamma, lam = discount
    draw = np.random.default_rng(seed)
    width = 56
    rewards, values = draw.normal(size=(2, 1, width)).astype(np.float32)
    mask = draw.random((1, width)) < 0.7
    segments = np.zeros((1, width), np.int32)
    expected = np.zeros(width)
    start = 0
    for index, length in enumerate(lengths, start=1):
        part = slice(start, start + length)
        segments[0, part] = index
        expected[part] = gae_by_loop(rewards[0, part], values[0, part], mask[0, part], gamma, lam)
        start += length
    mask[0, start:] = False
    advantages, returns = jax.jit(gae, static_argnames=("gamma", "lam"))(
        rewards, values, mask, segments, gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(advantages[0], expected, atol=2e-5)
    np.testing.assert_allclose(returns[0], np.where(mask[0], expected + values[0], 0), atol=2e-5)


def test_group_advantage_is_grpos_formula() -> None:
    scores = np.array([1.0, 0.0, 0.5, 0.25])
    centred = scores - scores.mean()
    np.testing.assert_allclose(group_advantages(scores), centred / (np.sqrt((centred**2).sum() / 3) + 1e-6))
    np.testing.assert_allclose(group_advantages(scores, divide_by_std=False), centred)


def test_leave_one_out_gives_the_only_winner_one() -> None:
    np.testing.assert_allclose(
        leave_one_out_advantages(np.array([1.0, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3]
    )


@pytest.mark.parametrize("advantage", [group_advantages, leave_one_out_advantages])
@pytest.mark.parametrize("score", [0.35, -1e6 / 3, 1e-9])
def test_equal_scores_give_exactly_zero(advantage: GroupAdvantage, score: float) -> None:
    single = np.float32(score)
    residue = np.array([single, np.nextafter(single, np.float32(1)), *[single] * 6], np.float64)
    assert not advantage(np.full(8, single, np.float64)).any()
    assert not advantage(residue).any()
    assert not advantage(np.zeros(8)).any()


@pytest.mark.parametrize("advantage", [group_advantages, leave_one_out_advantages])
def test_a_group_of_one_is_refused(advantage: GroupAdvantage) -> None:
    with pytest.raises(ValueError, match="group of 1 has no baseline"):
        advantage(np.array([1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_moments_merge_over_any_split(counts: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = [draw.normal(1000.0, 1.0, (1, 32)).astype(np.float32) for _ in counts]
    masks = [(np.arange(32) < count)[None] for count in counts]
    merged = merge(measured(part, mask) for part, mask in zip(parts, masks, strict=True))
    kept = np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)]).astype(np.float64)
    assert merged.count == len(kept)
    if len(kept):
        found = [float(x) for x in (merged.mean, merged.low, merged.high)]
        np.testing.assert_allclose(found, [kept.mean(), kept.min(), kept.max()], rtol=1e-6)
        np.testing.assert_allclose(merged.variance, kept.var(), rtol=1e-4, atol=1e-6)


def test_whitening_uses_the_masked_mean_and_variance() -> None:
    values = np.array([[0.95, 1.0, 100.0]], np.float32)
    mask = np.array([[True, True, False]])
    found = whitening(measured(values, mask))
    whitened = (values[mask] - found.mean) * found.scale
    np.testing.assert_allclose(whitened, [-1, 1], rtol=1e-5)


def test_equal_advantages_whiten_to_zero() -> None:
    values = np.full((4, 64), 0.35, np.float32)
    parts = [measured(values, np.ones((4, 64), bool)), measured(values, np.arange(256).reshape(4, 64) < 77)]
    assert whitening(merge(parts)).scale == 0.0
    assert whitening(Moments()) == Whitening(0.0, 0.0)
    # What float32 leaves of a KL between a policy and itself, at a weight of 0.001.
    assert whitening(Moments(count=1000.0, mean=1e-12, m2=1000.0 * 1e-9**2)).scale == 0.0


def test_fading_keeps_mean_and_variance_and_halves_the_weight() -> None:
    past = Moments(count=8.0, mean=2.0, m2=32.0)
    old = faded(past, 0.5)
    assert (old.mean, old.variance) == (2.0, past.variance)
    assert merge([old, Moments(count=4.0, mean=4.0, m2=0.0)]).mean == 3.0


def test_groups_do_not_depend_on_the_order_of_arrival() -> None:
    answers = [sampled_answer(sample) for sample in samples()]

    def run(order: np.ndarray) -> dict[str, float]:
        groups = Groups(4, group_advantages)
        done: list[Answer] = []
        for index in order:
            done.extend(groups.add(answers[index]))
        assert groups.incomplete() == {}
        return {answer.name: answer.advantage for answer in done}

    expected = run(np.arange(16))
    for seed in range(5):
        assert run(np.random.default_rng(seed).permutation(16)) == expected
    first = group_advantages(np.array([answer.reward for answer in answers[:4]]))
    np.testing.assert_array_equal([expected[answer.name] for answer in answers[:4]], first)


def test_a_group_waits_for_its_last_answer() -> None:
    groups = Groups(4, group_advantages)
    answers = [sampled_answer(sample) for sample in samples(prompts=1)]
    assert [groups.add(answer) for answer in answers[:3]] == [[], [], []]
    assert groups.incomplete() == {"0": 3}
    assert len(groups.add(answers[3])) == 4


def test_an_advantage_of_the_wrong_shape_is_refused() -> None:
    groups = Groups(2, lambda scores: scores[:1])
    answer = sampled_answer(samples(prompts=1)[0])
    groups.add(answer)
    with pytest.raises(ValueError, match=r"shape \(1,\) for a group of 2"):
        groups.add(replace(answer, name="other"))
