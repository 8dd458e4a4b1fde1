"""Sums of two two-digit numbers; what the short demos learn.

`37+85=` is answered by `122`. RL and test prompts are the pairs whose ones digits carry. The warm start
learns from a teacher that forgets the carry in most of those cases and redraws its mistakes at each visit:
afterwards the model half knows the carry, and RL selects what it half knows. It teaches no new arithmetic.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row, held_out, in_hash_order


@dataclass(frozen=True)
class Arithmetic:
    """The task `arithmetic`.

    Attributes:
        low: Smallest operand.
        high: Largest operand.
        forget: Share of the carries that the teacher of the warm start forgets.
        hold_out_one_in: One pair in so many is held out, by a hash of its prompt.
    """

    low: int = 10
    high: int = 99
    forget: float = 0.6
    hold_out_one_in: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high - 9:
            raise UserError(
                f"data.task: low = {self.low}, high = {self.high}: 0 <= low <= high - 9 is needed"
            )
        if not 0.0 <= self.forget <= 1.0:
            raise UserError(f"data.task.forget = {self.forget}: a share from 0 to 1 is needed")
        if self.hold_out_one_in < 2:
            raise UserError(f"data.task.hold_out_one_in = {self.hold_out_one_in}: 2 or more is needed")

    def train_rows(self) -> list[Row]:
        """Pairs that carry and are not held out."""
        return [_row(a, b, a + b) for a, b in self._kept if _carries(a, b)]

    def test_rows(self) -> list[Row]:
        """Pairs that carry and are held out."""
        return in_hash_order([_row(a, b, a + b) for a, b in self._held if _carries(a, b)])

    def example_rows(self, seed: int, step: int, count: int) -> list[Row]:
        """Pairs that are not held out, with the teacher's answers."""
        rng = random.Random(f"arithmetic/{seed}/{step}")
        pairs = rng.choices(self._kept, k=count)
        return [_row(a, b, self._taught_sum(a, b, rng)) for a, b in pairs]

    def stop_rows(self) -> list[Row]:
        """Held-out pairs without a carry: what the teacher always has right."""
        return in_hash_order([_row(a, b, a + b) for a, b in self._held if not _carries(a, b)])

    @cached_property
    def _kept(self) -> list[tuple[int, int]]:
        return [pair for pair in self._pairs if not held_out(_prompt(*pair), self.hold_out_one_in)]

    @cached_property
    def _held(self) -> list[tuple[int, int]]:
        return [pair for pair in self._pairs if held_out(_prompt(*pair), self.hold_out_one_in)]

    @property
    def _pairs(self) -> product[tuple[int, int]]:
        operands = range(self.low, self.high + 1)
        return product(operands, operands)

    def _taught_sum(self, a: int, b: int, rng: random.Random) -> int:
        forgets = rng.random() < self.forget
        return a + b - 10 if _carries(a, b) and forgets else a + b


def _carries(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


def _prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def _row(a: int, b: int, answer: int) -> Row:
    return {"prompt": _prompt(a, b), "answer": str(answer)}
