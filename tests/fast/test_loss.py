"""Losses and aggregation against loops and hand-computed values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.config import ActorSection
from streamrl_jax.train.aggregate import Aggregation, AggregationMode, Size, masked_sum, size_of
from streamrl_jax.train.kl import KlEstimator, kl_estimate
from streamrl_jax.train.loss import (
    PolicyInputs,
    clipped_policy_loss,
    clipped_value_loss,
    clipped_weight_loss,
    policy_gradient_loss,
    sequence_policy_loss,
)

MODES: tuple[AggregationMode, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
SCALE = 8


def inputs(logp: Any, old: Any, advantages: Any, mask: Any, segments: Any = None) -> PolicyInputs:
    def row(values: Any) -> jax.Array:
        return jnp.asarray(values, jnp.float32)[None]

    kept = jnp.asarray(mask, bool)[None]
    ids = jnp.ones(kept.shape, jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32)[None]
    return PolicyInputs(row(logp), row(old), row(old), row(advantages), kept, ids)


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


def packed(seed: int = 4) -> tuple[PolicyInputs, list[list[int]]]:
    """Three answers in a row with prompts between them; and the indices of each one's kept tokens."""
    draw = np.random.default_rng(seed)
    segments = np.repeat([1, 2, 3, 0], [7, 4, 9, 2])
    mask = np.isin(np.arange(22), [2, 3, 5, 6, 8, 9, 10, 13, 15, 16, 19])
    old = draw.normal(-2, 0.5, 22)
    advantages = np.repeat([1.0, -0.7, 0.4, 0.0], [7, 4, 9, 2])
    kept = [[int(t) for t in np.flatnonzero(mask & (segments == s))] for s in (1, 2, 3)]
    return inputs(old + draw.normal(0, 0.4, 22), old, advantages, mask, segments), kept


def test_gspo_is_the_sequences_clipped_ratio_at_each_of_its_tokens() -> None:
    given, sequences = packed()
    settings = ActorSection(loss_mode="gspo", clip_ratio_low=0.1, clip_ratio_high=0.15)
    loss, statistics = sequence_policy_loss(given, settings)
    change = np.asarray(given.logprobs - given.old_logprobs, np.float64)[0]
    for kept in sequences:
        ratio = np.exp(change[kept].mean())
        advantage = float(given.advantages[0, kept[0]])
        near = min(max(ratio, 0.9), 1.15)
        expected = max(-advantage * ratio, -advantage * near)
        np.testing.assert_allclose(loss[0, np.array(kept)], expected, rtol=1e-5)
        assert float(statistics["pg_clipfrac"][0, kept[0]]) == (-advantage * near > -advantage * ratio)


def test_gspos_gradient_is_that_of_the_papers_objective() -> None:
    given, sequences = packed()
    settings = ActorSection(loss_mode="gspo", clip_ratio_low=0.9, clip_ratio_high=9.0)  # nothing is clipped
    aggregation = Aggregation("seq-mean-token-mean")

    def ours(logp: jax.Array) -> jax.Array:
        changed = replace(given, logprobs=logp)
        loss, _ = sequence_policy_loss(changed, settings)
        weights = aggregation.weights(given.mask, given.segment_ids)
        return masked_sum(loss, given.mask, weights) / len(sequences)

    def papers(logp: jax.Array) -> jax.Array:
        change = logp - given.old_logprobs
        ratios = [jnp.exp(change[0, jnp.array(kept)].mean()) for kept in sequences]
        advantages = [given.advantages[0, kept[0]] for kept in sequences]
        return -jnp.stack([a * s for a, s in zip(advantages, ratios, strict=True)]).mean()

    np.testing.assert_allclose(
        jax.grad(ours)(given.logprobs), jax.grad(papers)(given.logprobs), rtol=1e-5, atol=1e-7
    )


def test_cispo_clips_the_weight_and_keeps_every_tokens_gradient() -> None:
    ratios = np.array([0.5, 1.0, 1.1, 4.0])
    logp = np.array([-1.0, -2.0, -0.5, -3.0])
    advantages = np.array([1.0, -1.0, 2.0, 0.5])
    settings = ActorSection(loss_mode="cispo", clip_ratio_low=0.9, clip_ratio_high=0.3)
    weights = np.array([0.5, 1.0, 1.1, 1.3])

    def total(x: jax.Array) -> jax.Array:
        loss, _ = clipped_weight_loss(inputs(x, logp - np.log(ratios), advantages, np.ones(4)), settings)
        return loss.sum()

    value, gradient = jax.value_and_grad(total)(jnp.asarray(logp, jnp.float32))
    assert value == pytest.approx(-(weights * advantages * logp).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, -weights * advantages, rtol=1e-5)
    _, statistics = clipped_weight_loss(inputs(logp, logp - np.log(ratios), advantages, np.ones(4)), settings)
    np.testing.assert_array_equal(statistics["pg_clipfrac"][0], [0, 0, 0, 1])


def test_reinforce_has_no_ratio() -> None:
    loss, _ = policy_gradient_loss(
        inputs([-1.0, -2.0], [-9.0, 5.0], [2.0, -1.0], [1, 1]), ActorSection(loss_mode="reinforce")
    )
    np.testing.assert_allclose(loss[0], [2.0, -2.0])


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
    ("kind", "value", "slope"),
    [("k1", 0.1, 1.0), ("k2", 0.005, 0.1), ("k3", 0.004837, None), ("k3+", 0.004837, 0.1)],
)
def test_kl_estimators(kind: KlEstimator, value: float, slope: float | None) -> None:
    logp = jnp.float32(-1.0)
    found, gradient = jax.value_and_grad(kl_estimate)(logp, jnp.float32(-1.1), kind)
    assert found == pytest.approx(value, rel=1e-3)
    expected = 1 - math.exp(-0.1) if slope is None else slope
    assert gradient == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
def test_unbiased_estimators_average_to_the_kl(kind: KlEstimator) -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    estimates = kl_estimate(jnp.log(policy), jnp.log(reference), kind)
    true = float((policy * np.log(policy / reference)).sum())
    assert float((policy * np.asarray(estimates)).sum()) == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3+"])
def test_the_expected_gradient_is_that_of_the_kl(kind: KlEstimator) -> None:
    reference = jnp.array([0.2, 0.2, 0.6])

    def kl(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - jnp.log(reference)))

    def expected(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        sampled_from = jax.lax.stop_gradient(jnp.exp(logp))
        return jnp.sum(sampled_from * kl_estimate(logp, jnp.log(reference), kind))

    logits = jnp.array([0.3, -0.2, 0.1])
    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(kl)(logits), rtol=1e-5)


def aggregate(
    losses: list[list[float]], masks: list[list[int]], mode: AggregationMode, split: list[slice]
) -> float:
    """The aggregated loss when the sequences come in micro-batches `split`."""
    aggregation = Aggregation(mode, SCALE)
    total, size = 0.0, Size()
    for part in split:
        # Packed into one row: the sequences end to end, told apart by their segment ids.
        ids = [index for index, mask in enumerate(masks[part], 1) for _ in mask]
        segments, kept = jnp.asarray([ids]), jnp.asarray([[bool(x) for mask in masks[part] for x in mask]])
        values = jnp.asarray([[x for sequence in losses[part] for x in sequence]])
        total += float(masked_sum(values, kept, aggregation.weights(kept, segments)))
        size += size_of(kept, segments)
    return total / float(aggregation.denominator(size))


@pytest.mark.parametrize("split", [[slice(0, 2)], [slice(0, 1), slice(1, 2)]])
def test_token_mean_whatever_the_split(split: list[slice]) -> None:
    assert aggregate([[4.0], [0.0, 0.0, 0.0]], [[1], [1, 1, 1]], "token-mean", split) == pytest.approx(1.0)


def test_masked_sequences_do_not_count_in_the_denominator() -> None:
    losses = [[1.0, 1.0], [7.0] * 6]
    masks = [[1, 1], [0] * 6]
    for mode, right in zip(MODES, (1.0, 1.0, 2.0, 2.0 / SCALE), strict=True):
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
        "seq-mean-token-sum-norm": np.mean([np.sum(loss) / SCALE for loss in losses]),
    }[mode]
    size = 4 // count
    split = [slice(i * size, (i + 1) * size) for i in range(count)]
    assert aggregate(losses, masks, mode, split) == pytest.approx(expected, rel=1e-5)
