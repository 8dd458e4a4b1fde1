"""Rules 8 and 10 on the real vLLM: a stopped engine shows, and a killed one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.types import Assignment, InstanceState, Sampling
from tests.engine.conftest import (
    ARCHITECTURE,
    FENCE,
    START_S,
    Loop,
    Rig,
    checkpoint_arrays,
    connect,
    make_model,
    reference_logprobs,
)
from tests.engine.run_world import alive

GONE_WITHIN_S = 60.0

PARENT = """
import asyncio, sys, time
from pathlib import Path
from tests.engine.conftest import make_launcher

instance = asyncio.run(make_launcher(Path(sys.argv[1]), Path(sys.argv[2]), ranks=2).start("instance-0"))
print(instance.address, instance.process_group, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Foreign:
    """An instance that another process has started."""

    address: str
    process_group: int

    def ended(self) -> str | None:
        """As far as can be seen from here."""
        return None if psutil.pid_exists(self.process_group) else "gone"

    def log_tail(self) -> str:
        """Is read elsewhere."""
        return ""


def tree(root: int) -> list[psutil.Process]:
    """A process and its descendants."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def engine_core(root: int) -> psutil.Process:
    """The descendant that holds the engine: the one with the most memory."""
    return max(tree(root)[1:], key=lambda process: process.memory_info().rss)


def wait_until(happened: Callable[[], bool], what: str) -> float:
    """Waits, bounded; the seconds it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < GONE_WITHIN_S, f"{what}: not within {GONE_WITHIN_S} s"
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_stopped_engine_core_shows_as_growing_age(rig: Rig) -> None:
    def age() -> float:
        return rig.loop.run(rig.status()).engine_age_s

    wait_until(lambda: age() < 2, "an age under 2 s")
    core = engine_core(rig.instance.process_group)
    core.suspend()
    try:
        wait_until(lambda: age() > 3, "an age over 3 s")
    finally:
        core.resume()
    wait_until(lambda: age() < 2, "an age under 2 s again")


def test_an_update_of_a_stopped_engine_is_given_up_in_time_and_repeated_later(rig: Rig) -> None:
    model = make_model(rig.version + 1)
    manifest, blob = pack(FENCE, rig.version + 1, ARCHITECTURE, checkpoint_arrays(model))
    core = engine_core(rig.instance.process_group)
    core.suspend()
    try:
        began = time.monotonic()
        # Longer than a pause of the machine before it begins.
        report = rig.update(manifest, blob, timeout_s=5)
        assert time.monotonic() - began < 60
        assert (report.accepted, report.quarantined) == (False, False)
        assert "not checked in time" in report.reason
    finally:
        core.resume()
    rig.push(model)
    greedy = Sampling(0.0, 8, (), evaluation=True)
    answer = rig.answer([Assignment(rig.sample_id(), 0, np.array([7, 8], np.int32), greedy)])[0]
    assert answer.versions[0].version == rig.version


@pytest.fixture(scope="module")
def parted(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Rig, subprocess.Popen[bytes]]]:
    """An instance of two tensor-parallel ranks whose launcher is another process, and that process."""
    loop = Loop()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir), str(tmp_path_factory.mktemp("parted"))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert parent.stdout is not None
        address, group = parent.stdout.readline().split()
        rig = loop.run(connect(loop, Foreign(address.decode(), int(group))), START_S + 60)
        yield rig, parent
        loop.run(rig.client.close())
    finally:
        parent.kill()
        parent.communicate(timeout=30)
        loop.close()


def test_two_ranks_agree_on_a_push_and_refuse_a_bad_one_together(
    parted: tuple[Rig, subprocess.Popen[bytes]],
) -> None:
    rig, _ = parted
    model = make_model(3)
    rig.push(model)
    prompt = np.array([7, 8, 9], np.int32)

    def difference() -> float:
        given = [Assignment(rig.sample_id(), 0, prompt, Sampling(0.7, 40, ())) for _ in range(4)]
        return max(
            float(np.abs(reference_logprobs(model, [7, 8, 9], a.token_ids.tolist(), 0.7) - a.logprobs).max())
            for a in rig.answer(given)
        )

    first = difference()
    print(f"\ntwo ranks: largest log-prob difference {first:.2e}")
    assert first < 1e-5
    manifest, blob = pack(FENCE, 1, ARCHITECTURE, checkpoint_arrays(make_model(4)))
    blob[manifest.tensors[3].offset] ^= 1
    report = rig.update(manifest, blob)
    assert (report.accepted, report.quarantined, report.version) == (False, False, 0)
    assert report.reason.count("do not match digest") == 1  # both ranks found it; it is told once
    assert difference() < 1e-5


def test_killing_the_parent_leaves_nothing_though_the_core_is_stopped(
    parted: tuple[Rig, subprocess.Popen[bytes]],
) -> None:
    rig, parent = parted
    guard = psutil.Process(rig.instance.process_group).parent()
    assert guard is not None
    processes = [guard, *tree(rig.instance.process_group)]
    engine_core(rig.instance.process_group).suspend()
    parent.kill()
    parent.wait()
    seconds = wait_until(lambda: not alive(processes), "the end of all processes")
    print(f"\nparent killed, core stopped: {len(processes)} processes gone after {seconds:.1f} s")


@pytest.mark.ends_the_engine
def test_killing_the_api_process_leaves_nothing_and_is_noticed(rig: Rig) -> None:
    assert rig.loop.run(rig.status()).state is InstanceState.IDLE
    processes = tree(rig.instance.process_group)
    assert len(processes) > 1
    os.kill(rig.instance.process_group, signal.SIGKILL)
    seconds = wait_until(lambda: not alive(processes), "the end of all processes")
    wait_until(lambda: rig.instance.ended() == "killed by SIGKILL", "the notice")
    print(f"\nAPI process killed: {len(processes)} processes gone after {seconds:.1f} s")
