"""Sharing a machine's devices out between instances and trainer."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.gen.options import parse_cores
from streamrl_jax.setup.devices import (
    DeviceSplit,
    Machine,
    device_for_another,
    look_around,
    split_devices,
    trainer_environment,
)

EIGHT = Machine(tuple("01234567"), tuple(range(64)))
TWO_CORES = Machine((), (0, 1))
LONG = 'gen.pools=[{name="long", tensor_parallel_size=2}]'
NAMED = 'gen.pools=[{name="long", tensor_parallel_size=2, devices=["0,1"]}]'


def split(machine: Machine, *overrides: str) -> DeviceSplit:
    return split_devices(load_config([], overrides), machine)


@pytest.mark.parametrize(
    ("machine", "overrides", "instances", "trainer"),
    [
        (EIGHT, ["gen.instances=4"], ("4", "5", "6", "7"), ("0", "1", "2", "3")),
        (EIGHT, ["gen.instances=2", "gen.tensor_parallel_size=2"], ("4,5", "6,7"), tuple("0123")),
        (EIGHT, ["gen.instances=2", "trainer.devices=6,7"], ("4", "5"), ("6", "7")),
        (EIGHT, ['gen.devices=["0", "1"]', "gen.instances=2"], ("0", "1"), tuple("234567")),
        (EIGHT, ["gen.instances=0", "gen.endpoints=[a:1]"], (), tuple("01234567")),
        (EIGHT, ['gen.devices=["cpu:0-3"]'], ("cpu:0-3",), tuple("01234567")),
        (TWO_CORES, ["gen.instances=2"], ("cpu:0", "cpu:1"), ()),
        (TWO_CORES, ["gen.instances=3"], ("cpu:0", "cpu:0", "cpu:1"), ()),
        (TWO_CORES, ["gen.instances=1", "gen.tensor_parallel_size=2"], ("cpu:0,1",), ()),
        (
            TWO_CORES,
            ['gen.devices=["4", "5"]', "gen.instances=2", "trainer.devices=0,1"],
            ("4", "5"),
            ("0", "1"),
        ),
        (Machine((), (3, 5, 7)), ["gen.instances=2"], ("cpu:3", "cpu:5,7"), ()),
        (EIGHT, ["gen.instances=2", LONG], ("4", "5", "6,7"), ("0", "1", "2", "3")),
        (EIGHT, ["gen.instances=1", NAMED], ("7", "0,1"), ("2", "3", "4", "5", "6")),
        (Machine((), tuple(range(8))), ["gen.instances=2", LONG], ("cpu:0,1", "cpu:2,3", "cpu:4,5,6,7"), ()),
        (EIGHT, ["gen.launcher=ray", "gen.instances=2"], ("", ""), tuple("01234567")),
    ],
)
def test_devices_are_shared_out(
    machine: Machine, overrides: list[str], instances: tuple[str, ...], trainer: tuple[str, ...]
) -> None:
    assert split(machine, *overrides) == DeviceSplit(instances, trainer)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_every_instance_gets_its_cores_and_none_idles_where_all_can_share(
    instances: int, size: int, cores: int
) -> None:
    machine = Machine((), tuple(range(cores)))
    overrides = [f"gen.instances={instances}", f"gen.tensor_parallel_size={size}"]
    if cores < size:
        with pytest.raises(UserError, match=r"gen\.tensor_parallel_size"):
            split(machine, *overrides)
        return
    shares = [parse_cores(entry) for entry in split(machine, *overrides).instances]
    assert len(shares) == instances
    assert all(len(set(share)) == len(share) >= size for share in shares)
    if cores >= instances * size:
        assert sorted(core for share in shares for core in share) == list(range(cores))


@pytest.mark.parametrize(
    ("machine", "overrides", "message"),
    [
        (EIGHT, ["gen.instances=9"], r"gen\.instances = 9 .* needs 9 GPUs, and 8 are free"),
        (EIGHT, ["gen.instances=7", LONG], r"7 .*; gen\.pools\[long\]\.instances = 1 .* needs 9 GPUs"),
        (
            EIGHT,
            ['gen.devices=["1"]', "gen.instances=2", 'gen.pools=[{name="long", devices=["2,3", "cpu:x"]}]'],
            r"gen\.devices has 1 .*; gen\.pools\[long\]\.devices has 2 .*; gen\.pools\[long\]\.devices = '2,3' names "
            r"2 GPUs .*; .*cores are written like",
        ),
        (EIGHT, ["gen.instances=8"], r"leave none for the trainer; lower gen\.instances"),
        (
            EIGHT,
            ['gen.devices=["1"]', "gen.instances=2"],
            r"gen\.devices has 1 entries for gen\.instances = 2",
        ),
        (EIGHT, ['gen.devices=["1,2"]'], r"'1,2' names 2 GPUs for gen\.tensor_parallel_size = 1"),
        (EIGHT, ['gen.devices=["cpu:x"]'], r"cores are written like"),
        (EIGHT, ['gen.devices=["cpu:0"]', "gen.tensor_parallel_size=2"], r"has 1 cores"),
        (EIGHT, ['gen.devices=["3"]', "trainer.devices=3"], r"GPU 3 is given out 180%"),
        (EIGHT, ['gen.devices=["3", "3"]', "gen.instances=2"], r"GPU 3 is given out 180%"),
        (
            TWO_CORES,
            ["gen.devices=[cpu:0-1,cpu:1]", "gen.instances=2"],
            r"the cores 1 to more than one instance",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    machine: Machine, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        split(machine, *overrides)


@pytest.mark.parametrize(
    ("machine", "taken", "trainer", "size", "expected"),
    [
        (EIGHT, ["6", "7"], ["0", "1"], 1, "5"),
        (EIGHT, ["6,7"], ["0", "1"], 2, "4,5"),
        (TWO_CORES, ["cpu:0"], [], 1, "cpu:1"),
        (TWO_CORES, ["cpu:0", "cpu:1"], [], 1, "cpu:0"),
        (Machine((), tuple(range(8))), ["cpu:0-3"], [], 1, "cpu:4,5,6,7"),
        (Machine((), tuple(range(8))), ["cpu:0-3", "cpu:4-7", "cpu:0-3"], [], 2, "cpu:4,5"),
    ],
)
def test_one_that_joins_takes_what_is_free(
    machine: Machine, taken: list[str], trainer: list[str], size: int, expected: str
) -> None:
    assert device_for_another(machine, taken, trainer, size) == expected


def test_one_that_joins_is_refused_where_nothing_is_free() -> None:
    with pytest.raises(UserError, match=r"needs 2 GPUs, and 1 of this machine's 8 are free \(2\).*--join"):
        device_for_another(EIGHT, ["3", "4,5", "6", "7"], ["0", "1"], 2)
    with pytest.raises(UserError, match="needs 4 cores"):
        device_for_another(TWO_CORES, [], [], 4)


def test_one_gpu_may_serve_both_where_the_shares_of_memory_add_up() -> None:
    shares = ["gen.gpu_memory_utilization=0.4", "trainer.xla_memory_fraction=0.5"]
    one = Machine(("0",), (0,))
    assert split(one, 'gen.devices=["0"]', "trainer.devices=0", *shares) == DeviceSplit(("0",), ("0",))


def test_the_trainer_sees_its_gpus_and_a_capped_share_of_their_memory() -> None:
    config = load_config([], ["trainer.xla_memory_fraction=0.85"])
    assert trainer_environment(config, DeviceSplit((), ("0", "2"))) == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",
    }
    assert trainer_environment(config, DeviceSplit(("cpu:0",), ())) == {}


def test_what_this_process_may_use_is_what_there_is() -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    assert look_around({"CUDA_VISIBLE_DEVICES": "2, 3"}) == Machine(("2", "3"), cores)
    assert look_around({"CUDA_VISIBLE_DEVICES": ""}) == Machine((), cores)
    assert look_around({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "1"}) == Machine((), cores)
