"""Losses and aggregation against loops and hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.config import ActorSection
from streamrl_jax.train.aggregate import AggregationMode, Size, denominator, masked_sum, token_weight
from streamrl_jax.train.loss import (
    KlEstimator,
    PolicyInputs,
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
)

MODES: tuple[AggregationMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def inputs(logp: Any, behaviour: Any, advantages: Any, mask: Any) -> PolicyInputs:
    def row(values: Any) -> jax.Array:
        return jnp.asarray(values, jnp.float32)[None]

    kept = jnp.asarray(mask, bool)[None]
    return PolicyInputs(row(logp), row(behaviour), row(advantages), kept, jnp.ones(kept.shape, jnp.int32))


def policy_loss_of_token(ratio: float, advantage: float, low: float, high: float, c: float) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * c) if advantage < 0 else loss


def test_policy_loss_equals_a_loop_with_its_own_lower_and_upper_clip() -> None:
    draw = np.random.default_rng(0)
    ratios = np.exp(draw.normal(0, 1, 400))
    advantages = draw.normal(0, 1, 400)
    given = inputs(np.log(ratios), np.zeros(400), advantages, np.ones(400))
    loss, statistics = clipped_policy_loss(
        given, ActorSection(clip_ratio_low=0.2, clip_ratio_high=0.4, clip_ratio_c=3.0)
    )
    expected = [policy_loss_of_token(r, a, 0.2, 0.4, 3.0) for r, a in zip(ratios, advantages, strict=True)]
    np.testing.assert_allclose(loss[0], expected, rtol=1e-5, atol=1e-6)
    took_effect = ((advantages > 0) & (ratios > 1.4)) | ((advantages < 0) & (ratios < 0.8))
    np.testing.assert_array_equal(statistics["pg_clipfrac"][0], took_effect)
    np.testing.assert_array_equal(statistics["pg_clipfrac_lower"][0], (advantages < 0) & (ratios > 3.0))
    np.testing.assert_allclose(statistics["ppo_kl"][0], -np.log(ratios), rtol=1e-5, atol=1e-6)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logp = np.array([-1.0, -2.0, -0.5], np.float32)
    advantages = np.array([1.0, -2.0, 0.5], np.float32)

    def total(x: jax.Array) -> jax.Array:
        loss, _ = clipped_policy_loss(inputs(x, logp, advantages, [1, 1, 1]), ActorSection())
        return loss.sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(logp)), -advantages, rtol=1e-6)


def test_what_stands_at_masked_tokens_reaches_neither_loss_nor_gradient() -> None:
    mask = np.array([True, False, True, False])

    def total(logp: jax.Array, behaviour: np.ndarray, advantages: np.ndarray) -> jax.Array:
        loss, _ = clipped_policy_loss(inputs(logp, behaviour, advantages, mask), ActorSection())
        return masked_sum(loss, jnp.asarray(mask)[None])

    logp = np.array([-1.0, -1.0, -2.0, -3.0], np.float32)
    wild = np.array([-1.0, -1e4, -2.0, 1e4], np.float32)
    clean = jax.value_and_grad(total)(jnp.asarray(logp), logp, np.ones(4, np.float32))
    dirty = jax.value_and_grad(total)(
        jnp.asarray(logp), np.where(mask, logp, wild), np.array([1, 1e30, 1, -1e30], np.float32)
    )
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert clean[1][1] == clean[1][3] == 0


def test_value_loss_equals_a_loop() -> None:
    draw = np.random.default_rng(1)
    values, old, returns = draw.normal(0, 1, (3, 1, 200)).astype(np.float32)
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.5)
    for t in range(200):
        v, o, r = float(values[0, t]), float(old[0, t]), float(returns[0, t])
        near = min(max(v, o - 0.5), o + 0.5)
        assert loss[0, t] == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), rel=1e-5, abs=1e-6)
        assert clipped[0, t] == ((near - r) ** 2 > (v - r) ** 2)


@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("k1", 0.1, 1.0), ("k2", 0.005, 0.1), ("k3", 0.004837, None)]
)
def test_kl_estimators(kind: KlEstimator, value: float, slope: float | None) -> None:
    logp = jnp.float32(-1.0)
    found, gradient = jax.value_and_grad(kl_estimate)(logp, jnp.float32(-1.1), kind)
    assert found == pytest.approx(value, rel=1e-3)
    expected = 1 - math.exp(-0.1) if slope is None else slope
    assert gradient == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(kind: KlEstimator) -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    estimates = kl_estimate(jnp.log(policy), jnp.log(reference), kind)
    true = float((policy * np.log(policy / reference)).sum())
    assert float((policy * np.asarray(estimates)).sum()) == pytest.approx(true, rel=1e-5)


def test_the_expected_gradient_of_k2_is_that_of_the_kl() -> None:
    reference = jnp.array([0.2, 0.2, 0.6])

    def kl(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - jnp.log(reference)))

    def expected_k2(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        sampled_from = jax.lax.stop_gradient(jnp.exp(logp))
        return jnp.sum(sampled_from * kl_estimate(logp, jnp.log(reference), "k2"))

    logits = jnp.array([0.3, -0.2, 0.1])
    np.testing.assert_allclose(jax.grad(expected_k2)(logits), jax.grad(kl)(logits), rtol=1e-5)


def aggregate(
    losses: list[list[float]], masks: list[list[int]], mode: AggregationMode, split: list[slice]
) -> float:
    """The aggregated loss when the sequences come in micro-batches `split`."""
    total, size = 0.0, Size()
    for part in split:
        for sequence, mask in zip(losses[part], masks[part], strict=True):
            kept = jnp.asarray([mask], bool)
            weights = jnp.full(kept.shape, token_weight(mode, max(sum(mask), 1)))
            total += float(masked_sum(jnp.asarray([sequence]), kept, weights))
            size += Size(sum(mask), int(any(mask)))
    return total / denominator(mode, size)


@pytest.mark.parametrize("split", [[slice(0, 2)], [slice(0, 1), slice(1, 2)]])
def test_token_mean_whatever_the_split(split: list[slice]) -> None:
    assert aggregate([[4.0], [0.0, 0.0, 0.0]], [[1], [1, 1, 1]], "token-mean", split) == pytest.approx(1.0)


def test_masked_sequences_do_not_count_in_the_denominator() -> None:
    losses = [[1.0, 1.0], [7.0] * 6]
    masks = [[1, 1], [0] * 6]
    for mode, right in zip(MODES, (1.0, 1.0, 2.0), strict=True):
        assert aggregate(losses, masks, mode, [slice(0, 2)]) == pytest.approx(right)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_logged_value_does_not_depend_on_the_number_of_micro_batches(
    mode: AggregationMode, count: int
) -> None:
    draw = np.random.default_rng(3)
    losses = [draw.normal(size=n).tolist() for n in (5, 1, 3, 7)]
    masks = [[1] * len(loss) for loss in losses]
    expected = {
        "token-mean": np.concatenate(losses).mean(),
        "seq-mean-token-mean": np.mean([np.mean(loss) for loss in losses]),
        "seq-mean-token-sum": np.mean([np.sum(loss) for loss in losses]),
    }[mode]
    size = 4 // count
    split = [slice(i * size, (i + 1) * size) for i in range(count)]
    assert aggregate(losses, masks, mode, split) == pytest.approx(expected, rel=1e-5)
