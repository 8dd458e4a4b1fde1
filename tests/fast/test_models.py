"""The decoder: equal to transformers, blind to packing, blocks, rematerialisation and the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.train.logprob import token_logprobs
from streamrl_jax.train.mesh import batch_sharding
from streamrl_jax.train.models import Compute, Model, Params, arch_from_hf
from streamrl_jax.train.rope import Llama3Scaling, Rope

from .tiny import (
    LLAMA3_ROPE,
    Packed,
    Sequences,
    hf_config,
    pack,
    random_params,
    random_sequences,
    shardings,
    tiny_arch,
    tiny_model,
    unpack,
)

Reference = tuple[Model, Params, list[np.ndarray], Params]

SEQUENCES = random_sequences(0, [[9, 6, 5], [14, 7], [3, 17], [1, 2]])
LENGTH = 24


def mean_logp(model: Model, params: Params, batch: Packed, weights: Any) -> tuple[jax.Array, jax.Array]:
    """A scalar that depends on all log-probs in different measure, and the log-probs."""
    hidden = model.hidden_states(params, *batch)
    logp, _ = token_logprobs(
        hidden,
        model.head_weight(params),
        batch.tokens,
        batch.segment_ids,
        temperature=0.8,
        chunk=8,
        mesh=model.mesh,
    )
    return jnp.sum(logp * weights), logp


def value_and_grad(
    model: Model, params: Params, sequences: Sequences, length: int
) -> tuple[list[np.ndarray], Params]:
    """Log-probs of each sequence, and the gradient of their sum weighed by the place in the sequence."""
    batch = pack(sequences, length)
    on_mesh = Packed(*(jax.device_put(part, batch_sharding(model.mesh)) for part in batch))
    weights = jnp.cos(batch.positions.astype(np.float32))
    grad = jax.jit(jax.grad(lambda params: mean_logp(model, params, on_mesh, weights), has_aux=True))
    gradient, logp = grad(params)
    return unpack(logp, sequences), jax.tree.map(np.asarray, gradient)


def assert_close(a: Any, b: Any, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=atol), a, b)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """A tied Qwen2 on one device with its log-probs and gradient over `SEQUENCES`."""
    model = tiny_model(tiny_arch(), compute=Compute(remat="none"))
    params = random_params(model, 3)
    return (model, params, *value_and_grad(model, params, SEQUENCES, LENGTH))


def test_packed_rows_equal_unpacked_ones(reference: Reference) -> None:
    model, params, logp, gradient = reference
    alone = [[part] for row in SEQUENCES for part in row]
    logp_alone, gradient_alone = value_and_grad(model, params, alone, 17)
    assert_close(logp, logp_alone, 2e-6)
    assert_close(gradient, gradient_alone, 2e-5)


def test_padding_on_the_left_changes_nothing(reference: Reference) -> None:
    model, params, logp, _ = reference
    batch = pack(SEQUENCES, LENGTH + 3, left_padding=3)
    _, shifted = jax.jit(lambda params: mean_logp(model, params, batch, 1.0))(params)
    assert_close(logp, unpack(shifted, SEQUENCES, left_padding=3), 2e-6)


@pytest.mark.parametrize(
    "compute",
    [
        Compute(remat="dots"),
        Compute(remat="full", attention_block=7),  # does not divide the length
    ],
)
def test_remat_and_blocks_change_nothing(reference: Reference, compute: Compute) -> None:
    model, params, logp, gradient = reference
    other = Model(model.arch, model.mesh, compute=compute)
    logp_other, gradient_other = value_and_grad(other, params, SEQUENCES, LENGTH)
    assert_close(logp, logp_other, 2e-6)
    assert_close(gradient, gradient_other, 2e-5)


# On tensor=4 the two key/value heads do not divide and are replicated.
@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (1, 2, 4)])
def test_the_mesh_changes_nothing(
    reference: Reference,
    mesh_shape: tuple[int, int, int],
    record_property: Any,
) -> None:
    model, _, logp, gradient = reference
    sharded = tiny_model(model.arch, mesh_shape)
    params_sharded = random_params(sharded, 3)
    logp_sharded, gradient_sharded = value_and_grad(sharded, params_sharded, SEQUENCES, LENGTH)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(logp, logp_sharded, strict=True))
    record_property("max_logprob_difference", difference)
    assert_close(logp, logp_sharded, 5e-6)
    assert_close(gradient, gradient_sharded, 2e-5)


def test_attention_memory_grows_linearly() -> None:
    arch = tiny_arch(num_hidden_layers=1)
    length = 2048

    def temporaries(block: int) -> int:
        model = tiny_model(arch, compute=Compute(attention_block=block))
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(params: Params, *batch: Any) -> jax.Array:
            return jnp.sum(model.hidden_states(params, *batch))

        lowered = jax.jit(jax.grad(loss)).lower(model.abstract_params(), ids, ids, ids)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    scores = 4 * arch.heads * length * length
    assert temporaries(length) > scores
    assert temporaries(64) < scores / 4


def test_bfloat16_stays_near_and_keeps_float32_masters(
    reference: Reference,
) -> None:
    model, params, logp, _ = reference
    half = Model(model.arch, model.mesh, compute=Compute(dtype="bfloat16"))
    batch = pack(SEQUENCES, LENGTH)
    assert jax.eval_shape(half.hidden_states, params, *batch).dtype == jnp.bfloat16
    total, logp_half = jax.jit(lambda params: mean_logp(half, params, batch, 1.0))(params)
    pieces = zip(logp, unpack(logp_half, SEQUENCES), strict=True)
    assert total.dtype == logp_half.dtype == jnp.float32
    assert 0 < max(float(np.abs(a - b).max()) for a, b in pieces) < 0.1
    gradient = jax.eval_shape(jax.grad(lambda params: mean_logp(half, params, batch, 1.0)[0]), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((params, gradient)))


def test_initial_parameters_have_the_scale_of_their_fan_in_on_any_mesh() -> None:
    arch = tiny_arch(hidden_size=64, intermediate_size=96, tie_word_embeddings=False, vocab_size=200)
    params = tiny_model(arch).init_params(0)
    jax.tree.map(np.testing.assert_array_equal, tiny_model(arch, (2, 2, 2)).init_params(0), params)
    for path, fan_in in [
        (("layers", "attention", "query", "kernel"), 64),
        (("layers", "attention", "out", "kernel"), 64),
        (("layers", "mlp", "down", "kernel"), 96),
        (("embedding", "weight"), 64),
        (("lm_head", "weight"), 64),
    ]:
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        assert np.std(leaf) == pytest.approx(fan_in**-0.5, rel=0.05), path
    kernels = params["layers"]["mlp"]["gate"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
    assert np.all(params["norm"]["scale"] == 1) and not np.any(params["layers"]["attention"]["key"]["bias"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_starts_as_the_policy_under_a_head_of_zeros(tied: bool) -> None:
    arch = tiny_arch(tie_word_embeddings=tied)
    policy, critic = tiny_model(arch, (2, 2, 2)), tiny_model(arch, (2, 2, 2), head="value")
    policy_params = random_params(policy, 0)
    params = critic.value_params_from(policy_params)
    assert "lm_head" not in params and not any(np.any(leaf) for leaf in jax.tree.leaves(params["value_head"]))
    for shared in ("embedding", "layers", "norm"):
        jax.tree.map(np.testing.assert_array_equal, params[shared], policy_params[shared])
    assert shardings(params) == shardings(critic.abstract_params())
    jax.tree.map(lambda leaf: leaf.delete(), policy_params)  # as a donating step does
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))


def test_values_are_a_linear_map_of_the_hidden_states() -> None:
    policy, critic = (
        tiny_model(tiny_arch()),
        tiny_model(tiny_arch(), head="value", compute=Compute("bfloat16")),
    )
    params = random_params(critic, 1)
    batch = pack(SEQUENCES, LENGTH)

    @jax.jit
    def both(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden, head = critic.hidden_states(params, *batch), params["value_head"]
        return critic.values(params, *batch), hidden.astype(jnp.float32) @ head["kernel"] + head["bias"]

    values, expected = both(params)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, expected, atol=1e-5)
    with pytest.raises(ValueError, match="no value head"):
        policy.values(params, *batch)
    with pytest.raises(ValueError, match="no output head"):
        critic.head_weight(params)
    with pytest.raises(ValueError, match="only a value model"):
        policy.value_params_from(params)


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({}, 1e4),
    ],
)
def test_both_ways_of_writing_the_rotary_base(rope: dict[str, Any], theta: float) -> None:
    config = hf_config()
    del config["rope_parameters"]
    assert arch_from_hf(config | rope).rope == Rope(theta)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": LLAMA3_ROPE},
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
    ],
)
def test_both_ways_of_writing_the_stretched_rotary_embedding(written: dict[str, Any]) -> None:
    config = hf_config("LlamaForCausalLM")
    del config["rope_parameters"]
    assert arch_from_hf(config | written).rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 32))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"factor": None}, "'factor' is null: a positive number"),
        ({"low_freq_factor": 0}, "'low_freq_factor' is 0: a positive number"),
        ({"high_freq_factor": 1.0}, "'high_freq_factor' is 1.0: it must be above low_freq_factor = 1"),
        ({"original_max_position_embeddings": 0.5}, "'original_max_position_embeddings' is 0.5"),
    ],
)
def test_a_stretched_rotary_embedding_that_makes_no_sense(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=r"config\.json, rope_parameters: field " + says):
        tiny_arch("LlamaForCausalLM", rope_parameters=LLAMA3_ROPE | changes)


def test_what_a_configuration_leaves_out() -> None:
    config = hf_config(head_dim=None)
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    arch = arch_from_hf(config)
    assert (arch.kv_heads, arch.head_dim, arch.tied) == (4, 8, False)
    assert arch.hf_config == config
    assert arch_from_hf(hf_config(head_dim=16)).head_dim == 16
    assert (
        arch_from_hf(hf_config("Qwen3ForCausalLM")).head_dim == 128
    )  # transformers' default for this family
    # Qwen2.5 writes a window that it does not use.
    assert (
        arch_from_hf(hf_config(use_sliding_window=False, sliding_window=32768, max_window_layers=21))
        is not None
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "'architectures' is .\"Mistral.*Qwen2ForCausalLM"),
        ({"architectures": None}, "'architectures' is null"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is \"gelu\""),
        ({"use_sliding_window": True}, "'use_sliding_window' is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'"),
        ({"mlp_bias": True}, "'mlp_bias' is true"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling'.*'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'rope_scaling'.*'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'rope_parameters'.*'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'rope_parameters'.*'longrope' is not supported"),
        ({"rope_scaling": LLAMA3_ROPE}, "'rope_scaling'.*it differs from rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'rope_parameters'.*partial"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5: a partial"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3: it must divide num_attention_heads = 4"),
        ({"hidden_size": 33}, "'hidden_size' is 33"),
        ({"head_dim": 7}, "'head_dim' is 7"),
        ({"vocab_size": "48"}, "'vocab_size' is \"48\""),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is \"yes\""),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=r"dir/config\.json: field .*" + says):
        arch_from_hf(hf_config(**changes), "dir/config.json")


def test_a_missing_field_is_named() -> None:
    config = hf_config()
    del config["intermediate_size"]
    with pytest.raises(
        UserError, match="field 'intermediate_size' is missing: a positive whole number is needed"
    ):
        arch_from_hf(config)
