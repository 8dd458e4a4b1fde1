"""Tiny architectures, configurations and made-up samples for the tests of the training step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from streamrl_jax.config import Config
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Arch, arch_from_hf
from streamrl_jax.types import FinishReason, Generation, Prompt, Sample, VersionRun

MAX_PROMPT, MAX_RESPONSE = 6, 10


def tiny_arch() -> Arch:
    """A Qwen2 of one layer, 32 wide."""
    return arch_from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
    )


def mesh_of(data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over the first devices."""
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])


def config(**sections: dict[str, Any]) -> Config:
    """A configuration of 4 prompts with 4 answers each; sections are merged over it, field by field."""
    base: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_length": MAX_PROMPT, "max_response_length": MAX_RESPONSE, "train_batch_size": 4},
        "rollout": {"n": 4, "temperature": 0.7},
        # An eps far above the gradients' rounding: Adam's first step is otherwise lr * sign(gradient), which turns
        # rounding of a zero gradient into a full step.
        "actor": {"ppo_max_token_len_per_gpu": 64, "optim": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}},
        "critic": {"optim": {"lr": 1e-2, "eps": 1e-3}},
        "trainer": {"total_training_steps": 10, "pack_row_length": 32},
        "model": {"remat": "none"},
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return Config.model_validate(base)


def samples(iteration: int = 0, *, prompts: int = 4, n: int = 4, seed: int = 0, version: int = 0) -> list[Sample]:
    """Random prompts, answers, log-probs and rewards of a group of `n` answers per prompt."""
    draw = np.random.default_rng((seed, iteration))
    made: list[Sample] = []
    for index in range(prompts):
        prompt_ids = draw.integers(0, 32, draw.integers(1, MAX_PROMPT + 1)).astype(np.int32)
        prompt = Prompt(str(index), prompt_ids, {})
        for member in range(n):
            length = int(draw.integers(1, MAX_RESPONSE + 1))
            generation = Generation(
                sample_id=f"{iteration}/{index}/{member}",
                attempt=0,
                token_ids=draw.integers(0, 32, length).astype(np.int32),
                logprobs=(-3.5 + draw.normal(0, 0.3, length)).astype(np.float32),
                versions=(VersionRun(version, length),),
                finish_reason=FinishReason.STOP,
                instance="instance-0",
            )
            reward = float(draw.integers(0, 2))
            made.append(Sample(generation.sample_id, iteration, prompt, member, generation, reward))
    return made
