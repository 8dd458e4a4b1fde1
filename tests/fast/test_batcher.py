"""Packing: every answer whole, once, where its placement says, in the shapes that are compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.train.answer import Answer, Shaping, generated_answer, sampled_answer, taught_answer
from streamrl_jax.train.batcher import MicroBatch, MicroBatcher, pack_all
from streamrl_jax.train.packing import row_cost
from streamrl_jax.train.report import packing_metrics
from streamrl_jax.train.shapes import BatchShape, Shape
from streamrl_jax.types import FinishReason, VersionRun

from .tiny_training import samples, with_generation

SHAPE = BatchShape((Shape(3, 16), Shape(1, 16)))


def answer(
    prompt: int, response: int, name: str = "0/a/0", reward: float = 0.0, advantage: float = 0.0
) -> Answer:
    draw = np.random.default_rng(prompt * 100 + response)
    return Answer(
        name=name,
        prompt_ids=draw.integers(1, 50, prompt).astype(np.int32),
        response_ids=draw.integers(1, 50, response).astype(np.int32),
        logprobs=-draw.random(response).astype(np.float32),
        versions=np.full(response, 3, np.int32),
        reward=reward,
        advantage=advantage,
    )


def stream(answers: list[Answer], shape: BatchShape, pack: bool) -> list[MicroBatch]:
    batcher = MicroBatcher(shape, pack=pack)
    batches: list[MicroBatch] = []
    for one in answers:
        batches.extend(batcher.add(one))
    return batches + batcher.flush()


def check_placement(micro: MicroBatch, taken: np.ndarray) -> None:
    for placement in micro.placements:
        one, rows = placement.answer, micro.rows
        whole = placement.row, slice(placement.start, placement.start + len(one))
        assert not taken[whole].any()
        taken[whole] = True
        np.testing.assert_array_equal(rows.tokens[whole], [*one.prompt_ids, *one.response_ids])
        np.testing.assert_array_equal(rows.positions[whole], np.arange(len(one)))
        segment = rows.segment_ids[whole]
        assert segment[0] > 0
        assert (rows.segment_ids[placement.row] == segment[0]).sum() == len(one)
        prompt, count = len(one.prompt_ids), len(one.response_ids)
        np.testing.assert_array_equal(rows.response_mask[whole], [False] * prompt + [True] * count)
        np.testing.assert_array_equal(rows.behaviour_logprobs[whole], [*np.zeros(prompt), *one.logprobs])
        np.testing.assert_array_equal(rows.rewards[whole], [*np.zeros(len(one) - 1), np.float32(one.reward)])
        np.testing.assert_array_equal(rows.advantages[placement.response], np.float32(one.advantage))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_each_answer_is_packed_whole_and_once(
    lengths: list[tuple[int, int]], pack: bool, at_once: bool
) -> None:
    answers = [
        answer(p, r, f"0/x/{i}", reward=i + 0.5, advantage=i - 3.0) for i, (p, r) in enumerate(lengths)
    ]
    build = pack_all(answers, SHAPE, pack=pack) if at_once else stream(answers, SHAPE, pack)
    placed = [placement.answer.name for micro in build for placement in micro.placements]
    assert sorted(placed) == sorted(one.name for one in answers)
    for micro in build:
        assert micro.rows.tokens.shape in {(1, 16), (3, 16)}
        taken = np.zeros(micro.rows.tokens.shape, bool)
        check_placement(micro, taken)
        np.testing.assert_array_equal(taken, micro.rows.segment_ids > 0)
        assert micro.used == taken.sum()
        if not pack:
            assert len({placement.row for placement in micro.placements}) == len(micro.placements)


def test_a_micro_batch_leaves_as_soon_as_nothing_more_would_fit() -> None:
    batcher = MicroBatcher(SHAPE)
    released = [len(batcher.add(answer(3, 5, str(i)))) for i in range(12)]
    assert released == [0, 0, 0, 0, 0, 1] * 2
    assert batcher.flush() == []


def test_answers_that_fill_no_shape_wait_for_better_ones_and_not_for_long() -> None:
    batcher = MicroBatcher(SHAPE)
    arriving = [answer(1, 1, "short"), *(answer(5, 6, str(i)) for i in range(6))]
    released = [batcher.add(one) for one in arriving]
    assert [len(each) for each in released] == [0, 0, 0, 0, 0, 0, 1]  # 68 tokens, and a full one has 48
    placed = [placement.answer.name for each in released for micro in each for placement in micro.placements]
    placed += [placement.answer.name for micro in batcher.flush() for placement in micro.placements]
    assert sorted(placed) == ["0", "1", "2", "3", "4", "5", "short"]


def test_what_is_left_goes_into_the_smaller_shape() -> None:
    batcher = MicroBatcher(SHAPE)
    assert batcher.add(answer(5, 6, "late")) == []
    (rest,) = batcher.flush()
    assert [placement.answer.name for placement in rest.placements] == ["late"]
    assert rest.rows.tokens.shape == (1, 16)
    assert batcher.flush() == []


def test_an_answer_longer_than_a_row_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"sample 7/q/1: 8 prompt and 9 answer tokens do not fit a row of 16"
    ):
        MicroBatcher(SHAPE).add(answer(8, 9, "7/q/1"))


def test_what_a_sample_becomes() -> None:
    sample = samples()[0]
    length = len(sample.generation.token_ids)
    cut = replace(
        sample.generation,
        finish_reason=FinishReason.LENGTH,
        versions=(VersionRun(4, 1), VersionRun(5, length - 1)),
    )
    made = sampled_answer(replace(sample, generation=cut, reward=0.25))
    assert (made.name, made.prompt_id, made.instance) == ("0/0/0", "0", "instance-0")
    assert (made.score, made.reward, made.truncated, made.trained) == (0.25, 0.25, True, True)
    np.testing.assert_array_equal(made.versions, [4] + [5] * (length - 1))
    aborted = replace(sample.generation, finish_reason=FinishReason.ABORT)
    with pytest.raises(ValueError, match="0/0/0 was aborted"):
        generated_answer(sample.prompt, aborted)


def test_an_answer_that_cannot_be_trained_on_is_named() -> None:
    one = answer(2, 3, "1/p/0")
    with pytest.raises(ValueError, match="1/p/0: 2 prompt and 0 answer tokens"):
        replace(one, response_ids=one.response_ids[:0], logprobs=one.logprobs[:0], versions=one.versions[:0])
    with pytest.raises(ValueError, match="1/p/0: 3 answer tokens, 2 log-probs"):
        replace(one, logprobs=one.logprobs[:2])


def test_a_taught_answer_is_masked_like_a_sampled_one() -> None:
    ids = np.array([4, 5, 6], np.int32)
    (micro,) = pack_all([taught_answer("row 1", ids, ids[:2])], SHAPE)
    np.testing.assert_array_equal(micro.rows.response_mask[0, :6], [0, 0, 0, 1, 1, 0])


def test_which_number_of_an_answer_is_not_finite() -> None:
    one = answer(2, 3, "1/p/0")
    assert one.non_finite == ""
    assert replace(one, reward=float("nan")).non_finite == "its reward is nan"
    assert replace(one, advantage=float("inf")).non_finite == "its advantage is inf"
    assert replace(one, reward=-1e39).non_finite == "its reward is -1e+39, beyond float32"
    broken = replace(one, logprobs=np.array([-1, -np.inf, -1], np.float32))
    assert broken.non_finite == "a log-prob of instance unnamed is not finite"


@pytest.mark.parametrize(
    ("masks", "finish", "trained"),
    [(True, FinishReason.LENGTH, False), (True, FinishReason.STOP, True), (False, FinishReason.LENGTH, True)],
)
def test_overlong_filtering_takes_a_cut_answer_out_of_the_loss(
    masks: bool, finish: FinishReason, trained: bool
) -> None:
    sample = with_generation(samples()[0], finish_reason=finish)
    made = sampled_answer(sample, Shaping(mask_truncated=masks))
    (micro,) = pack_all([made], BatchShape((Shape(1, 32),)))
    assert made.trained == trained == micro.rows.response_mask.any()


def test_the_soft_punishment_shapes_the_reward_and_not_the_score() -> None:
    sample = samples()[0]
    length = len(sample.generation.token_ids)
    made = sampled_answer(sample, Shaping(limit=length + 1, buffer_len=4, penalty_factor=2.0))
    assert made.score == sample.reward
    assert made.reward == pytest.approx(sample.reward - 2.0 * 3 / 4)


def test_what_is_logged_of_the_packing() -> None:
    shape = BatchShape((Shape(4, 16), Shape(2, 16)), shards=2)
    first, second = pack_all([answer(6, 10), answer(6, 6), answer(1, 3), answer(2, 2), answer(4, 4)], shape)
    assert sorted(len(placement.answer) for placement in first.placements) == [4, 12, 16]
    assert sorted(len(placement.answer) for placement in second.placements) == [4, 8]
    assert [micro.rows.tokens.shape for micro in (first, second)] == [(2, 16), (2, 16)]
    work = [[row_cost([16]), row_cost([12, 4])], [row_cost([8, 4]), 0.0]]  # of the two ranks, a row each
    expected = {
        "training/micro_batches": 2,
        "training/tokens": 44,
        "training/padding_share": 1 - 44 / 64,
        "training/compiled_shapes": 2,
        "training/shapes_used": 1,
        "training/rank_imbalance": sum(map(max, work)) / (sum(map(sum, work)) / 2),
    }
    assert packing_metrics([first, second], shape) == pytest.approx(expected)
