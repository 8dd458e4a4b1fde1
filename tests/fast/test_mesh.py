"""The mesh and the table from logical to physical axes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from streamrl_jax.errors import UserError
from streamrl_jax.train.mesh import batch_sharding, batch_shards, make_mesh, partition_spec


@pytest.mark.parametrize(
    ("asked", "built"),
    [((2, 2, 2), (2, 2, 2)), ((-1, 2, 1), (4, 2, 1)), ((1, -1, 1), (1, 8, 1)), ((2, 2, -1), (2, 2, 2))],
)
def test_one_axis_fills_up(asked: tuple[int, int, int], built: tuple[int, int, int]) -> None:
    mesh = make_mesh(*asked)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), built, strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert len(set(mesh.devices.flat)) == 8


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((3, 1, 1), "data=3, fsdp=1, tensor=1 does not fit 8 cpu devices"),
        ((3, -1, 1), "does not fit 8 cpu devices"),
        ((1, 2, 1), "does not fit 8 cpu devices"),
        ((-1, -1, 1), "data and fsdp are -1"),
        ((0, 1, 8), "data is 0"),
        ((1, 1, -2), "tensor is -2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(asked: tuple[int, int, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_mesh(*asked)


def test_dimensions_follow_the_table() -> None:
    mesh = make_mesh(2, 2, 2)
    assert partition_spec(("embed", "heads", "head_dim"), (8, 4, 16), mesh) == PartitionSpec(
        "fsdp", "tensor", None
    )
    assert partition_spec(("vocab", "embed"), (64, 8), mesh) == PartitionSpec("tensor", "fsdp")
    assert partition_spec(("batch", "length"), (4, 10), mesh) == PartitionSpec(("data", "fsdp"), None)
    assert partition_spec((), (), mesh) == PartitionSpec()


def test_a_dimension_that_does_not_divide_is_replicated() -> None:
    mesh = make_mesh(1, 2, 4)
    spec = partition_spec(("embed", "kv_heads", "head_dim"), (8, 2, 16), mesh)
    assert spec == PartitionSpec("fsdp", None, None)
    # Never split half way: 2 rows on data=2, fsdp=2 are not split over one of the two.
    assert partition_spec(("batch",), (2,), make_mesh(2, 2, 2)) == PartitionSpec(None)


def test_a_mesh_axis_serves_one_dimension() -> None:
    mesh = make_mesh(2, 2, 2)
    with pytest.raises(ValueError, match="'heads' and 'mlp' both claim mesh axis 'tensor'"):
        partition_spec(("heads", "mlp"), (4, 4), mesh)
    with pytest.raises(ValueError, match="'width' is not in the sharding table"):
        partition_spec(("width",), (4,), mesh)
    with pytest.raises(ValueError, match="2 axes"):
        partition_spec(("embed", "mlp"), (4,), mesh)


def test_rows_are_split_over_data_and_fsdp_and_copied_over_tensor() -> None:
    mesh = make_mesh(2, 2, 2)
    assert batch_shards(mesh) == 4
    rows = jax.device_put(np.arange(8 * 3).reshape(8, 3), batch_sharding(mesh))
    held = {shard.device.id: np.asarray(shard.data)[:, 0].tolist() for shard in rows.addressable_shards}
    order = [device.id for device in mesh.devices.flat]
    parts = [[0, 3], [6, 9], [12, 15], [18, 21]]
    assert [held[device] for device in order] == [part for part in parts for _ in range(2)]
