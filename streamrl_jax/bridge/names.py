"""One table: trainer's parameter tree <-> Hugging Face checkpoint names; serves load, export and push alike.

Pure: no JAX, and the transforms use only indexing, `reshape` and `.T`, so they work on NumPy arrays, memory maps,
`jax.Array`s and tracers alike. Invariant: for a given architecture each checkpoint name and each parameter (layer by
layer) appears in exactly one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal, Protocol

from streamrl_jax.errors import UserError
from streamrl_jax.flops import Shape

HEAD_NAME: Final = "lm_head.weight"
EMBEDDING_NAME: Final = "model.embed_tokens.weight"

# Buffers that old checkpoints stored; they follow from the configuration and are not parameters.
_IGNORED_SUFFIXES: Final = (".rotary_emb.inv_freq",)


class Dimensions(Shape, Protocol):
    """The part of `streamrl_jax.train.models.Arch` that names and shapes depend on."""

    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def tied(self) -> bool: ...
    @property
    def head(self) -> Literal["lm", "value"]: ...
    @property
    def head_bias(self) -> bool: ...


def _as_it_is(array: Any) -> Any:
    return array


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        path: Where the parameter lies in the tree, e.g. ("layers", "attention", "query", "kernel").
        pattern: The checkpoint's name, with "{0}" for the layer and "{1}" for the expert where the parameter is
            stacked over them.
        shape: The parameter's shape in the tree, without the leading dimensions of a stacked one.
        checkpoint_shape: The shape under that name in a checkpoint.
        transposed: Whether it is a matrix that the checkpoint stores as [out, in] and the tree as [*in,
            *out].
        stacked: Leading dimensions of a stacked parameter: (layers,) or (layers, experts); () for one that is not.
    """

    path: tuple[str, ...]
    pattern: str
    shape: tuple[int, ...]
    checkpoint_shape: tuple[int, ...]
    transposed: bool = False
    stacked: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The indices into the stacked dimensions, in order; the empty one for a parameter that is not stacked."""
        return tuple(product(*map(range, self.stacked)))

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's names, one for each of `places`."""
        return tuple(self.pattern.format(*place) for place in self.places)

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """The parameter's shape in the tree, stacked dimensions included."""
        return (*self.stacked, *self.shape)

    def to_checkpoint(self, array: Any) -> Any:
        """The array of one place (any with NumPy's interface) in the checkpoint's layout."""
        if not self.transposed:
            return array.reshape(self.checkpoint_shape)
        return array.reshape(self.checkpoint_shape[::-1]).T

    def from_checkpoint(self, array: Any) -> Any:
        """The inverse of `to_checkpoint`; of a NumPy array or memory map it is a view, nothing is read."""
        return (array.T if self.transposed else array).reshape(self.shape)


def entries(arch: Dimensions) -> tuple[Entry, ...]:
    """The table for an architecture, in the order an export writes it."""
    table = [_same(("embedding", "weight"), EMBEDDING_NAME, (arch.vocab_size, arch.embed)), *_block(arch)]
    table.append(_same(("norm", "scale"), "model.norm.weight", (arch.embed,)))
    if arch.head == "value":
        table.append(Entry(("value_head", "kernel"), "score.weight", (arch.embed,), (1, arch.embed)))
        if arch.head_bias:
            table.append(Entry(("value_head", "bias"), "score.bias", (), (1,)))
    elif not arch.tied:
        table.append(_same(("lm_head", "weight"), HEAD_NAME, (arch.vocab_size, arch.embed)))
    return tuple(table)


def checkpoint_shapes(arch: Dimensions, *, explicit_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Every name of a checkpoint with its shape, in order.

    Args:
        arch: The architecture.
        explicit_head: Adds `lm_head.weight` to a tied model's names. vLLM needs it in a weight update: there
            the head of a tied model would keep its old values.
    """
    shapes = {name: entry.checkpoint_shape for entry in entries(arch) for name in entry.names}
    if explicit_head:
        shapes[HEAD_NAME] = (arch.vocab_size, arch.embed)
    return shapes


def parameters(arch: Dimensions) -> int:
    """How many numbers a checkpoint holds; of a mixture, those of all experts."""
    return sum(math.prod(shape) for shape in checkpoint_shapes(arch).values())


def to_checkpoint(
    arch: Dimensions,
    params: Mapping[str, Any],
    *,
    explicit_head: bool = False,
    fetch: Callable[[Any], Any] = _as_it_is,
) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) in the order of `checkpoint_shapes`, one layer's array at a time.

    Args:
        arch: The architecture.
        params: The parameter tree (arrays of NumPy, JAX or tracers).
        explicit_head: As in `checkpoint_shapes`.
        fetch: Applied to each layer's array, all its experts together, before it is laid out anew, e.g.
            `numpy.asarray` to bring it to the host.
    """
    for entry in entries(arch):
        leaf = leaf_at(params, entry.path)
        found = iter(entry.names)
        for layer in product(*map(range, entry.stacked[:1])):
            fetched = fetch(leaf[layer] if layer else leaf)
            for expert in product(*map(range, entry.stacked[1:])):
                yield next(found), entry.to_checkpoint(fetched[expert] if expert else fetched)
    if explicit_head and arch.tied:
        yield HEAD_NAME, fetch(leaf_at(params, ("embedding", "weight")))


def from_checkpoint(
    arch: Dimensions, tensors: Mapping[str, Any], stack: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Builds the parameter tree from a checkpoint's tensors, whose names and shapes have been checked.

    Args:
        arch: The architecture.
        tensors: name -> array.
        stack: How to join the arrays of layers or experts along a new first dimension, e.g. `numpy.stack`.

    Returns:
        The nested dictionary that `to_checkpoint` takes.
    """
    tree: dict[str, Any] = {}
    for entry in entries(arch):
        parts = [entry.from_checkpoint(tensors[name]) for name in entry.names]
        for count in reversed(entry.stacked):
            parts = [stack(parts[start : start + count]) for start in range(0, len(parts), count)]
        place(tree, entry.path, parts[0])
    return tree


def check_names(
    arch: Dimensions, found: Mapping[str, tuple[int, ...]], where: str, *, explicit_head: bool = False
) -> None:
    """Compares a checkpoint's names and shapes with the table and reports every difference at once.

    A tied model's checkpoint may hold `lm_head.weight` too; whoever reads it sees to it that it equals the
    embedding.

    Args:
        arch: The architecture.
        found: name -> shape.
        where: What to call the checkpoint in the error.
        explicit_head: As in `checkpoint_shapes`; then a tied model's head must be there.

    Raises:
        UserError: Names are missing or unknown, or shapes differ; all of them are listed.
    """
    expected = checkpoint_shapes(arch, explicit_head=explicit_head)
    tolerated = {HEAD_NAME: expected[EMBEDDING_NAME]} if arch.tied else {}
    known = tolerated | expected
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in known and not name.endswith(_IGNORED_SUFFIXES)]
    wrong = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in known.items()
        if name in found and tuple(found[name]) != shape
    ]
    parts = [
        f"{len(items)} {what}: {', '.join(items)}"
        for what, items in (("missing", missing), ("unknown", extra), ("of a wrong shape", wrong))
        if items
    ]
    if parts:
        raise UserError(
            f"{where}: the tensors do not fit the configuration; {'; '.join(parts)}. Check that config.json "
            f"belongs to these weights."
        )


def leaf_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The leaf of a nested dictionary at `path`."""
    node: Any = tree
    for key in path:
        node = node[key]
    return node


def place(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    """Puts a leaf into a nested dictionary, creating the dictionaries on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _same(
    path: tuple[str, ...], pattern: str, shape: tuple[int, ...], stacked: tuple[int, ...] = ()
) -> Entry:
    return Entry(path, pattern, shape, shape, stacked=stacked)


def _block(arch: Dimensions) -> Iterator[Entry]:
    """The entries of the repeated block."""
    embed, layers = (arch.embed,), (arch.layers,)
    queries, keys = (arch.heads, arch.head_dim), (arch.kv_heads, arch.head_dim)
    norms = {"attention_norm": ("input_layernorm", embed), "mlp_norm": ("post_attention_layernorm", embed)}
    if arch.qk_norm:
        norms["attention.query_norm"] = ("self_attn.q_norm", (arch.head_dim,))
        norms["attention.key_norm"] = ("self_attn.k_norm", (arch.head_dim,))
    for module, (name, shape) in norms.items():
        yield _same(
            ("layers", *module.split("."), "scale"), f"model.layers.{{0}}.{name}.weight", shape, layers
        )
    linears = {
        "attention.query": ("self_attn.q_proj", embed, queries, arch.qkv_bias),
        "attention.key": ("self_attn.k_proj", embed, keys, arch.qkv_bias),
        "attention.value": ("self_attn.v_proj", embed, keys, arch.qkv_bias),
        "attention.out": ("self_attn.o_proj", queries, embed, False),
    }
    for module, (name, inputs, outputs, bias) in linears.items():
        yield _kernel(module, name, inputs, outputs, layers)
        if bias:
            path, size = ("layers", *module.split("."), "bias"), math.prod(outputs)
            yield Entry(path, f"model.layers.{{0}}.{name}.bias", outputs, (size,), stacked=layers)
    yield from _feed_forward(arch)


def _feed_forward(arch: Dimensions) -> Iterator[Entry]:
    """The dense layer, or the router and the experts, whose kernels are stacked over layers and experts."""
    embed, mlp, layers = (arch.embed,), (arch.mlp,), (arch.layers,)
    prefix, stacked = "mlp.", layers
    if arch.experts:
        yield _kernel("mlp.router", "mlp.gate", embed, (arch.experts,), layers)
        prefix, stacked = "mlp.experts.{1}.", (*layers, arch.experts)
    yield _kernel("mlp.gate", f"{prefix}gate_proj", embed, mlp, stacked)
    yield _kernel("mlp.up", f"{prefix}up_proj", embed, mlp, stacked)
    yield _kernel("mlp.down", f"{prefix}down_proj", mlp, embed, stacked)


def _kernel(
    module: str, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], stacked: tuple[int, ...]
) -> Entry:
    path, matrix = ("layers", *module.split("."), "kernel"), (math.prod(outputs), math.prod(inputs))
    return Entry(path, f"model.layers.{{0}}.{name}.weight", (*inputs, *outputs), matrix, True, stacked)
