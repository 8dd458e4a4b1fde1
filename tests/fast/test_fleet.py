"""What a run gets its instances from: pools of several sizes, endpoints, and further ones while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.launch import StaticInstance
from streamrl_jax.gen.launch.fleet import Fleet, Place
from streamrl_jax.gen.launch.plan import FleetPlan
from streamrl_jax.gen.options import EngineOptions, InstanceSpec, PoolTemplate
from streamrl_jax.setup.devices import instance_names
from streamrl_jax.types import Fence

SPEC = InstanceSpec("instance", EngineOptions("m", 64), fence=Fence("run", 3))
LONG = InstanceSpec("long", EngineOptions("m", 64, tensor_parallel_size=2, max_num_seqs=8), lookahead=1)
POOLS = (PoolTemplate("instance", SPEC, ("cpu:0", "cpu:1")), PoolTemplate("long", LONG, ("cpu:2,3",)))


class Making:
    """A launcher that only notes what it is told."""

    def __init__(self, specs: Sequence[InstanceSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.specs)

    async def start(self, name: str) -> StaticInstance:
        return StaticInstance(f"made:{len(name)}")

    def admit(self, spec: InstanceSpec) -> None:
        self.specs[spec.name] = spec

    def forget(self, name: str) -> None:
        del self.specs[name]

    def host(self, name: str) -> str:
        return "here"


def fleet(made: list[Making], endpoints: dict[str, str] | None = None) -> Fleet:
    def make(specs: Sequence[InstanceSpec]) -> Making:
        made.append(Making(specs))
        return made[0]

    return Fleet(make, POOLS, endpoints or {}, lambda taken, size: f"cpu:{len(taken)}x{size}", net.OPEN)


def test_a_run_begins_with_the_instances_of_all_pools_and_the_endpoints() -> None:
    made: list[Making] = []
    found = fleet(made, {"endpoint-0": "127.0.0.1:5"})
    assert found.names == ("instance-0", "instance-1", "long-0", "endpoint-0")
    specs = made[0].specs
    assert [specs[name].engine.device for name in found.names[:3]] == ["cpu:0", "cpu:1", "cpu:2,3"]
    assert (specs["long-0"].engine.max_num_seqs, specs["long-0"].lookahead) == (8, 1)
    assert found.place("instance-1") == Place("here", "cpu:1")
    assert found.place("endpoint-0") == Place("127.0.0.1")
    assert asyncio.run(found.start("endpoint-0")).address == "127.0.0.1:5"
    assert asyncio.run(found.start("long-0")).address == "made:6"


def test_further_instances_get_names_that_nobody_had() -> None:
    made: list[Making] = []
    found = fleet(made)
    assert found.grow() == "instance-2"
    assert found.grow("long", "cpu:7,8") == "long-1"
    specs = made[0].specs
    assert (specs["instance-2"].engine.device, specs["long-1"].engine.device) == ("cpu:3x1", "cpu:7,8")
    assert specs["instance-2"].fence == SPEC.fence
    found.forget("instance-2")
    assert "instance-2" not in specs
    assert found.grow() == "instance-3"
    assert found.endpoint("127.0.0.1:9") == "endpoint-0"
    found.forget("endpoint-0")
    assert found.endpoint("127.0.0.1:9") == "endpoint-1"
    assert found.names == ("instance-0", "instance-1", "long-0"), "the run began with these"


def test_guests_are_called_as_they_wish_where_the_name_is_free() -> None:
    found = fleet([])
    found.guest("node7-1", "127.0.0.1:7", "node7")
    assert found.place("node7-1") == Place("node7", joined=True)
    assert asyncio.run(found.start("node7-1")).address == "127.0.0.1:7"
    for taken in ("instance-0", "node7-1", "long"):
        with pytest.raises(UserError, match="give this one another --name"):
            found.guest(taken, "127.0.0.1:8", "node7")
    with pytest.raises(UserError, match="in the pool already"):
        found.guest("node7-2", "127.0.0.1:7", "node7")
    found.forget("node7-1")
    found.guest("node7-1", "127.0.0.1:7", "node7")


def test_a_name_that_a_guest_has_chosen_is_given_to_no_other() -> None:
    found = fleet([], {"endpoint-0": "127.0.0.1:5"})
    found.guest("instance-2", "127.0.0.1:7", "node7")
    found.guest("endpoint-1", "127.0.0.1:8", "node8")
    assert [found.grow(), found.grow(), found.endpoint("127.0.0.1:9")] == [
        "instance-3",
        "instance-4",
        "endpoint-2",
    ]
    assert asyncio.run(found.start("instance-2")).address == "127.0.0.1:7"
    assert asyncio.run(found.start("endpoint-1")).address == "127.0.0.1:8"


def test_what_cannot_be_added_is_refused_with_the_remedy() -> None:
    found = fleet([])
    with pytest.raises(UserError, match=r"no pool 'lon'; did you mean long\? the pools are instance, long"):
        found.grow("lon")
    with pytest.raises(UserError, match="is no HOST:PORT"):
        found.endpoint("somewhere")
    with pytest.raises(UserError, match="plain text"):
        found.endpoint("10.0.0.1:5")


def test_the_plan_travels_as_text() -> None:
    plan = FleetPlan(
        POOLS,
        {"endpoint-0": "a:1"},
        "/run",
        AccessFiles(token="/run/token"),
        7,
        gpus=("4", "5"),
        cores=(0, 1),
    )
    assert FleetPlan.from_json(plan.to_json()) == plan


def test_pools_of_the_configuration_inherit_what_they_leave_out() -> None:
    pools = 'gen.pools=[{name="long", instances=2, tensor_parallel_size=2}, {name="wide", max_num_seqs=256}]'
    config = load_config([], ["gen.instances=1", "gen.max_num_seqs=32", "gen.lookahead=0", pools])
    assert [name for name, _ in instance_names(config)] == ["instance-0", "long-0", "long-1", "wide-0"]
    assert [(p.tensor_parallel_size, p.max_num_seqs, p.lookahead) for p in config.gen.all_pools] == [
        (1, 32, 0),
        (2, 32, 0),
        (1, 256, 0),
    ]


def test_every_fault_of_the_pools_is_told_at_once() -> None:
    pools = 'gen.pools=[{name="Long"}, {name="b"}, {name="b"}, {name="endpoint", devices=["0"]}]'
    with pytest.raises(UserError) as caught:
        load_config([], [pools, "gen.launcher=ray", "gen.instances=0"])
    for fault in (
        "'Long'",
        "'b', as another one",
        "kept for other",
        "gen.pools[endpoint].devices is not read",
    ):
        assert fault in str(caught.value)
    with pytest.raises(UserError, match=r"nothing would generate; set gen\.min_instances"):
        load_config([], ["gen.instances=0"])
    with pytest.raises(UserError, match=r"gen\.ray\.gpus_per_worker is set, but gen\.launcher = 'local'"):
        load_config([], ["gen.ray.gpus_per_worker=0.0"])
    load_config([], ["gen.instances=0", "gen.min_instances=1"])
