"""Losses of the ranker over a list of prompts, one observed length each.

All take `scores` [list], `tokens` [list] (observed lengths) and `cut` [list] (the limit ended the answer, so that its
length is a lower bound), and give a mean over the terms that say something; 0 where nothing does. What is not known is
left out: of two answers of equal length, or where the shorter one was cut, neither is the longer one. None but the
regression changes when a number is added to all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LossName = Literal["plackett_luce", "shortest_first", "pairwise", "regression"]
ListLoss = Callable[
    [Float[Array, " list"], Float[Array, " list"], Bool[Array, " list"]],
    Float[Array, ""],
]


def known_longer(tokens: Float[Array, " list"], cut: Bool[Array, " list"]) -> Bool[Array, "list list"]:
    """Entry [i, j]: answer i is known to be longer than j.

    j ended by itself, and i has more tokens, or as many and was cut there.
    """
    more = (tokens[:, None] > tokens[None, :]) | ((tokens[:, None] == tokens[None, :]) & cut[:, None])
    return more & ~cut[None, :]


def plackett_luce(
    scores: Float[Array, " list"], tokens: Float[Array, " list"], cut: Bool[Array, " list"]
) -> Float[Array, ""]:
    """ListMLE, longest first: the negative log-likelihood of the observed order under the Plackett-Luce model.

    Xia et al. 2008, "Listwise approach to learning to rank: theory and algorithm"; Plackett 1975. The longest is drawn
    first, with odds exp(score), then the longest of the rest:

        loss = mean over i of  logsumexp(score[j] for j = i and all j known shorter than i) - score[i]

    Without ties and cuts that is the likelihood exactly; with them each answer is compared with those alone that are
    known to be shorter (a partial order). The mean is over answers that have such.
    """
    below = known_longer(tokens, cut)
    rival = below | jnp.eye(len(scores), dtype=bool)
    terms = jax.nn.logsumexp(jnp.where(rival, scores[None, :], -jnp.inf), axis=1) - scores
    return _mean(terms, below.any(axis=1))


def shortest_first(
    scores: Float[Array, " list"], tokens: Float[Array, " list"], cut: Bool[Array, " list"]
) -> Float[Array, ""]:
    """The same model drawn from the other end, which is Cox's partial likelihood (Cox 1972) of the answers' ends.

    An answer ends with the odds exp(-score) among those that are still running; one that was cut only was running:

        loss = mean over i that ended of  logsumexp(-score[j] for j = i and all j known longer than i) + score[i]
    """
    above = known_longer(tokens, cut).T
    rival = above | jnp.eye(len(scores), dtype=bool)
    terms = jax.nn.logsumexp(jnp.where(rival, -scores[None, :], -jnp.inf), axis=1) + scores
    return _mean(terms, above.any(axis=1))


def pairwise(
    scores: Float[Array, " list"], tokens: Float[Array, " list"], cut: Bool[Array, " list"]
) -> Float[Array, ""]:
    """RankNet (Burges et al. 2005): log(1 + exp(score of the shorter - score of the longer)), over known pairs."""
    return _mean(jax.nn.softplus(scores[None, :] - scores[:, None]), known_longer(tokens, cut))


def regression(
    scores: Float[Array, " list"], tokens: Float[Array, " list"], cut: Bool[Array, " list"]
) -> Float[Array, ""]:
    """Squared error of the log length; of a cut answer only a score that is too low is wrong."""
    error = scores - jnp.log(tokens)
    error = jnp.where(cut, jnp.minimum(error, 0.0), error)
    return jnp.mean(error**2)


LOSSES: Final[Mapping[LossName, ListLoss]] = MappingProxyType(
    {
        "plackett_luce": plackett_luce,
        "shortest_first": shortest_first,
        "pairwise": pairwise,
        "regression": regression,
    }
)


def _mean(terms: Array, kept: Array) -> Float[Array, ""]:
    """The mean of the terms that are kept; 0 where none is."""
    return jnp.sum(jnp.where(kept, terms, 0.0)) / jnp.maximum(jnp.sum(kept), 1)
