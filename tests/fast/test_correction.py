"""Importance corrections and segment sums, against loops; and a whole update made of them, against a textbook's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.config_algorithm import RolloutCorrectionSection
from streamrl_jax.train.correction import Corrected, correct
from streamrl_jax.train.segments import first_kept, segment_sums

from .naive_ppo import logprobs, padded
from .tiny import random_params
from .tiny_training import MAX_RESPONSE, new_trainer, programs, run, samples, with_generation

# Two answers in a row, prompt tokens before each: which tokens are kept, of which answer.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0]])
MASK = np.array([[0, 1, 1, 1, 0, 1, 1, 0]], bool)
RHO = np.array([[9.0, 1.5, 4.0, 0.6, 9.0, 0.3, 1.0, 9.0]])


def corrected(**fields: object) -> Corrected:
    behaviour = np.full(RHO.shape, -2.0, np.float32)
    start = jnp.asarray(behaviour + np.log(RHO), jnp.float32)
    section = RolloutCorrectionSection.model_validate({"bypass_mode": False, **fields})
    return correct(start, jnp.asarray(behaviour), jnp.asarray(MASK), jnp.asarray(SEGMENTS), section)


def test_without_a_correction_the_raw_ratios_are_measured_and_nothing_else_happens() -> None:
    result = corrected()
    assert result.weights is None
    np.testing.assert_array_equal(result.mask, MASK)
    assert result.statistics.keys() == {"rho", "rho_kl"}
    np.testing.assert_allclose(result.statistics["rho"][MASK], RHO[MASK], rtol=1e-5)
    np.testing.assert_allclose(result.statistics["rho_kl"][MASK], -np.log(RHO[MASK]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [1.5, 2.0, 0.6, 0.3, 1.0]), ("sequence", [2.0, 2.0, 2.0, 0.3, 0.3])],
)
def test_the_truncated_weight_of_token_and_sequence(level: str, expected: list[float]) -> None:
    # The products: 1.5 * 4 * 0.6 = 3.6, cut at 2, and 0.3 * 1.
    result = corrected(rollout_is=level, rollout_is_threshold=2.0)
    assert result.weights is not None
    np.testing.assert_allclose(result.weights[MASK], expected, rtol=1e-5)
    np.testing.assert_array_equal(result.mask, MASK)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"rollout_rs": "token"}, [1, 0, 1, 0, 1]),  # outside [1/2, 2]: 4 and 0.3
        (
            {"rollout_rs": "sequence", "rollout_rs_threshold": 3.7},
            [1, 1, 1, 1, 1],
        ),  # [1/3.7, 3.7] holds 3.6 and 0.3
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 3.2}, [0, 0, 0, 0, 0]),
        ({"rollout_rs": "geometric"}, [1, 1, 1, 1, 1]),  # 3.6^(1/3) = 1.53, 0.3^(1/2) = 0.55
        ({"rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.6}, [1, 1, 1, 0, 0]),
    ],
)
def test_what_a_rejection_leaves(fields: dict[str, object], kept: list[int]) -> None:
    result = corrected(**fields)
    np.testing.assert_array_equal(result.mask[MASK], np.array(kept, bool))
    assert not np.asarray(result.mask)[~MASK].any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8), st.integers(0, 99))
def test_segment_sums_and_marks_equal_loops(parts: list[tuple[int, bool]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids = np.concatenate([np.full(length, 0 if pad else i) for i, (length, pad) in enumerate(parts, 1)])
    values = draw.normal(size=ids.shape).astype(np.float32)
    mask = (draw.random(ids.shape) < 0.5) & (ids > 0)
    sums = segment_sums(jnp.asarray(values)[None], jnp.asarray(ids)[None])[0]
    marks = np.asarray(first_kept(jnp.asarray(mask)[None], jnp.asarray(ids)[None])[0])
    for i in set(ids[ids > 0].tolist()):
        inside = ids == i
        np.testing.assert_allclose(np.asarray(sums)[inside], values[inside].sum(), rtol=1e-4, atol=1e-5)
        assert marks[inside].sum() == mask[inside].any()
        if mask[inside].any():
            assert marks[np.flatnonzero(inside & mask)[0]]
    assert not marks[ids == 0].any()


def test_a_corrected_update_of_returns_is_the_textbooks() -> None:
    """REINFORCE++'s discounted returns with the KL in the reward, whitened; weighted and masked by rho; CISPO."""
    steps = programs("cispo")
    cfg, params = steps.cfg, random_params(steps.actor, 0)
    plain = padded(samples(0))
    start = np.asarray(logprobs(steps.actor, params, plain, cfg.rollout.temperature)[0], np.float64)
    draw = np.random.default_rng(2)
    batch = [
        with_generation(sample, logprobs=(row[kept] + draw.normal(0, 0.45, kept.sum())).astype(np.float32))
        for sample, row, kept in zip(samples(0), start, plain.mask == 1, strict=True)
    ]
    rows = padded(batch)
    reference = logprobs(steps.actor, random_params(steps.actor, 2), rows, cfg.rollout.temperature)[0]
    advantages, weights, kept = (np.zeros(rows.mask.shape) for _ in range(3))
    for i, sample in enumerate(batch):
        tokens, ahead = np.flatnonzero(rows.mask[i]), sample.reward
        rho = np.exp(start[i] - rows.behaviour[i])
        for t in tokens[::-1]:
            ahead -= cfg.algorithm.kl_coef * (rows.behaviour[i, t] - float(reference[i, t]))
            advantages[i, t] = ahead
            ahead *= cfg.algorithm.gamma
            weights[i, t] = min(np.prod(rho[tokens]), 2.0)
            kept[i, t] = 1 / 1.4 <= rho[t] <= 1.4
    answered = advantages[rows.mask == 1]
    advantages = (advantages - answered.mean()) / answered.std()
    sequences = kept.any(axis=1).sum()
    assert 0.4 < kept.sum() / rows.mask.sum() < 0.95 and sequences < len(batch) and weights.max() == 2.0

    def loss(params: Any) -> Any:
        logp, entropy = logprobs(steps.actor, params, rows, cfg.rollout.temperature)
        policy, bonus = (
            jnp.sum(x * kept) / MAX_RESPONSE / sequences for x in (-weights * advantages * logp, entropy)
        )
        return policy - cfg.actor.entropy_coeff * bonus, (policy, bonus)

    (_, (policy, bonus)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    (metrics,) = run(new_trainer(steps, rows=2), [batch])
    norm = np.sqrt(
        sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(gradient))
    )
    assert metrics["actor/pg_loss"] == pytest.approx(float(policy), rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(float(bonus), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["rollout_corr/rollout_rs_masked/mean"] == pytest.approx(1 - kept.sum() / rows.mask.sum())
    assert metrics["rollout_corr/rho/max"] == pytest.approx(
        np.exp(start - rows.behaviour)[rows.mask == 1].max(), rel=1e-4
    )
