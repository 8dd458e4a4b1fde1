"""Shapes that follow from configuration and number of devices. Without JAX: a dry run tells them too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError

_ROW_MULTIPLE: Final = 64
_TAIL_SHARE: Final = 4  # the last micro-batch of an iteration may use a shape of a quarter of the rows


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
class BatchShape:
    """The shapes that the step is compiled for.

    Attributes:
        row_len: Tokens of a row.
        rows: Row counts, ascending; the last is the full micro-batch, smaller ones serve what is left at the
            end.
    """

    row_len: int
    rows: tuple[int, ...]

    @property
    def full(self) -> int:
        """Rows of a full micro-batch."""
        return self.rows[-1]

    def fitting(self, rows: int) -> int:
        """The smallest compiled row count that holds so many."""
        return next(count for count in self.rows if count >= rows)


def plan_shape(
    *,
    longest: int,
    samples: int,
    budget_per_shard: int,
    shards: int,
    row_len: int = 0,
) -> BatchShape:
    """Chooses the row shapes.

    Args:
        longest: Tokens of the longest sample that the limits allow.
        samples: Samples of an iteration; no shape is larger than what they can need.
        budget_per_shard: Tokens of a micro-batch per data-parallel rank, `actor.ppo_max_token_len_per_gpu`.
        shards: Data-parallel ranks (data x fsdp), over which the rows are split evenly.
        row_len: Tokens of a row; 0: `longest`, rounded up to 64.

    Returns:
        Full micro-batches of as many rows as the budget allows, and a shape of a quarter of that for the
        rest.

    Raises:
        UserError: A row is shorter than the longest sample, or longer than the budget.
    """
    row_len = row_len or -(-longest // _ROW_MULTIPLE) * _ROW_MULTIPLE
    if row_len < longest:
        raise UserError(
            f"trainer.pack_row_length = {row_len} is under the longest prompt and answer, {longest} tokens, "
            "so that a long sample would fit no row; raise it, or set it to 0"
        )
    if budget_per_shard < row_len:
        raise UserError(
            f"actor.ppo_max_token_len_per_gpu = {budget_per_shard} is less than a row of {row_len} tokens; "
            f"raise it to {row_len} or more, or lower data.max_prompt_length, data.max_response_length or "
            "trainer.pack_row_length"
        )
    needed = -(-samples // (row_len // longest))
    per_shard = min(budget_per_shard // row_len, -(-needed // shards))
    tail = -(-per_shard // _TAIL_SHARE)
    return BatchShape(row_len, tuple(sorted({tail * shards, per_shard * shards})))


def plan_rl_shape(cfg: Config, shards: int) -> BatchShape:
    """`plan_shape` of a run's training iterations."""
    return plan_shape(
        longest=cfg.longest_sample,
        samples=cfg.samples_per_iteration,
        budget_per_shard=cfg.actor.ppo_max_token_len_per_gpu,
        shards=shards,
        row_len=cfg.trainer.pack_row_length,
    )
