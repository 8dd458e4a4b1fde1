"""Rule 10: whatever happens to a launcher, a guard or an instance, no process of the instance is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import InstanceClient
from streamrl_jax.gen.guard import group_members
from streamrl_jax.gen.launch import LocalInstance, LocalLauncher, StaticLauncher, endpoint_names
from streamrl_jax.gen.launch.local import exit_reason, log_tail
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.types import Fence, InstanceState

GONE_WITHIN_S = 60.0


def launcher(run_dir: Path, model: str = "", grace_s: float = 5.0, python: str = "") -> LocalLauncher:
    """A launcher of one fake instance."""
    spec = InstanceSpec("instance-0", EngineOptions(model, 64), fence=Fence("run", 0))
    return LocalLauncher([spec], run_dir, python=python, module="tests.fake_instance", grace_s=grace_s)


def core_of(run_dir: Path) -> int:
    """Process id of the stand-in for EngineCore."""
    return int((run_dir / "instances" / "instance-0.address.core").read_text())


def wait_until(happened: Callable[[], bool], what: str) -> None:
    """Waits, bounded."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {GONE_WITHIN_S} s"
        time.sleep(0.05)


def gone(*pids: int) -> bool:
    """Whether processes have ended (a zombie has)."""
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def guard_of(instance: LocalInstance) -> int:
    """The guard is the parent of the instance."""
    parent = psutil.Process(instance.process_group).parent()
    assert parent is not None
    return parent.pid


def ignores_sigterm(pid: int) -> bool:
    """As the kernel has it."""
    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def test_an_instance_answers_at_once_and_leaves_nothing_when_stopped(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int, int]:
        instance = await launcher(tmp_path, grace_s=60.0).start("instance-0")
        client = InstanceClient(instance.address)
        status, info = await client.status(timeout_s=60)
        await client.close()
        assert status.state in (InstanceState.LOADING, InstanceState.IDLE)
        assert (info.name, instance.ended(), instance.managed) == ("instance-0", None, True)
        assert "answers at" in instance.log_tail()
        pids = (instance.process_group, core_of(tmp_path), guard_of(instance))
        await instance.stop()
        assert instance.ended() == "exit code 0", "by itself: after its grace it would have been killed"
        await instance.stop()  # harmless
        return pids

    pids = asyncio.run(scenario())
    assert gone(*pids)
    assert not list(group_members(pids[0]))


def test_each_start_gets_a_seed_and_an_address_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        starter = launcher(tmp_path)
        seeds: list[int] = []
        for _ in range(2):
            instance = await starter.start("instance-0")
            seeds.append(json.loads((tmp_path / "instances/instance-0.json").read_text())["engine"]["seed"])
            await instance.stop()
        return seeds

    first, second = asyncio.run(scenario())
    assert first != second


def test_an_instance_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        instance = await launcher(tmp_path, "deaf", grace_s=1.0).start("instance-0")
        wait_until(lambda: ignores_sigterm(instance.process_group), "its turning deaf")
        await instance.stop()
        assert instance.ended() == "killed by SIGKILL"
        return instance.process_group, core_of(tmp_path)

    assert gone(*asyncio.run(scenario()))


@pytest.mark.parametrize("stopped_first", [False, True])
def test_killing_the_instance_takes_its_core_along_and_is_noticed(
    tmp_path: Path, stopped_first: bool
) -> None:
    async def scenario() -> None:
        instance = await launcher(tmp_path).start("instance-0")
        core = core_of(tmp_path)
        if stopped_first:
            os.kill(core, signal.SIGSTOP)
        os.kill(instance.process_group, signal.SIGKILL)
        wait_until(lambda: instance.ended() == "killed by SIGKILL", "the end of the guard")
        wait_until(lambda: gone(core), "the end of the core")
        await instance.stop()

    asyncio.run(scenario())


def test_killing_the_guard_takes_everything_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        instance = await launcher(tmp_path).start("instance-0")
        core = core_of(tmp_path)
        os.kill(guard_of(instance), signal.SIGKILL)
        wait_until(lambda: gone(instance.process_group, core), "the end of instance and core")
        assert instance.ended() == "killed by SIGKILL"
        await instance.stop()

    asyncio.run(scenario())


def test_a_descendant_in_a_session_of_its_own_ends_too(tmp_path: Path) -> None:
    """What left the instance's group (a compiler's server, say) neither survives it nor holds its guard up."""
    pid_file = tmp_path / "stranger"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$3" = tests.fake_instance ]; then setsid sleep 613 & echo $! > {pid_file}; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)

    async def scenario() -> None:
        instance = await launcher(tmp_path, python=str(python)).start("instance-0")
        stranger = int(pid_file.read_text())
        assert os.getpgid(stranger) != instance.process_group
        began = time.monotonic()
        await instance.stop()
        assert time.monotonic() - began < GONE_WITHIN_S
        assert gone(stranger)

    asyncio.run(scenario())


PARENT = """
import asyncio, sys, time
from pathlib import Path
from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.types import Fence
from tests.fast.test_gen_launch import launcher

async def start():
    return await launcher(Path(sys.argv[1]), sys.argv[2], grace_s=1.0).start("instance-0")

instance = asyncio.run(start())
writer = BlobWriter(SHARED_MEMORY, Fence("forsaken", 0), 1, 64)
print(instance.process_group, writer.seal(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["running", "stopped", "deaf"])
def test_killing_the_launcher_takes_everything_along(tmp_path: Path, state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), "deaf" if state == "deaf" else ""],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    words = parent.stdout.readline().decode().split()
    instance, blob = int(words[0]), Path(words[1])
    assert blob.exists()
    core = core_of(tmp_path)
    guard = psutil.Process(instance).ppid()
    if state == "stopped":
        os.kill(instance, signal.SIGSTOP)
        os.kill(core, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: gone(instance, core, guard), "the end of instance, core and guard")
    assert not blob.exists(), "the weights that the launcher left in shared memory"


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"instance-0 did not start: exit code 1.*told to break"):
        asyncio.run(launcher(tmp_path, "broken").start("instance-0"))
    spec = InstanceSpec("instance-0", EngineOptions("", 64))
    with pytest.raises(UserError, match=r"gen\.python = '/nowhere/python'"):
        asyncio.run(LocalLauncher([spec], tmp_path, python="/nowhere/python").start("instance-0"))


def test_static_endpoints_are_named_and_left_alone() -> None:
    async def scenario() -> None:
        static = StaticLauncher(endpoint_names(["10.0.0.1:5", "10.0.0.2:5"]))
        assert list(static.names) == ["endpoint-0", "endpoint-1"]
        instance = await static.start("endpoint-1")
        assert (instance.address, instance.managed, instance.ended()) == ("10.0.0.2:5", False, None)
        await instance.stop()

    asyncio.run(scenario())
    with pytest.raises(UserError, match="twice"):
        StaticLauncher({"a": "h:1", "b": "h:1"})
    with pytest.raises(UserError, match="HOST:PORT"):
        StaticLauncher({"a": "h"})


def test_exits_and_logs_in_words(tmp_path: Path) -> None:
    assert exit_reason(None) is None
    assert exit_reason(1) == "exit code 1"
    assert exit_reason(137) == exit_reason(-9) == "killed by SIGKILL"
    assert log_tail(tmp_path / "none.log") == ""
    path = tmp_path / "log"
    path.write_text("\n".join(map(str, range(1000))))
    assert log_tail(path, lines=2) == "998\n999"
