"""Addition by counting on, with detours: answers whose lengths have a long tail that the prompt tells in part.

`118+14=` is answered by `119+13=120+12=…=131+01=132`, as in the task `counting`. At the end of a decade (`119+13=`) the
warm start's teacher may write the term once more (`119+13:119+13=`), and once more again, as an answer that checks
itself does. That keeps the sum, so every chain ends right, and costs 7 tokens each time. How often it checks depends on
the tens digit: seldom in most decades, about twenty times in the hard ones. The colon says before the copy that it is
one, so that a small model need not find out.

So the length of an answer is known in part from its prompt (the right operand, and the decades on the way), and the
rest is chance (geometric numbers of repeats). Right operands are small in most prompts and large in few. With the
defaults the lengths have a median of 53 tokens, a 99th percentile of about 550, and 1 answer in 300 would be longer
than 700.

As in `counting`, a held-out sum does occur on the way in the chains of others: what is held out is where a chain
begins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row, draw_of, held_out, in_hash_order

_LEFT: Final = range(100, 990)
_SHORTEST: Final = 2
_EVEN_EXAMPLES: Final = 0.15
"""Share of the warm start's examples whose right operand is drawn evenly: large ones are rare among the prompts, and
have to be learned all the same."""


@dataclass(frozen=True)
class Detours:
    """The task `detours`.

    Attributes:
        longest: Largest right operand.
        scale: A right operand that is larger by so much is e times as rare.
        again: Chance that the teacher writes the term at the end of a decade again, each time it has done so.
        hard: Tens digits of the hard decades, as a text.
        again_hard: The chance there.
        most_terms: The teacher goes on where its chain would get longer than this; a term has 7 tokens.
        hold_out_one_in: One prompt in so many is held out, by a hash of its text.
    """

    longest: int = 80
    scale: float = 8.0
    again: float = 0.3
    hard: str = "37"
    again_hard: float = 0.95
    most_terms: int = 99
    hold_out_one_in: int = 5

    def __post_init__(self) -> None:
        if not _SHORTEST <= self.longest <= 99:
            raise UserError(f"data.task.longest = {self.longest}: a number from {_SHORTEST} to 99 is needed")
        if not 1.0 <= self.scale <= 1000.0:
            raise UserError(f"data.task.scale = {self.scale}: a number from 1 to 1000 is needed")
        for name, chance in (("again", self.again), ("again_hard", self.again_hard)):
            if not 0.0 <= chance < 1.0:
                raise UserError(f"data.task.{name} = {chance}: a chance from 0 to less than 1 is needed")
        if self.hard and not self.hard.isdecimal():
            raise UserError(f"data.task.hard = {self.hard!r}: tens digits are needed, as in '37'")
        if self.most_terms < self.longest:
            raise UserError(
                f"data.task.most_terms = {self.most_terms}: at least longest = {self.longest} is needed"
            )
        if self.hold_out_one_in < 2:
            raise UserError(f"data.task.hold_out_one_in = {self.hold_out_one_in}: 2 or more is needed")

    def train_rows(self) -> list[Row]:
        """Sums of a three-digit number and a long-tailed one, not held out."""
        return [_row(left, right) for left, right in self._pairs if not self._held(left, right)]

    def test_rows(self) -> list[Row]:
        """The held-out ones."""
        return in_hash_order([_row(left, right) for left, right in self._pairs if self._held(left, right)])

    def example_rows(self, seed: int, step: int, count: int) -> list[Row]:
        """Chains that the teacher counts; none is held out."""
        rng = random.Random(f"detours/{seed}/{step}")
        rows: list[Row] = []
        for _ in range(count):
            even = rng.random() < _EVEN_EXAMPLES
            left, right = self._drawn_evenly(rng) if even else rng.choice(self._examples)
            rows.append({"prompt": _prompt(left, right), "answer": self.answer(left, right, rng)})
        return rows

    def stop_rows(self) -> list[Row]:
        """Held-out chains without a repeat, cut after their last decade's end: nothing of the rest is chance."""
        rows: list[Row] = []
        for left, right in self._pairs:
            after = (left + right) % 10  # steps in the sum's decade
            if self._held(left, right) and 0 < after < right:
                chain = _prompt(left, right) + _count(left, right, lambda *_: False)
                rest = _count(left + right - after, after, lambda *_: False)
                rows.append({"prompt": chain.removesuffix(rest), "answer": rest})
        return in_hash_order(rows)

    def answer(self, left: int, right: int, rng: random.Random) -> str:
        """How the teacher answers.

        Args:
            left: Where the count starts.
            right: Steps to go, at least one.
            rng: Decides how often a term is repeated.

        Returns:
            The chain; the last number is `left + right`.
        """

        def again(left: int, terms: int) -> bool:
            return terms < self.most_terms and rng.random() < self.chance(left)

        return _count(left, right, again)

    def chance(self, left: int) -> float:
        """Chance that the last term of a decade is written again.

        Args:
            left: The decade's last number.
        """
        return self.again_hard if str(left // 10 % 10) in self.hard else self.again

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return [
            (left, right)
            for left in _LEFT
            for right in range(_SHORTEST, self.longest + 1)
            if left + right < 1000 and draw_of(_prompt(left, right)) < math.exp(-right / self.scale)
        ]

    @cached_property
    def _examples(self) -> list[tuple[int, int]]:
        return [pair for pair in self._pairs if not self._held(*pair)]

    def _drawn_evenly(self, rng: random.Random) -> tuple[int, int]:
        while True:
            left, right = rng.choice(_LEFT), rng.randint(1, self.longest)
            if left + right < 1000 and not self._held(left, right):
                return left, right

    def _held(self, left: int, right: int) -> bool:
        return held_out(_prompt(left, right), self.hold_out_one_in)


def _count(left: int, right: int, again: Callable[[int, int], bool]) -> str:
    """Counts from `left` to the sum in steps of one.

    Args:
        left: Where the count starts.
        right: Steps to go, at least one.
        again: Says at the end of a decade whether its last term is written again, from its left operand and the terms
            that the chain would have without.

    Returns:
        The chain; the last number is `left + right`.
    """
    chain, terms = "", 0
    while right:
        repeats = terms > 0 and left % 10 == 9 and again(left, terms + right)
        if not repeats:
            left, right = left + 1, right - 1
        chain += (":" if repeats else "=" if terms else "") + (f"{left}+{right:02}" if right else str(left))
        terms += 1
    return chain


def _prompt(left: int, right: int) -> str:
    """Every operand has as many digits in each term, and so have all terms: that is learned soonest."""
    return f"{left}+{right:02}="


def _row(left: int, right: int) -> Row:
    return {"prompt": _prompt(left, right), "answer": str(left + right)}
