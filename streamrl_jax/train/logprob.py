"""Log-probabilities of tokens: the one place where hidden states become numbers that a loss uses.

Alignment, everywhere: entry t of a result belongs to token t, and is computed from the state at t - 1, the
last one that has not seen token t. It is 0 where no such state exists: at the first token of a segment and in
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from streamrl_jax.train.mesh import batch_shards, named_sharding

_NEVER: Final = -1e9
"""Logit of an id that is never sampled. Its probability is 0 exactly; being finite, it leaves 0 and not NaN where a
masked sum or the entropy multiplies it by 0."""


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
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "rows len"], Float[Array, "rows len"]]:
    """log softmax(logits_{t-1} / temperature)[token_t] and the entropy of that distribution.

    The softmax is over the ids that the generator samples from: those below `vocab_limit`. Rows of the head that pad
    the vocabulary beyond it have probability 0 and gradient 0.

    The logits of all tokens never exist at once: the rows are worked off in slices of columns, and the
    backward pass computes each slice's logits again. The result does not depend on `chunk` or `mesh`.

    Args:
        hidden: States after the final norm, in the compute dtype.
        head_weight: The output head.
        tokens: Token ids.
        segment_ids: Which packed sequence a token belongs to, 0 for padding.
        temperature: What the logits are divided by, as when the tokens were sampled; above 0.
        chunk: About how many tokens of a data-parallel rank have logits at the same time; 0 for all of them.
        vocab_limit: Ids from here on are not in the distribution (`Tokenizer.vocab_limit`); None: all are.
        mesh: The mesh that rows and head are split over; None for a single device.

    Returns:
        Log-probabilities and entropies in nats, both float32, aligned at the token (see the module).
    """
    rows, length = tokens.shape
    ranks = 1 if mesh is None else batch_shards(mesh)
    columns = min(length, max(1, chunk * ranks // rows)) if chunk else length
    # The state at t - 1 and the token t, side by side; what is rolled around to column 0 is masked below.
    states = jnp.roll(hidden, 1, axis=1).reshape(ranks, rows // ranks, length, -1)
    weight = _one_for_each_rank(head_weight.astype(hidden.dtype), ranks, mesh)
    score = partial(_score, temperature=temperature, vocab_limit=vocab_limit)
    targets = tokens.reshape(ranks, rows // ranks, length)
    if columns == length:
        results = score(states, targets, weight)
    else:
        results = _in_slices(jax.checkpoint(score, prevent_cse=False), states, targets, weight, columns)
    mask = predicted(segment_ids)
    logp, entropy = (jnp.where(mask, part.reshape(rows, length), 0.0) for part in results)
    return logp, entropy


def _one_for_each_rank(
    weight: Float[Array, "vocab embed"], ranks: int, mesh: Mesh | None
) -> Float[Array, "ranks vocab embed"]:
    """The head once for each data-parallel rank, gathered over fsdp before the slices begin.

    With a copy of its own, a rank adds up the head's gradient over the slices by itself; one head for all
    would be summed over the ranks, vocab x embed numbers, at each slice.
    """
    copies = jnp.broadcast_to(weight, (ranks, *weight.shape))
    if mesh is None:
        return copies
    sharding = named_sharding(("batch", "vocab", "norm"), copies.shape, mesh)
    return jax.lax.with_sharding_constraint(copies, sharding)


def _score(
    states: Float[Array, "ranks rows columns embed"],
    targets: Int[Array, "ranks rows columns"],
    weight: Float[Array, "ranks vocab embed"],
    *,
    temperature: float,
    vocab_limit: int | None,
) -> tuple[Float[Array, "ranks rows columns"], Float[Array, "ranks rows columns"]]:
    logits = jnp.einsum("nrce,nve->nrcv", states, weight, preferred_element_type=jnp.float32) / temperature
    ids = jnp.arange(weight.shape[1])
    if vocab_limit is not None:
        logits = jnp.where(ids < vocab_limit, logits, _NEVER)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather: it stays local when the vocabulary is split over devices.
    chosen = jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
    probs = jnp.exp(logits - log_total[..., None])
    return chosen - log_total, log_total - jnp.sum(probs * logits, axis=-1)


def _in_slices(
    score: Callable[[Array, Array, Array], tuple[Array, Array]],
    states: Float[Array, "ranks rows len embed"],
    targets: Int[Array, "ranks rows len"],
    weight: Float[Array, "ranks vocab embed"],
    columns: int,
) -> tuple[Float[Array, "ranks rows len"], Float[Array, "ranks rows len"]]:
    ranks, rows, length, embed = states.shape
    count = -(-length // columns)
    surplus = count * columns - length
    padded_states = jnp.pad(states, ((0, 0), (0, 0), (0, surplus), (0, 0)))
    padded_targets = jnp.pad(targets, ((0, 0), (0, 0), (0, surplus)))
    state_slices = jnp.moveaxis(padded_states.reshape(ranks, rows, count, columns, embed), 2, 0)
    target_slices = jnp.moveaxis(padded_targets.reshape(ranks, rows, count, columns), 2, 0)

    def step(_: None, slices: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, score(*slices, weight)

    _, results = jax.lax.scan(step, None, (state_slices, target_slices))
    whole = (jnp.moveaxis(part, 0, 2).reshape(ranks, rows, count * columns) for part in results)
    logp, entropy = (part[:, :, :length] for part in whole)
    return logp, entropy
