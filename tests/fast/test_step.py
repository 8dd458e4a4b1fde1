"""The training step: updates, refusals, schedules, several mini-batches, supervised training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.config import ActorSection, OptimSection
from streamrl_jax.train.advantage import Whitening
from streamrl_jax.train.aggregate import Size
from streamrl_jax.train.answer import Answer, sampled_answer, taught_answer
from streamrl_jax.train.batcher import empty_rows
from streamrl_jax.train.groups import draw_mini_batches
from streamrl_jax.train.loss import PolicyInputs
from streamrl_jax.train.optim import decayed, learning_rate
from streamrl_jax.train.sft import SupervisedTrainer
from streamrl_jax.train.state import Gradients
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.types import FinishReason, Prompt, VersionRun

from .naive_ppo import NaivePpo, logprobs, padded
from .tiny import random_params
from .tiny_training import ROW, config, new_trainer, programs, run, samples, with_generation


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=2e-6),
        found,
        expected,
    )


def naive_for(steps: Steps) -> NaivePpo:
    assert steps.critic is not None
    return NaivePpo(
        steps.cfg,
        steps.actor,
        steps.critic,
        random_params(steps.actor, 0),
        random_params(steps.critic, 1),
        random_params(steps.actor, 2),
    )


def test_running_whitening_waits_once_and_then_streams_with_earlier_statistics() -> None:
    steps = programs("ppo")
    trainer, naive = new_trainer(steps, rows=2), naive_for(steps)
    run(trainer, [samples(0)])
    naive.iterate(samples(0))
    first = naive.spread
    trainer.begin_iteration(1)
    for sample in samples(1):
        trainer.add(sample)
    assert trainer.accumulated > 0
    metrics = trainer.end_iteration().metrics
    for name, value in naive.iterate(samples(1), spread=first).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    trainer.begin_iteration(0)
    assert trainer.accumulated == 0


def test_the_first_iteration_of_running_whitening_waits_for_its_batch() -> None:
    trainer = new_trainer(programs("ppo"), rows=2)
    for sample in samples(0):
        trainer.add(sample)
    assert trainer.accumulated == 0
    metrics = trainer.end_iteration().metrics
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.accumulated == metrics["training/micro_batches"]


def test_advantages_without_a_spread_whiten_no_later_ones() -> None:
    """Running statistics of answers that all earned the same would turn the first success into a gradient of 0."""
    trainer, other = (new_trainer(programs("decoupled"), rows=8) for _ in range(2))
    (nothing,) = run(trainer, [[replace(sample, reward=0.0) for sample in samples(0)]])
    assert nothing["critic/advantages/max"] == nothing["critic/advantages/min"] == 0.0
    first, fresh = (each_run(one, 1) for one in (trainer, other))
    for name in ("max", "min"):
        assert first[f"critic/advantages/{name}"] == pytest.approx(
            fresh[f"critic/advantages/{name}"], rel=1e-6
        )
    assert first["critic/advantages/max"] > 1.0


def test_an_iteration_of_equal_rewards_leaves_no_statistics_to_whiten_by() -> None:
    """Its advantages are a KL's or the critic's errors, and may be as small as rounding."""
    trainer = new_trainer(programs("ppo"), rows=8)
    run(trainer, [[replace(sample, reward=0.0) for sample in samples(0)]])
    assert float(trainer.state.advantages.count) == 0.0
    each_run(trainer, 1)
    assert float(trainer.state.advantages.count) > 0.0


def each_run(trainer: Trainer, version: int) -> dict[str, float]:
    trainer.begin_iteration(version)
    for sample in samples(version):
        trainer.add(sample)
    return trainer.end_iteration().metrics


def test_grpo_streams_from_the_first_complete_groups() -> None:
    trainer = new_trainer(programs("grpo"), rows=2)
    for sample in samples(0):
        trainer.add(sample)
    assert trainer.accumulated > 0
    trainer.end_iteration()


@pytest.mark.parametrize("network", ["actor", "critic"])
@pytest.mark.parametrize("part", ["gradient", "loss"])
def test_what_is_not_finite_refuses_the_update(network: str, part: str) -> None:
    steps = programs("ppo")
    trainer = new_trainer(steps, rows=2)
    before = jax.device_get(trainer.state)
    sums: dict[str, Gradients | None] = dict(zip(("actor", "critic"), steps.zero_gradients(), strict=True))
    broken = sums[network]
    assert broken is not None
    if part == "loss":
        sums[network] = Gradients(broken.tree, broken.loss + jnp.inf, Size(3, 1))
    else:
        scale = broken.tree["norm"]["scale"]
        tree = broken.tree | {"norm": {"scale": scale.at[3].set(jnp.nan)}}
        sums[network] = Gradients(tree, broken.loss, Size(3, 1))
    actor, critic = sums["actor"], sums["critic"]
    assert actor is not None
    state, zeros, report = steps.apply(trainer.state, (actor, critic))
    assert report["training/update_refused"] == 1.0
    assert_same(state, before)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(zeros))


@pytest.mark.parametrize("kind", ["ppo", "decoupled", "cispo"])
def test_after_the_warm_up_no_program_is_compiled_again(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One update and several, with and without critic and reference, whitened by earlier and by own statistics."""
    shared = programs(kind)
    trainer = new_trainer(Steps(shared.actor.arch, shared.mesh, shared.cfg), rows=2)

    def compiled() -> list[str]:
        found = [text for text in caplog.messages if "Compiling" in text]
        caplog.clear()
        return found

    with jax.log_compiles():
        trainer.warm_up()
        assert compiled(), "the log is listened to"
        run(trainer, [samples(i) for i in range(3)])
        assert compiled() == []


def test_warm_up_leaves_the_state_as_it_is() -> None:
    trainer = new_trainer(programs("grpo"), rows=2)
    before = jax.device_get(trainer.state)
    trainer.warm_up()
    assert_same(trainer.state, before)


def test_several_updates_keep_the_old_values_and_advantages() -> None:
    steps = programs("several")
    trainer, naive = new_trainer(steps, rows=8), naive_for(steps)
    batch = samples(0)
    drawn = draw_mini_batches([sampled_answer(s) for s in batch], 2, seed=0, version=1)
    names = [{answer.name for answer in mini} for mini in drawn]
    assert [len(mini) for mini in names] == [8, 8]
    naive.iterate(batch, mini_batches=names, epochs=2)
    trainer.begin_iteration(1)
    for sample in batch[::-1]:
        trainer.add(sample)
    metrics = trainer.end_iteration().metrics
    assert trainer.accumulated == 4
    assert trainer.state.critic is not None
    assert_close(trainer.state.actor.params, naive.params)
    assert_close(trainer.state.critic.params, naive.values)
    assert int(trainer.state.updates) == 4
    assert metrics["critic/vf_clipfrac"] > 0
    # Only what was scored before the first update is of the trainer's version.
    compared = metrics["training/rollout_tokens_compared"] + metrics["training/rollout_tokens_other_version"]
    assert compared == sum(len(answer.response_ids) for answer in drawn[0])


def test_during_its_warm_up_only_the_critic_learns() -> None:
    trainer = new_trainer(programs("several"), rows=8)
    actor = jax.device_get(trainer.state.actor)
    assert trainer.state.critic is not None
    critic = jax.device_get(trainer.state.critic.params)
    run(trainer, [samples(0)])
    assert_same(trainer.state.actor, actor)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), trainer.state.critic.params, critic)
    assert all(jax.tree.leaves(moved))


def test_mini_batches_are_drawn_anew_each_iteration_and_hold_whole_groups() -> None:
    answers = [sampled_answer(sample) for sample in samples(prompts=12)]

    def draw(order: list[Answer], version: int) -> list[set[str]]:
        return [{a.prompt_id for a in mini} for mini in draw_mini_batches(order, 3, seed=5, version=version)]

    first = draw(answers, 0)
    assert [len(part) for part in first] == [4, 4, 4]
    assert set().union(*first) == {str(i) for i in range(12)}
    assert draw(answers[::-1], 0) == first
    assert draw(answers, 1) != first


def test_scores_and_lengths_of_an_iteration() -> None:
    batch = samples(0)
    batch[0] = with_generation(batch[0], finish_reason=FinishReason.LENGTH)
    (metrics,) = run(new_trainer(programs("ppo"), rows=2), [batch])
    scores = [sample.reward for sample in batch]
    lengths = [len(sample.generation.token_ids) for sample in batch]
    assert metrics["critic/score/mean"] == pytest.approx(np.mean(scores))
    assert (metrics["critic/score/min"], metrics["critic/score/max"]) == (min(scores), max(scores))
    assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["response_length/clip_ratio"] == 1 / 16
    taken = 0.05 * metrics["actor/reward_kl_penalty"] * sum(lengths) / 16
    assert metrics["critic/rewards/mean"] == pytest.approx(np.mean(scores) - taken)


def test_agreement_compares_the_tokens_of_the_trainers_version_only() -> None:
    steps = programs("grpo")
    trainer = new_trainer(steps, rows=2)
    batch = samples(0)
    scored = np.asarray(logprobs(steps.actor, trainer.state.actor.params, padded(batch), 0.7)[0])
    exact = []
    for row, sample in enumerate(batch):
        count = len(sample.generation.token_ids)
        start = len(sample.prompt.token_ids)
        exact.append(with_generation(sample, logprobs=scored[row, start : start + count]))
    off, stale = 5, next(i for i, s in enumerate(exact) if len(s.generation.token_ids) > 2 and i != 5)
    wrong = exact[off].generation.logprobs.copy()
    wrong[-1] -= 0.25
    exact[off] = with_generation(exact[off], logprobs=wrong)
    count = len(exact[stale].generation.token_ids)
    exact[stale] = with_generation(
        exact[stale],
        logprobs=exact[stale].generation.logprobs - 1.0,
        versions=(VersionRun(-1, count),),
    )
    for sample in exact:
        trainer.add(sample)
    result = trainer.end_iteration()
    assert result.metrics["training/rollout_tokens_other_version"] == count
    assert result.metrics["training/rollout_logprobs_diff_max"] == pytest.approx(0.25, abs=1e-5)
    assert result.metrics["training/rollout_logprobs_diff_p50"] < 1e-5
    worst = result.agreement.worst
    assert worst is not None
    assert (worst.sample, worst.index, worst.instance) == (exact[off].sample_id, len(wrong) - 1, "instance-0")


def test_missing_samples_are_named() -> None:
    trainer = new_trainer(programs("grpo"), rows=2)
    with pytest.raises(ValueError, match="no sample to train on"):
        trainer.end_iteration()
    trainer.begin_iteration(3)
    for sample in samples(0)[:6]:
        trainer.add(sample)
    with pytest.raises(ValueError, match=r"version 3: groups of 4 lack answers: \{'1': 2\}"):
        trainer.end_iteration()


def test_the_dtypes_stay_those_declared_under_bfloat16() -> None:
    """bfloat16 is for arithmetic, never for what is kept."""
    steps = Steps(
        programs("ppo").actor.arch, programs("ppo").mesh, config(model={"compute_dtype": "bfloat16"})
    )
    state, (actor_sum, critic_sum) = steps.abstract_state(), jax.eval_shape(steps.zero_gradients)
    rows = empty_rows(2, ROW)

    def iteration(state: Any, actor_sum: Any, critic_sum: Any, rows: Any) -> Any:
        critic_sum, prepared, _ = steps.learn_critic_on_arrival(state.critic.params, critic_sum, rows, None)
        actor_sum, _, logp = steps.learn_actor(state.actor.params, actor_sum, prepared, Whitening())
        new, _, _ = steps.apply(state, (actor_sum, critic_sum))
        return new, logp

    new, logp = jax.eval_shape(iteration, state, actor_sum, critic_sum, rows)
    assert logp.dtype == jnp.float32
    assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_a_policy_loss_of_ones_own_logs_its_statistics() -> None:
    def reinforce(inputs: PolicyInputs, settings: ActorSection) -> Any:
        return -inputs.logprobs * inputs.advantages, {"surprise": -inputs.logprobs}

    shared = programs("grpo")
    steps = Steps(shared.actor.arch, shared.mesh, shared.cfg, policy_loss=reinforce)
    rows = empty_rows(2, ROW)
    prepared, _ = jax.eval_shape(steps.estimate, None, rows, None)
    actor_sum, _ = jax.eval_shape(steps.zero_gradients)
    params = steps.actor.abstract_params()
    _, tally, _ = jax.eval_shape(steps.learn_actor, params, actor_sum, prepared, Whitening())
    assert tally.means.keys() == {"actor/surprise"}
    assert tally.spreads.keys() == {"critic/advantages", "rollout_corr/rho", "rollout_corr/rho_kl"}
    assert tally.weighted.keys() == {"actor/pg_loss", "actor/entropy"}


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_reaches_its_floor(scheduler: Any, expected: list[float]) -> None:
    settings = OptimSection(lr=1.0, lr_warmup_steps=2, lr_scheduler=scheduler, min_lr_ratio=0.1)
    rate = learning_rate(settings, total_steps=10)
    np.testing.assert_allclose(
        [float(jnp.asarray(rate(step))) for step in (0, 1, 2, 4, 6, 10)], expected, rtol=1e-6
    )


def test_the_actors_schedule_ends_with_the_run_though_it_began_after_the_critics_warm_up() -> None:
    optim = {"lr": 1e-2, "lr_scheduler": "linear", "min_lr_ratio": 0.0}
    cfg = config(
        trainer={"total_training_steps": 3},
        actor={"optim": optim},
        critic={"optim": optim, "warmup_steps": 1},
    )
    steps = Steps(programs("ppo").actor.arch, programs("ppo").mesh, cfg)
    results = run(new_trainer(steps, rows=2), [samples(i) for i in range(3)])
    assert [found["critic/lr"] for found in results] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    assert [found["actor/lr"] for found in results[1:]] == pytest.approx([0.01, 0.005])


def test_norms_and_biases_are_not_decayed() -> None:
    tree = decayed(random_params(programs("ppo").actor, 0))
    kept = {jax.tree_util.keystr(path) for path, on in jax.tree_util.tree_leaves_with_path(tree) if not on}
    assert all("scale" in name or "bias" in name for name in kept)
    assert any("scale" in name for name in kept)
    assert any("bias" in name for name in kept)
    assert tree["embedding"]["weight"] is True


def test_supervised_training_minimises_the_answers_cross_entropy() -> None:
    steps = programs("ppo")
    cfg = config(
        sft={"batch_size": 4, "steps": 60, "optim": {"lr": 1e-2}}, rollout={"n": 4, "temperature": 0.7}
    )
    # A prompt of its own for each answer, so that all can be learnt by heart.
    batch = [replace(s, prompt=Prompt(str(i), np.array([i], np.int32), {})) for i, s in enumerate(samples(0))]
    examples = [taught_answer(s.sample_id, s.prompt.token_ids, s.generation.token_ids) for s in batch]
    params = random_params(steps.actor, 0)
    trainer = SupervisedTrainer(steps.actor.arch, steps.mesh, cfg, params, longest=16)
    trainer.warm_up()
    rows = padded(batch)
    scored = np.asarray(logprobs(steps.actor, trainer.network.params, rows, 1.0)[0])
    expected = -(scored * rows.mask).sum() / rows.mask.sum()
    first = trainer.update(examples)
    assert first["sft/loss"] == pytest.approx(expected, rel=1e-5)
    assert first["sft/tokens"] == rows.mask.sum()
    assert trainer.greedy_accuracy(examples) < 0.5
    losses = [trainer.update(examples)["sft/loss"] for _ in range(59)]
    assert losses[-1] < 0.1
    assert trainer.greedy_accuracy(examples) == 1.0
