"""The packer: each answer once, rows within their length, little padding whatever comes in which order, level ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.bench.packing import ORDERS, arranged, read_lengths
from streamrl_jax.train.packing import Packed, Packer, level, rank_costs, row_cost
from streamrl_jax.train.shapes import BatchShape, Shape, plan_shape

LENGTHS = Path(__file__).parents[1] / "data" / "conversation_lengths.csv"


def streamed(shape: BatchShape, lengths: Sequence[int], *, pack: bool = True) -> list[Packed]:
    packer = Packer(shape, pack=pack)
    packed = [one for length in lengths for one in packer.add(length)]
    return packed + packer.flush()


def at_once(shape: BatchShape, lengths: Sequence[int], *, pack: bool = True) -> list[Packed]:
    packer = Packer(shape, pack=pack)
    for length in lengths:
        packer.put(length)
    return packer.flush()


def padding(packed: Sequence[Packed], lengths: Sequence[int]) -> float:
    return 1 - sum(lengths) / sum(one.shape.tokens for one in packed)


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=80),
    longest=st.integers(1, 3000),
    room=st.integers(0, 8000),
    shards=st.integers(1, 9),
    pack=st.booleans(),
    together=st.booleans(),
)
def test_each_answer_once_and_no_row_too_long(
    shares: list[float], longest: int, room: int, shards: int, pack: bool, together: bool
) -> None:
    lengths = [1 + int(share * (longest - 1)) for share in shares]
    budget = -(-longest // 64) * 64 + room
    shape = plan_shape(longest=longest, samples=len(lengths), budget_per_shard=budget, shards=shards)
    way = at_once if together else streamed
    packed = way(shape, lengths, pack=pack)
    assert sorted(number for one in packed for row in one.rows for number in row) == list(range(len(lengths)))
    for one in packed:
        assert one.shape in shape.shapes
        assert len(one.rows) == one.shape.rows
        assert any(one.rows)
        assert all(sum(lengths[number] for number in row) <= one.shape.row_len for row in one.rows)
        assert pack or all(len(row) <= 1 for row in one.rows)
    assert way(shape, lengths, pack=pack) == packed


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=200), st.integers(1, 4))
def test_what_waits_is_bounded(lengths: list[int], shards: int) -> None:
    shape = plan_shape(longest=700, samples=len(lengths), budget_per_shard=2048, shards=shards)
    packer, waiting = Packer(shape), 0
    for length in lengths:
        left = [number for one in packer.add(length) for row in one.rows for number in row]
        waiting += length - sum(lengths[number] for number in left)
        assert waiting < 1.25 * shape.full.tokens


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=12), st.integers(1, 8))
def test_levelled_ranks_are_never_less_level_than_the_order_given(rows: list[float], ranks: int) -> None:
    costs = (rows * ranks)[: len(rows) // ranks * ranks] or [0.0] * ranks
    order = level(costs, ranks)
    assert sorted(order) == list(range(len(costs)))
    assert max(rank_costs([costs[at] for at in order], ranks)) <= max(rank_costs(costs, ranks))


def test_the_dearest_rows_go_to_different_ranks() -> None:
    costs = [9.0, 8.0, 1.0, 2.0, 0.0, 0.0]
    assert rank_costs([costs[at] for at in level(costs, 2)], 2) == [10.0, 10.0]


def test_a_rows_cost_is_linear_in_tokens_and_quadratic_within_an_answer() -> None:
    assert row_cost([]) == 0
    assert row_cost([18432]) == 2 * 18432
    assert row_cost([100, 300]) == pytest.approx(row_cost([100]) + row_cost([300]))
    assert row_cost([400]) > row_cost([100, 300])


def test_the_rows_of_a_micro_batch_are_levelled_over_the_ranks() -> None:
    lengths = [600, 600, 20, 20, 20, 20, 20, 20]
    shape = BatchShape((Shape(4, 640),), shards=2)
    (packed,) = at_once(shape, lengths)
    halves = packed.rows[:2], packed.rows[2:]
    assert [sorted(number for row in half for number in row if number < 2) for half in halves] == [[0], [1]]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("budget", [8192, 16384, 32768])
@pytest.mark.parametrize("order", ORDERS)
def test_under_a_tenth_is_padding_on_lengths_of_real_conversations(
    order: str, budget: int, ranks: int
) -> None:
    requests = read_lengths(LENGTHS)
    shape = plan_shape(longest=8192, samples=512, budget_per_shard=budget, shards=ranks)
    used = computed = 0
    for seed in range(4):
        drawn = np.random.default_rng(seed).integers(0, len(requests), 512)
        lengths = arranged([requests[at] for at in drawn], order, seed)
        used += sum(lengths)
        computed += sum(one.shape.tokens for one in streamed(shape, lengths))
    assert 1 - used / computed < 0.1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("shares", [(0.25, 0.65, 0.1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 0.2, 0.7)])
def test_under_a_tenth_is_padding_on_short_sums_at_every_step(
    shares: tuple[float, float, float], together: bool
) -> None:
    """As in configs/demo.toml: prompts of six tokens, answers of three to five, which differ from step to step."""
    shape = plan_shape(longest=16, samples=256, budget_per_shard=1024, shards=1)
    draw = np.random.default_rng(0)
    for _ in range(20):
        lengths = [6 + int(n) for n in draw.choice([3, 4, 5], 256, p=shares)]
        packed = (at_once if together else streamed)(shape, lengths)
        assert padding(packed, lengths) < 0.1
        assert len(packed) <= sum(lengths) // 1024 + 8  # full ones, and eighths for what is left


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_under_a_tenth_is_padding_on_long_tailed_answers(order: str) -> None:
    """As in configs/demo_long.toml."""
    shape = plan_shape(longest=360, samples=128, budget_per_shard=4096, shards=1)
    draw = np.random.default_rng(0)
    shares: list[float] = []
    for _ in range(20):
        drawn = np.clip(draw.lognormal(4.5, 0.7, 128), 10, 352).astype(int)
        lengths = [8 + int(n) for n in (np.sort(drawn) if order == "sorted" else drawn)]
        shares.append(padding(streamed(shape, lengths), lengths))
    assert np.mean(shares) < 0.08
    assert max(shares) < 0.12


def test_the_stream_keeps_moving_while_samples_arrive() -> None:
    lengths = arranged(read_lengths(LENGTHS), "arrival", 0)
    shape = plan_shape(longest=8192, samples=200, budget_per_shard=8192, shards=1)
    packer = Packer(shape)
    left = [len(packer.add(length)) for length in lengths]
    assert sum(left) > 0.9 * (sum(left) + len(packer.flush()))
    assert left.index(1) < 20


def test_an_answer_longer_than_every_row_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit a row of 16"):
        Packer(BatchShape((Shape(2, 16),))).add(17)
