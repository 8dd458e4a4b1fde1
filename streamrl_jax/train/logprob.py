"""Log-probabilities of tokens: the one place where hidden states become numbers that a loss uses.

Alignment, everywhere: entry t of a result belongs to token t, and is computed from the state at t - 1, the
last one that has not seen token t. It is 0 where no such state exists: at the first token of a segment and in
padding.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp() of it is exactly 0, and 0 times it is 0, not NaN as with an infinity.
_IMPOSSIBLE = -1e30


def predicted(segment_ids: Int[Array, "rows len"]) -> Bool[Array, "rows len"]:
    """True at the tokens that a state of their own segment precedes."""
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids > 0) & (segment_ids == previous)


def shift_values(
    head_output: Float[Array, "rows len"], segment_ids: Int[Array, "rows len"]
) -> Float[Array, "rows len"]:
    """Aligns a critic's output with the tokens: V_t is its output at t - 1, where token t was chosen.

    Args:
        head_output: The value head's output at each token.
        segment_ids: Which packed sequence a token belongs to, 0 for padding.

    Returns:
        The values, 0 at the first token of a segment and in padding.
    """
    return jnp.where(predicted(segment_ids), jnp.roll(head_output, 1, axis=1), 0)


def token_logprobs(
    hidden: Float[Array, "rows len embed"],
    head_weight: Float[Array, "vocab embed"],
    tokens: Int[Array, "rows len"],
    segment_ids: Int[Array, "rows len"],
    *,
    temperature: float,
    chunk: int,
    vocab_limit: int | None = None,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    """log softmax(logits_{t-1} / temperature)[token_t] and the entropy of that distribution.

    The logits of all tokens never exist at once: the rows are worked off in slices of columns, and the
    backward pass computes each slice's logits again. The result does not depend on `chunk`.

    Args:
        hidden: States after the final norm, in the compute dtype.
        head_weight: The output head.
        tokens: Token ids.
        segment_ids: Which packed sequence a token belongs to, 0 for padding.
        temperature: What the logits are divided by, as when the tokens were sampled; above 0.
        chunk: About how many tokens, over all rows of the (global) batch, have logits at the same time;
            0 for all of them.
        vocab_limit: Ids from this one on (the padding of the vocabulary) have probability 0; None if all are
            real.

    Returns:
        Log-probabilities and entropies in nats, both float32, aligned at the token (see the module).
    """
    length = tokens.shape[1]
    columns = min(length, max(1, chunk // tokens.shape[0])) if chunk else length
    # The state at t - 1 and the token t, side by side; what is rolled around to column 0 is masked below.
    states = jnp.roll(hidden, 1, axis=1)
    weight = head_weight.astype(hidden.dtype)

    def score(states: Array, targets: Array, weight: Array) -> tuple[Array, Array]:
        return _score(states, targets, weight, temperature, vocab_limit)

    if columns == length:
        logp, entropy = score(states, tokens, weight)
    else:
        logp, entropy = _in_slices(jax.checkpoint(score, prevent_cse=False), states, tokens, weight, columns)
    mask = predicted(segment_ids)
    return jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)


def _score(
    states: Float[Array, "rows columns embed"],
    targets: Int[Array, "rows columns"],
    weight: Float[Array, "vocab embed"],
    temperature: float,
    vocab_limit: int | None,
) -> tuple[Float[Array, "rows columns"], Float[Array, "rows columns"]]:
    logits = jnp.einsum("rce,ve->rcv", states, weight, preferred_element_type=jnp.float32) / temperature
    ids = jnp.arange(weight.shape[0])
    if vocab_limit is not None:
        logits = jnp.where(ids < vocab_limit, logits, _IMPOSSIBLE)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather: it stays local when the vocabulary is split over devices.
    chosen = jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
    probs = jnp.exp(logits - log_total[..., None])
    return chosen - log_total, log_total - jnp.sum(probs * logits, axis=-1)


def _in_slices(
    score: Callable[[Array, Array, Array], tuple[Array, Array]],
    states: Float[Array, "rows len embed"],
    targets: Int[Array, "rows len"],
    weight: Float[Array, "vocab embed"],
    columns: int,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    rows, length, embed = states.shape
    count = -(-length // columns)
    surplus = count * columns - length
    state_slices = jnp.pad(states, ((0, 0), (0, surplus), (0, 0))).reshape(rows, count, columns, embed)
    target_slices = jnp.pad(targets, ((0, 0), (0, surplus))).reshape(rows, count, columns)

    def step(_: None, slices: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, score(*slices, weight)

    _, results = jax.lax.scan(
        step, None, (jnp.moveaxis(state_slices, 1, 0), jnp.moveaxis(target_slices, 1, 0))
    )
    logp, entropy = (jnp.moveaxis(part, 0, 1).reshape(rows, count * columns)[:, :length] for part in results)
    return logp, entropy
