"""Two runs on one host, with instances of the same names: nothing of the one gets into the way of the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl_jax.control.events import EventKind
from streamrl_jax.gen.guard import _SEGMENTS_S
from streamrl_jax.types import Fence
from tests.chaos.harness import local, pid_of, scene

NAMES = ("instance-0", "instance-1")

HOLDER = """
import time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # as vLLM's own segments: nobody tidies up
print(segment.name, flush=True)
time.sleep(60)
"""


def test_two_runs_of_the_same_names_side_by_side(tmp_path: Path) -> None:
    homes = [tmp_path / name / "run" for name in ("one", "two")]
    for home in homes:
        home.mkdir(parents=True)
    first, second = (local(home, NAMES) for home in homes)
    with (
        scene(first, homes[0], fence=Fence("one", 0)) as one,
        scene(second, homes[1], fence=Fence("two", 0)) as two,
    ):
        jobs = [(found, found.submit(0, prompts=20)) for found in (one, two)]
        addresses = {view.address for found in (one, two) for view in found.controller.pool()}
        assert len(addresses) == 4
        one.signal("instance-0", signal.SIGKILL)
        for found, name in jobs:
            assert len(found.take(name)) == 80
        one.adds_up()
        assert two.adds_up()["redispatched"] == 0
        assert not two.seen(EventKind.LOST)
        alive = [pid_of(homes[1], name) for name in NAMES]
    for pid in alive:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_shared_memory_of_a_killed_instance_is_removed_also_of_one_started_by_hand() -> None:
    """kill -9 of a whole process group: nothing tells whose segment it was, but its guard has seen it."""
    guard = [sys.executable, "-m", "streamrl_jax.gen.guard", "-1", "0", "1"]
    with subprocess.Popen(
        [*guard, sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        segment = Path("/dev/shm") / process.stdout.readline().strip()
        assert segment.name.startswith("psm_") and segment.exists()
        time.sleep(4 * _SEGMENTS_S)  # it looks so often, and can be asked nothing
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
        )
        os.killpg(int(children.stdout.split()[0]), signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL
    assert not segment.exists()
