"""The main job without vLLM: a tiny model, a reward that is quickly learned, instances that compute in NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from streamrl_jax.config import Config
from streamrl_jax.tasks.toy_model import ToyShape, write_toy_checkpoint

SHAPE = ToyShape(embed=32, layers=1, heads=2, kv_heads=1, mlp=48, max_positions=64)
PROMPTS, ANSWERS, LENGTH = 4, 4, 8
SAMPLES = PROMPTS * ANSWERS

# `gen.python` names the interpreter of the generation environment. This one starts the fake where vLLM is asked for.
_PYTHON = """#!/bin/sh
if [ "$3" = streamrl_jax.gen.instance ]; then
    shift 3
    exec {python} -P -m tests.fake_instance "$@"
fi
exec {python} "$@"
"""

_REWARD = '''
def digits(solution_str, ground_truth):
    """Share of the answer that is digits: any policy has some, and learns to have more."""
    return sum(character.isdigit() for character in solution_str) / 8
'''


def world(folder: Path) -> Path:
    """Writes model, reward function and interpreter into ``folder``; gives it back."""
    write_toy_checkpoint(folder / "model", seed=0, shape=SHAPE)
    (folder / "reward.py").write_text(_REWARD)
    python = folder / "gen-python"
    python.write_text(_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    return folder


def sections(folder: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The configuration of a run in a `world`; ``changes`` are merged over it, field by field."""
    optim = {"lr": 3e-3, "betas": [0.9, 0.99]}
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "seed": 1},
        "model": {"path": str(folder / "model"), "remat": "none"},
        "data": {
            "train": "task:arithmetic",
            "test": "task:arithmetic",
            "train_batch_size": PROMPTS,
            "max_prompt_length": 8,
            "max_response_length": LENGTH,
        },
        "rollout": {"n": ANSWERS},
        "gen": {
            "instances": 2,
            "python": str(folder / "gen-python"),
            "max_num_seqs": 4,
            "lookahead": 2,
            "heartbeat_interval_s": 0.2,
        },
        "actor": {"ppo_max_token_len_per_gpu": 64, "optim": optim},
        "critic": {"optim": optim},
        "reward": {"function": f"{folder / 'reward.py'}:digits"},
        "trainer": {"total_training_steps": 4, "save_freq": 2, "test_freq": 4, "pack_row_length": 32},
        "agreement": {"max_logprob_diff": 1e-4, "quantile": 1.0, "probe_prompts": 2, "probe_tokens": 4},
        "eval": {"max_prompts": 4, "n": 2, "temperature": 1.0},
    }
    for name, fields in changes.items():
        base[name] = base.get(name, {}) | fields
    return base


def job_config(folder: Path, **changes: dict[str, Any]) -> Config:
    """`sections`, validated."""
    return Config.model_validate(sections(folder, **changes))
