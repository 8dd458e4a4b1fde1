"""A published version is the parameters at the call, in the checkpoint's layout, whatever happens later."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from streamrl_jax.bridge import names
from streamrl_jax.bridge.blob import map_blob
from streamrl_jax.bridge.manifest import DTYPES, check, check_targets, read_tensor
from streamrl_jax.bridge.publish import (
    ByteBudget,
    Published,
    Publisher,
    bytes_per_device,
    convert,
    list_pieces,
    make_buckets,
)
from streamrl_jax.errors import UserError
from streamrl_jax.train.models import Arch, Model, Params
from streamrl_jax.types import Fence

from .tiny import tiny_arch, tiny_model

FENCE = Fence("publish-test", 1)
DTYPE_NAMES = ["float32", "bfloat16"]


def _model(tied: bool = True, mesh: tuple[int, int, int] = (1, 1, 1)) -> Model:
    return tiny_model(tiny_arch(tie_word_embeddings=tied), mesh)


def _params(model: Model, seed: int) -> Params:
    """Random values, placed where the model's parameters lie."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put(rng.standard_normal(leaf.shape, np.float32), leaf.sharding),
        model.abstract_params(),
    )


@contextlib.contextmanager
def _file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process grows past ``nbytes``: nearest to a full disk that fills none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _reference(arch: Arch, params: Params, dtype: str) -> dict[str, np.ndarray]:
    """One tensor after the other in NumPy, rounded by ml_dtypes (to nearest, ties to even)."""
    host = jax.tree.map(np.array, params)
    pairs = names.to_checkpoint(arch, host, explicit_head=True)
    return {name: np.ascontiguousarray(array).astype(DTYPES[dtype]) for name, array in pairs}


def _shipped(published: Published) -> dict[str, np.ndarray]:
    blob = map_blob(published.path, published.manifest.total_bytes)
    assert check(published.manifest, blob) == []
    return {spec.name: read_tensor(blob, spec) for spec in published.manifest.tensors}


def _assert_same_bits(shipped: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert shipped.keys() == wanted.keys()
    for name, array in wanted.items():
        assert shipped[name].dtype == array.dtype and shipped[name].shape == array.shape
        assert shipped[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_every_tensor_is_shipped_bitwise_with_an_explicit_head(
    tmp_path: Path, dtype: str, tied: bool, mesh: tuple[int, int, int]
) -> None:
    model = _model(tied, mesh)
    params = _params(model, 0)
    with Publisher(model.arch, dtype, FENCE, [tmp_path], bucket_bytes=30_000) as publisher:
        published = publisher.publish(params, 0).future.result(60)
        shipped = _shipped(published)
        _assert_same_bits(shipped, _reference(model.arch, params, dtype))
        assert check_targets(published.manifest, publisher.targets) == []
        assert published.manifest.architecture == "Qwen2ForCausalLM"
        assert published.manifest.version == 0 and published.manifest.fence == FENCE
    head, embedding = shipped[names.HEAD_NAME], shipped[names.EMBEDDING_NAME]
    assert (head.tobytes() == embedding.tobytes()) == tied


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_experts_of_a_mixture_are_shipped_one_by_one_from_where_they_lie(
    tmp_path: Path, dtype: str
) -> None:
    model = tiny_model(tiny_arch("Qwen3MoeForCausalLM", num_hidden_layers=1, num_experts=4), (1, 2, 4))
    params = _params(model, 0)
    with Publisher(model.arch, dtype, FENCE, [tmp_path], bucket_bytes=60_000) as publisher:
        shipped = _shipped(publisher.publish(params, 0).future.result(60))
    _assert_same_bits(shipped, _reference(model.arch, params, dtype))
    assert shipped["model.layers.0.mlp.gate.weight"].shape == (4, 32)
    kernel = np.asarray(params["layers"]["mlp"]["down"]["kernel"])
    found = shipped["model.layers.0.mlp.experts.2.down_proj.weight"]
    np.testing.assert_array_equal(found, kernel[0, 2].T.astype(DTYPES[dtype]))


def test_all_experts_of_a_layer_are_one_piece_and_all_layers_share_a_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A large mixture has 18,000 experts' tensors: neither a slice nor a compilation for each of them."""
    arch = tiny_arch("Qwen3MoeForCausalLM", num_hidden_layers=3, hidden_size=16, moe_intermediate_size=12)
    params = _params(tiny_model(arch), 0)
    pieces = [piece for piece in list_pieces(arch) if piece.entry.path[-2:] == ("up", "kernel")]
    assert [len(piece.names) for piece in pieces] == [8, 8, 8]
    with jax.log_compiles():
        converted = [convert(params, (piece,), "bfloat16")[0] for piece in pieces]
    assert caplog.text.count("Compiling jit(_convert)") == 1
    kernel = np.asarray(params["layers"]["mlp"]["up"]["kernel"])
    for layer, array in enumerate(converted):
        np.testing.assert_array_equal(array, kernel[layer].swapaxes(1, 2).astype(DTYPES["bfloat16"]))


def test_rounding_is_to_nearest_even() -> None:
    model = _model()
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], np.uint32).view(
        np.float32
    )
    rounded = np.array([0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80], np.uint16).view(ml_dtypes.bfloat16)
    params = _params(model, 0)
    norm = np.resize(halves, model.arch.embed)
    params["norm"]["scale"] = jnp.asarray(norm)
    piece = next(piece for piece in list_pieces(model.arch) if piece.names == ("model.norm.weight",))
    (array,) = convert(params, (piece,), "bfloat16")
    assert np.asarray(array).tobytes() == np.resize(rounded, model.arch.embed).tobytes()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_snapshot_survives_that_the_next_step_takes_the_parameters_buffers(
    tmp_path: Path, dtype: str, mesh: tuple[int, int, int]
) -> None:
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0.5 - 1.0, params), donate_argnums=0)
    model = _model(True, mesh)
    params = _params(model, 1)
    with Publisher(model.arch, dtype, FENCE, [tmp_path], bucket_bytes=30_000, device_bytes=1) as publisher:
        for version in range(6):
            wanted = _reference(model.arch, params, dtype)
            old = params
            publication = publisher.publish(params, version)
            for _ in range(3):
                params = step(params)
            assert old["norm"]["scale"].is_deleted()  # the buffers are really gone
            _assert_same_bits(_shipped(publication.future.result(60)), wanted)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_nothing_that_is_converted_shares_memory_with_the_parameters(dtype: str) -> None:
    model = _model(tied=False)
    params = _params(model, 0)
    taken = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    converted = convert(params, list_pieces(model.arch), dtype)
    assert not taken & {array.unsafe_buffer_pointer() for array in converted}


def test_a_second_version_compiles_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    params = _params(model, 0)
    other = _params(model, 1)
    with Publisher(model.arch, "bfloat16", FENCE, [tmp_path], bucket_bytes=30_000) as publisher:
        publisher.publish(params, 0).future.result(60)
        with jax.log_compiles():
            publisher.publish(other, 1).future.result(60)
            assert "Compiling" not in caplog.text
            jax.jit(lambda x: x + 1)(1.0)
            assert "Compiling" in caplog.text  # what one looks like


@pytest.mark.parametrize(
    ("architecture", "mesh"),
    [("Qwen2", (1, 1, 1)), ("Qwen2", (2, 2, 2)), ("Qwen3Moe", (2, 2, 2)), ("Qwen3Moe", (1, 2, 4))],
)
def test_converted_tensors_take_the_bytes_per_device_that_are_accounted(
    architecture: str, mesh: tuple[int, int, int]
) -> None:
    model = tiny_model(tiny_arch(f"{architecture}ForCausalLM", tie_word_embeddings=False), mesh)
    params = _params(model, 0)
    pieces = list_pieces(model.arch)
    held: Counter[int] = Counter()
    for array in convert(params, pieces, "bfloat16"):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert len(held) == np.prod(mesh)
    assert set(held.values()) == {bytes_per_device(params, pieces, "bfloat16")}


def test_buckets_keep_order_and_bound() -> None:
    pieces = list_pieces(tiny_arch())
    buckets = make_buckets(pieces, "bfloat16", 1000)
    assert [piece for bucket in buckets for piece in bucket] == list(pieces)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(piece.nbytes("bfloat16") for piece in bucket) <= 1000


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_a_checkpoint_in_order(architecture: str, tied: bool) -> None:
    arch = tiny_arch(architecture, tie_word_embeddings=tied)
    shapes = names.checkpoint_shapes(arch, explicit_head=True)
    found = [(name, piece.entry.checkpoint_shape) for piece in list_pieces(arch) for name in piece.names]
    assert len(found) == len(shapes) and dict(found) == shapes


def test_a_version_lies_ready_until_it_is_released(tmp_path: Path) -> None:
    """An instance that comes back may be slower to load one than the trainer is to make the next ones."""
    model = _model()
    params = _params(model, 0)
    publisher = Publisher(model.arch, "float32", FENCE, [tmp_path])
    published = [publisher.publish(params, version).future.result(60) for version in range(4)]
    assert sorted(publisher.held) == [0, 1, 2, 3]
    view = map_blob(published[2].path, published[2].manifest.total_bytes)
    for version in (0, 2, 2):  # a second time changes nothing
        publisher.release(version)
    assert sorted(publisher.held) == [1, 3]
    assert [entry.path.exists() for entry in published] == [False, True, False, True]
    assert check(published[2].manifest, view) == []
    with pytest.raises(ValueError, match="version 3 is published after version 3"):
        publisher.publish(params, 3)
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_no_room_reaches_the_future_and_leaves_the_older_version(tmp_path: Path) -> None:
    model = _model()
    params = _params(model, 0)
    publisher = Publisher(model.arch, "float32", FENCE, [tmp_path])
    first = publisher.publish(params, 0).future.result(60)
    with _file_size_limit(1000), pytest.raises(UserError, match=r"no room for the weights, \d+ bytes needed"):
        publisher.publish(params, 1).future.result(60)
    assert sorted(publisher.held) == [0]
    assert list(tmp_path.iterdir()) == [first.path]
    _shipped(publisher.publish(params, 2).future.result(60))
    publisher.close()


def test_budget_lets_one_in_whatever_its_size_and_makes_the_next_wait() -> None:
    budget = ByteBudget(10)
    budget.acquire(100, 1.0)
    with pytest.raises(TimeoutError, match=r"1 bytes of device memory: 100 of 10"):
        budget.acquire(1, 0.05)
    entered = threading.Event()

    def wait() -> None:
        budget.acquire(10, 10.0)
        entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not entered.wait(0.05)
    budget.release(100)
    assert entered.wait(60.0)
    waiter.join()
