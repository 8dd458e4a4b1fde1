"""Shapes that follow from configuration and number of devices. Without JAX: a dry run tells them too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError

_ROW_MULTIPLE: Final = 64
_SHORT_ROW: Final = 512  # up to here a row's attention is cheap beside the rest, and one row length does
# Of rows, in parts of the longest; docs/benchmarks.md has what they bring.
_LENGTHS: Final = (1.0, 0.55, 0.4, 0.3)
MOST_SHAPES: Final = 6
MOST_SHAPES_OF_SHORT_ROWS: Final = 3  # small models too: a compilation takes longer there than an iteration


def fill_axes(axes: Mapping[str, int], devices: int, kind: str) -> dict[str, int]:
    """Gives the mesh axis that is -1 the devices that the others leave.

    Args:
        axes: Size of each axis; one may be -1.
        devices: How many there are.
        kind: Of the devices, for the error.

    Returns:
        The sizes, whose product is `devices`.

    Raises:
        UserError: An axis is neither positive nor -1, two are -1, or the product is not `devices`.
    """
    sizes = dict(axes)
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(f"mesh: {axis} is {size}; give a positive number, or -1 to fill up ({asked})")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"mesh: {' and '.join(open_axes)} are -1; at most one axis can fill up ({asked})")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and devices % fixed == 0:
        sizes[open_axes[0]] = devices // fixed
    if math.prod(sizes.values()) != devices:
        raise UserError(
            f"mesh: {asked} does not fit {devices} {kind} devices; the axes must "
            f"multiply to the number of devices (set one axis to -1 to fill up)"
        )
    return sizes


@dataclass(frozen=True)
class Shape:
    """One shape that the step is compiled for: [rows, row_len], over all data-parallel ranks."""

    rows: int
    row_len: int

    @property
    def tokens(self) -> int:
        """What is computed, padding included."""
        return self.rows * self.row_len

    def __str__(self) -> str:
        return f"{self.rows:,} × {self.row_len:,}"


@dataclass(frozen=True)
class BatchShape:
    """The shapes that a micro-batch may have. All of them are compiled before the first iteration.

    Attributes:
        shapes: The one of most tokens first. At least one has rows that hold the longest sample.
        shards: Data-parallel ranks; each works on an equal share of the rows, the first on the first ones.
    """

    shapes: tuple[Shape, ...]
    shards: int = 1

    @property
    def full(self) -> Shape:
        """The shape of most tokens."""
        return self.shapes[0]

    @property
    def row_len(self) -> int:
        """Tokens of the longest row."""
        return max(shape.row_len for shape in self.shapes)


def plan_shape(
    *,
    longest: int,
    samples: int,
    budget_per_shard: int,
    shards: int,
    row_len: int = 0,
) -> BatchShape:
    """Chooses the shapes, from the limits alone: what lengths there will be is not known when they are compiled.

    A rank's share of a shape is at most the budget. Rows hold eight of the longest samples, up to 512 tokens, so
    that little room is left in them. Where the longest sample is longer than that, there are rows of four lengths:
    r for the longest sample, .55 r, .4 r and .3 r. So answers of just over half of a row need not lie alone in it,
    and short ones are not computed in rows of the longest, where attention costs as the square of the row. Smaller
    micro-batches, of an eighth or so, serve what is left at the end.

    Args:
        longest: Tokens of the longest sample that the limits allow.
        samples: Samples of an iteration; no shape is larger than what they can need.
        budget_per_shard: Tokens of a micro-batch per data-parallel rank, `actor.ppo_max_token_len_per_gpu`.
        shards: Data-parallel ranks (data x fsdp), over which the rows are split evenly.
        row_len: Tokens of every row; 0: chosen, the longest being `longest` rounded up to 64.

    Returns:
        At most six shapes, at most three where rows have up to 512 tokens.

    Raises:
        UserError: A row is shorter than the longest sample, or longer than the budget.
    """
    least = _shortest_row(longest, budget_per_shard, row_len)

    def rows(length: int) -> int:
        """As many as the budget allows a rank, and no more than it can need."""
        needed = -(-samples // max(1, length // longest))
        return min(budget_per_shard // length, -(-needed // shards))

    def part(length: int, divisor: int) -> tuple[int, int]:
        """A part of those rows, at least one."""
        return -(-rows(length) // divisor), length

    most_that_fits = budget_per_shard // _ROW_MULTIPLE * _ROW_MULTIPLE
    roomy = max(least, min(_rounded(8 * longest), _SHORT_ROW, most_that_fits))
    lengths = [_rounded(roomy * share) for share in _LENGTHS]
    if row_len:
        wanted, most = [part(row_len, 1), part(row_len, 4), part(row_len, 16)], MOST_SHAPES
    elif roomy <= _SHORT_ROW:
        wanted = [part(roomy, 1), part(roomy, 8), part(lengths[3], 16), part(roomy, 4), part(lengths[1], 1)]
        most = MOST_SHAPES_OF_SHORT_ROWS
    else:
        # What is left at the end may be long: one of the small shapes has the longest rows.
        small = [part(roomy, 8), part(lengths[1], 4), part(lengths[3], 8)]
        wanted, most = [part(length, 1) for length in lengths] + small, MOST_SHAPES
    shapes = [Shape(count * shards, length) for count, length in dict.fromkeys(wanted)][:most]
    return BatchShape(tuple(sorted(shapes, key=lambda s: (-s.tokens, s.row_len))), shards)


def _shortest_row(longest: int, budget: int, row_len: int) -> int:
    """Of the rows that hold the longest sample. Raises as `plan_shape`."""
    least = row_len or _rounded(longest)
    if least < longest:
        raise UserError(
            f"trainer.pack_row_length = {row_len} is under the longest prompt and answer, {longest} tokens, "
            "so that a long sample would fit no row; raise it, or set it to 0"
        )
    if budget < least:
        raise UserError(
            f"actor.ppo_max_token_len_per_gpu = {budget} is less than a row of {least} tokens; raise it to {least} or "
            "more, or lower data.max_prompt_length, data.max_response_length or trainer.pack_row_length"
        )
    return least


def _rounded(length: float) -> int:
    return math.ceil(length / _ROW_MULTIPLE) * _ROW_MULTIPLE


def plan_rl_shape(cfg: Config, shards: int) -> BatchShape:
    """`plan_shape` of a run's training iterations."""
    return plan_shape(
        longest=cfg.longest_sample,
        samples=cfg.samples_per_iteration,
        budget_per_shard=cfg.actor.ppo_max_token_len_per_gpu,
        shards=shards,
        row_len=cfg.trainer.pack_row_length,
    )
