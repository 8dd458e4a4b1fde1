"""Metric records, their files, and the arithmetic of throughput."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl_jax import flops
from streamrl_jax.errors import UserError
from streamrl_jax.metric_names import METRICS, undeclared
from streamrl_jax.metrics import (
    JsonlSink,
    MetricRecord,
    Missing,
    Sinks,
    TensorBoardSink,
    read_metrics,
    record,
)


def written(path: Path, steps: range, restored_step: int | None = None) -> None:
    sink = JsonlSink(path, restored_step)
    for step in steps:
        sink.write(record(step, 100.0 + step, {"actor/pg_loss": step / 3}))
    sink.close()


def test_what_is_not_finite_is_null_with_its_reason(tmp_path: Path) -> None:
    values = {
        "b": float("nan"),
        "a": np.float32(0.1),
        "c": float("-inf"),
        "d": Missing("no peak known for cpu"),
        "e": None,
        "f": 2,
    }
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(record(1, 5.0, values))
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["metrics"] == {"a": float(np.float32(0.1)), "b": None, "c": None, "d": None, "f": 2.0}
    assert line["missing"] == {"b": "nan", "c": "-inf", "d": "no peak known for cpu"}
    sink.close()


def test_records_read_back_equal_and_are_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    records = [record(step, 1e9 + step / 7, {"a": step / 3, "b": Missing("nan")}) for step in range(3)]
    for number, entry in enumerate(records, 1):
        sink.write(entry)
        assert read_metrics(path) == records[:number]
    sink.close()
    assert records[1].number("a") == 1 / 3
    assert records[1].number("b") is None and records[1].number("never") is None


def test_a_resume_cuts_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(6))
    written(path, range(4, 5), restored_step=3)
    assert [entry.step for entry in read_metrics(path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_torn_by_a_kill_is_left_out_and_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(3))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [entry.step for entry in read_metrics(path)] == [0, 1]
    written(path, range(2, 3), restored_step=1)
    assert [entry.step for entry in read_metrics(path)] == [0, 1, 2]


def test_a_resume_from_before_the_first_step_starts_the_file_anew(tmp_path: Path) -> None:
    written(tmp_path / "m.jsonl", range(1, 3))
    written(tmp_path / "m.jsonl", range(1, 2), restored_step=0)
    assert [entry.step for entry in read_metrics(tmp_path / "m.jsonl")] == [1]
    JsonlSink(tmp_path / "none.jsonl", restored_step=4).close()
    assert (tmp_path / "none.jsonl").read_text() == ""


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(2))
    path.write_text(path.read_text().replace('{"step": 0', '{"stp": 0'))
    with pytest.raises(UserError, match=r"m\.jsonl, line 1, is not a metric record"):
        JsonlSink(path, restored_step=1)


def read_events(path: Path) -> list[Any]:
    """Reads an event file with another implementation's message type and checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto import event_pb2

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    data, events = path.read_bytes(), []
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length, length_check = struct.unpack("<QI", data[:12])
        payload = data[12 : 12 + length]
        (check,) = struct.unpack("<I", data[12 + length : 16 + length])
        assert (length_check, check) == (masked(data[:8]), masked(payload))
        events.append(vars(event_pb2)["Event"].FromString(payload))
        data = data[16 + length :]
    return events


def test_tensorboard_gets_each_finite_metric_at_its_step(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(record(300, 100.5, {"actor/pg_loss": 0.25, "perf/mfu/actor": Missing("cpu"), "é": -1e30}))
    sink.write(record(301, 101.0, {"actor/pg_loss": 0.5}))
    header, first, second = read_events(next(tmp_path.iterdir()))
    sink.close()
    assert header.file_version == "brain.Event:2"
    assert (first.step, first.wall_time) == (300, 100.5)
    points = {value.tag: value.simple_value for value in first.summary.value}
    assert points == {"actor/pg_loss": 0.25, "é": float(np.float32(-1e30))}
    assert (second.step, second.summary.value[0].simple_value) == (301, 0.5)


def test_a_resume_takes_later_points_out_of_the_curves(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, restored_step=7).close()
    _, start = read_events(next(tmp_path.iterdir()))
    assert (start.step, start.session_log.status) == (8, start.session_log.START)


class FailingSink:
    def write(self, record: MetricRecord) -> None:
        pass

    def close(self) -> None:
        raise OSError("disk full")


def test_every_sink_is_closed_though_one_fails(tmp_path: Path) -> None:
    last = JsonlSink(tmp_path / "m.jsonl")
    sinks = Sinks([FailingSink(), last])
    sinks.write(record(1, 0.0, {}))
    with pytest.raises(ExceptionGroup) as caught:
        sinks.close()
    assert [str(error) for error in caught.value.exceptions] == ["disk full"]
    with pytest.raises(ValueError, match="closed"):
        last.write(record(2, 0.0, {}))


def test_the_table_of_names_covers_patterns_and_finds_strangers() -> None:
    assert undeclared(["actor/pg_loss", "timing_s/step", "gen/instance-0/idle_ratio", "val/pass@4"]) == []
    assert undeclared(["acter/pg_loss", "loss", "acter/pg_loss"]) == ["acter/pg_loss", "loss"]


def names_in_the_source() -> set[str]:
    """Metric names that stand in the program's text; those that it composes are left out."""
    groups = "|".join(sorted({name.split("/")[0] for name in METRICS}))
    literal = re.compile(rf'"((?:{groups})/[a-z0-9_/@]*[a-z0-9])"')
    files = (Path(__file__).parents[2] / "streamrl_jax").rglob("*.py")
    texts = [file.read_text(encoding="utf-8") for file in files if file.name != "metric_names.py"]
    return {name for text in texts for name in literal.findall(text)}


def test_every_metric_that_the_program_names_is_declared() -> None:
    sums = {"critic/advantages_raw", "critic/value_errors"}  # that metrics are made from
    spreads = {"critic/advantages", "critic/returns", "critic/values"}  # logged as /mean, /max, /min
    found = names_in_the_source()
    assert len(found) > 40
    assert undeclared(found - sums - spreads) == []


# --- FLOPs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    vocab_size: int = 11
    embed: int = 6
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 3
    mlp: int = 5
    experts: int = 0
    experts_per_token: int = 0


def counted_forward(sizes: Sizes, length: int, head: int) -> int:
    """Counts every multiplication and addition of the matrix products, token by token."""
    total = 0
    for position in range(length):
        for _ in range(sizes.layers):
            width = sizes.heads * sizes.head_dim
            kv_width = sizes.kv_heads * sizes.head_dim
            products = [
                (sizes.embed, width),
                (sizes.embed, kv_width),
                (sizes.embed, kv_width),
                (width, sizes.embed),
            ]
            expert = [(sizes.embed, sizes.mlp), (sizes.embed, sizes.mlp), (sizes.mlp, sizes.embed)]
            if sizes.experts:
                products += [(sizes.embed, sizes.experts), *expert * sizes.experts_per_token]
            else:
                products += expert
            total += sum(2 * rows * columns for rows, columns in products)
            attended = position + 1
            total += sizes.heads * 2 * (2 * attended * sizes.head_dim)
        total += 2 * sizes.embed * head
    return total


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(experts=7, experts_per_token=3)])
@pytest.mark.parametrize("value_head", [False, True])
def test_forward_flops_are_those_counted_by_hand(sizes: Sizes, value_head: bool) -> None:
    """Exact but for the diagonal: L²/2 pairs stand for L(L + 1)/2."""
    lengths = [7, 1, 20]
    counted = sum(counted_forward(sizes, length, 1 if value_head else sizes.vocab_size) for length in lengths)
    diagonal = sum(lengths) * sizes.layers * sizes.heads * sizes.head_dim * 2
    assert flops.forward_flops(sizes, lengths, value_head=value_head) == counted - diagonal


def test_an_update_is_three_forwards_an_epoch_and_the_scoring_passes() -> None:
    forward = flops.forward_flops(Sizes(), [5, 9])
    assert flops.update_flops(Sizes(), [5, 9]) == 3 * forward
    assert flops.update_flops(Sizes(), [5, 9], epochs=2, scoring_passes=1) == 7 * forward


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H800", "bfloat16", 989e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peaks_are_found_by_the_name_jax_gives(kind: str, dtype: str, peak: float | None) -> None:
    assert flops.peak_flops(kind, dtype) == peak


def test_utilisation_and_throughput() -> None:
    assert flops.mfu(2e12, 2.0, 4, 1e12) == 0.25
    assert flops.mfu(2e12, 2.0, 4, None) is None
    assert flops.throughput(1000, 2.0, 5) == 100.0
    assert flops.throughput(1000, 0.0, 5) == 0.0
