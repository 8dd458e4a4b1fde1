"""The device mesh and the one table that says which array dimension lies on which mesh axis.

Arrays are described by *logical* axis names ("embed", "heads", ...), one for each dimension; `RULES` maps a
logical name to the physical mesh axes it is split over. To change how the model is sharded, change the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from streamrl_jax.train.shapes import fill_axes

# Order matters: neighbouring devices differ in the last axis, so `tensor`, which talks the most, is innermost.
MESH_AXES: Final[tuple[str, ...]] = ("data", "fsdp", "tensor")

RULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "batch": ("data", "fsdp"),
        "length": (),
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "mlp": ("tensor",),
        "experts": ("tensor",),
        "expert_mlp": (),
        "router": (),
        "vocab": ("tensor",),
        "layers": (),
        "norm": (),
    }
)


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm] (an alias at run time)
) -> Mesh:
    """Builds the trainer's mesh.

    Devices are taken process by process, and the last axis changes first. So with several trainer processes `data` is
    the axis that crosses them, once a step for the gradients, as long as fsdp x tensor divides the devices of a
    process; where it is more than a process has, `fsdp` crosses too, and `tensor` only where it alone is more.

    Args:
        data: Devices along the axis that holds whole copies of the parameters; -1 fills up.
        fsdp: Devices along the axis that splits parameters and batch; -1 fills up.
        tensor: Devices along the axis that splits heads, feed-forward width and vocabulary; -1 fills up.
        devices: The devices to use, all of the job's if None.

    Returns:
        A mesh with axes `MESH_AXES`, all of them Auto: XLA places the collectives.

    Raises:
        UserError: An axis is neither positive nor -1, two are -1, or the product is not the number of
            devices.
    """
    available = list(jax.devices() if devices is None else devices)
    asked: dict[str, int] = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    sizes = fill_axes(asked, len(available), available[0].platform)
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=available)


def partition_spec(axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Turns an array's logical axes into the mesh axes each dimension is split over.

    A dimension that its mesh axes do not divide is replicated as a whole: 2 key/value heads on tensor=4 lie
    complete on every device. That costs memory and never changes a value.

    Args:
        axes: A logical name for each dimension.
        shape: The array's shape.
        mesh: The mesh from `make_mesh`.

    Returns:
        The specification, one entry for each dimension.

    Raises:
        ValueError: A name is not in `RULES`, the lengths differ, or two dimensions claim one mesh axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axes {tuple(axes)} for the {len(shape)} dimensions of {tuple(shape)}")
    taken: dict[str, str] = {}
    entries: list[str | tuple[str, ...] | None] = []
    for name, size in zip(axes, shape, strict=True):
        if name not in RULES:
            raise ValueError(f"logical axis {name!r} is not in the sharding table; known: {', '.join(RULES)}")
        for axis in RULES[name]:
            if axis in taken:
                raise ValueError(
                    f"axes {tuple(axes)}: {taken[axis]!r} and {name!r} both claim mesh axis {axis!r}"
                )
            taken[axis] = name
        parts = math.prod(mesh.shape[axis] for axis in RULES[name])
        entries.append(_entry(RULES[name]) if size % parts == 0 else None)
    return PartitionSpec(*entries)


def named_sharding(axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """`partition_spec` bound to its mesh."""
    return NamedSharding(mesh, partition_spec(axes, shape, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of anything whose first dimension is the rows of a batch: over data and fsdp.

    The number of rows must be a multiple of `batch_shards(mesh)`.
    """
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a scalar or of anything that lies whole on each device."""
    return NamedSharding(mesh, PartitionSpec())


def put(value: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """Copies a host array to the devices, each process the parts of its own.

    `jax.device_put` would compare the array between the processes first, by a collective that nobody sees.

    Args:
        value: The whole array, the same in every process.
        sharding: Where it shall lie.
    """
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
