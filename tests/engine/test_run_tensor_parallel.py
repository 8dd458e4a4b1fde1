"""A run that starts a tensor-parallel instance itself: two ranks on two cores, weights and answers right."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.types import VersionRun
from tests.engine.run_world import CONFIGS, blobs, consumed, dispatched_ids, streamrl, trained

WITHIN_S = 800.0
BOUND = 1e-4


def in_use() -> set[str]:
    """Shared memory that living processes have mapped: once a run is over, it is that of others on this machine."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            found.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return found


def test_a_run_starts_an_instance_of_two_ranks(tmp_path: Path) -> None:
    """Two synchronous iterations of the demo's task, from random weights that only the trainer has."""
    before = set(os.listdir("/dev/shm"))
    run_dir = tmp_path / "run"
    streamrl(
        *("train", CONFIGS / "demo.toml", "--run-dir", run_dir),
        f"model.path={write_toy_checkpoint(tmp_path / 'model', seed=3)}",
        *("run.seed=3", "trainer.total_training_steps=2", "data.train_batch_size=8", "eval.max_prompts=16"),
        *("gen.instances=1", "gen.devices=[]", "gen.tensor_parallel_size=2"),
        log=tmp_path / "log",
        within_s=WITHIN_S,
    )
    assert sorted(consumed(run_dir)) == [0, 1]
    for iteration, samples in consumed(run_dir).items():
        assert {sample.sample_id for sample in samples} == dispatched_ids(run_dir, iteration)
        for answer in (sample.generation for sample in samples):
            assert answer.versions == (VersionRun(iteration, len(answer.token_ids)),)
    for metrics in trained(run_dir).values():
        assert metrics["training/rollout_logprobs_diff_max"] < BOUND
        assert metrics["rollouter/restarts"] == 0
    assert blobs(run_dir) == []
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(run_dir) in line]
    left = set(os.listdir("/dev/shm")) - before - in_use()
    assert not {name for name in left if name.startswith(("psm_", "vllm", "sem."))}
