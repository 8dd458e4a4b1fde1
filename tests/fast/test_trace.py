"""The timeline: spans where they belong, phases summed, readable after a kill."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from streamrl_jax.trace import Trace, read_trace
from streamrl_jax.types import FinishReason, Generation, Prompt, Sample, Timings, VersionRun


def a_sample(instance: str, arrived_s: float, timings: Timings) -> Sample:
    ids = np.array([1, 2], np.int32)
    answer = Generation(
        "train/0/3/1",
        1,
        ids,
        np.zeros(2, np.float32),
        (VersionRun(0, 2),),
        FinishReason.STOP,
        instance,
        timings,
    )
    return Sample("train/0/3/1", 0, Prompt("3", ids, {}), 1, answer, 0.5, arrived_s=arrived_s)


def test_phases_are_spans_of_the_trainer_and_add_up(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        for iteration in range(2):
            with trace.phase("update", iteration=iteration):
                time.sleep(0.02)
        seconds = trace.take_seconds()
        assert trace.take_seconds() == {}
    spans = [event for event in read_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert [span["args"] for span in spans] == [{"iteration": 0}, {"iteration": 1}]
    assert abs(sum(span["dur"] for span in spans) / 1e6 - seconds["update"]) < 1e-4
    assert spans[0]["ts"] + spans[0]["dur"] <= spans[1]["ts"]


def test_a_sample_is_laid_out_backwards_from_its_arrival(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        trace.sample(a_sample("instance-1", 10.0, Timings(queued_s=1.0, prefill_s=0.5, decode_s=2.0)))
        trace.sample(a_sample("instance-0", 11.0, Timings()))
    events = read_trace(tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    edges = [(names[e["pid"]], e["ph"], e["name"], e["ts"] / 1e6) for e in events if e["ph"] in "be"]
    assert edges[:4] == [
        ("instance-1", "b", "queued", 6.5),
        ("instance-1", "e", "queued", 7.5),
        ("instance-1", "b", "generate", 7.5),
        ("instance-1", "e", "generate", 10.0),
    ]
    assert {edge[0] for edge in edges[4:]} == {"instance-0"}


def test_a_score_that_is_not_finite_leaves_the_file_readable(tmp_path: Path) -> None:
    """Viewers read strict JSON, which has no NaN."""
    with Trace(tmp_path / "trace.json") as trace:
        trace.sample(replace(a_sample("instance-0", 11.0, Timings()), reward=math.nan))
    assert "NaN" not in (tmp_path / "trace.json").read_text()
    assert {e["args"]["reward"] for e in read_trace(tmp_path / "trace.json") if e["ph"] == "b"} == {"nan"}


def test_a_torn_last_line_is_left_out_and_a_resume_appends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.span("update", 1.0, 2.0)
    whole = path.read_text()
    path.write_text(whole + '{"ph": "X", "pi')
    assert [event["name"] for event in read_trace(path)] == ["process_name", "update"]
    with Trace(path) as trace:
        trace.span("update", 3.0, 4.0)
    assert [event["ts"] for event in read_trace(path) if event["ph"] == "X"] == [1_000_000, 3_000_000]
