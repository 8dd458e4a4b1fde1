"""The controller as a process of its own: what it loads, whom it ends with, and how its own end or silence is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl_jax.config import Config
from streamrl_jax.control.client import Peer
from streamrl_jax.control.events import ControlEvent
from streamrl_jax.control.faults import ControlError, RewardError
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.remote import RemoteController
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.launch.plan import FleetPlan
from streamrl_jax.gen.options import EngineOptions, InstanceSpec, PoolTemplate
from streamrl_jax.gen.whereabouts import CONTROL_FILE
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.controller import ControllerProcess, start_controller
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.types import Fence
from tests.chaos.harness import version_zero

from .control_world import SAMPLING, prompts
from .job_world import SHAPE, wait_until

FENCE = Fence("run", 0)
HEAVY = ("jax", "jaxlib", "flax", "torch", "transformers", "vllm")

_REWARDS = '''
import re, time

def length(prompt, text, generation):
    return float(len(generation.token_ids))

def sleeping(prompt, text, generation):
    time.sleep(60)

def holding(prompt, text, generation):
    """Holds the interpreter lock for longer than anybody lives."""
    re.match("(a|aa)+$", "a" * 200 + "b")

def raising(prompt, text, generation):
    raise KeyError("the answer sheet is missing")
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_toy_checkpoint(folder / "model", seed=0, shape=SHAPE)
    (folder / "rewards.py").write_text(_REWARDS)
    return folder


def config_of(world: Path, reward: str = "length", **changes: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(world / "model")},
        "data": {"train": "task:arithmetic", "max_prompt_length": 8, "max_response_length": 32},
        "gen": {"heartbeat_interval_s": 0.2},
        "reward": {"function": f"{world / 'rewards.py'}:{reward}"},
        "control": {"lease_s": 4.0},
    }
    return Config.model_validate(base | changes)


class Started:
    """A controller's process with one instance whose engine counts."""

    def __init__(self, run_dir: Path, cfg: Config) -> None:
        for folder in ("logs", "instances"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        self.home = RunDir(run_dir, FENCE)
        self.stack = contextlib.ExitStack()
        self.events: list[ControlEvent] = []
        self.settings = ControlSettings.of(cfg)
        engine = EngineOptions("none", 512, max_num_seqs=4)
        pool = PoolTemplate(
            "instance", InstanceSpec("instance", engine, lookahead=2, fence=FENCE), ("cpu:0",)
        )
        plan = FleetPlan((pool,), {}, str(run_dir), net.AccessFiles(), module="tests.fake_instance")
        model = Path(cfg.model.path)
        self.process: ControllerProcess = start_controller(
            cfg, self.home, model, plan, replace(self.settings, close_timeout_s=60.0)
        )
        peer = Peer(
            self.process.address, net.OPEN, FENCE, lease_s=self.settings.reader_lease_s,
            ended=self.process.ended, situation=self.process.give_up,
        )  # fmt: skip
        self.controller = RemoteController(self.settings, peer, self.events.append, self.process.stop)

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def begin(self) -> None:
        self.controller.start()
        self.controller.wait_ready(60)
        self.controller.publish(*self.stack.enter_context(version_zero(FENCE))).result(60)

    def submit(self, name: str = "train/0", count: int = 4) -> None:
        self.controller.submit(Job(name, prompts(count), 2, SAMPLING, 0, 0))

    def processes(self) -> list[int]:
        mark = str(self.home.path)
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "status"])
            if any(mark in part for part in process.info["cmdline"] or ())
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture
def started(world: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    one = Started(tmp_path, config_of(world, getattr(request, "param", "length")))
    try:
        one.begin()
        yield one
    finally:
        one.controller.close()
        one.stack.close()
        assert one.processes() == []


def test_a_job_goes_through_a_process_that_loads_nothing_heavy(started: Started) -> None:
    """Samples, counters and figures come across; neither JAX nor torch nor vLLM is in the process."""
    started.submit()
    samples = list(started.controller.samples("train/0", 60))
    assert sorted(s.prompt.prompt_id for s in samples) == sorted([str(row) for row in range(4)] * 2)
    assert all(s.reward == len(s.generation.token_ids) for s in samples)
    assert started.controller.counters()["delivered"] <= 8 == started.controller.counters()["finished"]
    usage = started.controller.usage()
    assert 1e7 < usage["control/rss_bytes"] < 1e9 and 0 < usage["control/latency_ms/median"] < 6e4
    mapped = Path(f"/proc/{started.pid}/maps").read_text()
    assert not [name for name in HEAVY if f"/{name}/" in mapped]
    told = started.home.path / CONTROL_FILE
    assert json.loads(told.read_text())["pid"] == started.pid and told.stat().st_mode & 0o777 == 0o600


def test_nothing_heavy_is_imported() -> None:
    """Also what maps no library of its own."""
    program = "import sys, streamrl_jax.control.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(loaded.stdout.split())


def test_kill_9_of_the_controller_is_told_at_once_and_not_by_its_silence(started: Started) -> None:
    started.submit(count=5000)  # far from done when it ends
    stream = started.controller.samples("train/0", 60)
    next(stream)
    os.kill(started.pid, signal.SIGKILL)
    with pytest.raises(
        ControlError, match=r"the controller's process has ended \(killed by SIGKILL"
    ) as raised:
        list(stream)
    log = (started.home.logs / "controller.log").read_text().splitlines()
    assert "serves at" in "\n".join(log) and log[-1] in str(raised.value), "its last lines"
    with pytest.raises(ControlError, match="killed by SIGKILL"):
        started.controller.pool()
    with pytest.raises(ControlError, match="killed by SIGKILL"):
        started.submit("train/1")
    with pytest.raises(ControlError, match="killed by SIGKILL"):
        next(started.controller.samples("train/0", 60))
    wait_until(lambda: started.processes() == [], 60)


def test_a_stopped_controller_is_told_within_its_lease(started: Started) -> None:
    started.submit(count=5000)  # far from done when it ends
    stream = started.controller.samples("train/0", 300)
    next(stream)
    os.kill(started.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ControlError) as caught:
        list(stream)
    (silence,) = re.findall(r"gave no sign of life for (\d+) s .control.lease_s = 4", str(caught.value))
    assert 4 <= int(silence) < 4 + 6, "the lease, without the time in which this process stood still itself"
    assert time.monotonic() - begun < 4 + 200, "which is left out"
    begun = time.monotonic()
    started.controller.close()
    assert time.monotonic() - begun < 60, "its orderly end, for which it has 60 s, is not waited for"


@pytest.mark.parametrize("started", ["holding"], indirect=True)
def test_a_reward_that_holds_the_interpreter_is_named(started: Started) -> None:
    """The controller hangs, the trainer does not: its call fails with the sample's name and where the reward is."""
    started.submit()
    with pytest.raises(ControlError, match="while it computed the reward of sample train/0/") as raised:
        list(started.controller.samples("train/0", 300))
    assert "in holding" in str(raised.value), "the traceback that the log got"


@pytest.mark.parametrize("started", ["raising"], indirect=True)
def test_a_reward_that_raises_is_raised_here(started: Started) -> None:
    started.submit()
    with pytest.raises(RewardError, match="raised KeyError: 'the answer sheet is missing'") as raised:
        list(started.controller.samples("train/0", 60))
    assert "in raising" in str(raised.value)
    with pytest.raises(RewardError, match="the answer sheet is missing"):
        started.submit("train/1")


def test_what_it_cannot_load_is_told_before_anything_starts(world: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards.py has no function 'lenght'; did you mean 'length'"):
        Started(tmp_path, config_of(world, "lenght"))
    assert not list(tmp_path.glob("instances/instance*"))


def test_an_address_that_is_taken_is_told(world: Path, tmp_path: Path, started: Started) -> None:
    cfg = config_of(world, control={"listen": started.process.address})
    with pytest.raises(UserError, match=f"cannot listen on {started.process.address}"):
        Started(tmp_path / "second", cfg)


_MAIN_JOB = """
import sys, time
from pathlib import Path
from tests.fast.test_controller_process import Started, config_of

one = Started(Path(sys.argv[2]), config_of(Path(sys.argv[1])))
one.begin()
print("ready", flush=True)
time.sleep(600)
"""


def test_kill_9_of_the_main_job_leaves_nothing(world: Path, tmp_path: Path) -> None:
    """Controller and instances end with it."""
    command = [sys.executable, "-c", _MAIN_JOB, str(world), str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    job.kill()
    job.wait()
    mark = str(tmp_path / "instances")
    wait_until(
        lambda: (
            not [
                p for p in psutil.process_iter(["cmdline"]) if any(mark in a for a in p.info["cmdline"] or ())
            ]
        ),
        120,
    )
