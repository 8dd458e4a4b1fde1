"""What progress messages cost: ``python -m tests.engine.progress_cost [--fake]`` prints a table.

One real vLLM instance on a tiny model and a controller for each interval in turn: tokens a second. Rounds alternate, so
that noise of the machine meets all intervals. With ``--fake`` a counting instance of 64 slots that makes 4,096 tokens a
second: processor time, which noise hardly touches.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from streamrl_jax.bench.counting_engine import Pace
from streamrl_jax.bench.stream_rounds import Setting, cpu_seconds, in_process, instance_pids
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen.launch import StaticLauncher
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Fence, Prompt, Sampling
from tests.engine.conftest import FENCE, START_S, VOCABULARY, Loop, make_launcher, make_model
from tests.engine.test_chaos import version_zero

INTERVALS = (0.0, 10.0, 2.0, 0.5)
ROUNDS = 3
SAMPLES, TOKENS = 32, 240


def tokens_per_s(address: str, fence: Fence, interval_s: float) -> float:
    """One job through a controller of its own."""
    settings = ControlSettings(start_timeout_s=START_S, progress_interval_s=interval_s, lease_s=60.0)
    endpoint = StaticLauncher({"a": address})
    controller = Controller(
        settings, fence, endpoint, lambda prompt, text, answer: RewardResult(0.0), str, lambda event: None
    )
    draw = np.random.default_rng(fence.incarnation)
    prompts = [
        Prompt(str(row), draw.integers(2, VOCABULARY, 6).astype(np.int32), {}) for row in range(SAMPLES)
    ]
    sampling = Sampling(0.8, TOKENS, (), evaluation=True, forced_length=TOKENS)
    with version_zero(fence) as (manifest, source):
        try:
            controller.start()
            controller.wait_ready(START_S)
            controller.publish(manifest, source).result(120)
            began = time.monotonic()
            controller.submit(Job("eval/0", prompts, 1, sampling, 0, 0, evaluation=True))
            made = sum(len(sample.generation.token_ids) for sample in controller.samples("eval/0", START_S))
            return made / (time.monotonic() - began)
        finally:
            controller.close()


def real() -> None:
    """Tokens a second of vLLM: the median of the rounds, and from where to where they went."""
    folder, hand = Path(tempfile.mkdtemp()), Loop()
    make_model(0).config.save_pretrained(folder / "model")
    instance = hand.run(make_launcher(folder / "model", folder).start("instance-0"))
    found: dict[float, list[float]] = defaultdict(list)
    try:
        for number in range(ROUNDS * len(INTERVALS)):
            interval_s = INTERVALS[number % len(INTERVALS)]
            speed = tokens_per_s(instance.address, Fence(FENCE.run_id, number), interval_s)
            found[interval_s].append(speed)
            print(f"{interval_s:4g} s: {speed:.0f} tokens/s", flush=True)
    finally:
        hand.run(instance.stop())
        hand.close()
    for interval_s, speeds in found.items():
        print(
            f"| {interval_s:g} | {statistics.median(speeds):.0f} | {min(speeds):.0f} to {max(speeds):.0f} |"
        )


def fake() -> None:
    """Processor time of both processes, percent of a core."""
    for interval_s in INTERVALS:
        setting = Setting(Pace(512, 8.0, 32), 1, 64, 8, interval_s, 240)
        with tempfile.TemporaryDirectory() as folder, in_process(Path(folder), setting) as way:
            way.run(72)
            pids = [*instance_pids(Path(folder)), os.getpid()]
            before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
            way.run(setting.samples)
            wall_s = time.monotonic() - began
            shares = [100 * (cpu_seconds(pid) - s) / wall_s for pid, s in zip(pids, before, strict=True)]
        print(f"| {interval_s:g} | {shares[0]:.1f} | {shares[-1]:.1f} |", flush=True)


if __name__ == "__main__":
    fake() if "--fake" in sys.argv else real()
