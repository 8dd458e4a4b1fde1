"""100,000 queued prompts, 200,000 streamed samples, real processes, and memory that does not grow with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from streamrl_jax.bench.counting_engine import Pace
from streamrl_jax.bench.stream_rounds import Setting, in_process, instance_pids, peak_bytes
from streamrl_jax.control.jobs import Job
from streamrl_jax.types import Prompt, Sampling

PROMPTS, N, TOKENS = 100_000, 2, 4
CONTROLLER_MIB = 32
INSTANCE_MIB = 16


class Numbers(Sequence[Prompt]):
    """Prompts that are made when they are looked at: what is measured is the controller's memory."""

    def __len__(self) -> int:
        return PROMPTS

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(PROMPTS))]
        if index >= PROMPTS:
            raise IndexError(index)
        return Prompt(str(index), np.asarray([1, index % 100], np.int32), {})


def forget_peak() -> None:
    """The peak of this process's memory counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def test_memory_follows_what_is_under_way_not_what_waits_or_was_streamed(tmp_path: Path) -> None:
    """Neither the 200,000 samples that wait at first nor those that have passed at the end take memory."""
    setting = Setting(
        Pace(tokens=TOKENS), instances=2, slots=64, lookahead=8, progress_interval_s=0.0, samples=0
    )
    with in_process(tmp_path, setting) as way:
        way.run(5_000)  # caches and pools of the allocator fill up
        pids = instance_pids(tmp_path)
        before = [peak_bytes(pid) for pid in pids]
        forget_peak()
        own = peak_bytes("self")
        job = Job("train/100", Numbers(), N, Sampling(1.0, TOKENS, (0,), seed=1), 100, 0)
        began, seen = time.monotonic(), bytearray(PROMPTS * N)
        handed = way.controller.counters()["dispatched"]
        way.controller.submit(job)
        entries = way.controller.sizes()["open"]  # quick instances have answered some of them already
        handed = way.controller.counters()["dispatched"] - handed
        assert entries <= handed + 1 < PROMPTS, "what waits has no entry"
        for sample in way.controller.samples(job.job_id, 60.0):
            seen[int(sample.prompt.prompt_id) * N + sample.group_index] += 1
        seconds = time.monotonic() - began
        grown = (peak_bytes("self") - own) >> 20
        instances = [(peak_bytes(pid) - at) >> 20 for pid, at in zip(pids, before, strict=True)]
        print(f"{PROMPTS * N / seconds:,.0f} samples/s; controller +{grown} MiB, instances +{instances} MiB")
        assert set(seen) == {1}, "each sample once"
        assert grown <= CONTROLLER_MIB
        assert max(instances) <= INSTANCE_MIB
        end = time.monotonic() + 60
        while any(way.controller.sizes().values()):
            assert time.monotonic() < end, f"left over: {way.controller.sizes()}"
            time.sleep(0.01)
