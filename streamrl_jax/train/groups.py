"""Answers to one prompt belong together: in their advantage, and in a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from streamrl_jax.train.advantage import GroupAdvantage
from streamrl_jax.train.answer import Answer


class Groups:
    """Collects the `n` answers to each prompt of an iteration and gives them their advantages.

    Invariant: what a group's answers get does not depend on the order in which they came.
    """

    def __init__(self, n: int, advantage: GroupAdvantage | None) -> None:
        """Starts empty.

        Args:
            n: Answers per prompt.
            advantage: Rewards of a group, ordered by sample id -> advantages; None: they come from elsewhere.
        """
        self._n = n
        self._advantage = advantage
        self._waiting: dict[str, list[Answer]] = {}

    def add(self, answer: Answer) -> list[Answer]:
        """Takes an answer.

        Returns:
            The whole group, with its advantages, if this was the last one, else nothing.

        Raises:
            ValueError: The advantage function gave a wrong shape.
        """
        group = self._waiting.setdefault(answer.prompt_id, [])
        group.append(answer)
        if len(group) < self._n:
            return []
        del self._waiting[answer.prompt_id]
        group.sort(key=attrgetter("name"))
        if self._advantage is None:
            return group
        advantages = np.asarray(self._advantage(np.array([answer.reward for answer in group], np.float64)))
        if advantages.shape != (self._n,):
            raise ValueError(
                f"the advantage function gave shape {advantages.shape} for a group of {self._n} scores; "
                "one number each is needed"
            )
        return [
            replace(answer, advantage=float(value)) for answer, value in zip(group, advantages, strict=True)
        ]

    def incomplete(self) -> dict[str, int]:
        """Prompts whose group is not complete, and how many of their answers are there."""
        return {prompt_id: len(group) for prompt_id, group in self._waiting.items()}


def draw_mini_batches(
    answers: Sequence[Answer], count: int, *, seed: int, version: int
) -> list[list[Answer]]:
    """Splits an iteration into mini-batches of whole groups, at random: samples arrive the shortest first.

    Args:
        answers: All of the iteration, in any order; the result does not depend on it.
        count: Mini-batches; no more than there are prompts are made.
        seed: The run's.
        version: Of the trainer; together with the seed it determines the draw, so a resumed run draws alike.

    Returns:
        The mini-batches; their numbers of prompts differ by one at most.
    """
    groups: dict[str, list[Answer]] = {}
    for answer in sorted(answers, key=attrgetter("name")):
        groups.setdefault(answer.prompt_id, []).append(answer)
    prompts = list(groups)
    draw = np.random.default_rng((seed, version)).permutation(len(prompts))
    parts = np.array_split(draw, min(count, len(prompts)))
    return [[answer for index in part for answer in groups[prompts[index]]] for part in parts]
