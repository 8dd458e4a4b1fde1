"""The name table: each checkpoint name and each parameter exactly once; the round trip changes no bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.train.families import ARCHITECTURES
from streamrl_jax.train.models import Arch

from .tiny import tiny_arch, tiny_model


@st.composite
def archs(draw: st.DrawFn) -> Arch:
    """Small architectures of all supported kinds."""
    kv_heads = draw(st.integers(1, 3))
    return tiny_arch(
        draw(st.sampled_from([name for name in ARCHITECTURES if name.endswith("ForCausalLM")])),
        hidden_size=draw(st.integers(1, 7)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(1, 11)),
        tie_word_embeddings=draw(st.booleans()),
    )


def numbered_params(arch: Arch) -> dict[str, Any]:
    """Parameters in which every element is another number."""
    tree: dict[str, Any] = {}
    start = 0
    for entry in names.entries(arch):
        size = int(np.prod(entry.tree_shape))
        names.place(
            tree, entry.path, np.arange(start, start + size, dtype=np.float32).reshape(entry.tree_shape)
        )
        start += size
    return tree


@settings(deadline=None, max_examples=50)
@given(arch=archs())
def test_round_trip_is_exact_and_each_element_travels_once(arch: Arch) -> None:
    params = numbered_params(arch)
    tensors = list(names.to_checkpoint(arch, params))
    assert len({name for name, _ in tensors}) == len(tensors)
    assert {name: array.shape for name, array in tensors} == names.checkpoint_shapes(arch)
    shipped = np.sort(np.concatenate([array.reshape(-1) for _, array in tensors]))
    np.testing.assert_array_equal(shipped, np.arange(len(shipped)))
    back = names.from_checkpoint(arch, dict(tensors), np.stack)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize("kind", ["ForTokenClassification", "ForSequenceClassification"])
def test_the_table_covers_a_critics_parameters(kind: str) -> None:
    arch = tiny_arch(f"Qwen3{kind}", critic=True, num_labels=1)
    table: dict[str, Any] = {}
    for entry in names.entries(arch):
        names.place(table, entry.path, entry.tree_shape)
    model = jax.tree.map(lambda leaf: leaf.shape, tiny_model(arch, head="value").abstract_params())
    if kind == "ForSequenceClassification":  # it stores no bias
        del model["value_head"]["bias"]
    assert table == model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name.endswith("ForCausalLM")])
def test_the_table_covers_the_models_parameters(architecture: str, tied: bool) -> None:
    arch = tiny_arch(architecture, tie_word_embeddings=tied)
    model = jax.tree.map(lambda leaf: leaf.shape, tiny_model(arch).abstract_params())
    table: dict[str, Any] = {}
    for entry in names.entries(arch):
        names.place(table, entry.path, entry.tree_shape)
    assert table == model


def test_a_linear_map_means_the_same_in_both_layouts() -> None:
    arch = tiny_arch()
    params = numbered_params(arch)
    tensors = dict(names.to_checkpoint(arch, params))
    rng = np.random.default_rng(0)
    query = params["layers"]["attention"]["query"]["kernel"][1]
    x = rng.normal(size=arch.embed)
    expected = (
        tensors["model.layers.1.self_attn.q_proj.weight"] @ x
    )  # torch: y = W x, heads one after the other
    np.testing.assert_allclose(np.tensordot(x, query, 1).reshape(-1), expected)
    out = params["layers"]["attention"]["out"]["kernel"][0]
    heads = rng.normal(size=(arch.heads, arch.head_dim))
    expected = tensors["model.layers.0.self_attn.o_proj.weight"] @ heads.reshape(-1)
    np.testing.assert_allclose(np.tensordot(heads, out, 2), expected)


def test_the_transforms_work_on_traced_arrays() -> None:
    arch = tiny_arch()
    params = numbered_params(arch)
    traced = jax.jit(lambda tree: dict(names.to_checkpoint(arch, tree)))(params)
    for name, array in names.to_checkpoint(arch, params):
        np.testing.assert_array_equal(traced[name], array)


def test_a_tied_head_is_shipped_only_when_asked_for() -> None:
    arch = tiny_arch(tie_word_embeddings=True)
    params = numbered_params(arch)
    assert names.HEAD_NAME not in dict(names.to_checkpoint(arch, params))
    pushed = dict(names.to_checkpoint(arch, params, explicit_head=True))
    np.testing.assert_array_equal(pushed[names.HEAD_NAME], pushed[names.EMBEDDING_NAME])
    assert {name: array.shape for name, array in pushed.items()} == names.checkpoint_shapes(
        arch, explicit_head=True
    )
    untied = tiny_arch(tie_word_embeddings=False)
    heads = [name for name, _ in names.to_checkpoint(untied, numbered_params(untied), explicit_head=True)]
    assert heads.count(names.HEAD_NAME) == 1


def test_every_difference_is_reported_at_once() -> None:
    arch = tiny_arch()
    found = names.checkpoint_shapes(arch)
    del found["model.norm.weight"], found["model.layers.0.mlp.up_proj.weight"]
    found |= {"model.layers.2.mlp.up_proj.weight": (40, 32), "visual.weight": (1,)}
    found["model.embed_tokens.weight"] = (50, 32)
    with pytest.raises(UserError) as error:
        names.check_names(arch, found, "somewhere")
    message = str(error.value)
    assert message.startswith("somewhere: ")
    assert "2 missing: model.layers.0.mlp.up_proj.weight, model.norm.weight" in message
    assert "2 unknown: model.layers.2.mlp.up_proj.weight, visual.weight" in message
    assert "1 of a wrong shape: model.embed_tokens.weight is [50, 32] instead of [48, 32]" in message


def test_what_a_checkpoint_may_hold_besides() -> None:
    arch = tiny_arch(tie_word_embeddings=True)
    found = names.checkpoint_shapes(arch)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    names.check_names(arch, found | buffers | {names.HEAD_NAME: (48, 32)}, "somewhere")
    with pytest.raises(UserError, match=r"lm_head\.weight is \[1, 32\] instead of \[48, 32\]"):
        names.check_names(arch, found | {names.HEAD_NAME: (1, 32)}, "somewhere")
    with pytest.raises(UserError, match=r"1 missing: lm_head\.weight"):
        names.check_names(arch, found, "a push", explicit_head=True)
