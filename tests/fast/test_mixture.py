"""The mixture of experts: equal to a loop, on any mesh and in any packing; its balance loss is each sequence's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from streamrl_jax.errors import UserError
from streamrl_jax.train.logprob import token_logprobs
from streamrl_jax.train.mesh import batch_sharding
from streamrl_jax.train.models import Compute, Model, Params
from streamrl_jax.train.models.experts import BLOCK, Kernels, grouped_swiglu
from streamrl_jax.train.models.mixture import Mixture, apply_experts, balance_losses

from .tiny import Packed, Sequences, pack, random_params, random_sequences, tiny_arch, tiny_model, unpack

ARCHITECTURE = "Qwen3MoeForCausalLM"
SEQUENCES = random_sequences(0, [[9, 6, 5], [14, 7], [3, 17], [1, 2], [20], [4, 4, 4], [], [11]])
LENGTH = 24

jitted_losses = jax.jit(balance_losses)
Result = tuple[list[np.ndarray], list[np.ndarray], Params]


def result(
    model: Model, params: Params, sequences: Sequences, batch: Packed, left_padding: int = 0
) -> Result:
    """Log-probs and balance losses of each sequence, and the gradient of a weighed sum of all of them."""
    on_mesh = Packed(*(jax.device_put(part, batch_sharding(model.mesh)) for part in batch))

    def total(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden, balance = model.hidden_and_balance(params, *on_mesh)
        head, ids = model.head_weight(params), on_mesh.segment_ids
        logp, _ = token_logprobs(hidden, head, on_mesh.tokens, ids, temperature=0.8, chunk=0, mesh=model.mesh)
        weights = jnp.cos(on_mesh.positions.astype(jnp.float32))
        return jnp.sum(logp * weights) + 3 * jnp.sum(balance), (logp, balance)

    gradient, (logp, balance) = jax.jit(jax.grad(total, has_aux=True))(params)
    outside = np.asarray(batch.segment_ids) == 0
    assert not np.any(np.asarray(balance)[outside])
    pieces = [unpack(values, sequences, left_padding=left_padding) for values in (logp, balance)]
    return pieces[0], pieces[1], jax.tree.map(np.asarray, gradient)


def assert_same(a: Result, b: Result, atol: float, gradient_atol: float) -> None:
    for mine, others in zip(a[:2], b[:2], strict=True):
        for x, y in zip(mine, others, strict=True):
            np.testing.assert_allclose(x, y, atol=atol, rtol=atol)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=gradient_atol, rtol=gradient_atol), a[2], b[2]
    )


@pytest.fixture(scope="module")
def reference() -> tuple[Model, Params, Result]:
    model = tiny_model(tiny_arch(ARCHITECTURE, head_dim=8), compute=Compute(remat="none"))
    params = random_params(model, 3)
    return model, params, result(model, params, SEQUENCES, pack(SEQUENCES, LENGTH))


@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (1, 2, 4), (1, 8, 1)])
def test_the_mesh_changes_nothing(
    reference: tuple[Model, Params, Result], mesh_shape: tuple[int, int, int]
) -> None:
    model, _, expected = reference
    compute = Compute(remat="full" if mesh_shape == (2, 2, 2) else "none")
    sharded = tiny_model(model.arch, mesh_shape, compute=compute)
    params = random_params(sharded, 3)
    kernel = params["layers"]["mlp"]["gate"]["kernel"]
    _, fsdp, tensor = mesh_shape
    layers, experts, embed, mlp = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (layers, experts // tensor, embed // fsdp, mlp)
    found = result(sharded, params, SEQUENCES, pack(SEQUENCES, LENGTH))
    assert_same(found, expected, 5e-6, 2e-5)


def test_packed_rows_equal_unpacked_ones_and_padding_changes_nothing(
    reference: tuple[Model, Params, Result],
) -> None:
    model, params, expected = reference
    alone = [[part] for row in SEQUENCES for part in row]
    assert_same(result(model, params, alone, pack(alone, 21)), expected, 3e-6, 2e-5)
    padded = pack(SEQUENCES, LENGTH + 3, left_padding=3)
    padded.tokens[padded.segment_ids == 0] = 7
    padded.positions[padded.segment_ids == 0] = 5
    assert_same(result(model, params, SEQUENCES, padded, left_padding=3), expected, 3e-6, 2e-5)


def loop_over_pairs(x: Any, chosen: Any, weights: Any, kernels: Any) -> np.ndarray:
    gate, up, down = (np.asarray(kernel, np.float64) for kernel in kernels)
    out = np.zeros(x.shape, np.float64)
    for token, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if 0 <= expert < len(gate):
                inner = x[token].astype(np.float64) @ gate[expert]
                hidden = inner / (1 + np.exp(-inner)) * (x[token] @ up[expert])
                out[token] += share * (hidden @ down[expert])
    return out


@pytest.mark.parametrize("choice", ["any", "one", "none", "outside"])
def test_experts_equal_a_loop_over_pairs(choice: str) -> None:
    """Any load: experts without a token, all tokens on one, pairs that belong to other devices or to padding."""
    rng = np.random.default_rng(5)
    tokens, per_token, experts, embed, mlp = 13, 3, 4, 6, 5
    x = rng.normal(size=(tokens, embed)).astype(np.float32)
    weights = rng.random((tokens, per_token)).astype(np.float32)
    kernels = Kernels(
        *(
            jnp.asarray(rng.normal(size=shape), jnp.float32)
            for shape in ((experts, embed, mlp), (experts, embed, mlp), (experts, mlp, embed))
        )
    )
    chosen = {
        "any": np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)]),
        "one": np.full((tokens, per_token), 2),
        "none": np.full((tokens, per_token), experts),
        "outside": rng.integers(-3, experts + 3, (tokens, per_token)),
    }[choice]
    found = jax.jit(apply_experts)(x, chosen, weights, kernels)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, loop_over_pairs(x, chosen, weights, kernels), atol=2e-5)


def test_blocks_of_rows_have_the_values_and_gradients_of_every_row_alone() -> None:
    """Groups of no row, of few, of exactly a block and of several; nothing comes from rows that belong to none."""
    sizes = np.array([0, BLOCK + 190, 3, BLOCK, 0, 200], np.int32)
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)

    rows, weights = draw(sizes.sum() + 85, 6), draw(sizes.sum() + 85, 6)
    kernels = Kernels(draw(6, 6, 5), draw(6, 6, 5), draw(6, 5, 6))
    used, expert = sizes.sum(), np.repeat(np.arange(6), sizes)

    def grouped(rows: jax.Array, kernels: Kernels) -> jax.Array:
        return jnp.sum(grouped_swiglu(rows, kernels, jnp.asarray(sizes))[:used] * weights[:used])

    def alone(rows: jax.Array, kernels: Kernels) -> jax.Array:
        gate, up, down = (kernel[expert] for kernel in kernels)
        x = rows[:used, None]
        return jnp.sum(((jax.nn.silu(x @ gate) * (x @ up)) @ down)[:, 0] * weights[:used])

    expected = jax.jit(jax.value_and_grad(alone, (0, 1)))(rows, kernels)
    found = jax.jit(jax.value_and_grad(grouped, (0, 1)))(rows.at[used:].set(jnp.nan), kernels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    out = jax.jit(grouped_swiglu)(rows, kernels, sizes)
    assert out.dtype == jnp.float32 and not np.any(out[used:])


def test_memory_does_not_grow_with_rows_times_experts() -> None:
    """A dense product over all experts would hold rows * experts * embed numbers."""
    tokens, per_token, experts, embed, mlp = 1024, 8, 32, 64, 32
    kernel: Any = jax.ShapeDtypeStruct((experts, embed, mlp), jnp.bfloat16)
    last: Any = jax.ShapeDtypeStruct((experts, mlp, embed), jnp.bfloat16)
    given: Any = (
        jax.ShapeDtypeStruct((tokens, embed), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, per_token), jnp.int32),
        jax.ShapeDtypeStruct((tokens, per_token), jnp.float32),
        Kernels(kernel, kernel, last),
    )
    gradient = jax.jit(jax.grad(lambda *given: jnp.sum(apply_experts(*given)), argnums=(0, 2, 3)))
    memory = gradient.lower(*given).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * tokens * per_token * experts * embed / 2


def loop_over_sequences(probs: Any, chosen: Any, segment_ids: Any) -> dict[tuple[int, int], float]:
    """E * sum_e f_e P_e of each sequence, f_e the share of choices and P_e the mean probability."""
    losses = {}
    for row, ids in enumerate(segment_ids):
        for segment in set(ids.tolist()) - {0}:
            here = ids == segment
            shares = (
                np.bincount(chosen[row, here].reshape(-1), minlength=probs.shape[-1]) / chosen[row, here].size
            )
            losses[row, segment] = probs.shape[-1] * float(np.sum(shares * probs[row, here].mean(axis=0)))
    return losses


def test_balance_losses_add_up_to_each_sequences_own() -> None:
    rng = np.random.default_rng(2)
    batch = pack(SEQUENCES, LENGTH, left_padding=1)
    logits = 2 * rng.normal(size=(*batch.tokens.shape, 8)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(logits))
    chosen = np.argsort(-probs, axis=-1)[..., :3]
    shares = np.asarray(jitted_losses(probs, chosen, batch.segment_ids))
    for (row, segment), loss in loop_over_sequences(probs, chosen, batch.segment_ids).items():
        assert shares[row, batch.segment_ids[row] == segment].sum() == pytest.approx(loss, rel=1e-5)


def test_experts_that_are_chosen_alike_cost_1_and_choosing_is_not_differentiated() -> None:
    ids = np.ones((1, 8), np.int32)
    even = np.full((1, 8, 8), 1 / 8, np.float32)
    chosen = np.stack([np.arange(8), (np.arange(8) + 1) % 8], axis=-1)[None]
    np.testing.assert_allclose(jitted_losses(even, chosen, ids).sum(), 1.0, rtol=1e-6)
    # The gradient moves probability away from the expert that all tokens chose, and from no other.
    crowded = np.zeros((1, 8, 1), np.int32)
    gradient = jax.jit(jax.grad(lambda probs: jnp.sum(jitted_losses(probs, crowded, ids))))(even)
    np.testing.assert_allclose(gradient[..., 0], 1.0, rtol=1e-6)  # E n_0 / (k L^2)
    assert not np.any(gradient[..., 1:])


def test_the_balance_loss_of_one_layer_is_transformers_own_but_for_its_factor_k() -> None:
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = np.random.default_rng(1).normal(size=(1, 17, 8)).astype(np.float32)
    expected = load_balancing_loss_func((torch.tensor(logits[0]),), num_experts=8, top_k=3)
    probs = jax.nn.softmax(logits)
    ours = np.sum(jitted_losses(probs, jax.lax.top_k(probs, 3)[1], np.ones((1, 17), np.int32)))
    assert 3 * float(ours) == pytest.approx(float(expected), rel=1e-5)


def test_a_dense_model_has_no_balance_loss() -> None:
    model = tiny_model(tiny_arch())
    batch = pack(SEQUENCES, LENGTH)
    balance = jax.jit(lambda params: model.hidden_and_balance(params, *batch)[1])(random_params(model, 0))
    assert balance.dtype == jnp.float32 and balance.shape == batch.tokens.shape and not np.any(balance)


def test_the_router_is_float32_under_bfloat16() -> None:
    """The choice is that of a float32 router on the rounded states; products of bfloat16 would choose others."""
    arch = tiny_arch(ARCHITECTURE)
    layer = Mixture(arch, rngs=nnx.Rngs(0))
    states = np.random.default_rng(3).normal(size=(4, 64, arch.embed)).astype(np.float32)
    x, ids = jnp.asarray(states, jnp.bfloat16), np.ones((4, 64), np.int32)
    mesh = tiny_model(arch).mesh
    out, balance = jax.jit(lambda layer, x: layer(x, ids, mesh))(layer, x)
    router = np.asarray(layer.router.kernel[...], np.float64)
    exact = np.asarray(x, np.float64) @ router
    probs = np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    expected = jitted_losses(
        jnp.asarray(probs, jnp.float32), jax.lax.top_k(jnp.asarray(probs), arch.experts_per_token)[1], ids
    )
    assert out.dtype == jnp.bfloat16 and balance.dtype == jnp.float32
    np.testing.assert_allclose(balance, expected, rtol=1e-5)
    rounded = np.asarray(jnp.matmul(x, jnp.asarray(router, jnp.bfloat16)), np.float32)
    chosen = [np.sort(np.argsort(-values, -1)[..., : arch.experts_per_token]) for values in (exact, rounded)]
    assert np.any(chosen[0] != chosen[1])  # the test would notice


def test_experts_that_cannot_be_shared_out_are_refused() -> None:
    arch = tiny_arch(ARCHITECTURE, num_experts=6)
    tiny_model(arch, (2, 2, 2))
    with pytest.raises(UserError, match=r"trainer\.mesh\.tensor = 4 does not divide .* num_experts = 6"):
        tiny_model(arch, (1, 2, 4))


def test_what_a_mixtures_configuration_may_say() -> None:
    arch = tiny_arch(ARCHITECTURE)
    assert (arch.experts, arch.experts_per_token, arch.mlp, arch.normalise_experts) == (8, 3, 24, True)
    renamed = tiny_arch(ARCHITECTURE, num_experts=None, num_local_experts=8)  # as transformers 5 writes it
    assert renamed.experts == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": None}, "'num_experts' is null: a positive whole number"),
        ({"num_local_experts": 4}, "'num_local_experts' is 4: it differs from num_experts"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9: there are only 8 experts"),
        ({"decoder_sparse_step": 2}, "'decoder_sparse_step' is 2: only models whose layers are all mixtures"),
        ({"mlp_only_layers": [0]}, r"'mlp_only_layers' is \[0\]: only models whose layers are all mixtures"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' is 0"),
        ({"norm_topk_prob": "yes"}, "'norm_topk_prob' is \"yes\""),
    ],
)
def test_what_a_mixture_may_not_be_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tiny_arch(ARCHITECTURE, **changes)
