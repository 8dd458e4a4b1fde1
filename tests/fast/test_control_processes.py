"""The controller over real processes: kill -9 and SIGSTOP in mid-batch, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.gen.launch import LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.types import Manifest, WeightSource
from tests.chaos.harness import version_zero
from tests.fast.control_world import (
    FENCE,
    SETTINGS,
    check_answer,
    decode,
    job,
    reward_by_length,
)


def pid_of(run_dir: Path, name: str) -> int:
    return json.loads((run_dir / "instances" / f"{name}.address").read_text())["pid"]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Guards and instances of a run: they name its directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in part for part in process.info["cmdline"] or ())
    ]


@pytest.fixture
def weights() -> Iterator[tuple[Manifest, WeightSource]]:
    """Version 0, in shared memory."""
    with version_zero(FENCE) as found:
        yield found


def test_kill_and_stop_in_mid_batch(tmp_path: Path, weights: tuple[Manifest, WeightSource]) -> None:
    """One instance is killed, the other one stopped like a machine that hangs: 600 samples, each once."""
    pace = json.dumps({"tokens_per_s": 100})  # so that both are at work when they are hit
    specs = [
        InstanceSpec(name, EngineOptions(pace, 512, max_num_seqs=4), lookahead=2, fence=FENCE)
        for name in "ab"
    ]
    launcher = LocalLauncher(specs, tmp_path, module="tests.fake_instance", grace_s=0.5)
    events: list[ControlEvent] = []
    settings = replace(SETTINGS, lease_s=6.0, heartbeat_interval_s=0.1)
    controller = Controller(settings, FENCE, launcher, reward_by_length, decode, events.append)
    try:
        controller.start()
        controller.wait_ready(60)
        assert len(processes_of(tmp_path)) == 4
        controller.publish(*weights).result(60)
        controller.submit(job(0, count=150, n=4))
        samples = []
        for sample in controller.samples("train/0", 60):
            samples.append(sample)
            check_answer(sample.prompt, sample.generation)
            if len(samples) == 20:
                os.killpg(os.getpgid(pid_of(tmp_path, "a")), signal.SIGKILL)
            if len(samples) == 40:
                os.kill(pid_of(tmp_path, "b"), signal.SIGSTOP)
        counts = controller.counters()
    finally:
        controller.close()
    assert max(Counter(sample.sample_id for sample in samples).values()) == 1
    assert len(samples) == 600
    assert counts["redispatched"] > 0
    why = {event.instance: event.text for event in reversed(events) if event.kind is EventKind.LOST}
    assert "its process ended (killed by SIGKILL" in why["a"]
    assert "nothing was heard for" in why["b"]
    assert processes_of(tmp_path) == []
