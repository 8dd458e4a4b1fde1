"""Every shipped configuration loads, and says what it is shipped for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.config import ActorSection, Config, RewardSection
from streamrl_jax.config_io import load_config
from streamrl_jax.data import load_prompts
from streamrl_jax.data.sft import load_examples
from streamrl_jax.data.sources import read_rows
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.rewards import load_reward
from streamrl_jax.tasks import TASK_PREFIX, load_task
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.train.loss import PolicyInputs, clipped_policy_loss
from streamrl_jax.types import Prompt
from streamrl_jax.user_code import load_function
from tests.fast.answered import ANSWERED

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
DEMOS = ("demo", "demo_critic", "demo_grpo", "demo_long", "demo_tail")

# What each is for: a change of these is a change of the product.
INTENDED: dict[str, Callable[[Config], bool]] = {
    "demo": lambda c: c.uses_critic and c.gen.instances == 2 and c.samples_per_iteration == 256 and c.streams,
    # An answer of noise to a pick that counts, few answers an iteration, and the reward for the beginning alone.
    "demo_critic": lambda c: (
        c.uses_critic
        and c.algorithm.lam == 1.0
        and c.data.task["shortest"] >= 36
        and c.samples_per_iteration == 16
        and c.reward.function == "leading_number"
        and c.streams
    ),
    "demo_grpo": lambda c: c.algorithm.adv_estimator == "grpo" and not c.uses_critic and c.gen.instances == 2,
    "demo_long": lambda c: c.rollout.temperature != 1.0 and c.data.max_response_length > 300 and c.streams,
    # Lengths as chance has them, hardly any of them cut, and more samples than the instances have slots.
    "demo_tail": lambda c: (
        c.rollout.temperature == c.eval.temperature == 1.0
        and c.data.max_response_length == 700
        and c.gen.instances == 2
        and c.samples_per_iteration == 128 == 4 * c.gen.max_num_seqs
    ),
    "smollm2_135m_cpu": lambda c: c.trainer.total_training_steps == 3 and c.data.apply_chat_template,
    "qwen2_5_0_5b_gsm8k_8gpu": lambda c: (
        c.model.compute_dtype == c.gen.dtype == "bfloat16"
        and c.trainer.devices == "0,1,2,3"
        and c.gen.devices == ["4", "5", "6", "7"]
        and c.trainer.max_staleness == 1
    ),
}


def shipped() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def load(name: str) -> Config:
    return load_config([CONFIGS / f"{name}.toml"], [])


def test_every_shipped_configuration_has_its_intention_written_down() -> None:
    assert shipped() == sorted(INTENDED)


@pytest.mark.parametrize("name", INTENDED)
def test_a_shipped_configuration_loads_with_its_intended_settings(name: str) -> None:
    cfg = load(name)
    assert INTENDED[name](cfg)
    load_reward(cfg.reward)
    for source in (cfg.data.train, cfg.data.test, cfg.sft.data):
        if source.startswith(TASK_PREFIX):
            load_task(source, cfg.data.task)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "model", seed=0))


@pytest.mark.parametrize("name", DEMOS)
def test_prompts_and_examples_of_a_demo_fit_its_limits(name: str, toy: Tokenizer) -> None:
    cfg = load(name)
    for which in ("train", "test"):
        prompts = load_prompts(cfg.data, toy, which, cfg.run.seed)
        assert len(prompts) >= cfg.data.train_batch_size and prompts.dropped == 0
    examples = load_examples(cfg, toy)
    assert examples.stop_set
    for example in [*examples.stop_set, *(e for step in range(20) for e in examples.batch(step))]:
        assert len(example.prompt_ids) + len(example.answer_ids) <= cfg.longest_sample


@pytest.mark.parametrize("name", DEMOS)
def test_a_right_answer_of_a_demo_fits_and_is_rewarded(name: str, toy: Tokenizer) -> None:
    cfg = load(name)
    rows = read_rows(cfg.data.test, "data.test", "test", cfg.data.task)
    prompts = load_prompts(cfg.data, toy, "test", cfg.run.seed).all()
    reward = load_reward(cfg.reward)
    for row, prompt in list(zip(rows, prompts, strict=True))[:20]:
        assert reward(prompt, row.columns["answer"], ANSWERED).score == 1.0
        assert reward(prompt, f"{row.columns['answer']}0", ANSWERED).score == 0.0


def test_the_demos_of_ppo_and_grpo_differ_in_the_algorithm_alone() -> None:
    ppo, grpo = (load(name).model_dump() for name in ("demo", "demo_grpo"))
    differing = {key for key in ppo if ppo[key] != grpo[key]}
    assert differing == {"run", "algorithm", "critic"}


# What a layer over GRPO's configuration makes of it.
ALGORITHMS: dict[str, Callable[[Config], bool]] = {
    "ppo": lambda c: c.uses_critic and c.streams,
    "dr_grpo": lambda c: (
        not c.algorithm.norm_adv_by_std_in_grpo and c.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    ),
    "dapo": lambda c: (
        c.algorithm.filter_groups.enable
        and c.algorithm.mask_truncated_completions
        and c.reward.overlong_buffer.len > 0
        and c.actor.clip_ratio_high > c.actor.clip_ratio_low
    ),
    "rloo": lambda c: c.algorithm.adv_estimator == "rloo" and c.actor.loss_mode == "reinforce",
    "reinforce_plus_plus": lambda c: c.whitens and not c.uses_critic and not c.uses_groups,
    "gspo": lambda c: c.actor.loss_mode == "gspo" and c.actor.loss_agg_mode == "seq-mean-token-mean",
    "cispo": lambda c: c.actor.loss_mode == "cispo" and c.actor.clip_ratio_low == 1.0,
    "decoupled": lambda c: (
        not c.algorithm.rollout_correction.bypass_mode
        and c.algorithm.rollout_correction.rollout_is == "token"
    ),
    "masked": lambda c: c.algorithm.rollout_correction.rollout_rs == "token",
}


def test_every_layer_of_an_algorithm_has_its_intention_written_down() -> None:
    assert sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.toml")) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_layer_says_what_it_is_named_for(name: str) -> None:
    layers = [CONFIGS / "demo_grpo.toml", CONFIGS / "algorithms" / f"{name}.toml"]
    assert ALGORITHMS[name](load_config(layers, []))


def test_ppo_is_the_same_as_a_layer_and_as_the_demo() -> None:
    demo, layered = (
        load_config(paths, []).model_dump(exclude={"run"})
        for paths in (
            [CONFIGS / "demo.toml"],
            [CONFIGS / "demo_grpo.toml", CONFIGS / "algorithms" / "ppo.toml"],
        )
    )
    assert demo == layered


def test_the_example_of_a_reward_works() -> None:
    function = f"{REPOSITORY}/examples/custom_reward.py:close_enough"
    reward = load_reward(RewardSection(function=function, kwargs={"tolerance": 5}))
    prompt = Prompt("0", np.zeros(1, np.int32), {"prompt": "1+1=", "answer": "20"})
    scores = [reward(prompt, text, ANSWERED).score for text in ("20", "19", "14", "twenty", "")]
    assert scores == [1.0, 0.8, 0.0, 0.0, 0.0]


def test_the_example_of_an_advantage_pushes_up_the_best_alone() -> None:
    where = f"{REPOSITORY}/examples/custom_advantage.py:beyond_the_best_half"
    advantage = load_function(where, "algorithm.advantage_fn")
    assert advantage is not None
    np.testing.assert_allclose(advantage(np.array([1.0, 0.0, 0.5, 0.5])), [0.25, -0.75, -0.25, -0.25])


def test_the_example_of_a_loss_has_the_policy_gradient_of_ppo_at_ratio_one() -> None:
    loss = load_function(f"{REPOSITORY}/examples/custom_loss.py:truncated_reinforce", "algorithm.loss_fn")
    assert loss is not None
    rng = np.random.default_rng(0)
    logprobs, advantages = (jnp.asarray(rng.normal(size=(2, 5)), jnp.float32) for _ in range(2))

    def gradient(function: Callable[..., Any]) -> jax.Array:
        def total(values: jax.Array) -> jax.Array:
            whole, ones = jnp.ones((2, 5), bool), jnp.ones((2, 5), jnp.int32)
            inputs = PolicyInputs(values, logprobs, logprobs, advantages, whole, ones)
            return function(inputs, ActorSection())[0].sum()

        return jax.grad(total)(logprobs)

    np.testing.assert_allclose(gradient(loss), gradient(clipped_policy_loss), rtol=1e-6)
