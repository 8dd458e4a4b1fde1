"""Configurations and made-up samples for the tests of the training step, and programs that they share."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from streamrl_jax.config import Config
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.shapes import BatchShape, Shape
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.types import FinishReason, Generation, Prompt, Sample, VersionRun

from .tiny import random_params, tiny_arch

MAX_PROMPT, MAX_RESPONSE = 6, 10
ROW = 32
VOCAB = 48


def config(**sections: dict[str, Any]) -> Config:
    """A configuration of 4 prompts with 4 answers each; sections are merged over it, field by field."""
    # Adam divides by the gradient's own size: with a tiny eps its first step is lr * sign(gradient), and the
    # rounding of a gradient that is zero becomes a full step. A larger eps keeps the step continuous.
    optim = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    base: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_length": MAX_PROMPT, "max_response_length": MAX_RESPONSE, "train_batch_size": 4},
        "rollout": {"n": 4, "temperature": 0.7},
        "actor": {"ppo_max_token_len_per_gpu": 64, "optim": optim},
        "trainer": {"total_training_steps": 10, "pack_row_length": ROW},
        "model": {"remat": "none"},
    }
    if sections.get("algorithm", {}).get("adv_estimator", "gae") == "gae":
        base["critic"] = {"optim": optim}
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return Config.model_validate(base)


def ppo_config() -> Config:
    """PPO with everything on: critic, KL in reward and in loss, entropy bonus, GAE with discount."""
    return config(
        actor={
            "ppo_max_token_len_per_gpu": 64,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "entropy_coeff": 0.01,
            "optim": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1},
        },
        algorithm={"use_kl_in_reward": True, "kl_coef": 0.05, "gamma": 0.97, "lam": 0.9},
    )


def several_updates_config() -> Config:
    """As `ppo_config`, in two mini-batches and two epochs, after one iteration of the critic alone."""
    cfg = ppo_config()
    actor = cfg.actor.model_copy(update={"ppo_mini_batch_size": 2, "ppo_epochs": 2})
    critic = cfg.critic.model_copy(update={"warmup_steps": 1})
    return cfg.model_copy(update={"actor": actor, "critic": critic})


def grpo_config() -> Config:
    """GRPO with a mean over sequences."""
    return config(
        algorithm={"adv_estimator": "grpo"},
        actor={"loss_agg_mode": "seq-mean-token-mean", "optim": {"lr": 1e-2, "eps": 1e-3}},
    )


def dapo_config() -> Config:
    """DAPO: dynamic sampling, clip-higher, overlong shaping and filtering, token mean."""
    return config(
        algorithm={
            "adv_estimator": "grpo",
            "mask_truncated_completions": True,
            "filter_groups": {"enable": True},
        },
        actor={"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
        reward={"overlong_buffer": {"len": 4, "penalty_factor": 0.5}},
    )


def gspo_config() -> Config:
    """GSPO with RLOO's advantage, and a KL of the right gradient."""
    return config(
        algorithm={"adv_estimator": "rloo"},
        actor={
            "loss_mode": "gspo",
            "loss_agg_mode": "seq-mean-token-mean",
            "clip_ratio_low": 0.05,
            "clip_ratio_high": 0.07,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": "k3+",
        },
    )


def cispo_config() -> Config:
    """CISPO, decoupled, with truncated and masked importance corrections, and REINFORCE++'s returns."""
    return config(
        algorithm={
            "adv_estimator": "reinforce_plus_plus",
            "gamma": 0.95,
            "whiten_advantages": "batch",
            "use_kl_in_reward": True,
            "kl_coef": 0.05,
            "rollout_correction": {
                "bypass_mode": False,
                "rollout_is": "sequence",
                "rollout_rs": "token",
                "rollout_rs_threshold": 1.4,
            },
        },
        actor={"loss_mode": "cispo", "entropy_coeff": 0.01, "loss_agg_mode": "seq-mean-token-sum-norm"},
    )


def decoupled_config() -> Config:
    """Decoupled PPO in two mini-batches and two epochs, with the group's baseline, whitened."""
    return config(
        algorithm={
            "adv_estimator": "reinforce_plus_plus_baseline",
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token", "rollout_rs": "geometric"},
        },
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
    )


def mixture_config() -> Config:
    """GRPO on a mixture of experts, with its balance loss."""
    return config(
        algorithm={"adv_estimator": "grpo"},
        actor={"router_aux_loss_coef": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
    )


CONFIGS = {
    "ppo": ppo_config,
    "grpo": grpo_config,
    "several": several_updates_config,
    "dapo": dapo_config,
    "gspo": gspo_config,
    "cispo": cispo_config,
    "decoupled": decoupled_config,
    "mixture": mixture_config,
}


@lru_cache(maxsize=8)
def programs(kind: str, mesh: tuple[int, int, int] = (1, 1, 1)) -> Steps:
    """Compiled programs, shared by the tests of a process."""
    cfg = CONFIGS[kind]()
    devices = jax.devices()[: int(np.prod(mesh))]
    architecture = "Qwen3MoeForCausalLM" if kind == "mixture" else "Qwen2ForCausalLM"
    return Steps(tiny_arch(architecture, num_hidden_layers=1), make_mesh(*mesh, devices=devices), cfg)


def new_trainer(steps: Steps, rows: int, *, pack: bool = True) -> Trainer:
    """A trainer at its beginning; equal for equal configurations, on any mesh."""
    critic = None if steps.critic is None else random_params(steps.critic, 1)
    reference = random_params(steps.actor, 2) if steps.cfg.uses_reference else None
    state = steps.init_state(random_params(steps.actor, 0), critic)
    return Trainer(steps, state, reference, shape=BatchShape((Shape(rows, ROW),)), pack=pack)


def run(trainer: Trainer, iterations: list[list[Sample]]) -> list[dict[str, float]]:
    """Trains on the samples of one iteration after the other; gives the metrics of each."""
    metrics: list[dict[str, float]] = []
    for version, arriving in enumerate(iterations):
        trainer.begin_iteration(version)
        for sample in arriving:
            trainer.add(sample)
        metrics.append(trainer.end_iteration().metrics)
    return metrics


def samples(
    iteration: int = 0, *, prompts: int = 4, n: int = 4, seed: int = 0, right: float | None = None
) -> list[Sample]:
    """Random prompts, answers, log-probs and rewards of a group of `n` answers per prompt.

    Rewards lie in [0, 1), or are 1 with chance `right`, else 0. The longest answers are cut by the limit.
    """
    draw = np.random.default_rng((seed, iteration))
    made: list[Sample] = []
    for index in range(prompts):
        prompt_ids = draw.integers(0, VOCAB, draw.integers(1, MAX_PROMPT + 1)).astype(np.int32)
        prompt = Prompt(str(index), prompt_ids, {})
        for member in range(n):
            length = int(draw.integers(1, MAX_RESPONSE + 1))
            generation = Generation(
                sample_id=f"{iteration}/{index}/{member}",
                attempt=0,
                token_ids=draw.integers(0, VOCAB, length).astype(np.int32),
                logprobs=(-4.0 + draw.normal(0, 0.3, length)).astype(np.float32),
                versions=(VersionRun(iteration, length),),
                finish_reason=FinishReason.LENGTH if length == MAX_RESPONSE else FinishReason.STOP,
                instance="instance-0",
            )
            made.append(
                Sample(generation.sample_id, iteration, prompt, member, generation, _score(draw, right))
            )
    return made


def _score(draw: np.random.Generator, right: float | None) -> float:
    chance = float(draw.random())
    return chance if right is None else float(chance < right)


def with_generation(sample: Sample, **changes: Any) -> Sample:
    """A sample whose generation differs in some fields."""
    return replace(sample, generation=replace(sample.generation, **changes))
