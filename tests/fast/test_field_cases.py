"""Faults seen in the field, each with its right value, through the project's own functions.

`docs/field_cases.md` says in a line what each case is and what is done about it. What only a real engine can show is in
`tests/engine/test_field_cases.py`. Those who look for the general rule behind a case find it in the file of the part.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from streamrl_jax.bridge import names
from streamrl_jax.bridge.blob import map_blob
from streamrl_jax.bridge.manifest import Target, check_targets, pack, read_tensor
from streamrl_jax.bridge.publish import Publisher
from streamrl_jax.config import AlgorithmSection, Config, DataSection
from streamrl_jax.control.events import EventKind
from streamrl_jax.control.partials import ending, resumable
from streamrl_jax.data import load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.admission import sampling_fault
from streamrl_jax.gen.codec import assignment_from_proto, assignment_to_proto
from streamrl_jax.gen.translate import sampled_logprobs
from streamrl_jax.samples_log import SampleLog, read_samples
from streamrl_jax.setup.instances import standalone_spec
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.train.advantage import gae, group_advantage, whitening
from streamrl_jax.train.answer import check_vocabulary, sampled_answer, taught_answer
from streamrl_jax.train.batcher import pack_all
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import Frontier, Meta
from streamrl_jax.train.hf import load_params, save_params
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.kl import kl_estimate
from streamrl_jax.train.logprob import token_logprobs
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Model, Params
from streamrl_jax.train.models.layers import rope_tables
from streamrl_jax.train.moments import moments
from streamrl_jax.train.recorder import staleness_metrics
from streamrl_jax.train.rollouts import newest_admitted, training_sampling
from streamrl_jax.train.sft import SupervisedTrainer
from streamrl_jax.train.shapes import BatchShape, Shape
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Partial,
    Prompt,
    Sample,
    Sampling,
    VersionRun,
    expand_runs,
)
from tests.fakes import FakeEngine

from .control_world import SETTINGS, HeldEngine, World, check_answer, job, running
from .test_tokenizer import byte_level_bpe, with_bos, write_checkpoint
from .tiny import random_params, tiny_arch, tiny_model
from .tiny_training import ROW, config, new_trainer, programs, run, samples, with_generation

ROWS = 8
"""Of a micro-batch where nothing else is said: one shape to compile."""

# ------------------------------------------------------------------ made-up answers and a trainer for them


def answered(
    length: int, reward: float, *, prompt: int = 0, member: int = 0, reason: FinishReason = FinishReason.STOP
) -> Sample:
    """An answer of so many tokens; prompts and answers are made of ids of the tiny model."""
    ids = (np.arange(length) * 5 + prompt + member) % 48
    logprobs = np.full(length, -3.0, np.float32)
    sample_id = f"train/0/{prompt}/{member}"
    versions = (VersionRun(0, length),)
    generation = Generation(sample_id, 0, ids.astype(np.int32), logprobs, versions, reason, "instance-0")
    return Sample(
        sample_id, 0, Prompt(str(prompt), np.array([7, prompt], np.int32), {}), member, generation, reward
    )


def one_shape(rows: int, length: int) -> BatchShape:
    """Micro-batches of so many rows."""
    return BatchShape((Shape(rows, length),))


def minus_the_score(inputs: Any, settings: Any) -> Any:
    """A token's loss is minus its advantage, with the gradient of the policy's."""
    return -inputs.advantages * jnp.exp(inputs.logprobs - jax.lax.stop_gradient(inputs.logprobs)), {}


def as_they_are(scores: np.ndarray) -> np.ndarray:
    """A group advantage: the scores themselves, so that a test can choose the losses."""
    return scores


@lru_cache(maxsize=1)
def plain_programs() -> Steps:
    """GRPO with two answers a prompt and a loss that a test can choose; cut answers are left out."""
    cfg = config(
        rollout={"n": 2},
        algorithm={"adv_estimator": "grpo", "mask_truncated_completions": True},
    )
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return Steps(tiny_arch(num_hidden_layers=1), mesh, cfg, policy_loss=minus_the_score)


def trained(given: list[Sample], *, rows: int) -> tuple[dict[str, float], Any]:
    """One iteration with one answer a row and so many rows a micro-batch: its metrics and the new parameters."""
    steps = plain_programs()
    trainer = Trainer(
        steps,
        steps.init_state(random_params(steps.actor, 0), None),
        group_advantage=as_they_are,
        shape=one_shape(rows, ROW),
        pack=False,
    )
    (metrics,) = run(trainer, [given])
    return metrics, jax.device_get(trainer.state.actor.params)


def logits_of(model: Model, params: Params, rows: Any) -> jax.Array:
    """Logits at every token of packed rows, all at once."""

    def forward(params: Params, tokens: Any, positions: Any, segment_ids: Any) -> jax.Array:
        return model.hidden_states(params, tokens, positions, segment_ids) @ model.head_weight(params).T

    return jax.jit(forward)(params, rows.tokens, rows.positions, rows.segment_ids)


def assert_trees_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), found, expected)


def one_row(*columns: list[float]) -> list[Any]:
    return [np.array([column], np.float32) for column in columns]


# ------------------------------------------------------------------ what was sampled, and with which probability


@pytest.mark.parametrize("changed", [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_case_01_truncated_sampling_is_refused_for_training(changed: dict[str, Any]) -> None:
    """p = [.5, .3, .2] cut to two survivors would be sampled with .625 and trained with .5: a ratio of .8."""
    (name,) = changed
    with pytest.raises(ValidationError, match=rf"rollout\.{name} = .* truncates the distribution"):
        Config.model_validate({"rollout": changed})
    sampling = replace(training_sampling(Config(), (1,)), **changed)
    assert f"sampling.{name}" in sampling_fault(sampling), "an instance refuses it too"
    assert sampling_fault(replace(sampling, evaluation=True)) == ""


def test_case_01_what_is_sampled_and_trained_untruncated_has_ratio_one() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    assert log_prob_of(logits, token=0, temperature=1.0) == pytest.approx(np.log(0.5), abs=1e-6)


def log_prob_of(logits: np.ndarray, *, token: int, temperature: float, limit: int | None = None) -> float:
    """The trainer's log-prob of a token that follows a state with these logits."""
    hidden = jnp.asarray(np.stack([logits, logits])[None], jnp.float32)
    head = jnp.eye(len(logits), dtype=jnp.float32)
    tokens, segments = jnp.array([[0, token]]), jnp.ones((1, 2), jnp.int32)
    score = jax.jit(partial(token_logprobs, temperature=temperature, chunk=0, vocab_limit=limit))
    return float(score(hidden, head, tokens, segments)[0][0, 1])


@pytest.mark.parametrize(("token", "right"), [(0, -0.2026), (1, -1.8692), (2, -3.5359)])
def test_case_02_log_probs_are_those_at_the_sampling_temperature(token: int, right: float) -> None:
    """log_softmax([2, 1, 0] / 0.6); at temperature 1 the first would be -0.4076."""
    cfg = Config.model_validate({"rollout": {"temperature": 0.6}})
    sampling = training_sampling(cfg, ())
    assert sampling.temperature == 0.6
    found = log_prob_of(np.array([2.0, 1.0, 0.0]), token=token, temperature=sampling.temperature)
    assert found == pytest.approx(right, abs=1e-4)


def test_case_02_trainer_scores_at_the_temperature_of_the_rollout() -> None:
    """The tiny runs sample at 0.7, and `score` is what agreement, reference and proximal policy are taken from."""
    steps = programs("grpo")
    assert steps.cfg.rollout.temperature == 0.7
    params = random_params(steps.actor, 0)
    (micro,) = pack_all([sampled_answer(answered(9, 1.0))], one_shape(ROWS, ROW))
    rows = steps.place(micro.rows)
    logits = np.asarray(logits_of(steps.actor, params, micro.rows)[0], np.float64) / 0.7
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = np.asarray(steps.score(params, rows))[0]
    for place in range(2, 11):
        assert found[place] == pytest.approx(expected[place - 1, micro.rows.tokens[0, place]], abs=1e-5)


def test_case_03_the_sampled_ids_entry_is_taken_whatever_the_order() -> None:
    """vLLM's flat form of two positions, in which the sampled ids 7 and 3 stand last and first."""
    positions = [{9: -0.1, 7: -2.0}, {3: -1.5, 9: -0.3, 1: -2.5}]
    ends = np.cumsum([len(position) for position in positions]).tolist()
    flat = SimpleNamespace(
        token_ids=[token for position in positions for token in position],
        logprobs=[value for position in positions for value in position.values()],
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
    )
    assert sampled_logprobs([7, 3], flat).tolist() == [-2.0, -1.5]


# ------------------------------------------------------------------ packing, advantages


def test_case_04_two_sequences_in_one_row_are_as_if_alone() -> None:
    steps = programs("grpo")
    params = random_params(steps.actor, 0)
    first, second = sampled_answer(answered(5, 1.0)), sampled_answer(answered(8, 0.0, prompt=1))

    def scored(*answers: Any) -> tuple[dict[str, np.ndarray], Any]:
        (micro,) = pack_all(answers, one_shape(ROWS, ROW))
        logp = np.asarray(steps.score(params, steps.place(micro.rows)))
        return {p.answer.name: logp[p.response] for p in micro.placements}, micro.rows

    together, rows = scored(first, second)
    assert rows.segment_ids[0, :18].tolist() == [1] * 10 + [2] * 7 + [0]
    assert rows.positions[0, :18].tolist() == [*range(10), *range(7), 0]
    for answer in (first, second):
        alone, _ = scored(answer)
        np.testing.assert_allclose(together[answer.name], alone[answer.name], atol=2e-6)


def test_case_04_loss_advantages_values_and_gradient_do_not_depend_on_packing() -> None:
    """PPO with critic, KL in reward and loss, two iterations, so that the second starts from what the first did."""
    iterations = [samples(0, seed=4), samples(1, seed=4)]
    packed, alone = (new_trainer(programs("ppo"), rows=ROWS, pack=pack) for pack in (True, False))
    of_the_split = {"training/micro_batches", "training/padding_share"}
    for one, other in zip(run(packed, iterations), run(alone, iterations), strict=True):
        assert one["training/padding_share"] < other["training/padding_share"]
        for name in one.keys() - of_the_split:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=2e-6), name
    assert_trees_close(jax.device_get(packed.state), jax.device_get(alone.state))


@pytest.mark.parametrize(
    ("mask", "rewards", "values", "lam", "right"),
    [
        pytest.param([1, 1, 0], [0, 1, 0], [0, 0, 100], 0.95, [0.95, 1, 0], id="case 5: padding"),
        pytest.param([1, 0, 1], [0, 0, 1], [0.5, 9, 0.5], 1.0, [0.5, 0, 0.5], id="case 6: passed over"),
        pytest.param([1, 0, 1], [0, 0, 1], [0.5, 9, 0.5], 0.95, [0.475, 0, 0.5], id="case 6: lambda"),
    ],
)
def test_case_05_and_case_06_gae_passes_masked_tokens_over(
    mask: list[float], rewards: list[float], values: list[float], lam: float, right: list[float]
) -> None:
    kept, reward_row, value_row = one_row(mask, rewards, values)
    segments = jnp.ones((1, 3), jnp.int32)
    estimate = jax.jit(partial(gae, gamma=1.0, lam=lam))
    advantages, _ = estimate(reward_row, value_row, kept.astype(bool), segments)
    np.testing.assert_allclose(advantages[0], right, rtol=1e-6)


def test_case_05_whitening_uses_masked_mean_and_variance() -> None:
    """Of [.95, 1, (100)] mean .975 and deviation .025 remain."""
    values, mask = one_row([0.95, 1.0, 100.0])[0], np.array([[True, True, False]])
    found = whitening(jax.device_get(jax.jit(moments)(values, mask)))
    assert found.mean == pytest.approx(0.975, abs=1e-6)
    np.testing.assert_allclose((values[0, :2] - found.mean) * found.scale, [-1.0, 1.0], rtol=1e-4)


# ------------------------------------------------------------------ denominators


@pytest.mark.parametrize("rows", [1, 2])
def test_case_07_token_mean_under_micro_batching(rows: int) -> None:
    """A: one token of loss 4. B: three tokens of loss 0. A mean of means would be 2."""
    given = [answered(1, -4.0), answered(3, 0.0, member=1)]
    metrics, params = trained(given, rows=rows)
    assert metrics["training/micro_batches"] == 2 / rows
    assert metrics["actor/pg_loss"] == pytest.approx(1.0, abs=1e-6)
    whole, expected = trained(given, rows=2)
    assert metrics["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-5)
    assert_trees_close(params, expected)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("masked_loss", [0.0, 1.0, 100.0])
def test_case_08_masked_samples_are_in_no_denominator(rows: int, masked_loss: float) -> None:
    """Two kept tokens of loss 1; six of an answer that the length limit cut, whatever their loss."""
    cut = answered(6, -masked_loss, member=1, reason=FinishReason.LENGTH)
    metrics, params = trained([answered(2, -1.0), cut], rows=rows)
    assert metrics["actor/pg_loss"] == pytest.approx(1.0, abs=1e-6)
    _, expected = trained([answered(2, -1.0), replace(cut, reward=0.0)], rows=2)
    assert_trees_close(params, expected)


def test_case_09_what_is_logged_does_not_depend_on_the_number_of_micro_batches() -> None:
    given = [
        answered(length, reward, prompt=prompt, member=member)
        for (length, reward), (prompt, member) in zip(
            [(1, -4.0), (3, 0.5), (7, 1.0), (2, -0.25)], [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True
        )
    ]
    found = {rows: trained(given, rows=rows)[0] for rows in (4, 2, 1)}
    assert {rows: metrics["training/micro_batches"] for rows, metrics in found.items()} == {4: 1, 2: 2, 1: 4}
    right = (1 * 4.0 - 3 * 0.5 - 7 * 1.0 + 2 * 0.25) / 13
    for metrics in found.values():
        assert metrics["actor/pg_loss"] == pytest.approx(right, rel=1e-5)
        for name in ("actor/grad_norm", "actor/entropy", "critic/advantages/mean"):
            assert metrics[name] == pytest.approx(found[4][name], rel=1e-5), name


# ------------------------------------------------------------------ groups, KL


ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


def of_group(estimator: str, scores: Any) -> np.ndarray:
    return group_advantage(AlgorithmSection.model_validate({"adv_estimator": estimator}))(
        np.asarray(scores, np.float64)
    )


def test_case_10_leave_one_out_gives_the_only_winner_one() -> None:
    np.testing.assert_allclose(of_group("rloo", [1.0, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_10_equal_scores_give_exactly_zero(estimator: str) -> None:
    """Eight times 0.35 in float32; then as sums in another order leave it, one last bit apart."""
    score = np.float32(0.35)
    apart = [np.nextafter(score, np.float32(1)), *[score] * 7]
    for scores in ([score] * 8, apart, [0.0] * 8):
        assert of_group(estimator, scores).tolist() == [0.0] * 8


def test_case_10_a_group_without_spread_leaves_no_gradient() -> None:
    """Through the trainer: what is exactly 0 moves nothing; the update's decay is all that happens."""
    equal = [replace(sample, reward=float(np.float32(0.35))) for sample in samples(0)]
    (metrics,) = run(new_trainer(programs("grpo"), rows=ROWS), [equal])
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_10_a_group_of_one_is_an_error(estimator: str) -> None:
    with pytest.raises(ValidationError, match=r"rollout\.n = 1: a group of one has no baseline"):
        Config.model_validate({"rollout": {"n": 1}, "algorithm": {"adv_estimator": estimator}})
    with pytest.raises(ValueError, match="group of 1 has no baseline"):
        of_group(estimator, [1.0])


@pytest.mark.parametrize(("kind", "right"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.004837), ("k3+", 0.004837)])
def test_case_11_kl_estimates(kind: Any, right: float) -> None:
    logp, reference = jnp.array([-1.0]), jnp.array([-1.1])
    assert float(kl_estimate(logp, reference, kind)[0]) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3+"])
def test_case_11_the_gradient_of_k2_is_that_of_the_kl(kind: Any) -> None:
    gradient = jax.grad(lambda logp: kl_estimate(logp, jnp.array([-1.1]), kind)[0])(jnp.array([-1.0]))
    assert float(gradient[0]) == pytest.approx(0.1, abs=1e-6)


def test_case_11_the_logged_kl_is_masked_and_not_scaled() -> None:
    """It is the estimate's mean over the answers' tokens, not over the prompts', and without the loss's coefficient."""
    steps = programs("ppo")
    assert steps.cfg.actor.use_kl_loss and steps.cfg.actor.kl_loss_coef == 0.1
    batch = samples(0, seed=5)
    (metrics,) = run(new_trainer(steps, rows=ROWS), [batch])
    micros = pack_all([sampled_answer(sample) for sample in batch], one_shape(ROWS, ROW))
    policy, reference = (
        random_params(steps.actor, 0),
        random_params(steps.actor, 2),
    )  # as `new_trainer` has them
    estimates: list[np.ndarray] = []
    for micro in micros:
        rows = steps.place(micro.rows)
        d = np.asarray(steps.score(reference, rows), np.float64) - np.asarray(steps.score(policy, rows))
        estimates += [np.expm1(d[p.response]) - d[p.response] for p in micro.placements]
    assert metrics["actor/kl_loss"] == pytest.approx(np.concatenate(estimates).mean(), rel=1e-4)


# ------------------------------------------------------------------ checkpoints, pushes, exports


def test_case_12_a_tied_model_is_pushed_with_its_head_and_exported_without(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    steps = programs("grpo")
    arch = steps.actor.arch
    assert arch.tied
    trainer = new_trainer(steps, rows=ROWS)
    run(trainer, [samples(0)])
    params = trainer.state.actor.params
    new = np.asarray(params["embedding"]["weight"])
    assert (new != np.asarray(random_params(steps.actor, 0)["embedding"]["weight"])).any()
    with Publisher(arch, "float32", Fence("run", 0), [tmp_path]) as publisher:
        published = publisher.publish(params, 1).future.result(60)
        blob = map_blob(published.path, published.manifest.total_bytes)
        pushed = {spec.name: read_tensor(blob, spec) for spec in published.manifest.tensors}
    np.testing.assert_array_equal(pushed[names.EMBEDDING_NAME], new)
    np.testing.assert_array_equal(pushed[names.HEAD_NAME], new)

    save_params(params, arch, tmp_path / "out", source=None)
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert names.HEAD_NAME not in set(file.keys())
    ids = np.array([[5, 9, 17, 3, 40, 2, 2, 8]], np.int32)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        expected = model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    rows = SimpleNamespace(tokens=ids, positions=positions, segment_ids=np.ones_like(ids))
    np.testing.assert_allclose(logits_of(steps.actor, params, rows), expected, atol=1e-4)


def test_case_13_each_target_is_written_once_and_all_faults_are_listed() -> None:
    """Grouped heads, stacked layers: each name of the checkpoint once. The receiver names all that does not fit.

    That the receiver's fused and split parameters are each written once is asked of vLLM's own model
    (`streamrl_jax.gen.targets`; on two ranks in tests/engine/test_engine_end.py).
    """
    arch = tiny_arch(num_key_value_heads=2, num_attention_heads=4)
    params = jax.tree.map(np.asarray, random_params(tiny_model(arch), 0))
    tensors = list(names.to_checkpoint(arch, params, explicit_head=True))
    assert max(Counter(name for name, _ in tensors).values()) == 1
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors}
    targets = {name: Target(array.shape, "float32") for name, array in arrays.items()}
    lost = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    more = {"model.layers.2.mlp.up_proj.weight": np.zeros((40, 32), np.float32)}
    given = {name: array for name, array in arrays.items() if name not in lost} | more
    manifest, _ = pack(Fence("run", 0), 1, "Qwen2ForCausalLM", given)
    faults = check_targets(manifest, targets)
    assert len(faults) == 3 and all(any(name in fault for fault in faults) for name in [*lost, *more])
    shapes = {name: array.shape for name, array in given.items() if name != names.HEAD_NAME}
    with pytest.raises(UserError) as error:
        names.check_names(arch, shapes, "a checkpoint")
    assert all(name in str(error.value) for name in [*lost, *more])


def padded_checkpoint(path: Path, **generation_config: Any) -> Path:
    """400 ids at the most, 512 rows of the embedding."""
    return write_checkpoint(path, byte_level_bpe(), generation_config=generation_config or None)


def test_case_14_ids_that_pad_the_vocabulary_have_no_probability_in_training() -> None:
    """Five logits, of which the tokenizer has three: the softmax is over three, and the others get no gradient."""
    logits = np.array([2.0, 1.0, 0.0, 9.0, 9.0])
    assert log_prob_of(logits, token=1, temperature=1.0, limit=3) == pytest.approx(-1.4076, abs=1e-4)
    assert log_prob_of(logits, token=1, temperature=1.0) < -8

    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 4)), jnp.float32)
    head = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)), jnp.float32)
    tokens, segments = jnp.array([[0, 1, 2, 0, 1, 2]]), jnp.ones((1, 6), jnp.int32)

    def loss(hidden: jax.Array, head: jax.Array, limit: int | None, chunk: int) -> jax.Array:
        logp, entropy = token_logprobs(
            hidden, head, tokens, segments, temperature=0.7, chunk=chunk, vocab_limit=limit
        )
        return jnp.sum(logp * jnp.arange(6.0)) + 0.3 * jnp.sum(entropy)

    # As if the head had only the tokenizer's rows.
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=(2, 3))
    value, (to_hidden, to_head) = both(hidden, head[:3], None, 0)
    for chunk in (0, 2):
        found, (hidden_found, head_found) = both(hidden, head, 3, chunk)
        assert float(found) == pytest.approx(float(value), rel=1e-5)
        np.testing.assert_allclose(hidden_found, to_hidden, atol=1e-5)
        np.testing.assert_allclose(head_found[:3], to_head, atol=1e-5)
        assert not np.asarray(head_found[3:]).any()


def test_case_14_one_number_tells_both_sides(tmp_path: Path) -> None:
    """It is the tokenizer's, added tokens included, and travels to an instance in its spec."""
    directory = padded_checkpoint(tmp_path / "m")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.vocab_size < tokenizer.model_vocab_size == 512
    assert tokenizer.vocab_limit(masked=True) == tokenizer.vocab_size
    assert tokenizer.vocab_limit(masked=False) is None
    backend = byte_level_bpe()
    backend.add_special_tokens(["<|added|>"])
    added = Tokenizer.load(write_checkpoint(tmp_path / "added", backend))
    assert added.vocab_limit(masked=True) == tokenizer.vocab_size + 1
    for masked in (True, False):
        cfg = config(rollout={"mask_padded_vocab": masked})
        spec = standalone_spec(cfg, directory, "127.0.0.1:7001", AccessFiles())
        assert spec.engine.vocab_limit == tokenizer.vocab_limit(masked=masked)
    exact = Tokenizer.load(write_toy_checkpoint(tmp_path / "toy", seed=0))
    assert exact.vocab_limit(masked=True) is None


def test_case_14_an_instance_that_samples_padding_is_named() -> None:
    """An endpoint that was started with another configuration than the run's."""
    sample = with_generation(answered(3, 1.0), token_ids=np.array([5, 39, 40], np.int32))
    check_vocabulary(sampled_answer(sample), 41)
    check_vocabulary(sampled_answer(sample), None)
    shared = programs("grpo")
    steps = Steps(shared.actor.arch, shared.mesh, shared.cfg, vocab_limit=40)
    with pytest.raises(UserError, match=r"train/0/0/0 from instance-0: token id 40 .* the tokenizer's 40"):
        new_trainer(steps, rows=ROWS).add(sample)


def test_case_14_a_supervised_start_does_not_count_padding() -> None:
    """The model would end every answer with an id of the padding: greedy decoding, masked, does not."""
    arch = tiny_arch(num_hidden_layers=1, tie_word_embeddings=False)
    model = tiny_model(arch)
    params = random_params(model, 0)
    head = params["lm_head"]["weight"]
    tokens = np.array([[7, 3, 9, 4, 8, 2]], np.int32)
    rows = SimpleNamespace(
        tokens=tokens, positions=np.arange(6, dtype=np.int32)[None], segment_ids=np.ones_like(tokens)
    )
    logits = np.asarray(logits_of(model, params, rows))[0, 0]
    best = int(logits[:40].argmax())
    params["lm_head"]["weight"] = jax.device_put(head.at[40:].multiply(50.0), head.sharding)
    assert int(np.asarray(logits_of(model, params, rows))[0, 0].argmax()) >= 40
    example = taught_answer("one", np.array([7], np.int32), np.array([best], np.int32))
    cfg = config(sft={"batch_size": 1})
    trainer = SupervisedTrainer(arch, model.mesh, cfg, params, longest=16, vocab_limit=40)
    assert trainer.greedy_accuracy([example]) == 1.0


def test_case_14_a_checkpoint_whose_answers_could_never_end_is_refused(tmp_path: Path) -> None:
    directory = padded_checkpoint(tmp_path / "m", eos_token_id=[500, 501])
    (directory / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(directory)
    with pytest.raises(UserError, match=r"the end-of-sequence ids \[500, 501\] .* answers would never end"):
        tokenizer.vocab_limit(masked=True)
    assert tokenizer.vocab_limit(masked=False) is None


def test_case_15_the_dtypes_after_several_steps_are_those_declared() -> None:
    """bfloat16 is for arithmetic and for what is shipped; parameters, moments and tables stay float32."""
    cfg = config(model={"compute_dtype": "bfloat16"}, algorithm={"adv_estimator": "grpo"})
    steps = Steps(programs("grpo").actor.arch, programs("grpo").mesh, cfg)
    trainer = new_trainer(steps, rows=ROWS)
    declared = jax.tree.map(lambda leaf: leaf.dtype, steps.abstract_state())
    run(trainer, [samples(iteration) for iteration in range(3)])
    assert int(trainer.state.updates) == 3
    assert jax.tree.map(lambda leaf: leaf.dtype, trainer.state) == declared
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state.actor.params)} == {jnp.dtype("float32")}
    arch = steps.actor.arch
    for table in rope_tables(jnp.arange(8)[None], arch.rope.frequencies(arch.head_dim)):
        assert table.dtype == jnp.float32


def test_case_15_the_bridge_ships_the_generators_dtype_and_leaves_the_masters(tmp_path: Path) -> None:
    steps = programs("grpo")
    params = random_params(steps.actor, 0)
    with Publisher(steps.actor.arch, "bfloat16", Fence("run", 0), [tmp_path]) as publisher:
        published = publisher.publish(params, 0).future.result(60)
    assert {spec.dtype for spec in published.manifest.tensors} == {"bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


# ------------------------------------------------------------------ instances, resumes


def test_case_17_an_instance_killed_in_mid_batch_costs_no_sample_and_doubles_none() -> None:
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=8, tokens_per_s=200, length=lambda a: 12))
    with running(world) as run:
        world.now("a").hang()  # it holds some until it is killed
        run.controller.submit(job(0, count=25, n=4))
        found: Counter[str] = Counter()
        for sample in run.controller.samples("train/0", 60):
            check_answer(sample.prompt, sample.generation)
            found[sample.sample_id] += 1
            if found.total() == 20:
                world.now("a").kill()
        assert set(found.values()) == {1} and len(found) == 100
        assert [event.instance for event in run.seen(EventKind.LOST)] == ["a"]


def test_case_18_a_resume_repeats_prompts_versions_and_losses(tmp_path: Path) -> None:
    """Killed in mid-step, after one whole iteration. (Real processes, kill -9: tests/fast/test_replay.py.)"""
    recorded = [samples(iteration) for iteration in range(3)]
    through = run(new_trainer(programs("grpo"), rows=ROWS, pack=False), recorded)

    first = new_trainer(programs("grpo"), rows=ROWS, pack=False)
    run(first, recorded[:1])
    with Checkpointer(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, first.state, Meta(1, 1, 0, Frontier(1), ""))
        checkpoints.wait()
    first.begin_iteration(1)
    for sample in recorded[1][:13]:  # gradients have been accumulated, and are lost with the process
        first.add(sample)
    assert first.accumulated > 0

    again = new_trainer(programs("grpo"), rows=ROWS, pack=False)
    with Checkpointer(tmp_path / "checkpoints", keep=1) as checkpoints:
        again.state, meta = checkpoints.restore(None, programs("grpo").abstract_state())
    assert meta.version == meta.frontier.iteration == 1
    for iteration in range(meta.version, 3):
        again.begin_iteration(iteration)
        for sample in recorded[iteration]:
            again.add(sample)
        metrics = again.end_iteration().metrics
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
            assert metrics[name] == through[iteration][name], name


def test_case_18_prompts_are_a_function_of_iteration_and_seed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_toy_checkpoint(tmp_path / "toy", seed=0))
    data = DataSection(train="task:arithmetic", train_batch_size=4)
    lives = [load_prompts(data, tokenizer, "train", seed=3) for _ in range(2)]
    for prompt in range(6):
        ids = [[p.prompt_id for p in life.iteration(prompt)] for life in lives]
        assert ids[0] == ids[1]


def test_case_18_weights_are_pushed_before_the_first_prompt() -> None:
    """A resumed run at version 3: nothing is answered before version 3 is there."""
    world = World(("a",))
    with running(world, version=None) as run:
        run.controller.submit(job(3))
        run.controller.wait_ready(60)
        run.publish(3).result(60)
        versions = [expand_runs(s.generation.versions) for s in run.controller.samples("train/3", 60)]
        assert set(np.concatenate(versions)) == {3}
        log = [line for line in world.now("a").engine.log if line != "forget"]
        assert log[0] == "update 3" and log[1].startswith("start train/3")


# ------------------------------------------------------------------ tokens and lengths


def test_case_19_a_template_that_writes_bos_gives_one(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path / "m", with_bos(), template=template))
    assert tokenizer.bos_id is not None
    ids = tokenizer.encode_chat([{"role": "user", "content": "the sum"}]).tolist()
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    for text in ("the sum", "<s>the sum"):
        assert tokenizer.encode_prompt(text).tolist() == ids


def test_case_19_an_eos_that_is_also_padding_is_trained_on(tmp_path: Path) -> None:
    """EOS = padding = 1: in the prompt, in the answer's middle and at its end; the mask follows the lengths."""
    config_files = {"eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = Tokenizer.load(
        write_checkpoint(tmp_path / "m", byte_level_bpe(), tokenizer_config=config_files)
    )
    eos = tokenizer.pad_id
    assert eos == tokenizer.eos_ids[0] == 1
    sample = with_generation(
        replace(answered(4, 1.0), prompt=Prompt("0", np.array([5, eos], np.int32), {})),
        token_ids=np.array([9, eos, 8, eos], np.int32),
    )
    (micro,) = pack_all([sampled_answer(sample)], one_shape(1, 16))
    assert micro.rows.tokens[0, :7].tolist() == [5, eos, 9, eos, 8, eos, 0]
    assert micro.rows.response_mask[0].tolist() == [False] * 2 + [True] * 4 + [False] * 10
    assert micro.rows.segment_ids[0].tolist() == [1] * 6 + [0] * 10


def beginning(tokens: int) -> Partial:
    return Partial(
        np.arange(1, tokens + 1, dtype=np.int32), np.full(tokens, -1.0, np.float32), (VersionRun(0, tokens),)
    )


@pytest.mark.parametrize("told", [1, 3, 7])
def test_case_20_a_resumed_answer_stays_within_the_limit(told: int) -> None:
    """Of 8 tokens: what an instance may add is the rest of the limit."""
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(0,))
    assert ending(beginning(told), sampling) is None
    left = resumable(beginning(told), min_version=0)
    assert left is not None
    given = Assignment("s", 1, np.array([5], np.int32), sampling, resumed=left)
    received = assignment_from_proto(assignment_to_proto(given))
    assert received.resumed is not None and len(received.resumed.token_ids) == told
    # `translate.sampling_parameters` takes the same difference, tested on vLLM.
    assert received.sampling.longest - len(received.resumed.token_ids) == 8 - told > 0


def test_case_20_an_answer_of_which_only_the_end_was_not_heard_is_not_drawn_on() -> None:
    """All 8 tokens are there: it is finished as it is, and an instance would refuse to go on with it."""
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(0,))
    end = ending(beginning(8), sampling)
    assert end is not None and end[1] is FinishReason.LENGTH
    np.testing.assert_array_equal(end[0].token_ids, np.arange(1, 9))
    given = Assignment("s", 1, np.array([5], np.int32), sampling, resumed=beginning(8))
    with pytest.raises(ValueError, match="leaves none"):
        assignment_from_proto(assignment_to_proto(given))


def test_case_20_the_finish_reason_is_kept_and_no_answer_passes_the_limit() -> None:
    """Every answer is cut by the limit; the instance is killed with partial answers known."""

    def engine(name: str, life: int) -> FakeEngine:
        stop = 0 if life else 8
        return HeldEngine(slots=8, tokens_per_s=200, length=lambda a: 99, held_at=lambda a: stop)

    world = World(("a",), engine)
    with running(world, replace(SETTINGS, progress_interval_s=0.01)) as run:
        run.controller.submit(job(0, count=4, n=2))
        run.wait_for(lambda: run.controller.sizes()["partials"] == 8)
        world.now("a").kill()
        found = list(run.controller.samples("train/0", 60))
    assert {len(sample.generation.token_ids) for sample in found} == {32}
    assert {sample.generation.finish_reason for sample in found} == {FinishReason.LENGTH}
    assert all(sampled_answer(sample).truncated for sample in found)


def test_case_20_a_prompt_that_is_too_long_is_refused_or_dropped_with_a_count(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_toy_checkpoint(tmp_path / "toy", seed=0))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * length}) + "\n" for length in (4, 9)))
    data = DataSection(train=str(file), max_prompt_length=5)
    with pytest.raises(UserError, match=r"line 2: the prompt has 9 tokens"):
        load_prompts(data, tokenizer, "train", seed=0)
    kept = load_prompts(data.model_copy(update={"overlong_prompts": "drop"}), tokenizer, "train", seed=0)
    assert kept.dropped == 1 and [len(prompt.token_ids) for prompt in kept.all()] == [4]


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_case_21_every_end_of_sequence_id_survives_the_export(tmp_path: Path, where: str) -> None:
    """They end answers in training too, beside the tokenizer's own."""
    source = write_toy_checkpoint(tmp_path / "toy", seed=0)
    own = Tokenizer.load(source).eos_ids[0]
    ids = [own, 7, 9]
    (source / "generation_config.json").unlink(missing_ok=True)
    settings = json.loads((source / where).read_text()) if (source / where).exists() else {}
    (source / where).write_text(json.dumps(settings | {"eos_token_id": ids}))
    assert Tokenizer.load(source).eos_ids == (own, 7, 9)
    arch = read_arch(source)
    save_params(load_params(source, tiny_model(arch)), arch, tmp_path / "out", source=source)
    assert json.loads((tmp_path / "out" / where).read_text())["eos_token_id"] == ids
    assert Tokenizer.load(tmp_path / "out").eos_ids == (own, 7, 9)


def test_case_22_bound_zero_means_the_trainers_own_version() -> None:
    assert [newest_admitted(version, 0, 10) for version in range(3)] == [0, 1, 2]
    world = World(("a", "b"), lambda name, life: FakeEngine(tokens_per_s=3000))
    with running(world) as run:
        for version in range(4):
            run.controller.submit(job(newest_admitted(version, 0, 10)))
            found = list(run.controller.samples(f"train/{version}", 60))
            assert staleness_metrics(found, version)["training/staleness/max"] == 0.0
            assert {int(v) for s in found for v in expand_runs(s.generation.versions)} == {version}
            run.publish(version + 1)


def test_case_23_the_returned_ids_are_trained_on_and_recorded(tmp_path: Path) -> None:
    """The policy wrote three ids for what the tokenizer writes with fewer."""
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path / "m", byte_level_bpe()))
    ids = [int(tokenizer.encode(letter, special_tokens=False)[0]) for letter in "the"]
    again = tokenizer.encode(tokenizer.decode(ids), special_tokens=False).tolist()
    assert tokenizer.decode(again) == tokenizer.decode(ids) == "the" and again != ids
    sample = with_generation(answered(3, 1.0), token_ids=np.array(ids, np.int32))
    (micro,) = pack_all([sampled_answer(sample)], one_shape(1, 16))
    assert micro.rows.tokens[micro.placements[0].response].tolist() == ids
    (tmp_path / "samples").mkdir()
    SampleLog(tmp_path / "samples", Fence("run", 0), tokenizer.decode).write(0, [sample], 0)
    (read,) = read_samples(tmp_path, 0)
    assert read.generation.token_ids.tolist() == ids


# ------------------------------------------------------------------ the page


HERE, ENGINE = "tests/fast/test_field_cases.py", "tests/engine/test_field_cases.py"
REPOSITORY = Path(__file__).parents[2]


def names_of_tests(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (REPOSITORY / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_case_has_a_test_and_a_line_whose_tests_exist() -> None:
    numbers = {
        int(n)
        for file in (HERE, ENGINE)
        for name in names_of_tests(file)
        for n in re.findall(r"case_(\d+)", name)
    }
    assert numbers == set(range(1, 24))
    page = (REPOSITORY / "docs" / "field_cases.md").read_text(encoding="utf-8")
    lines = {int(number): text for number, text in re.findall(r"^\| (\d+) \|(.*)$", page, re.MULTILINE)}
    assert list(lines) == list(range(1, 24))
    told: set[str] = set()
    for number, text in lines.items():
        named = re.findall(r"`(?:([\w/]+\.py):)?(test_\w+)`", text)
        assert any(f"case_{number:02}" in name for _, name in named), number
        for file, name in named:
            assert name in names_of_tests(file or HERE), f"case {number}: {name}"
            told.add(name)
    cases = {
        name
        for file in (HERE, ENGINE)
        for name in names_of_tests(file)
        if "case_" in name and "every" not in name
    }
    assert cases <= told, "each test of a case is named on the page"
