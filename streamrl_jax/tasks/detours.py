"""Addition by counting on, with detours: answers whose lengths have a long tail that the prompt tells in part.

`118+24=` is answered by `119+23=120+22=…=141+1=142`, as in the task `counting`. At the end of a decade (`129+13=`) the
warm start's teacher sometimes slips back to its beginning (`120+22=`) and counts the decade again, as an answer that
checks itself does. It keeps the sum, so every chain ends right, and a slip costs 10 terms (about 70 tokens). How often
it slips depends on the tens digit: seldom in most decades, mostly in the hard ones.

So the length of an answer is known in part from its prompt (the right operand, and the decades on the way), and the
rest is chance (a geometric number of repeats). Right operands are small in most prompts and large in few. With the
defaults the lengths have a median of 46 tokens, a 99th percentile of about 500, and 1 in 5,000 answers would be longer
than 1,000.

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
_DECADE: Final = 10


@dataclass(frozen=True)
class Detours:
    """The task `detours`.

    Attributes:
        longest: Largest right operand.
        scale: A right operand that is larger by so much is e times as rare.
        slip: Chance that the teacher does a decade again, each time it has come to its end.
        hard: Tens digits of the hard decades, as a text.
        slip_hard: The chance there.
        most_terms: The teacher slips no more where its chain would get longer than this; a term has 7 tokens.
        hold_out_one_in: One prompt in so many is held out, by a hash of its text.
    """

    longest: int = 80
    scale: float = 8.0
    slip: float = 0.1
    hard: str = "37"
    slip_hard: float = 0.6
    most_terms: int = 140
    hold_out_one_in: int = 5

    def __post_init__(self) -> None:
        if not _SHORTEST <= self.longest <= 90:
            raise UserError(f"data.task.longest = {self.longest}: a number from {_SHORTEST} to 90 is needed")
        if not 1.0 <= self.scale <= 1000.0:
            raise UserError(f"data.task.scale = {self.scale}: a number from 1 to 1000 is needed")
        for name, chance in (("slip", self.slip), ("slip_hard", self.slip_hard)):
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
            rows.append({"prompt": f"{left}+{right}=", "answer": self.answer(left, right, rng)})
        return rows

    def stop_rows(self) -> list[Row]:
        """Held-out chains without a slip, cut after their last decade's end: nothing of the rest is chance."""
        rows: list[Row] = []
        for left, right in self._pairs:
            after = (left + right) % _DECADE  # steps in the sum's decade
            if self._held(left, right) and 0 < after < right:
                chain = f"{left}+{right}={_count(left, right, lambda *_: False)}"
                rest = _count(left + right - after, after, lambda *_: False)
                rows.append({"prompt": chain.removesuffix(rest), "answer": rest})
        return in_hash_order(rows)

    def answer(self, left: int, right: int, rng: random.Random) -> str:
        """How the teacher answers.

        Args:
            left: Where the count starts.
            right: Steps to go, at least one.
            rng: Decides where it slips.

        Returns:
            The chain; the last number is `left + right`.
        """

        def slips(left: int, terms: int) -> bool:
            return terms + _DECADE <= self.most_terms and rng.random() < self.chance(left)

        return _count(left, right, slips)

    def chance(self, left: int) -> float:
        """Chance of a slip at the end of a decade.

        Args:
            left: The decade's last number.
        """
        return self.slip_hard if str(left // _DECADE % 10) in self.hard else self.slip

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return [
            (left, right)
            for left in _LEFT
            for right in range(_SHORTEST, self.longest + 1)
            if _fits(left, right) and draw_of(f"{left}+{right}=") < math.exp(-right / self.scale)
        ]

    @cached_property
    def _examples(self) -> list[tuple[int, int]]:
        return [pair for pair in self._pairs if not self._held(*pair)]

    def _drawn_evenly(self, rng: random.Random) -> tuple[int, int]:
        while True:
            left, right = rng.choice(_LEFT), rng.randint(1, self.longest)
            if _fits(left, right) and not self._held(left, right):
                return left, right

    def _held(self, left: int, right: int) -> bool:
        return held_out(f"{left}+{right}=", self.hold_out_one_in)


def _fits(left: int, right: int) -> bool:
    """Whether the sum has three digits, and what is left to go has two after a slip in the first decade too."""
    return left + right < 1000 and right + left % _DECADE < 100


def _count(left: int, right: int, slips: Callable[[int, int], bool]) -> str:
    """Counts from `left` to the sum in steps of one.

    Args:
        left: Where the count starts.
        right: Steps to go, at least one.
        slips: Says at the end of a decade whether it is done again, from its last number and the terms that the chain
            would have without a further slip.

    Returns:
        The chain; the last number is `left + right`.
    """
    terms: list[str] = []
    while right:
        back = left % _DECADE == _DECADE - 1 and slips(left, len(terms) + right)
        step = 1 - _DECADE if back else 1
        left, right = left + step, right - step
        terms.append(f"{left}+{right}" if right else str(left))
    return "=".join(terms)


def _row(left: int, right: int) -> Row:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}
