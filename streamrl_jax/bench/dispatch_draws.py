"""What `streamrl bench dispatch` compares: the policies, and the work of each round with what each policy knows of it.

A round draws prompts from a file of recorded lengths, and for each of its answers one of the prompt's recorded lengths.
All policies of a round answer exactly this work: they differ in the order of the prompts and in what they are told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Float32, Int32

from streamrl_jax import config_ranker
from streamrl_jax.ranker.lengths import ObservedLengths

Knows = Literal["nothing", "history", "ranker", "truth"]
"""Where the lengths come from that a policy plans with."""


@dataclass(frozen=True)
class Policy:
    """One way to hand out a round's work.

    Attributes:
        dispatch: As ``dispatch.policy``.
        knows: Where its lengths come from.
        shuffled: The prompts come in an order drawn for the round, else in that of the file.
    """

    dispatch: config_ranker.Policy
    knows: Knows
    shuffled: bool = False

    def informed(self, given: Collection[str]) -> bool:
        """Whether it has the lengths that it plans with, if these sources are given."""
        return self.knows in ("nothing", "truth", *given)


POLICIES: Final[Mapping[str, Policy]] = {
    "fcfs": Policy("arrival", "nothing"),
    "random": Policy("arrival", "nothing", shuffled=True),
    "lpt-history": Policy("lpt", "history"),
    "history": Policy("skewness", "history"),
    "ranker-lpt": Policy("lpt", "ranker"),
    "ranker-paper": Policy("paper", "ranker"),
    "ranker": Policy("skewness", "ranker"),
    "oracle-lpt": Policy("lpt", "truth"),
    "oracle-paper": Policy("paper", "truth"),
    "oracle": Policy("skewness", "truth"),
}
"""By the name that the command line knows."""

MEASURED: Final = (
    "fcfs",
    "random",
    "lpt-history",
    "ranker-lpt",
    "ranker-paper",
    "ranker",
    "oracle-lpt",
    "oracle",
)
"""Unless others are named."""

BASE: Final = "random"
BEST: Final = "oracle"
"""The two that every policy is compared with."""


@dataclass(frozen=True, eq=False)
class Material:
    """Prompts with recorded lengths, and what was predicted of them.

    Attributes:
        rows: One for each prompt.
        predicted: By source, expected tokens of an answer to each prompt; without ``truth``, which is the draw's own.
    """

    rows: Sequence[ObservedLengths]
    predicted: Mapping[str, Float32[np.ndarray, " rows"]]


@dataclass(frozen=True, eq=False)
class Draw:
    """The work of one round.

    Attributes:
        rows: Place of each prompt in the material, in the order of the file.
        lengths: Tokens of each answer.
        shuffled: The order of the prompts for the policies that shuffle.
    """

    rows: Int32[np.ndarray, " prompts"]
    lengths: Int32[np.ndarray, "prompts n"]
    shuffled: Int32[np.ndarray, " prompts"]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return int(self.lengths.sum())


@dataclass(frozen=True, eq=False)
class Order:
    """A round's work as one policy meets it.

    Attributes:
        rows: Place of each prompt in the material, in the order of arrival.
        lengths: Tokens of each answer.
        predicted: Expected tokens of an answer to each prompt; None: not known.
    """

    rows: Int32[np.ndarray, " prompts"]
    lengths: Int32[np.ndarray, "prompts n"]
    predicted: Float32[np.ndarray, " prompts"] | None


def draw(material: Material, prompts: int, n: int, seed: Sequence[int], *, again: bool = False) -> Draw:
    """Draws a round's work.

    Args:
        material: With enough rows and lengths (`dispatch_checks.check_enough`).
        prompts: How many.
        n: Answers to each.
        seed: Of this round.
        again: A prompt may be drawn more than once, as a pool needs that is larger than the measured one.
    """
    random = np.random.default_rng(list(seed))
    chosen = np.sort(random.choice(len(material.rows), prompts, replace=again)).astype(np.int32)
    lengths = np.stack([random.choice(material.rows[row].lengths, n, replace=False) for row in chosen])
    lengths = lengths.astype(np.int32)
    return Draw(chosen, lengths, random.permutation(prompts).astype(np.int32))


def order(policy: Policy, work: Draw, material: Material) -> Order:
    """How a policy meets a round's work.

    Args:
        policy: Whose lengths the material has.
        work: Of the round.
        material: It was drawn from.
    """
    rows, lengths = work.rows, work.lengths
    if policy.shuffled:
        rows, lengths = rows[work.shuffled], lengths[work.shuffled]
    match policy.knows:
        case "nothing":
            predicted = None
        case "truth":
            predicted = lengths.mean(axis=1).astype(np.float32)
        case source:
            predicted = material.predicted[source][rows]
    return Order(rows, lengths, predicted)


def turns(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """The order in which the policies run in each round: one drawn anew for each pair of rounds, there and back.

    So no policy has a place of its own, nor one that runs before it in every round: a machine that grows busy favours
    none within a pair, and what one leaves behind meets all others by chance.
    """
    random = np.random.default_rng(seed)
    found: list[list[str]] = []
    while len(found) < rounds:
        drawn = [names[int(place)] for place in random.permutation(len(names))]
        found += [drawn, drawn[::-1]]
    return found[:rounds]
