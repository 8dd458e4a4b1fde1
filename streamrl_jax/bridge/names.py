"""One table: trainer's parameter tree <-> Hugging Face checkpoint names; serves load, export and push alike.

Pure: no JAX, and the transforms use only indexing, `reshape` and `.T`, so they work on NumPy arrays, memory maps,
`jax.Array`s and tracers alike. Invariant: for a given architecture each checkpoint name and each parameter (layer by
layer) appears in exactly one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

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
    def tied(self) -> bool: ...


def _as_it_is(array: Any) -> Any:
    return array


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        path: Where the parameter lies in the tree, e.g. ("layers", "attention", "query", "kernel").
        pattern: The checkpoint's name, with "{layer}" where the parameter is stacked over the layers.
        shape: The parameter's shape in the tree, without the leading layers dimension of a stacked one.
        checkpoint_shape: The shape under that name in a checkpoint.
        transposed: Whether it is a matrix that the checkpoint stores as [out, in] and the tree as [*in,
            *out].
        layers: Length of the leading dimension of a stacked parameter, None for one that is not stacked.
    """

    path: tuple[str, ...]
    pattern: str
    shape: tuple[int, ...]
    checkpoint_shape: tuple[int, ...]
    transposed: bool = False
    layers: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's names, one for each layer of a stacked parameter."""
        if self.layers is None:
            return (self.pattern,)
        return tuple(self.pattern.format(layer=layer) for layer in range(self.layers))

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """The parameter's shape in the tree, layers included."""
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def to_checkpoint(self, array: Any) -> Any:
        """One layer's array (any with NumPy's interface) in the checkpoint's layout."""
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
    if not arch.tied:
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
        params: A policy's parameter tree (arrays of NumPy, JAX or tracers).
        explicit_head: As in `checkpoint_shapes`.
        fetch: Applied to each layer's array before it is laid out anew, e.g. `numpy.asarray` to bring it to
            the host.
    """
    for entry in entries(arch):
        leaf = leaf_at(params, entry.path)
        for layer, name in enumerate(entry.names):
            yield name, entry.to_checkpoint(fetch(leaf if entry.layers is None else leaf[layer]))
    if explicit_head and arch.tied:
        yield HEAD_NAME, fetch(leaf_at(params, ("embedding", "weight")))


def from_checkpoint(
    arch: Dimensions, tensors: Mapping[str, Any], stack: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Builds the parameter tree from a checkpoint's tensors, whose names and shapes have been checked.

    Args:
        arch: The architecture.
        tensors: name -> array.
        stack: How to join the layers' arrays along a new first dimension, e.g. `numpy.stack`.

    Returns:
        The nested dictionary that `to_checkpoint` takes.
    """
    tree: dict[str, Any] = {}
    for entry in entries(arch):
        parts = [entry.from_checkpoint(tensors[name]) for name in entry.names]
        place(tree, entry.path, parts[0] if entry.layers is None else stack(parts))
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


def _same(path: tuple[str, ...], pattern: str, shape: tuple[int, ...], layers: int | None = None) -> Entry:
    return Entry(path, pattern, shape, shape, layers=layers)


def _block(arch: Dimensions) -> Iterator[Entry]:
    """The entries of the repeated block."""
    embed = (arch.embed,)
    queries, keys = (arch.heads, arch.head_dim), (arch.kv_heads, arch.head_dim)
    linears = {
        "attention.query": ("self_attn.q_proj", embed, queries, arch.qkv_bias),
        "attention.key": ("self_attn.k_proj", embed, keys, arch.qkv_bias),
        "attention.value": ("self_attn.v_proj", embed, keys, arch.qkv_bias),
        "attention.out": ("self_attn.o_proj", queries, embed, False),
        "mlp.gate": ("mlp.gate_proj", embed, (arch.mlp,), False),
        "mlp.up": ("mlp.up_proj", embed, (arch.mlp,), False),
        "mlp.down": ("mlp.down_proj", (arch.mlp,), embed, False),
    }
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for module, name in norms.items():
        yield _same(("layers", module, "scale"), f"model.layers.{{layer}}.{name}.weight", embed, arch.layers)
    for module, (name, inputs, outputs, bias) in linears.items():
        path, pattern = ("layers", *module.split(".")), f"model.layers.{{layer}}.{name}"
        matrix = (math.prod(outputs), math.prod(inputs))
        yield Entry((*path, "kernel"), f"{pattern}.weight", (*inputs, *outputs), matrix, True, arch.layers)
        if bias:
            yield Entry(
                (*path, "bias"), f"{pattern}.bias", outputs, (math.prod(outputs),), False, arch.layers
            )
