"""Instances on a Ray cluster of several raylets on this machine: placed apart, lost with a node, recovered, gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from streamrl_jax.control.events import EventKind
from streamrl_jax.gen.launch.plan import RayPlan
from streamrl_jax.gen.launch.ray import RayInstance, RayLauncher
from streamrl_jax.gen.options import InstanceSpec
from tests.chaos.harness import CHAOS, processes_of, scene, specs, wait_until

BOUND_S = 120.0
"""From the death of a node until its instance serves elsewhere."""


def rays() -> list[psutil.Process]:
    """Ray's processes that this test's process started, at any depth."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
            if any("raylet" in part or "gcs_server" in part or "ray::" in part for part in words):
                found.append(process)
    return found


def add_node(cluster: Cluster, tries: int = 3) -> None:
    """A node with one CPU; may try again, as `started_head`."""
    before = {process.pid for process in rays()}
    try:
        cluster.add_node(wait=False, num_cpus=1, object_store_memory=80 * 2**20)
    except Exception as error:
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        for process in rays():
            if process.pid not in before:
                process.kill()
        add_node(cluster, tries - 1)


def started_head(tries: int = 3) -> Cluster:
    """Ray allows itself 30 s to start, whatever else the machine does, and nothing sets that: it may try again."""
    memory = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    try:
        return Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    except Exception as error:
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        for process in rays():
            process.kill()
        return started_head(tries - 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for instances and two nodes with one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = started_head()
    try:
        for _ in range(2):
            add_node(cluster)
        cluster.wait_for_nodes(120)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        end = time.monotonic() + 60
        while rays():
            assert time.monotonic() < end, f"left behind: {[process.cmdline() for process in rays()]}"
            time.sleep(0.1)


def launcher(
    cluster: Cluster, run_dir: Path, found: list[InstanceSpec], timeout_s: float = 60.0
) -> RayLauncher:
    plan = RayPlan(
        str(cluster.address), cpus_per_worker=1.0, gpus_per_worker=0.0, placement_timeout_s=timeout_s
    )
    for folder in ("instances", "logs"):
        (run_dir / folder).mkdir(exist_ok=True)
    return RayLauncher(found, run_dir, plan, run_seed=3, module="tests.fake_instance", grace_s=0.5)


def test_instances_land_on_different_nodes_and_survive_one(cluster: Cluster, tmp_path: Path) -> None:
    """A raylet is killed: its instance is lost, and is started again on a node that joins the cluster."""
    ours = launcher(cluster, tmp_path, specs(("instance-0", "instance-1")))
    started: dict[str, RayInstance] = {}
    begin = ours.start

    async def start(name: str) -> RayInstance:
        started[name] = await begin(name)
        return started[name]

    ours.start = start  # type: ignore[method-assign]
    with scene(ours, tmp_path, replace(CHAOS, lease_s=5.0)) as found:
        homes = {name: instance.node_id for name, instance in started.items()}
        assert len(set(homes.values())) == 2, "one CPU each: they cannot be on one node"
        victim = next(node for node in cluster.worker_nodes if node.node_id == homes["instance-1"])
        at: list[float] = []

        def kill_node() -> None:
            add_node(cluster)
            at.append(time.monotonic())
            cluster.remove_node(victim, allow_graceful=False)

        taken = found.take(found.submit(0, prompts=60), {20: kill_node})
        assert len(taken) == 240
        found.wait_for(lambda: found.seen(EventKind.UPDATED, "instance-1", at[0]), BOUND_S)
        assert started["instance-1"].node_id not in homes.values(), "on the node that came"
        assert len(found.take(found.submit(1, prompts=10))) == 40
        found.adds_up()
    wait_until(lambda: processes_of(tmp_path) == [])  # guards and instances have ended on all nodes
    end = time.monotonic() + BOUND_S  # Ray's nodes tell each other of free room a moment later
    while ray.available_resources().get("CPU") != 2.0:
        assert time.monotonic() < end, f"the room was not given back: {ray.available_resources()}"
        time.sleep(0.1)


def test_a_start_that_fails_is_told_with_its_reason(cluster: Cluster, tmp_path: Path) -> None:
    import asyncio

    from streamrl_jax.errors import UserError

    broken = replace(specs(("instance-0",))[0])
    broken = replace(broken, engine=replace(broken.engine, model="broken"))
    with pytest.raises(
        UserError, match=r"did not start on the Ray cluster: instance instance-0 did not start: exit"
    ):
        asyncio.run(launcher(cluster, tmp_path, [broken]).start("instance-0"))
    wide = replace(broken, engine=replace(broken.engine, tensor_parallel_size=4))
    with pytest.raises(UserError, match=r"needs 4 CPUs and 0 GPUs on one node, and no node"):
        asyncio.run(launcher(cluster, tmp_path, [wide], timeout_s=0.5).start("instance-0"))
    with pytest.raises(UserError, match="does not see the run directory"):
        elsewhere = launcher(cluster, tmp_path, [broken])
        elsewhere._run_dir = Path("/nowhere/run")
        asyncio.run(elsewhere.start("instance-0"))
    wait_until(lambda: processes_of(tmp_path) == [])
