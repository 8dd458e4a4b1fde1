"""What a trainer carries from one update to the next, as pytrees for checkpoints and jitted functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.train.aggregate import Count, Size
from streamrl_jax.train.batcher import HostRows, Rows
from streamrl_jax.train.mesh import batch_sharding, put, replicated
from streamrl_jax.train.models import Model, Params
from streamrl_jax.train.moments import Moments
from streamrl_jax.train.optim import Optimizer

jax.tree_util.register_dataclass(Rows)
DeviceRows = Rows[Array]
"""A micro-batch's rows as device arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Network:
    """Parameters (float32 masters) and the optimizer's state, sharded alike."""

    params: Params
    opt: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    There is no random key: nothing on the device draws numbers, and mini-batches are drawn from (seed, version) alone.

    Attributes:
        actor: The policy.
        critic: The value model; None without one.
        updates: Optimizer steps applied so far; refused ones do not count.
        advantages: Statistics of the advantages of earlier iterations, for running whitening; count 0 at the
            start.
    """

    actor: Network
    critic: Network | None
    updates: Int[Array, ""]
    advantages: Moments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """Sums over the micro-batches since the last update; divided by the global denominator in the update.

    Attributes:
        tree: Gradient of the summed loss, float32, sharded like the parameters.
        loss: The summed loss.
        size: What they cover; the denominator follows from it.
    """

    tree: Params
    loss: Float[Array, ""]
    size: Size


def abstract_network(model: Model, optimizer: Optimizer) -> Network:
    """A network as `jax.ShapeDtypeStruct`s with shardings; Adam's moments lie as the parameters do."""
    params = model.abstract_params()
    whole = replicated(model.mesh)
    opt = optax.tree_map_params(
        optimizer.rule,
        lambda _, param: param,
        jax.eval_shape(optimizer.rule.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
    )
    return Network(params, opt)


def abstract_state(actor: Network, critic: Network | None, whole: NamedSharding) -> TrainState:
    """A state of abstract networks: what a checkpoint is restored into."""

    def scalar(value: np.generic) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), value.dtype, sharding=whole)

    return TrainState(actor, critic, *jax.tree.map(scalar, initial_scalars()))


def initial_scalars() -> tuple[np.int32, Moments]:
    """`updates` and `advantages` of a new state, on the host."""
    return np.int32(0), jax.tree.map(np.float32, Moments())


def init_network(optimizer: Optimizer, params: Params, abstract: Network) -> Network:
    """A network at its beginning: moments of zero, created where they lie."""
    start = jax.jit(optimizer.rule.init, out_shardings=shardings(abstract.opt))
    return Network(params, start(params))


def place(rows: HostRows, mesh: Mesh) -> DeviceRows:
    """Copies rows to the devices that work on them; each process those of its own devices."""
    return jax.tree.map(lambda array: put(array, batch_sharding(mesh)), rows)


def place_whole(tree: Any, mesh: Mesh) -> Any:
    """Copies a tree of float32 or int32 scalars to every device."""
    return jax.tree.map(lambda leaf: put(leaf, replicated(mesh)), tree)


def shardings(tree: Any) -> Any:
    """The sharding of each leaf of a tree of arrays or of `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def add(gradients: Gradients, gradient: Params, loss: Float[Array, ""], size: Size) -> Gradients:
    """Adds a micro-batch's summed loss, its gradient and its size."""
    tree = jax.tree.map(jnp.add, gradients.tree, gradient)
    return Gradients(tree, gradients.loss + loss, gradients.size + size)


def zeros(params: Params) -> Gradients:
    """An empty accumulator for parameters (or their abstract shapes)."""
    tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return Gradients(tree, jnp.float32(0), Size(jnp.int32(0), jnp.int32(0)))


def take_step(
    optimizer: Optimizer, network: Network, gradients: Gradients, denominator: Count
) -> tuple[Network, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """Divides by the global denominator and takes one optimizer step.

    Args:
        optimizer: The network's.
        network: Where it stands.
        gradients: What was accumulated.
        denominator: Follows from their size; 0 where nothing was kept, and the caller then keeps the old network.

    Returns:
        The new network, whether loss and gradient are finite (if not, `choose` the old one), and the
        optimizer's report.
    """
    mean = jax.tree.map(lambda total: total / jnp.maximum(denominator, 1), gradients.tree)
    params, opt, report = optimizer.update(mean, network.opt, network.params)
    return Network(params, opt), jnp.isfinite(gradients.loss) & jnp.isfinite(report["grad_norm"]), report


def choose(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if the condition holds, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
