"""What travels between trainer and controller comes back equal: rows, jobs, samples, exceptions."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control import codec
from streamrl_jax.control.columns import columns_from_json, columns_to_json
from streamrl_jax.control.events import Activity, InstanceView
from streamrl_jax.control.faults import ControlError, ControllerFault, RewardError
from streamrl_jax.control.jobs import Job
from streamrl_jax.errors import UserError
from streamrl_jax.gen.net import MAX_MESSAGE_BYTES
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.types import (
    Fence,
    FinishReason,
    Generation,
    InstanceState,
    Prompt,
    Sample,
    Sampling,
    VersionRun,
)

SAMPLING = Sampling(temperature=1.0, max_new_tokens=32, stop_token_ids=(0,), seed=5)

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates()
    | st.datetimes() | st.times() | st.timedeltas() | st.decimals(allow_nan=False)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.just("~"), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Equal with types; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and (left == right or left != left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_rows_come_back_as_they_were(row: dict[str, Any]) -> None:
    assert same(dict(columns_from_json(columns_to_json(row, "0"))), row) or has_nan(row)


def has_nan(value: Any) -> bool:
    """The sign of a NaN is not kept."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, dict):
        return any(map(has_nan, value.values()))
    return isinstance(value, list | tuple) and any(map(has_nan, value))


def test_rows_of_arrays_and_the_rest() -> None:
    row = {
        "nan": float("nan"),
        "when": datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC),
        "price": Decimal("1.10"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.1),
        "set": {1, (2, b"\0")},
    }
    found = columns_from_json(columns_to_json(row, "0"))
    assert math.isnan(found["nan"])
    assert {key: found[key] for key in ("when", "price", "set")} == {
        k: row[k] for k in ("when", "price", "set")
    }
    np.testing.assert_array_equal(found["array"], row["array"])
    assert found["array"].dtype == np.int16 and type(found["scalar"]) is np.float32
    assert found["scalar"] == row["scalar"]


def test_what_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"prompt 17, column 'image': a value of type builtins.object"):
        columns_to_json({"image": [object()]}, "17")


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"a":{"~":["array",["O",[1],""]]}}', b'{"a":{"~":["odd",1]}}']
)
def test_no_row_is_read_from_anything_else(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"prompt.columns"):
        columns_from_json(text)


def test_a_job_of_many_prompts_travels_in_small_pieces() -> None:
    rows = [Prompt(str(row), np.arange(500, dtype=np.int32), {"text": "x" * 2000}) for row in range(2000)]
    job = Job("train/3", rows, 2, SAMPLING, 3, 2, priority=3)
    pieces = list(codec.job_to_proto(1, job, "train/2"))
    assert len(pieces) > 5 and max(piece.ByteSize() for piece in pieces) < 2 * codec.PIECE_BYTES
    found = codec.JobPieces()
    for piece in pieces:
        assert not found.whole
        found.add(piece)
    back, into = found.job()
    assert (
        into == "train/2" and found.head is not None and found.head.digest == codec.job_digest(job, "train/2")
    )
    assert codec.job_digest(back, into) == codec.job_digest(job, "train/2") != codec.job_digest(job)
    assert [dict(p.columns) for p in back.prompts] == [dict(p.columns) for p in rows]


def test_a_prompt_that_fits_no_message_is_refused_by_name() -> None:
    row = Prompt("17", np.arange(4, dtype=np.int32), {"video": b"\0" * MAX_MESSAGE_BYTES})
    with pytest.raises(UserError, match=r"prompt 17 has .* bytes with its columns"):
        list(codec.job_to_proto(0, Job("train/3", [row], 2, SAMPLING, 3, 2), ""))


def test_a_sample_comes_back_with_the_readers_own_prompt() -> None:
    prompt = Prompt("7", np.asarray([1, 2], np.int32), {"answer": "2"})
    ids, logprobs = np.asarray([5, 0], np.int32), np.asarray([-0.5, -1.25], np.float32)
    answer = Generation("train/3/7/1", 2, ids, logprobs, (VersionRun(3, 2),), FinishReason.STOP, "a")
    sample = Sample("train/3/7/1", 3, prompt, 1, answer, float("nan"), {"words": 2.0}, 10.0, 11.0)
    found = codec.sample_from_proto(codec.sample_to_proto(Fence("run", 0), sample), {"7": prompt}, 5.0)
    assert found.prompt is prompt and math.isnan(found.reward) and found.reward_extras == {"words": 2.0}
    assert (found.sample_id, found.iteration, found.group_index) == ("train/3/7/1", 3, 1)
    assert (found.arrived_s, found.rewarded_s) == (15.0, 16.0)
    np.testing.assert_array_equal(found.generation.token_ids, ids)
    np.testing.assert_array_equal(found.generation.logprobs, logprobs)
    with pytest.raises(ValueError, match=r"sample.prompt_id = 7 is unknown"):
        codec.sample_from_proto(codec.sample_to_proto(Fence("run", 0), sample), {}, 0.0)


def test_exceptions_keep_their_class_text_and_traceback() -> None:
    def back(error: BaseException) -> BaseException:
        return codec.error_from_proto(codec.error_to_proto(error))

    try:
        raise KeyError("the answer sheet is missing")
    except KeyError as error:
        cause = error
    for error in (
        ControlError("instance-0 is gone", "the last line"),
        RewardError("it raised", cause),
        UserError("a wrong value"),
        StopRequested("SIGTERM"),
        ValueError("version 2 is published after version 2"),
    ):
        assert type(back(error)) is type(error) and str(back(error)) == str(error)
    assert "in test_exceptions" in str(back(RewardError("it raised", cause)))
    fault = back(cause)
    assert (
        isinstance(fault, ControllerFault)
        and "KeyError: 'the answer" in str(fault)
        and "Traceback" in str(fault)
    )


lengths = st.lists(st.floats(1, 2.0**53), min_size=1, max_size=5)


@given(
    lengths, st.integers(1, 3), st.booleans(), st.sampled_from([None, "arrival", "lpt", "paper", "skewness"])
)
def test_predictions_and_forced_lengths_come_back(
    predicted: list[float], n: int, forces: bool, policy: Policy | None
) -> None:
    rows = [Prompt(str(row), np.arange(3, dtype=np.int32), {}) for row in range(len(predicted))]
    forced = [1 + index % 32 for index in range(len(rows) * n)] if forces else None
    job = Job(
        "eval/3", rows, n, SAMPLING, 3, 2, evaluation=True, predicted=predicted, forced=forced, policy=policy
    )
    back = sent(job)
    assert (back.predicted, back.forced, back.policy) == (predicted, forced, policy)
    assert codec.job_digest(back) == codec.job_digest(job) == codec.job_digest(replace(job, predicted=None))
    assert codec.job_digest(job) != codec.job_digest(replace(job, forced=[3] * job.size))


def sent(job: Job) -> Job:
    """The job after its way over the wire."""
    found = codec.JobPieces()
    for piece in codec.job_to_proto(0, job, ""):
        found.add(pb.SubmitRequest.FromString(piece.SerializeToString()))
    return found.job()[0]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"predicted": [3.0]}, r"predicted has 1 lengths; 2 are needed"),
        ({"predicted": [3.0, math.nan]}, r"predicted\[1\] = nan is no length"),
        ({"predicted": [0.5, 3.0]}, r"predicted\[0\] = 0.5 is no length"),
        ({"predicted": [math.inf, 3.0]}, r"predicted\[0\] = inf is no length"),
        ({"forced": [3, 4]}, r"forced lengths are for evaluations only"),
        ({"forced": [3, 4, 5], "evaluation": True}, r"forced has 3 lengths; 4 are needed"),
        ({"forced": [3, 4, 5, 33], "evaluation": True}, r"forced\[3\] = 33 is no length: .* in \[1, 32\]"),
        ({"forced": [3, 4, 0, 5], "evaluation": True}, r"forced\[2\] = 0 is no length"),
    ],
)
def test_lengths_that_are_none_are_refused_by_place_and_value(what: dict[str, Any], said: str) -> None:
    rows = [Prompt(str(row), np.arange(3, dtype=np.int32), {}) for row in range(2)]
    with pytest.raises(ValueError, match=said):
        Job("eval/3", rows, 2, SAMPLING, 3, 2, **what)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[0].ClearField("predicted"), r"predicted has 1 lengths; 2 are needed"),
        (lambda rows: setattr(rows[0], "predicted", math.nan), r"prompt.predicted = nan"),
        (lambda rows: setattr(rows[1], "predicted", 0.0), r"prompt.predicted = 0.0"),
        (lambda rows: rows[1].forced.append(3), r"prompt.forced has 3 lengths; the job has n = 2"),
        (lambda rows: rows[1].ClearField("forced"), r"forced has 2 lengths; 4 are needed"),
        (lambda rows: rows[1].forced.__setitem__(0, 0), r"prompt.forced = 0"),
    ],
)
def test_lengths_from_the_wire_are_checked(change: Callable[[Any], None], said: str) -> None:
    rows = [Prompt(str(row), np.arange(3, dtype=np.int32), {}) for row in range(2)]
    job = Job("eval/3", rows, 2, SAMPLING, 3, 2, evaluation=True, predicted=[4.0, 5.0], forced=[1, 2, 3, 4])
    (piece,) = codec.job_to_proto(0, job, "")
    change(piece.prompts)
    found = codec.JobPieces()
    with pytest.raises(ValueError, match=said):
        found.add(piece)
        found.job()


VIEW = InstanceView(
    "a",
    "h:1",
    InstanceState.IDLE,
    3,
    9,
    8,
    1,
    12.5,
    99,
    2,
    {Activity.BUSY: 1.5},
    8,
    kv_tokens=2**40,
    steps_total=7,
)


def test_a_view_comes_back_as_it_was() -> None:
    assert (
        codec.view_from_proto(pb.InstanceRow.FromString(codec.view_to_proto(VIEW).SerializeToString()))
        == VIEW
    )


@pytest.mark.parametrize("field", ["kv_tokens", "steps_total"])
def test_a_total_that_cannot_be_is_refused_by_name(field: str) -> None:
    row = codec.view_to_proto(VIEW)
    setattr(row, field, 2**53 + 1)
    with pytest.raises(ValueError, match=rf"instance\.{field} = 9007199254740993 "):
        codec.view_from_proto(row)
