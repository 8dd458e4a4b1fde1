"""The record of consumed samples: what is read back is what was consumed, bit for bit."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streamrl_jax.errors import UserError
from streamrl_jax.samples_log import SampleLog, read_samples, recorded_iterations, supersede
from streamrl_jax.types import Fence, FinishReason, Generation, Prompt, Sample, Timings, TokenIds, group_runs

FENCE = Fence("demo-1", 2)


def decode(ids: TokenIds) -> str:
    return " ".join(str(number) for number in ids)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 12))
    finite = st.floats(allow_nan=False)
    text = st.text(st.characters(codec="utf-8"), max_size=5)
    json_values = st.none() | st.booleans() | st.integers() | finite | text | st.lists(text, max_size=2)
    generation = Generation(
        sample_id=draw(text),
        attempt=draw(st.integers(0, 9)),
        token_ids=draw(hnp.arrays(np.int32, length)),
        logprobs=draw(hnp.arrays(np.float32, length, elements=st.floats(width=32))),
        versions=group_runs(draw(st.lists(st.integers(-1, 3), min_size=length, max_size=length))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        instance=draw(text),
        timings=Timings(*(draw(finite) for _ in range(3))),
    )
    return Sample(
        sample_id=generation.sample_id,
        iteration=draw(st.integers(0, 2**31 - 1)),
        prompt=Prompt(
            draw(text),
            draw(hnp.arrays(np.int32, st.integers(0, 5))),
            draw(st.dictionaries(text, json_values, max_size=3)),
        ),
        group_index=draw(st.integers(0, 63)),
        generation=generation,
        reward=draw(st.floats()),
        reward_extras=draw(st.dictionaries(text, st.floats(), max_size=2)),
        arrived_s=draw(finite),
        rewarded_s=draw(finite),
    )


def assert_same(left: Sample, right: Sample) -> None:
    for a, b in (
        (left.prompt.token_ids, right.prompt.token_ids),
        (left.generation.token_ids, right.generation.token_ids),
        (left.generation.logprobs, right.generation.logprobs),
    ):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    plain = ("sample_id", "iteration", "group_index", "arrived_s", "rewarded_s")
    assert all(getattr(left, name) == getattr(right, name) for name in plain)
    assert repr(left.reward) == repr(right.reward)
    assert repr(dict(left.reward_extras)) == repr(dict(right.reward_extras))
    assert (left.prompt.prompt_id, left.prompt.columns) == (right.prompt.prompt_id, right.prompt.columns)
    plain = ("sample_id", "attempt", "versions", "finish_reason", "instance", "timings")
    assert all(getattr(left.generation, name) == getattr(right.generation, name) for name in plain)


@given(st.lists(samples(), max_size=5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_back_is_what_was_consumed_in_its_order(tmp_path: Path, consumed: list[Sample]) -> None:
    (tmp_path / "samples").mkdir(exist_ok=True)
    SampleLog(tmp_path / "samples", FENCE, decode).write(7, consumed, trained_version=3)
    read = read_samples(tmp_path, 7)
    assert len(read) == len(consumed)
    for left, right in zip(consumed, read, strict=True):
        assert_same(left, right)


def simple(iteration: int, versions: list[int], columns: dict[str, object] | None = None) -> Sample:
    ids = np.arange(len(versions), dtype=np.int32)
    generation = Generation(
        "0/1/2", 1, ids, -ids.astype(np.float32), group_runs(versions), FinishReason.STOP, "instance-0"
    )
    prompt = Prompt("1", np.array([5, 6], np.int32), columns or {})
    return Sample("0/1/2", iteration, prompt, 2, generation, 0.5)


def log(folder: Path, iteration: int, *consumed: Sample) -> Path:
    (folder / "samples").mkdir(exist_ok=True)
    return SampleLog(folder / "samples", FENCE, decode).write(iteration, consumed, trained_version=4)


def test_the_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    table = pq.read_table(log(tmp_path, 4, simple(4, [3, 3, 4, 4])))
    (row,) = table.to_pylist()
    assert (row["prompt_text"], row["answer_text"]) == ("5 6", "0 1 2 3")
    assert (row["staleness_mean"], row["staleness_max"]) == (0.5, 1)
    metadata = table.schema.metadata
    assert (metadata[b"run_id"], metadata[b"incarnation"], metadata[b"trained_version"]) == (
        b"demo-1",
        b"2",
        b"4",
    )


def test_columns_that_json_lacks_become_values_or_text(tmp_path: Path) -> None:
    columns = {"when": datetime.date(2024, 1, 2), "x": np.float32(0.5), "ids": np.arange(2), "n": np.int64(3)}
    log(tmp_path, 0, simple(0, [0], columns))
    assert read_samples(tmp_path, 0)[0].prompt.columns == {
        "when": "2024-01-02",
        "x": 0.5,
        "ids": [0, 1],
        "n": 3,
    }


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    log(tmp_path, 0, simple(0, [0]))
    broken = simple(0, [0], columns={"a": object})
    with pytest.raises((TypeError, ValueError, AttributeError)):
        log(tmp_path, 0, broken, "not a sample")  # pyright: ignore[reportArgumentType]
    assert len(read_samples(tmp_path, 0)) == 1
    assert [entry.name for entry in (tmp_path / "samples").iterdir()] == ["iteration_000000.parquet"]


def test_a_resume_sets_aside_what_is_done_again(tmp_path: Path) -> None:
    for iteration in range(5):
        log(tmp_path, iteration, simple(iteration, [0]))
    folder = tmp_path / "samples"
    assert supersede(folder, 3, incarnation=1) == [3, 4]
    assert recorded_iterations(folder) == [0, 1, 2]
    assert recorded_iterations(folder / "superseded" / "1") == [3, 4]
    assert supersede(folder, 3, incarnation=2) == []


def test_missing_and_damaged_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="iteration 3 was not recorded \\(none is\\)"):
        read_samples(tmp_path, 3)
    log(tmp_path, 1, simple(1, [0]))
    path = log(tmp_path, 2, simple(2, [0]))
    with pytest.raises(UserError, match="iteration 3 was not recorded \\(1 to 2 are\\)"):
        read_samples(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"iteration_000002\.parquet cannot be read as Parquet"):
        read_samples(tmp_path, 2)


def test_a_large_iteration_comes_back_whole(tmp_path: Path) -> None:
    consumed = [simple(0, [0] * 500) for _ in range(512)]
    log(tmp_path, 0, *consumed)
    read = read_samples(tmp_path, 0)
    assert len(read) == 512
    assert_same(read[-1], consumed[-1])
