"""What is not finite refuses an iteration's update and names its samples; what teaches nothing is left out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.config import ActorSection
from streamrl_jax.config_algorithm import RolloutCorrectionSection
from streamrl_jax.errors import UserError
from streamrl_jax.train.agreement_gate import AgreementGate
from streamrl_jax.train.answer import Answer, sampled_answer, taught_answer
from streamrl_jax.train.groups import draw_mini_batches
from streamrl_jax.train.loss import PolicyInputs, clipped_policy_loss
from streamrl_jax.train.refusal import Refusal, find_culprits
from streamrl_jax.train.report import IterationResult
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.types import FinishReason, Sample

from .tiny_training import (
    config,
    decoupled_config,
    new_trainer,
    ppo_config,
    programs,
    run,
    samples,
    with_generation,
)


def iteration(trainer: Trainer, batch: list[Sample], version: int = 0) -> IterationResult:
    trainer.begin_iteration(version)
    for sample in batch:
        trainer.add(sample)
    return trainer.end_iteration()


def gate(**sections: Any) -> AgreementGate:
    """A gate that judges, and probes nothing."""
    nothing: Any = None
    cfg = config(algorithm={"adv_estimator": "grpo"}, **sections)
    return AgreementGate(cfg, nothing, nothing, (), nothing, nothing)


def unchanged(trainer: Trainer, before: Any) -> bool:
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), trainer.state, before)
    return all(jax.tree.leaves(same))


def spoilt_reward(sample: Sample) -> Sample:
    return replace(sample, reward=float("nan"))


def spoilt_logprob(sample: Sample) -> Sample:
    logprobs = sample.generation.logprobs.copy()
    logprobs[-1] = -np.inf
    return with_generation(sample, logprobs=logprobs)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("spoil", "says"), [(spoilt_reward, "its reward is nan"), (spoilt_logprob, "a log-prob of instance")]
)
def test_a_sample_that_is_not_finite_refuses_the_iteration_and_leaves_the_state(
    kind: str, spoil: Any, says: str
) -> None:
    trainer = new_trainer(programs(kind), rows=2)
    run(trainer, [samples(0)])  # with running whitening the next iteration streams
    before = jax.device_get(trainer.state)
    batch = samples(1)
    batch[9], batch[14] = spoil(batch[9]), spoil(batch[14])
    result = iteration(trainer, batch[::-1], version=1)
    assert result.refusal is not None
    assert says in str(result.refusal)
    assert result.refusal.samples == (batch[9].sample_id, batch[14].sample_id)
    assert result.metrics["training/update_refused"] == 1.0
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert unchanged(trainer, before)


def test_a_refused_iteration_leaves_nothing_behind_for_the_next() -> None:
    trainer, other = (new_trainer(programs("grpo"), rows=2) for _ in range(2))
    broken = samples(0)
    broken[15] = spoilt_reward(broken[15])
    assert iteration(trainer, broken).refusal is not None
    (expected,) = run(other, [samples(1)])
    found = iteration(trainer, samples(1)).metrics
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-6)


def steep_above(bound: float) -> Any:
    """A loss of a user's own that is finite, with a gradient that is not where the advantage is above the bound."""

    def loss(inputs: PolicyInputs, settings: ActorSection) -> Any:
        plain, statistics = clipped_policy_loss(inputs, settings)
        above = inputs.advantages > bound
        nothing = inputs.logprobs - jax.lax.stop_gradient(inputs.logprobs)
        root = jnp.sqrt(jnp.where(above, nothing, 1.0))  # the slope of the root at 0 is infinite
        return plain + jnp.where(above, root, 0.0), statistics

    return loss


def test_a_gradient_that_is_not_finite_is_traced_to_its_samples() -> None:
    shared = programs("grpo")
    steps = Steps(shared.actor.arch, shared.mesh, shared.cfg, policy_loss=steep_above(1.0))
    trainer = new_trainer(steps, rows=2)
    before = jax.device_get(trainer.state)
    batch = [replace(sample, reward=0.5 * index) for index, sample in enumerate(samples(0))]
    # The group's advantage of [0, 1, 2, 3] halves is 1.16 at its best answer alone.
    result = iteration(trainer, batch[::-1])
    assert result.refusal is not None
    assert result.refusal.samples == ("0/0/3", "0/1/3", "0/2/3", "0/3/3")
    assert unchanged(trainer, before)


def test_of_several_updates_the_one_that_is_not_finite_is_refused_alone() -> None:
    shared = programs("decoupled")
    steps = Steps(shared.actor.arch, shared.mesh, shared.cfg, policy_loss=steep_above(2.5))
    trainer = new_trainer(steps, rows=8)
    before = jax.device_get(trainer.state)
    batch = [replace(sample, reward=0.1 * sample.group_index) for sample in samples(0)]
    batch[6] = replace(batch[6], reward=9.0)  # whitened, this one alone is above 2.5
    result = iteration(trainer, batch)
    assert result.refusal is not None
    assert result.refusal.samples == (batch[6].sample_id,)
    # Two mini-batches, twice each: the one without it learns both times.
    assert result.metrics["training/update_refused"] == 2.0
    assert int(trainer.state.updates) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(trainer.state.actor)))
    moved = jax.tree.map(
        lambda a, b: bool((np.asarray(a) != b).any()), trainer.state.actor.params, before.actor.params
    )
    assert any(jax.tree.leaves(moved))


def test_a_mini_batch_without_a_token_to_train_on_is_no_update_and_the_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = decoupled_config()
    algorithm = cfg.algorithm.model_copy(update={"mask_truncated_completions": True})
    shared = programs("decoupled")
    steps = Steps(shared.actor.arch, shared.mesh, cfg.model_copy(update={"algorithm": algorithm}))
    trainer = new_trainer(steps, rows=8)
    batch = samples(0)
    (first, _) = draw_mini_batches([sampled_answer(sample) for sample in batch], 2, seed=0, version=0)
    names = {answer.name for answer in first}
    for index, sample in enumerate(batch):
        reason = FinishReason.LENGTH if sample.sample_id in names else FinishReason.STOP
        batch[index] = with_generation(sample, finish_reason=reason)
    result = iteration(trainer, batch)
    assert result.metrics["training/update_empty"] == 2.0
    assert int(trainer.state.updates) == 2
    kept = sum(len(s.generation.token_ids) for s in batch if s.sample_id not in names)
    assert float(trainer.state.advantages.count) == kept, (
        "the next iteration whitens by those that were trained on"
    )
    with caplog.at_level(logging.WARNING):
        gate(agreement={"policy": "warn"}).check(3, result)
    assert "nothing to train on in 2 updates" in caplog.text


def test_where_a_correction_rejects_every_token_the_critic_still_learns() -> None:
    cfg = ppo_config()
    correction = RolloutCorrectionSection(rollout_rs="token", rollout_rs_threshold=1.0 + 1e-6)
    algorithm = cfg.algorithm.model_copy(update={"rollout_correction": correction})
    shared = programs("ppo")
    trainer = new_trainer(
        Steps(shared.actor.arch, shared.mesh, cfg.model_copy(update={"algorithm": algorithm})), rows=8
    )
    actor = jax.device_get(trainer.state.actor)
    assert trainer.state.critic is not None
    critic = jax.device_get(trainer.state.critic.params)
    metrics = iteration(trainer, samples(0)).metrics
    assert metrics["rollout_corr/rollout_rs_masked/min"] == metrics["training/update_empty"] == 1.0
    assert all(
        (np.asarray(a) == b).all()
        for a, b in zip(jax.tree.leaves(trainer.state.actor), jax.tree.leaves(actor), strict=True)
    )
    assert any(
        (np.asarray(a) != b).any()
        for a, b in zip(jax.tree.leaves(trainer.state.critic.params), jax.tree.leaves(critic), strict=True)
    )


def named(name: str) -> Answer:
    return taught_answer(name, np.ones(2, np.int32), np.ones(3, np.int32))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=5))
def test_halving_finds_the_bad_answers_and_asks_little(count: int, bad: set[int]) -> None:
    answers = [named(str(index)) for index in range(count)]
    present = sorted(index for index in bad if index < count)
    asked = 0

    def spoils(part: Any) -> bool:
        nonlocal asked
        asked += 1
        return any(int(answer.name) in bad for answer in part)

    assert find_culprits(answers, spoils) == tuple(str(index) for index in present)
    assert asked <= 1 + 2 * len(present) * (int(np.ceil(np.log2(count))) if count > 1 else 1)


def test_a_sum_that_overflows_alone_names_no_sample() -> None:
    answers = [named(str(index)) for index in range(8)]
    assert find_culprits(answers, lambda part: len(part) > 4) == ()
    assert "no single sample" in str(Refusal("loss or gradient is not finite"))


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_run_stops_or_passes_over_it(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = new_trainer(programs("grpo"), rows=2)
    batch = samples(0)
    batch[3] = spoilt_reward(batch[3])
    result = iteration(trainer, batch)
    judge = gate(trainer={"on_non_finite": policy})
    if policy == "stop":
        with pytest.raises(UserError, match=rf"iteration 7: the update was refused: .*{batch[3].sample_id}"):
            judge.check(7, result)
        return
    with caplog.at_level(logging.WARNING):
        judge.check(7, result)
    assert batch[3].sample_id in caplog.text and "passed over" in caplog.text


def test_groups_without_a_spread_are_left_out_and_asked_for_anew() -> None:
    trainer = new_trainer(programs("dapo"), rows=2)
    batch = [
        replace(s, reward=float(s.prompt.prompt_id in "02") if s.group_index else 1.0) for s in samples(0)
    ]
    trainer.begin_iteration(0)
    asked = [trainer.add(sample) for sample in batch]
    # Groups 0 and 2 are right throughout; the others are right once.
    assert [index for index, count in enumerate(asked) if count] == [3, 11]
    result = trainer.end_iteration()
    metrics = result.metrics
    kept = [s for s in batch if s.prompt.prompt_id in "13"]
    assert sorted(result.lengths) == sorted(s.length for s in kept)
    assert metrics["training/groups_left_out"] == 2
    assert metrics["training/groups_left_out_score"] == 1.0
    assert metrics["critic/score/mean"] == pytest.approx(
        10 / 16
    )  # of all that was sampled, not of what is trained on
    (alone,) = run(new_trainer(programs("dapo"), rows=2), [batch[4:8] + batch[12:]])
    assert alone["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)


def test_an_iteration_whose_groups_all_teach_nothing_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = new_trainer(programs("dapo"), rows=2)
    before = jax.device_get(trainer.state)
    result = iteration(trainer, [replace(sample, reward=1.0) for sample in samples(0)])
    assert result.metrics["training/update_empty"] == 1.0
    assert result.refusal is None
    assert unchanged(trainer, before)
    with caplog.at_level(logging.WARNING):
        gate().check(3, result)
    assert "iteration 3: nothing to train on" in caplog.text


def test_an_iteration_that_is_masked_altogether_changes_nothing() -> None:
    trainer = new_trainer(programs("dapo"), rows=2)
    before = jax.device_get(trainer.state)
    cut = [with_generation(sample, finish_reason=FinishReason.LENGTH) for sample in samples(0)]
    result = iteration(trainer, cut)
    assert result.metrics["training/update_empty"] == 1.0
    assert unchanged(trainer, before)
