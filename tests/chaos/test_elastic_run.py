"""A whole main job whose first instance leaves: one is added and one dials in while it trains, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl_jax.commands.pool import add_instances, drain_instances, list_instances
from streamrl_jax.errors import UserError
from streamrl_jax.gen.options import EngineOptions, InstanceSpec, write_spec
from streamrl_jax.gen.whereabouts import find_controller
from streamrl_jax.samples_log import read_samples
from streamrl_jax.setup.joining import Secrets, joining
from tests.chaos.test_main_job import STEPS, Life, check_consumed
from tests.fast.job_world import left_behind, training_lines, wait_until, write_config, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def serving(run_dir: Path) -> set[str]:
    """Instances that have a version."""
    try:
        found = json.loads(list_instances(run_dir, as_json=True))
    except UserError:  # it is just starting
        return set()
    return {instance["name"] for instance in found["instances"] if instance["version"] >= 0}


def dial_in(world: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    """Starts an instance that finds the run by its directory, and computes the policy in NumPy."""
    found = joining(str(run_dir), [], [], Secrets())
    engine = EngineOptions(str(world / "model"), 64, max_num_seqs=4)
    address_file = str(world / "guest.address")
    spec = InstanceSpec(
        "guest", engine, found.listen, found.access, address_file=address_file, join=found.join
    )
    write_spec(spec, world / "guest.json")
    command = [sys.executable, "-m", "tests.fake_instance", "--spec", str(world / "guest.json")]
    with (world / "guest.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def test_the_first_instance_leaves_and_two_others_finish_the_run(world: Path) -> None:
    run_dir = world / "runs" / "elastic"
    config = write_config(
        world,
        run={"name": "elastic"},
        gen={"instances": 1},
        # The first iteration waits for its rewards until the pool has changed.
        reward={
            "function": f"{world / 'functions.py'}:gated",
            "kwargs": {"gate": str(world / "open")},
            "timeout_s": 600.0,
        },
        trainer={"total_training_steps": STEPS, "save_freq": 0, "test_freq": 0, "val_before_train": False},
    )
    life = Life(run_dir, str(config))
    life.until(lambda: find_controller(run_dir) and serving(run_dir) == {"instance-0"})
    assert add_instances(run_dir) == ["instance-1"]
    guest = dial_in(world, run_dir)
    try:
        life.until(lambda: {"instance-1", "guest"} <= serving(run_dir))
        assert drain_instances(run_dir, ["instance-0"], wait_s=120) == []
        with pytest.raises(UserError, match="are the last instances"):
            drain_instances(run_dir, ["instance-1", "guest"])
        (world / "open").touch()
        said = life.end()
        assert life.process.returncode == 0, said[-3000:]
        assert guest.wait(60) == 0, (world / "guest.log").read_text()[-3000:]
    finally:
        for process in (life.process, guest):
            process.kill()
            process.wait(60)
    check_consumed(run_dir)
    answered = [sample.generation.instance for step in range(STEPS) for sample in read_samples(run_dir, step)]
    assert {"instance-1", "guest"} <= set(answered)
    later = [s.generation.instance for step in range(1, STEPS) for s in read_samples(run_dir, step)]
    assert "instance-0" not in later
    for line in training_lines(run_dir):
        difference = line.metrics["training/rollout_logprobs_diff_max"]
        assert isinstance(difference, float)
        assert difference < 1e-4, "the newcomers have the right weights"
    wait_until(lambda: left_behind(run_dir) == [], 60)
