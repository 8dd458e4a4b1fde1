"""Rules 8 and 10 on the real vLLM: a stopped engine shows, and a killed one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl_jax.types import InstanceState
from tests.engine.conftest import Rig

GONE_WITHIN_S = 30.0

PARENT = """
import asyncio, sys, time
from pathlib import Path
from streamrl_jax.gen.client import InstanceClient
from tests.engine.conftest import make_launcher, wait_until_loaded

async def start():
    instance = await make_launcher(Path(sys.argv[1]), Path(sys.argv[2]), "orphan").start("orphan")
    client = InstanceClient(instance.address)
    await wait_until_loaded(client, instance)
    await client.close()
    return instance

instance = asyncio.run(start())
print(instance.process_group, flush=True)
time.sleep(600)
"""


def tree(root: int) -> list[psutil.Process]:
    """A process and its descendants."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def engine_core(root: int) -> psutil.Process:
    """The descendant that holds the engine: the one with the most memory."""
    return max(tree(root)[1:], key=lambda process: process.memory_info().rss)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_until(happened: Callable[[], bool], what: str) -> float:
    """Waits, bounded; the seconds it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < GONE_WITHIN_S, f"{what}: not within {GONE_WITHIN_S} s"
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_stopped_engine_core_shows_as_growing_age(rig: Rig) -> None:
    def age() -> float:
        return rig.loop.run(rig.client.status())[0].engine_age_s

    assert age() < 2
    core = engine_core(rig.instance.process_group)
    core.suspend()
    try:
        wait_until(lambda: age() > 3, "an age over 3 s")
    finally:
        core.resume()
    wait_until(lambda: age() < 2, "an age under 2 s again")


def test_killing_the_parent_leaves_nothing_though_the_core_is_stopped(
    model_dir: Path, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    instance = int(parent.stdout.readline())
    guard = psutil.Process(instance).parent()
    assert guard is not None
    processes = [guard, *tree(instance)]
    engine_core(instance).suspend()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    seconds = wait_until(lambda: not alive(processes), "the end of all processes")
    print(f"\nparent killed, core stopped: {len(processes)} processes gone after {seconds:.1f} s")


@pytest.mark.ends_the_engine
def test_killing_the_api_process_leaves_nothing_and_is_noticed(rig: Rig) -> None:
    assert rig.loop.run(rig.client.status())[0].state is InstanceState.IDLE
    processes = tree(rig.instance.process_group)
    assert len(processes) > 1
    os.kill(rig.instance.process_group, signal.SIGKILL)
    seconds = wait_until(lambda: not alive(processes), "the end of all processes")
    wait_until(lambda: rig.instance.ended() == "killed by SIGKILL", "the notice")
    print(f"\nAPI process killed: {len(processes)} processes gone after {seconds:.1f} s")
