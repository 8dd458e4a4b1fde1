"""The compiled shapes: few, within the budget, for the longest sample and for what is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.train.shapes import (
    MOST_SHAPES,
    MOST_SHAPES_OF_SHORT_ROWS,
    BatchShape,
    Shape,
    plan_rl_shape,
    plan_shape,
)

from .tiny_training import config


@pytest.mark.parametrize(
    ("asked", "built", "shards"),
    [
        # A row holds eight of 16 tokens; 1,024 tokens are 8 rows, an eighth of them 1; and one of .3 * 128, rounded up.
        (
            {"longest": 16, "samples": 256, "budget_per_shard": 1024, "shards": 1},
            [(8, 128), (1, 128), (1, 64)],
            1,
        ),
        # 100 tokens: rows of 512, so 2 rows on each of 2 ranks, then 1, and a row (of 5) of .3 * 512, rounded up.
        (
            {"longest": 100, "samples": 500, "budget_per_shard": 1024, "shards": 2},
            [(4, 512), (2, 512), (2, 192)],
            2,
        ),
        # 16 samples of 12 tokens, ten a row, never need more than 2 rows.
        (
            {"longest": 12, "samples": 16, "budget_per_shard": 4096, "shards": 1},
            [(2, 128), (1, 128), (1, 64)],
            1,
        ),
        # The rows that are asked for: full, a quarter, a sixteenth.
        (
            {"longest": 12, "samples": 999, "budget_per_shard": 240, "shards": 4, "row_len": 12},
            [(80, 12), (20, 12), (8, 12)],
            4,
        ),
        # Long rows: 1,536 tokens and .55, .4, .3 of that, then small ones with an eighth of the longest rows.
        (
            {"longest": 1500, "samples": 1024, "budget_per_shard": 16384, "shards": 4},
            [(128, 512), (72, 896), (100, 640), (40, 1536), (20, 896), (8, 1536)],
            4,
        ),
        # One long row is all that the budget holds: shorter ones have fewer tokens than it.
        (
            {"longest": 8000, "samples": 64, "budget_per_shard": 8192, "shards": 1},
            [(1, 8000), (3, 2432), (2, 3200), (1, 4416), (1, 2432)],
            1,
        ),
    ],
)
def test_the_limits_set_the_shapes(asked: dict[str, Any], built: list[tuple[int, int]], shards: int) -> None:
    assert plan_shape(**asked) == BatchShape(tuple(Shape(*each) for each in built), shards)


@settings(max_examples=300, deadline=None)
@given(
    longest=st.integers(1, 20_000),
    room=st.integers(0, 40_000),
    samples=st.integers(1, 5_000),
    shards=st.integers(1, 64),
    own=st.booleans(),
)
@example(longest=9, room=53, samples=1, shards=1, own=False)  # a budget that is no multiple of 64
def test_few_shapes_all_within_the_budget(
    longest: int, room: int, samples: int, shards: int, own: bool
) -> None:
    budget = -(-longest // 64) * 64 + room
    shape = plan_shape(
        longest=longest,
        samples=samples,
        budget_per_shard=budget,
        shards=shards,
        row_len=longest if own else 0,
    )
    assert shape.shards == shards
    assert 1 <= len(shape.shapes) <= (MOST_SHAPES if shape.row_len > 512 else MOST_SHAPES_OF_SHORT_ROWS)
    assert len(set(shape.shapes)) == len(shape.shapes)
    assert shape.row_len >= longest
    for each in shape.shapes:
        assert each.rows % shards == 0
        assert each.rows > 0
        assert each.tokens <= budget * shards
        assert each.tokens <= shape.full.tokens
    # Something small holds whatever is left, also the longest.
    least = min(each.rows for each in shape.shapes if each.row_len >= longest)
    assert least <= shards * -(-max(each.rows for each in shape.shapes) // shards // 8) or least <= shards


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"actor": {"ppo_max_token_len_per_gpu": 31}},
            "ppo_max_token_len_per_gpu = 31 is less than a row of 32",
        ),
        (
            {"trainer": {"pack_row_length": 15}},
            "pack_row_length = 15 is under the longest prompt and answer, 16",
        ),
    ],
)
def test_a_row_must_hold_a_sample_and_the_budget_a_row(section: dict[str, dict[str, int]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_rl_shape(config(**section), shards=1)
