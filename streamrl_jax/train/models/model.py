"""The model as pure functions of a parameter tree: what the training step, the loader and the bridge call.

A parameter tree (`Params`) is a plain nested dictionary of float32 arrays; optax, orbax and `jax.jit` take it
as it is. A model of head "lm" is a policy, one of head "value" a critic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from streamrl_jax.train.arch import Arch
from streamrl_jax.train.families import Head
from streamrl_jax.train.mesh import named_sharding
from streamrl_jax.train.models.decoder import Compute, Decoder

Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A decoder on a mesh. It holds no array and is hashable: jitted functions may take it as static.

    Attributes:
        arch: The architecture.
        mesh: The mesh its parameters and batches lie on.
        head: "lm" (a policy) or "value" (a critic: the same decoder with a scalar head).
        compute: Dtype, rematerialisation and attention blocks of the forward pass.
    """

    arch: Arch
    mesh: Mesh
    head: Head = "lm"
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        """Refuses a mixture whose experts cannot be shared out.

        Raises:
            UserError: The mesh's tensor axis does not divide their number.
        """
        self.arch.check_expert_shards(self.mesh.shape["tensor"])

    def init_params(self, seed: int) -> Params:
        """Random parameters (normal, fan_in^-0.5; value head zero), created where they lie.

        The values depend on the seed alone, not on the mesh.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_params())

        def create() -> Params:
            return nnx.to_pure_dict(nnx.state(Decoder(self.arch, self.head, rngs=nnx.Rngs(seed))))

        return jax.jit(create, out_shardings=shardings)()

    def abstract_params(self) -> Params:
        """The parameter tree as `jax.ShapeDtypeStruct`s with shardings: what orbax restores into."""
        _, axes_and_shapes = _abstract(self.arch, self.head)

        def leaf(entry: tuple[tuple[str, ...], jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
            axes, struct = entry
            sharding = named_sharding(axes, struct.shape, self.mesh)
            return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

        return jax.tree.map(leaf, axes_and_shapes, is_leaf=lambda node: isinstance(node, tuple))

    def hidden_states(
        self,
        params: Params,
        tokens: Int[Array, "rows len"],
        positions: Int[Array, "rows len"],
        segment_ids: Int[Array, "rows len"],
    ) -> Float[Array, "rows len embed"]:
        """Runs the decoder over packed rows.

        Args:
            params: The parameter tree.
            tokens: Token ids.
            positions: Position of each token within its own sequence; restarts at 0 with each segment.
            segment_ids: Which sequence of the row a token belongs to, from 1; 0 is padding. The tokens of a
                segment are contiguous. Attention is causal within a segment and never crosses one.

        Returns:
            The states after the final norm, in `compute.dtype`. Those of padding are finite and mean nothing.
        """
        return self.hidden_and_balance(params, tokens, positions, segment_ids)[0]

    def hidden_and_balance(
        self,
        params: Params,
        tokens: Int[Array, "rows len"],
        positions: Int[Array, "rows len"],
        segment_ids: Int[Array, "rows len"],
    ) -> tuple[Float[Array, "rows len embed"], Float[Array, "rows len"]]:
        """`hidden_states`, and a mixture's load-balance loss.

        Args:
            params: The parameter tree.
            tokens: Token ids.
            positions: As for `hidden_states`.
            segment_ids: As for `hidden_states`.

        Returns:
            The states; and, float32, each token's share of its sequence's load-balance loss
            (`streamrl_jax.train.models.mixture.balance_losses`), the mean over the layers. The sum over the tokens of a
            segment is that sequence's loss, 1 when its experts are chosen alike; it depends on no other sequence. 0
            for padding, and everywhere in a dense model.
        """
        return self._bind(params)(tokens, positions, segment_ids, self.compute, self.mesh)

    def head_weight(self, params: Params) -> Float[Array, "vocab embed"]:
        """The output head's matrix, float32: the embedding itself in a tied model."""
        if self.head != "lm":
            raise ValueError("a value model has no output head over the vocabulary")
        return params["embedding" if self.arch.tied else "lm_head"]["weight"]

    def values(
        self,
        params: Params,
        tokens: Int[Array, "rows len"],
        positions: Int[Array, "rows len"],
        segment_ids: Int[Array, "rows len"],
    ) -> Float[Array, "rows len"]:
        """The critic's output at each token, float32: its estimate *after* having read that token.

        `streamrl_jax.train.logprob.shift_values` aligns it with the tokens it is the baseline of.
        """
        if self.head != "value":
            raise ValueError("a policy has no value head; build the model with head='value'")
        hidden = self.hidden_states(params, tokens, positions, segment_ids)
        return self._bind(params).value_head(hidden)

    def value_params_from(self, policy_params: Params) -> Params:
        """A critic's parameters from a policy's: a copy of the decoder under a value head of zeros.

        Args:
            policy_params: Parameters of a policy of the same architecture and mesh.

        Returns:
            New arrays (the policy's may be donated afterwards).
        """
        if self.head != "value":
            raise ValueError("only a value model takes its parameters from a policy")
        template = self.abstract_params()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, template)
        shared = {name: tree for name, tree in policy_params.items() if name != "lm_head"}

        def create(shared: Params) -> Params:
            zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), template["value_head"])
            return jax.tree.map(jax.numpy.copy, shared) | {"value_head": zeros}

        return jax.jit(create, out_shardings=shardings)(shared)

    def _bind(self, params: Params) -> Decoder:
        graphdef, _ = _abstract(self.arch, self.head)
        return nnx.merge(graphdef, params)


@lru_cache(maxsize=64)
def _abstract(arch: Arch, head: Head) -> tuple[nnx.GraphDef[Decoder], Params]:
    """The module's static half, and each parameter's logical axes and shape; nothing is allocated."""
    decoder = nnx.eval_shape(lambda: Decoder(arch, head, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(decoder)

    def describe(variable: nnx.Variable[Any]) -> tuple[tuple[str, ...], jax.ShapeDtypeStruct]:
        return variable.get_metadata("axes"), variable.get_value()

    return graphdef, nnx.to_pure_dict(state, describe)
