"""The main job without vLLM: a tiny model, a reward that is quickly learned, instances that compute in NumPy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import psutil

from streamrl_jax.config import Config
from streamrl_jax.config_io import dump_config
from streamrl_jax.metrics import MetricRecord, read_metrics
from streamrl_jax.rundir import look
from streamrl_jax.tasks.toy_model import ToyShape, write_toy_checkpoint

SHAPE = ToyShape(embed=32, layers=1, heads=2, kv_heads=1, mlp=48, max_positions=64)
PROMPTS, ANSWERS, LENGTH = 4, 4, 8
SAMPLES = PROMPTS * ANSWERS

# `gen.python` names the interpreter of the generation environment. This one starts the fake where vLLM is asked for.
_PYTHON = """#!/bin/sh
if [ "$3" = streamrl_jax.gen.instance ]; then
    shift 3
    {before}
    exec {python} -P -m tests.fake_instance "$@"
fi
exec {python} "$@"
"""

_FUNCTIONS = '''
import fnmatch, os, sys, threading, time
from streamrl_jax.train.loss import clipped_policy_loss

main_job = os.getppid() if sys.argv[0].endswith("control/process.py") else os.getpid()
sent, one_at_a_time = [], threading.Lock()


def digits(prompt, text, generation, delay_s=0.0, hold=""):
    """Share of the answer that is digits: any policy has some, and learns to have more. Samples to hold get none."""
    time.sleep(600 if fnmatch.fnmatchcase(generation.sample_id, hold) else delay_s)
    return sum(character.isdigit() for character in text) / 8


def gated(prompt, text, generation, gate):
    """Answers of training are worth something once a file is there."""
    while generation.sample_id.startswith("train") and not os.path.exists(gate):
        time.sleep(0.05)
    return digits(prompt, text, generation)


def signalling(prompt, text, generation, at, number, times=1):
    """Signals the run at the first samples of a job."""
    with one_at_a_time:
        if generation.sample_id.startswith(at) and sent.count((at, number)) < times:
            sent.append((at, number))
            os.kill(main_job, number)
    return digits(prompt, text, generation)


def failing(prompt, text, generation, how):
    """Fails in training."""
    if generation.sample_id.startswith("train") and how == "raises":
        raise KeyError("the answer sheet is missing")
    if generation.sample_id.startswith("train") and how == "hangs":
        time.sleep(60)
    return float("nan") if how == "nan" else 0.0


def signalling_loss(*arguments, **rest):
    """A scheduler's warning while the training step is compiled."""
    os.kill(os.getpid(), 10)
    return clipped_policy_loss(*arguments, **rest)
'''


def write_world(folder: Path) -> Path:
    """Writes model, functions and interpreter into ``folder``; gives it back."""
    write_toy_checkpoint(folder / "model", seed=0, shape=SHAPE)
    (folder / "functions.py").write_text(_FUNCTIONS)
    write_python(folder / "gen-python")
    return folder


def write_python(path: Path, before: str = "") -> Path:
    """Writes an interpreter; ``before`` is a shell command that runs first in each instance."""
    path.write_text(_PYTHON.format(python=sys.executable, before=before))
    path.chmod(0o755)
    return path


def job_config(folder: Path, **changes: dict[str, Any]) -> Config:
    """The configuration of a run in a world, PPO with everything on; ``changes`` are merged over it."""
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
            "instances": 1,
            "python": str(folder / "gen-python"),
            "max_num_seqs": 4,
            "lookahead": 2,
            "heartbeat_interval_s": 0.2,
        },
        # Rows of one sample, four of them over data and fsdp: one compiled shape, four micro-batches an iteration.
        "actor": {"ppo_max_token_len_per_gpu": 16, "use_kl_loss": True, "optim": optim},
        "critic": {"optim": optim},
        "algorithm": {"use_kl_in_reward": True},
        "reward": {"function": f"{folder / 'functions.py'}:digits"},
        "trainer": {
            "total_training_steps": 4,
            "save_freq": 2,
            "test_freq": 2,
            "pack_row_length": 16,
            "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
            "compilation_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        },
        "agreement": {"max_logprob_diff": 1e-4, "quantile": 1.0, "probe_prompts": 2, "probe_tokens": 4},
        "eval": {"max_prompts": 4, "n": 2, "temperature": 1.0},
    }
    for name, fields in changes.items():
        base[name] = base.get(name, {}) | fields
    if "adv_estimator" in base["algorithm"] and "critic" not in changes:
        del base["critic"]  # the others train none
    return Config.model_validate(base)


def write_config(folder: Path, **changes: dict[str, Any]) -> Path:
    """`job_config` as a file."""
    path = folder / "job.toml"
    path.write_text(dump_config(job_config(folder, **changes)))
    return path


def child_environment() -> dict[str, str]:
    """Of a trainer's process: as many CPU devices as this one, so that it finds the same compiled programs."""
    return {**os.environ, "JAX_NUM_CPU_DEVICES": str(jax.device_count()), "PYTHONPATH": os.getcwd()}


@contextmanager
def jax_settings_kept() -> Iterator[None]:
    """A run sets JAX up for its whole process; the tests after it get their own settings back."""
    names = (
        "jax_default_matmul_precision",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def training_lines(run_dir: Path) -> list[MetricRecord]:
    """The metrics of the iterations, without the evaluations'."""
    return [line for line in metrics_of(run_dir) if "actor/pg_loss" in line.metrics]


def metrics_of(run_dir: Path) -> list[MetricRecord]:
    """All lines; none before there is one."""
    path = run_dir / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def left_behind(run_dir: Path) -> list[str]:
    """What a run that has ended should have taken along: processes and blobs in shared memory."""
    cores = {int(path.read_text()) for path in run_dir.glob("instances/*.core")}
    found = [
        f"{process.pid} {command}"
        for process in psutil.process_iter(["cmdline", "status"])
        if (command := " ".join(process.info["cmdline"] or ()))
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and (str(run_dir) in command or (process.pid in cores and "multiprocessing" in command))
    ]
    return found + [str(path) for path in Path("/dev/shm").glob(f"streamrl-{look(run_dir).fence.run_id}-*")]


def wait_until(what: Callable[[], object], timeout_s: float) -> None:
    """Polls until ``what`` is true."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.02)
