"""Any data set of the reasoning-gym package: procedural problems with programmatic scorers."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_STOP_ROWS = 100


@dataclass(frozen=True)
class ReasoningGym:
    """The task `reasoning_gym`.

    Attributes:
        dataset: Name of the data set, for instance "chain_sum".
        config: Its own settings, for instance { min_terms = 2, max_terms = 2 }.
        size: Training problems that are generated.
        test_size: Held-out problems that are generated.
        seed: Of the problems.
        instruction: Put behind each question, after a blank line.
    """

    dataset: str
    config: dict[str, Any] = field(default_factory=dict)
    size: int = 1000
    test_size: int = 100
    seed: int = 0
    instruction: str = ""

    def __post_init__(self) -> None:
        for name in ("size", "test_size"):
            if getattr(self, name) < 1:
                raise UserError(f"data.task.{name} = {getattr(self, name)}: at least 1 is needed")
        for name in ("seed", "size"):
            if name in self.config:
                raise UserError(f"data.task.config.{name}: give it as data.task.{name}")
        _ = self._generator  # a wrong name or setting is refused here

    def train_rows(self) -> list[Row]:
        """Problems whose question is not among the held-out ones; `answer` may be None, the scorer judges."""
        held_out = {row["prompt"] for row in self._test}
        return [
            row
            for row in self._rows(self.test_size, self.test_size + self.size)
            if row["prompt"] not in held_out
        ]

    def test_rows(self) -> list[Row]:
        """Held-out problems, each question once."""
        return self._test

    def example_rows(self, seed: int, step: int, count: int) -> list[Row]:
        """Training problems with their answers; those without a single right answer are left out."""
        return random.Random(f"reasoning_gym/{seed}/{step}").choices(self._answered, k=count)

    def stop_rows(self) -> list[Row]:
        """Training problems: held-out ones must not steer the training."""
        return self._answered[:_STOP_ROWS]

    @cached_property
    def _generator(self) -> ProceduralDataset:
        # One generator for both sides: problem k depends on seed + k alone, so a test set with the next seed
        # would repeat the training set.
        return create_generator(self.dataset, self.config, self.seed, self.test_size + self.size)

    @cached_property
    def _test(self) -> list[Row]:
        unique = {row["prompt"]: row for row in self._rows(0, self.test_size)}
        return list(unique.values())

    @cached_property
    def _answered(self) -> list[Row]:
        rows = [row for row in self.train_rows() if isinstance(row["answer"], str)]
        if not rows:
            raise UserError(
                f"sft.data: no problem of reasoning-gym's {self.dataset!r} comes with an answer to imitate; "
                "take another data set for the warm start"
            )
        return rows

    def _rows(self, start: int, stop: int) -> list[Row]:
        return [self._row(self._generator[index]) for index in range(start, stop)]

    def _row(self, problem: Mapping[str, Any]) -> Row:
        question = problem["question"]
        return {
            "prompt": f"{question}\n\n{self.instruction}" if self.instruction else question,
            "question": question,
            "answer": problem["answer"],
            "metadata": problem["metadata"],
            "dataset": self.dataset,
            "config": self.config,
        }


def create_generator(name: str, config: Mapping[str, Any], seed: int, size: int) -> ProceduralDataset:
    """Creates a data set of reasoning-gym.

    Raises:
        UserError: The package is missing, there is no such data set, or it refuses the settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"task:reasoning_gym needs the package reasoning-gym, which cannot be imported ({error}); "
            "install it with pip install 'streamrl-jax[tasks]'"
        ) from error
    if name not in DATASETS:
        raise UserError(
            f"data.task.dataset = {name!r}: reasoning-gym has no such data set; it has {', '.join(DATASETS)}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"data.task.config = {dict(config)!r}: reasoning-gym's {name!r} refuses it "
            f"({type(error).__name__}: {error}); its settings are the fields of the data set's configuration "
            "class"
        ) from error


def score(answer: str | None, row: Row) -> float:
    """Scores an answer by the data set's own scorer.

    Args:
        answer: What was answered; None for no answer.
        row: A row of the task.

    Returns:
        The scorer's value, 0 to 1.

    Raises:
        Exception: Whatever the scorer raises; some do on answers of a form that they did not expect.
    """
    scorer = _scorer(row["dataset"], json.dumps(row["config"], sort_keys=True))
    entry = {key: row[key] for key in ("question", "answer", "metadata")}
    return float(scorer.score_answer(answer, entry))


@functools.lru_cache(maxsize=64)
def _scorer(dataset: str, config: str) -> ProceduralDataset:
    return create_generator(dataset, json.loads(config), seed=0, size=1)
