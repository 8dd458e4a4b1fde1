"""Rule 1 on the real vLLM: one instance killed and one engine stopped in mid-batch, every sample once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen.launch import LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Fence, Manifest, Prompt, Sample, Sampling, WeightSource, expand_runs
from tests.engine.conftest import (
    ARCHITECTURE,
    START_S,
    STOP_ID,
    VOCABULARY,
    checkpoint_arrays,
    make_model,
    reference_logprobs,
)

CHAOS = Fence("chaos", 0)
SETTINGS = ControlSettings(start_timeout_s=START_S, heartbeat_interval_s=0.5, lease_s=15.0, max_restarts=2)
SAMPLING = Sampling(temperature=0.8, max_new_tokens=100, stop_token_ids=(STOP_ID,))
TOLERANCE = 1e-4


def launcher(model_dir: Path, run_dir: Path) -> LocalLauncher:
    cores = sorted(os.sched_getaffinity(0))
    specs = [
        InstanceSpec(
            f"instance-{index}",
            EngineOptions(
                str(model_dir),
                max_model_len=256,
                max_num_seqs=8,
                device=f"cpu:{cores[index % len(cores)]}",
                kv_cache_gib=0.25,
                vocab_limit=VOCABULARY,
            ),
            lookahead=2,
            fence=CHAOS,
        )
        for index in range(2)
    ]
    return LocalLauncher(specs, run_dir, run_seed=3, grace_s=2.0)


def named(run_dir: Path, name: str = "") -> list[psutil.Process]:
    """Guards and instances of a run: their command line names the spec in its directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"{run_dir}/instances/{name}" in part for part in process.info["cmdline"] or ())
    ]


def processes_of(run_dir: Path) -> set[psutil.Process]:
    """Those, and all that they started."""
    return {child for process in named(run_dir) for child in (process, *process.children(recursive=True))}


def api_process(run_dir: Path, name: str) -> psutil.Process:
    return next(
        process for process in named(run_dir, name) if "streamrl_jax.gen.guard" not in process.cmdline()
    )


def engine_core(run_dir: Path, name: str) -> psutil.Process:
    tree = api_process(run_dir, name).children(recursive=True)
    return max(tree, key=lambda process: process.memory_info().rss)


@contextmanager
def version_zero() -> Iterator[tuple[Manifest, WeightSource]]:
    manifest, blob = pack(CHAOS, 0, ARCHITECTURE, checkpoint_arrays(make_model(5)))
    with BlobWriter(SHARED_MEMORY, CHAOS, 0, len(blob)) as writer:
        writer.write(0, bytes(blob))
        path = writer.seal()
    try:
        yield manifest, WeightSource(path=str(path))
    finally:
        path.unlink()


def check(sample: Sample) -> None:
    """The answer is of version 0 with its log-probs, also after a restart: weights come before prompts."""
    answer = sample.generation
    assert set(expand_runs(answer.versions)) == {0}
    expected = reference_logprobs(
        make_model(5), sample.prompt.token_ids.tolist(), answer.token_ids.tolist(), SAMPLING.temperature
    )
    assert float(np.abs(expected - answer.logprobs).max()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_and_stopped_in_mid_batch(model_dir: Path, tmp_path: Path) -> None:
    events: list[ControlEvent] = []
    controller = Controller(
        SETTINGS,
        CHAOS,
        launcher(model_dir, tmp_path),
        lambda prompt, text, answer: RewardResult(float(len(answer.token_ids))),
        lambda ids: " ".join(map(str, ids)),
        events.append,
    )
    draw = np.random.default_rng(0)
    prompts = [Prompt(str(row), draw.integers(2, VOCABULARY, 6).astype(np.int32), {}) for row in range(100)]
    samples: list[Sample] = []
    try:
        controller.start()
        controller.wait_ready(START_S)
        started = processes_of(tmp_path)
        with version_zero() as (manifest, source):
            controller.publish(manifest, source).result(60)
            controller.submit(Job("train/0", prompts, 4, SAMPLING, 0, 0))
            for sample in controller.samples("train/0", START_S):
                samples.append(sample)
                if len(samples) == 60:
                    os.kill(api_process(tmp_path, "instance-0").pid, signal.SIGKILL)
                if len(samples) == 120:
                    engine_core(tmp_path, "instance-1").suspend()
            started |= processes_of(tmp_path)
            counts = controller.counters()
    finally:
        controller.close()
    assert Counter(sample.sample_id for sample in samples) == Counter(
        f"train/0/{row}/{index}" for row in range(100) for index in range(4)
    )
    for sample in samples[::10]:
        check(sample)
    lost = {event.instance: event.text for event in reversed(events) if event.kind is EventKind.LOST}
    assert "its process ended (killed by SIGKILL)" in lost["instance-0"]
    assert "no token" in lost["instance-1"] or "did not answer" in lost["instance-1"]
    assert counts["finished"] == counts["delivered"] == 400
    assert counts["redispatched"] == sum(e.count for e in events if e.kind is EventKind.REDISPATCH) > 0
    assert not [process for process in started if process.is_running()]
    print(f"\n{counts}")
