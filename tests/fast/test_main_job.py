"""The main job from end to end, sync and one step stale, PPO and GRPO: real processes, gRPC, bridge and trainer; the
engine computes in NumPy.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import streamrl_jax
from streamrl_jax.commands import evaluate
from streamrl_jax.config import Config
from streamrl_jax.config_io import load_config
from streamrl_jax.data import load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.main_job import RunResult, train
from streamrl_jax.metric_names import METRICS, undeclared
from streamrl_jax.metrics import Missing
from streamrl_jax.samples_log import read_samples, recorded_iterations
from streamrl_jax.trace import read_trace
from streamrl_jax.train.advantage import leave_one_out_advantages
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.hf_directory import map_tensors_of, read_arch
from streamrl_jax.types import expand_runs

from .job_world import (
    ANSWERS,
    SAMPLES,
    jax_settings_kept,
    job_config,
    left_behind,
    metrics_of,
    training_lines,
    write_world,
)


@dataclass
class Compiled(logging.Handler):
    """When something was compiled, and what."""

    seen: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "Compiling" in (text := record.getMessage()):
            self.seen.append((time.monotonic(), text))


@dataclass(frozen=True)
class Job:
    """A run that is over."""

    cfg: Config
    result: RunResult
    compiled: list[tuple[float, str]]

    @property
    def path(self) -> Path:
        return self.result.run_dir

    @property
    def iterations(self) -> range:
        return range(self.cfg.trainer.total_training_steps)


def run_job(cfg: Config, **functions: Any) -> Job:
    handler = Compiled()
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            return Job(cfg, streamrl_jax.run(cfg, **functions), handler.seen)
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        yield write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def sync(world: Path) -> Job:
    """PPO on a mesh of eight devices, two instances."""
    return run_job(job_config(world, run={"name": "sync"}, gen={"instances": 2}))


@pytest.fixture(scope="module")
def stale(world: Path) -> Job:
    """Decoupled GRPO with functions of one's own, one step stale; weights travel as to another host."""

    def digits(completions: list[str], **columns: Any) -> list[float]:
        return [sum(character.isdigit() for character in text) / 8 for text in completions]

    cfg = job_config(
        world,
        run={"name": "stale"},
        gen={"instances": 2},
        bridge={"transport": "grpc"},
        algorithm={
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token", "rollout_rs": "sequence"},
        },
        trainer={"max_staleness": 1, "total_training_steps": 5},
    )
    return run_job(cfg, reward_fn=digits, advantage_fn=leave_one_out_advantages)


@pytest.fixture(params=["sync", "stale"])
def job(request: pytest.FixtureRequest) -> Job:
    return request.getfixturevalue(request.param)


def test_every_sample_of_every_iteration_is_consumed_once(job: Job) -> None:
    """Its prompts are a function of the iteration, its ids those that were dispatched (DESIGN rules 1 and 7)."""
    tokenizer = Tokenizer.load(Path(job.cfg.model.path))
    prompts = load_prompts(job.cfg.data, tokenizer, "train", seed=job.cfg.run.seed)
    assert recorded_iterations(job.path / "samples") == list(job.iterations)
    for iteration in job.iterations:
        samples = read_samples(job.path, iteration)
        assert sorted(sample.sample_id for sample in samples) == sorted(
            f"train/{iteration}/{prompt.prompt_id}/{index}"
            for prompt in prompts.iteration(iteration)
            for index in range(ANSWERS)
        )
        given = {prompt.prompt_id: prompt for prompt in prompts.iteration(iteration)}
        for sample in samples:
            assert sample.prompt.token_ids.tolist() == given[sample.prompt.prompt_id].token_ids.tolist()
            text = tokenizer.decode(sample.generation.token_ids)
            assert sample.reward == sum(character.isdigit() for character in text) / 8


def test_tokens_are_as_new_as_the_mode_asks_for(job: Job) -> None:
    bound = job.cfg.trainer.max_staleness
    found = []
    for iteration, line in zip(job.iterations, training_lines(job.path), strict=True):
        versions = [expand_runs(s.generation.versions) for s in read_samples(job.path, iteration)]
        lags = iteration - np.concatenate(versions)
        assert lags.min() >= 0 and lags.max() <= bound
        assert line.number("training/staleness/mean") == pytest.approx(lags.mean())
        assert line.number("training/staleness/max") == lags.max()
        found.append(lags.max())
    # Iteration 1 is open from the start: what is generated before the first update is there is one version old.
    assert max(found) == bound


def test_trainer_and_generator_agree_at_every_step(job: Job) -> None:
    """Also one step stale, where a probe after each push is scored by both sides at its version (rule 4)."""
    for iteration, line in zip(job.iterations, training_lines(job.path), strict=True):
        kind = "probe" if job.cfg.trainer.max_staleness else "rollout"
        compared = line.number(f"training/{kind}_tokens_compared")
        answers = [len(s.generation.token_ids) for s in read_samples(job.path, iteration)]
        assert compared == (2 * 2 * 4 if kind == "probe" else sum(answers))
        difference = line.number(f"training/{kind}_logprobs_diff_max")
        assert difference is not None and difference < 1e-5


def test_each_step_has_one_line_of_finite_metrics(job: Job) -> None:
    lines = training_lines(job.path)
    assert [line.step for line in lines] == [iteration + 1 for iteration in job.iterations]
    for line in lines:
        missing = {name for name, value in line.metrics.items() if isinstance(value, Missing)}
        assert missing == {"perf/mfu/actor"}  # no peak is known of a CPU
        assert all(math.isfinite(value) for value in line.metrics.values() if isinstance(value, float))
        assert line.number("training/samples") == SAMPLES
        assert line.number("training/version") == line.step
        for name in ("training/overlapped", "trainer/idle_ratio", "rollouter/idle_ratio"):
            assert 0.0 <= (line.number(name) or 0.0) <= 1.0
        assert line.number("rollouter/duplicates_dropped") == line.number("rollouter/redispatched") == 0
        directory = Path(job.cfg.model.path)
        tensors = map_tensors_of(directory, read_arch(directory))
        head = tensors["model.embed_tokens.weight"]  # tied, and shipped under both names
        assert line.number("weights/bytes") == sum(t.nbytes for t in tensors.values()) + head.nbytes
        assert (line.number("timing_s/publish") or 0) > 0


def test_versions_are_evaluated_before_and_after(sync: Job, stale: Job) -> None:
    assert [found.version for found in sync.result.evaluations] == [0, 2, 4]
    assert [found.version for found in stale.result.evaluations] == [0, 2, 4, 5]
    for job in (sync, stale):
        lines = [line for line in metrics_of(job.path) if "val/accuracy" in line.metrics]
        found = job.result.evaluations
        assert [line.step for line in lines] == [evaluation.version for evaluation in found]
        assert [line.number("val/accuracy") for line in lines] == [one.accuracy for one in found]
        assert all(one.count == 4 * 2 and set(one.pass_at_k) == {1, 2} for one in found)


def test_a_run_leaves_its_records_and_nothing_else(job: Job) -> None:
    total = job.cfg.trainer.total_training_steps
    assert job.result.version == total and not job.result.stopped_by
    assert load_config([job.path / "config.toml"], []) == job.cfg
    provenance = json.loads((job.path / "provenance.json").read_text())
    assert provenance["incarnation"] == 0 and len(provenance["devices"]) == jax.device_count()
    with Checkpointer(job.path / "checkpoints", 1) as checkpoints:
        assert checkpoints.steps() == ((2, 4) if total == 4 else (2, 4, 5))
        meta = checkpoints.read_meta(None)
    assert meta.frontier.iteration == meta.version == total and "val/accuracy" in meta.metrics
    assert left_behind(job.path) == []


def test_nothing_is_compiled_once_samples_come(job: Job) -> None:
    """The warm-up has compiled every shape, and publishing what it needs, while the engines started.

    (At the first checkpoint Orbax compiles the slices of what lies on several devices.)
    """
    first = min(sample.rewarded_s for sample in read_samples(job.path, 0))
    saves = [
        event["ts"] / 1e6
        for event in read_trace(job.path / "trace.json")
        if event["name"] == "save_checkpoint"
    ]
    assert job.compiled and saves, "the log is listened to"
    assert [text for when, text in job.compiled if first < when < min(saves)] == []


def test_an_evaluation_alone_finds_what_the_run_found(sync: Job) -> None:
    """`streamrl eval` of the checkpoint that the run began with: the same prompts, seeds and answers."""
    alone, before = evaluate.run(sync.cfg), sync.result.evaluations[0]
    assert replace(alone, seconds=0.0) == replace(before, seconds=0.0)
    mine = f".{os.getpid()}."  # blobs are named after their owner
    assert not any("streamrl-evaluation-" in p.name and mine in p.name for p in Path("/dev/shm").iterdir())


def test_every_metric_is_declared_and_every_declared_one_is_emitted(sync: Job, stale: Job) -> None:
    """The table of `docs/metrics.md` is what a run writes; the warm start, the ranker and dispatch have own tests."""
    emitted = {name for job in (sync, stale) for line in metrics_of(job.path) for name in line.metrics}
    assert undeclared(emitted) == []
    silent = {name for name in METRICS if not any(fnmatchcase(one, name) for one in emitted)}
    assert {name for name in silent if not name.startswith(("sft/", "ranker/", "dispatch/"))} == {
        "perf/max_memory_allocated_gb",  # which JAX does not tell of a CPU
        "actor/router_aux_loss",  # a mixture's; test_streaming_equals_batching.py
        "training/groups_left_out",  # dynamic sampling's; test_main_job_dapo.py
        "training/groups_left_out_score",
    }


def test_a_run_directory_that_exists_is_refused(sync: Job) -> None:
    with pytest.raises(UserError, match=r"sync exists; continue it with --resume"):
        train(sync.cfg)


def test_from_python_overrides_are_for_files(world: Path) -> None:
    with pytest.raises(UserError, match="overrides are for configuration files"):
        streamrl_jax.run(job_config(world), "actor.optim.lr=1e-4")
