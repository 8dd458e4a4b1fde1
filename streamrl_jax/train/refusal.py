"""Why an iteration's update was refused, and which samples caused it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl_jax.train.answer import Answer

_NAMED: Final = 8  # more would hide the first ones


@dataclass(frozen=True)
class Refusal:
    """An update that was not applied; the state is as it was before it.

    Attributes:
        what: What was not finite.
        samples: Ids of samples that cause it, each by itself; empty where none does.
    """

    what: str
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.samples:
            return f"{self.what}; no single sample causes it"
        more = len(self.samples) - _NAMED
        named = ", ".join(self.samples[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{self.what}; caused by sample{'s' if len(self.samples) > 1 else ''} {named}"


def find_culprits(
    answers: Sequence[Answer], spoils: Callable[[Sequence[Answer]], bool], limit: int = _NAMED
) -> tuple[str, ...]:
    """Finds answers whose own loss or gradient is not finite, by halving: few are bad, so few halves are looked into.

    Args:
        answers: Those of a refused update.
        spoils: Whether the summed loss or gradient of some answers is not finite.
        limit: How many to find at the most.

    Returns:
        Their ids, in order; empty if only the sum of all overflows.
    """
    found: list[str] = []
    halves: list[Sequence[Answer]] = [answers]
    while halves and len(found) < limit:
        part = halves.pop()
        if not part or not spoils(part):
            continue
        if len(part) == 1:
            found.append(part[0].name)
            continue
        middle = len(part) // 2
        halves += [part[middle:], part[:middle]]
    return tuple(found)
