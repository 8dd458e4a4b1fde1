"""Token log-probs and values: alignment, temperature and packing against a loop in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.train.logprob import predicted, shift_values, token_logprobs

EMBED, VOCAB = 8, 13
# Two sequences and padding; one sequence of one token, one longer, padding on both sides; all padding.
SEGMENTS: Any = np.array(
    [[1, 1, 1, 2, 2, 2, 2, 0], [0, 1, 2, 2, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]], np.int32
)


def batch(seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*SEGMENTS.shape, EMBED)).astype(np.float32)
    weight = rng.normal(size=(VOCAB, EMBED)).astype(np.float32)
    return hidden, weight, rng.integers(0, VOCAB, SEGMENTS.shape).astype(np.int32)


def by_loop(
    hidden: np.ndarray, weight: np.ndarray, tokens: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    logp, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for row in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if SEGMENTS[row, t] == 0 or SEGMENTS[row, t] != SEGMENTS[row, t - 1]:
                continue
            logits = weight.astype(np.float64) @ hidden[row, t - 1] / temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logp[row, t] = np.log(p[tokens[row, t]])
            entropy[row, t] = -np.sum(p * np.log(p))
    return logp, entropy


@pytest.mark.parametrize("chunk", [0, 1, 9, 15, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_a_loop(temperature: float, chunk: int) -> None:
    hidden, weight, tokens = batch()
    score = jax.jit(partial(token_logprobs, temperature=temperature, chunk=chunk))
    logp, entropy = score(hidden, weight, tokens, SEGMENTS)
    expected_logp, expected_entropy = by_loop(hidden, weight, tokens, temperature)
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, expected_logp, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)
    assert not np.any(np.asarray(logp)[~np.asarray(predicted(SEGMENTS))])


def test_gradients_do_not_depend_on_the_chunks() -> None:
    hidden, weight, tokens = batch()

    def loss(hidden: Any, weight: Any, chunk: int) -> Any:
        logp, entropy = token_logprobs(hidden, weight, tokens, SEGMENTS, temperature=0.7, chunk=chunk)
        return jnp.sum(logp * jnp.arange(8.0)) + 0.3 * jnp.sum(entropy)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    whole, chunked = gradients(hidden, weight, 0), gradients(hidden, weight, 6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), chunked, whole)
    # What no token is predicted from gets no gradient: the last token of a segment, and padding.
    read = np.roll(np.asarray(predicted(SEGMENTS)), -1, axis=1)
    assert not np.any(np.asarray(whole[0])[~read])
    assert np.all(np.any(np.asarray(whole[0])[read], axis=-1))


def test_the_results_memory_does_not_grow_with_the_number_of_tokens() -> None:
    vocab, length = 4096, 512
    hidden = jax.ShapeDtypeStruct((1, length, EMBED), jnp.float32)
    weight = jax.ShapeDtypeStruct((vocab, EMBED), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def temporaries(chunk: int) -> int:
        def loss(hidden: Any, weight: Any, tokens: Any, segment_ids: Any) -> Any:
            logp, _ = token_logprobs(hidden, weight, tokens, segment_ids, temperature=1.0, chunk=chunk)
            return jnp.sum(logp)

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        memory = step.lower(hidden, weight, ids, ids).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    logits = 4 * vocab * length
    assert temporaries(0) > logits
    assert temporaries(32) < logits / 4


def test_values_are_aligned_with_the_token_they_are_the_baseline_of() -> None:
    output: Any = np.arange(1.0, 25.0, dtype=np.float32).reshape(3, 8)
    expected = [[0, 1, 2, 0, 4, 5, 6, 0], [0, 0, 0, 11, 12, 0, 0, 0], [0] * 8]
    np.testing.assert_array_equal(shift_values(output, SEGMENTS), expected)
    gradient = jax.grad(lambda x: jnp.sum(shift_values(x, SEGMENTS)))(output)
    np.testing.assert_array_equal(gradient, [[1, 1, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0] * 8])
