"""Which answers share a row, which rows a micro-batch, and which rows a rank. Works on lengths alone.

    add ─▶ waiting, by length ─▶ for each compiled shape: fill it ─▶ take the best filled ─▶ level it over the ranks

An answer waits until a shape can be filled well, or until more tokens wait than a full micro-batch and a quarter:
so little is padding, and the stream keeps moving whatever the lengths are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamrl_jax.train.shapes import BatchShape, Shape

_LOOK_BACK: Final = 0.25  # of a full micro-batch: what may wait beyond it for a better fit
_GOOD: Final = 0.94  # value at which a micro-batch leaves at once; see `_value`
_LAUNCH: Final = 1 / 32  # of a full micro-batch: what one more micro-batch costs beside its tokens
_SHORTER_ROWS: Final = 0.03  # share of the value given away for shorter rows, whose attention is cheaper
_TRIES: Final = 16  # in a full micro-batch's tokens, whether what waits would fill a shape well

# Tokens after which a query's products with its keys cost as much as the linear layers: 12 x width for a decoder
# of usual proportions (24 width^2 beside 2 n width for the causal half of n keys); here for a width of 1,536.
_LEVEL_LENGTH: Final = 12 * 1536

_Waiting = tuple[int, int]
"""Length, and minus the number of the answer: of equal lengths the oldest comes last, and is taken first."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch to be.

    Attributes:
        shape: Rows and their length.
        rows: For each row the numbers of its answers, from its first token on; empty ones are padding.
    """

    shape: Shape
    rows: tuple[tuple[int, ...], ...]


def row_cost(lengths: Sequence[int]) -> float:
    """Work of a row, in tokens of the linear layers: sum of n + n^2 / 18,432 over its answers of n tokens.

    The quadratic part is causal attention within each answer; padding costs nothing. So it is the work that a
    kernel does which skips what is masked. One that does not costs every rank the same, whatever lies where.

    Args:
        lengths: Tokens of each answer of the row.
    """
    return sum(n + n * n / _LEVEL_LENGTH for n in lengths)


def level(costs: Sequence[float], ranks: int) -> list[int]:
    """Orders rows such that the ranks, which take equal numbers of neighbouring rows, have about equal work.

    The dearest row first, each to the rank that has the least so far and a row free (Graham's LPT rule). If the
    order given is better, it stays.

    Args:
        costs: Of each row; a multiple of `ranks` of them.
        ranks: Data-parallel ranks.

    Returns:
        The rows' indices in their new order; the imbalance is never more than that of the order given.
    """
    size = len(costs) // ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, rank = heapq.heappop(least)
        own[rank].append(row)
        if len(own[rank]) < size:
            heapq.heappush(least, (load + costs[row], rank))
    ordered = [row for rows in own for row in rows]
    before, after = rank_costs(costs, ranks), rank_costs([costs[row] for row in ordered], ranks)
    return ordered if max(after) < max(before) else list(range(len(costs)))


def rank_costs(costs: Sequence[float], ranks: int) -> list[float]:
    """Work of each rank, of rows in their order."""
    size = len(costs) // ranks
    return [sum(costs[rank * size : (rank + 1) * size]) for rank in range(ranks)]


class Packer:
    """Hands out micro-batches of the answers' numbers, which count the calls of `add` from 0.

    Call order: `add` for each answer (or `put`, and `leaving` at times), then `flush` for what is left.

    Invariant: each number is in exactly one micro-batch returned, and no row is longer than its shape says.
    """

    def __init__(self, shape: BatchShape, *, pack: bool = True) -> None:
        """Starts empty.

        Args:
            shape: The compiled shapes.
            pack: Whether a row may hold several answers.
        """
        self._shape = shape
        self._pack = pack
        self._waiting: list[_Waiting] = []
        self._lengths: list[int] = []
        self._tokens = 0
        self._next_try = 0.0
        self._settle()

    @property
    def longest(self) -> int:
        """Tokens that an answer may have."""
        return self._shape.row_len

    def add(self, length: int) -> list[Packed]:
        """`put`, and what leaves now."""
        self.put(length)
        return self.leaving()

    def put(self, length: int) -> None:
        """Takes an answer of so many tokens.

        Raises:
            ValueError: No row is so long.
        """
        if length > self.longest:
            raise ValueError(f"{length} tokens do not fit a row of {self.longest}")
        insort(self._waiting, (length, -len(self._lengths)))
        self._lengths.append(length)
        self._tokens += length

    def leaving(self) -> list[Packed]:
        """The micro-batches that are filled well, and those that must not wait longer: mostly none, or one."""
        leaving: list[Packed] = []
        while self._waiting and self._is_time():
            best, value = self._best()
            if value < _GOOD and not self._is_late():
                self._next_try = self._tokens + self._shape.full.tokens / _TRIES
                break
            leaving.append(self._take(best))
        return leaving

    def flush(self) -> list[Packed]:
        """Packs what is left, into as many micro-batches as waste the least."""
        leaving: list[Packed] = []
        while self._waiting:
            leaving.append(self._take(self._best()[0]))
        return leaving

    def _is_time(self) -> bool:
        return self._tokens >= self._next_try or self._is_late()

    def _is_late(self) -> bool:
        if not self._pack:
            return len(self._waiting) >= max(shape.rows for shape in self._shape.shapes)
        return self._tokens >= (1 + _LOOK_BACK) * self._shape.full.tokens

    def _best(self) -> tuple[Packed, float]:
        """The shape that what waits fills best, and its value."""
        found = [(self._fill(shape), shape) for shape in self._shape.shapes]
        valued = [(self._value(rows, shape), rows, shape) for rows, shape in found]
        worth = max(value for value, _, _ in valued) * (1 - _SHORTER_ROWS)
        value, rows, shape = min(
            (entry for entry in valued if entry[0] >= worth), key=lambda entry: (entry[2].row_len, -entry[0])
        )
        return Packed(shape, tuple(rows)), value

    def _fill(self, shape: Shape) -> list[tuple[int, ...]]:
        """Row after row, each time the longest answer that fits: first-fit decreasing."""
        left = self._waiting.copy()
        rows: list[tuple[int, ...]] = []
        while len(rows) < shape.rows:
            row: list[int] = []
            room = shape.row_len
            while (at := bisect_right(left, (room, 1)) - 1) >= 0:
                length, number = left.pop(at)
                row.append(-number)
                room -= length
                if not self._pack:
                    break
            if not row:
                break
            rows.append(tuple(row))
        return rows

    def _value(self, rows: Sequence[Sequence[int]], shape: Shape) -> float:
        """Tokens used, over those that are computed and what a micro-batch costs beside them."""
        used = sum(self._lengths[number] for row in rows for number in row)
        return used / (shape.tokens + self._shape.full.tokens * _LAUNCH)

    def _take(self, packed: Packed) -> Packed:
        """Takes its answers out of those that wait, adds the empty rows, and levels the ranks."""
        gone = {number for row in packed.rows for number in row}
        self._waiting = [entry for entry in self._waiting if -entry[1] not in gone]
        self._settle()
        rows = packed.rows + ((),) * (packed.shape.rows - len(packed.rows))
        costs = [row_cost([self._lengths[number] for number in row]) for row in rows]
        return Packed(packed.shape, tuple(rows[at] for at in level(costs, self._shape.shards)))

    def _settle(self) -> None:
        self._tokens = sum(length for length, _ in self._waiting)
        self._next_try = float(self._shape.full.tokens)
