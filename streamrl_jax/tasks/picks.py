"""One pick that counts and many that do not: long answers whose reward depends on their beginning alone.

`3752=` is answered by `7+3+3+5+7…`: a digit of the prompt, and then some dozens more of them, picked at random. The
first must be the largest; nobody judges the others. They are the same kind of decision as the first, and without a
critic each of them is praised and blamed like the first: noise, the more of it the longer the answer is.

The sign between the picks is a verdict on the first, `+` if it was right and `-` if not. The warm start's teacher picks
at random but judges well, so the model knows what it has done as soon as it has done it, and a critic can.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row, held_out, in_hash_order

_SHORT_EXAMPLES = 0.9
"""Share of the warm start's examples that ask for a pick and its verdict alone (`3752.` is answered by `5-`): they are
cheap, and most of what is to be learned is in them.
"""

_STOP_ROWS = 300


@dataclass(frozen=True)
class Picks:
    """The task `picks`.

    Attributes:
        digits: How many digits a prompt has.
        shortest: Fewest further picks in the teacher's answers; an answer has twice as many tokens, and two.
        longest: Most further picks. As many as the fewest keep the policy's lengths from drifting: an answer's end
            is then learned as a place, and not as a chance that each token has.
        hold_out_one_in: One prompt in so many is held out, by a hash of its text.
    """

    digits: int = 4
    shortest: int = 36
    longest: int = 36
    hold_out_one_in: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 5:
            raise UserError(f"data.task.digits = {self.digits}: 2 to 5 are needed")
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"data.task: shortest = {self.shortest}, longest = {self.longest}: 1 <= shortest <= longest is needed"
            )
        if self.hold_out_one_in < 2:
            raise UserError(f"data.task.hold_out_one_in = {self.hold_out_one_in}: 2 or more is needed")

    def train_rows(self) -> list[Row]:
        """Prompts with at least two different digits, not held out; `answer` is the largest."""
        return [_row(offer) for offer in self._kept]

    def test_rows(self) -> list[Row]:
        """The held-out ones."""
        return in_hash_order([_row(offer) for offer in self._held])

    def example_rows(self, seed: int, step: int, count: int) -> list[Row]:
        """The teacher's answers to prompts that are not held out, short ones among them."""
        rng = random.Random(f"picks/{seed}/{step}")
        return [self._example(offer, rng) for offer in rng.choices(self._kept, k=count)]

    def stop_rows(self) -> list[Row]:
        """Held-out prompts with a pick behind them: its verdict is what the teacher always has right."""
        rng = random.Random(0)
        picked = [(offer, rng.choice(offer)) for offer in self._held]
        rows = [{"prompt": f"{offer}.{pick}", "answer": verdict(offer, pick)} for offer, pick in picked]
        return in_hash_order(rows)[:_STOP_ROWS]

    @cached_property
    def _kept(self) -> list[str]:
        return [offer for offer in self._offers if not held_out(_prompt(offer), self.hold_out_one_in)]

    @cached_property
    def _held(self) -> list[str]:
        return [offer for offer in self._offers if held_out(_prompt(offer), self.hold_out_one_in)]

    @property
    def _offers(self) -> list[str]:
        every = product(string.digits, repeat=self.digits)
        return ["".join(offer) for offer in every if len(set(offer)) > 1]

    def _example(self, offer: str, rng: random.Random) -> Row:
        pick = rng.choice(offer)
        sign = verdict(offer, pick)
        if rng.random() < _SHORT_EXAMPLES:
            return {"prompt": f"{offer}.", "answer": pick + sign}
        further = rng.choices(offer, k=rng.randint(self.shortest, self.longest))
        return {"prompt": _prompt(offer), "answer": sign.join([pick, *further])}


def verdict(offer: str, pick: str) -> str:
    """`+` if the pick is the largest digit of the offer, else `-`."""
    return "+" if pick == max(offer) else "-"


def _prompt(offer: str) -> str:
    return f"{offer}="


def _row(offer: str) -> Row:
    return {"prompt": _prompt(offer), "answer": max(offer)}
