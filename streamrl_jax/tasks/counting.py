"""Addition by counting on: answers of a hundred characters and more, for the demos of streaming.

`17+25=` is answered by `18+24=19+23=20+22=…=41+1=42`: the left operand goes up, the right one down, and what
counts is the sum at the end. The length depends on the right operand, so answers of one batch end at
different times. A held-out sum does occur on the way in the chains of others: what is held out is where a
chain begins. As in the task `arithmetic` the warm start's teacher forgets carries (`19` is followed by
`10`), each on its own; an answer is right when no carry of its chain was forgotten.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row, held_out, in_hash_order

_SHORT_EXAMPLES = 0.4
"""Share of the warm start's examples that are shorter than the RL prompts: they are cheap and teach how
chains end.
"""


@dataclass(frozen=True)
class Counting:
    """The task `counting`.

    Attributes:
        shortest: Smallest right operand of RL and test prompts; 19 makes answers of 102 tokens with the EOS.
        longest: Largest right operand; 60 makes 348 tokens.
        forget: Share of the carries that the teacher of the warm start forgets.
        hold_out_one_in: One prompt in so many is held out, by a hash of its text.
    """

    shortest: int = 19
    longest: int = 60
    forget: float = 0.5
    hold_out_one_in: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest <= 89:
            raise UserError(
                f"data.task: shortest = {self.shortest}, longest = {self.longest}: 2 <= shortest <= longest "
                "<= 89 is needed"
            )
        if not 0.0 <= self.forget <= 1.0:
            raise UserError(f"data.task.forget = {self.forget}: a share from 0 to 1 is needed")
        if self.hold_out_one_in < 2:
            raise UserError(f"data.task.hold_out_one_in = {self.hold_out_one_in}: 2 or more is needed")

    def train_rows(self) -> list[Row]:
        """Sums of two-digit numbers that stay under 100, not held out."""
        return [_row(left, right) for left, right in self._long_pairs if not self._held(left, right)]

    def test_rows(self) -> list[Row]:
        """The held-out ones."""
        return in_hash_order(
            [_row(left, right) for left, right in self._long_pairs if self._held(left, right)]
        )

    def example_rows(self, seed: int, step: int, count: int) -> list[Row]:
        """Chains that the teacher counts, shorter ones among them; none is held out."""
        rng = random.Random(f"counting/{seed}/{step}")
        rows: list[Row] = []
        for _ in range(count):
            pairs = self._short_examples if rng.random() < _SHORT_EXAMPLES else self._long_examples
            left, right = rng.choice(pairs)
            rows.append({"prompt": f"{left}+{right}=", "answer": count_on(left, right, self.forget, rng)})
        return rows

    def stop_rows(self) -> list[Row]:
        """Held-out chains cut after their last carry: the rest is what the teacher always has right."""
        rng = random.Random(0)
        rows: list[Row] = []
        for left, right in self._long_pairs:
            after = (left + right) % 10  # steps since the sum's last carry
            if self._held(left, right) and after:
                chain = f"{left}+{right}={count_on(left, right, 0.0, rng)}"
                rest = count_on(left + right - after, after, 0.0, rng)
                rows.append({"prompt": chain.removesuffix(rest), "answer": rest})
        return in_hash_order(rows)

    @cached_property
    def _long_pairs(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(10, 100) for b in range(self.shortest, self.longest + 1) if a + b < 100]

    @cached_property
    def _long_examples(self) -> list[tuple[int, int]]:
        return [pair for pair in self._long_pairs if not self._held(*pair)]

    @cached_property
    def _short_examples(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(10, 100) for b in range(1, self.shortest) if a + b < 100]

    def _held(self, left: int, right: int) -> bool:
        return held_out(f"{left}+{right}=", self.hold_out_one_in)


def count_on(left: int, right: int, forget: float, rng: random.Random) -> str:
    """Counts from `left` to the sum in steps of one.

    Args:
        left: Where the count starts.
        right: Steps to go, at least one.
        forget: Chance that a carry is forgotten (`19` followed by `10`).
        rng: Decides which.

    Returns:
        The chain, "18+24=19+23=…=42"; the last number is `left + right` unless a carry was forgotten.
    """
    terms: list[str] = []
    while right:
        forgets = left % 10 == 9 and rng.random() < forget
        left, right = left - 9 if forgets else left + 1, right - 1
        terms.append(f"{left}+{right}" if right else str(left))
    return "=".join(terms)


def _row(left: int, right: int) -> Row:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}
