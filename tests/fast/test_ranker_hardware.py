"""The roofline against figures that are known, and the shapes and names that it is asked with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import FLAT, Conditions, HeldOut, Profile, write_cost
from streamrl_jax.ranker.hardware import (
    BANDWIDTH_SHARE,
    GPUS,
    LAYER_S,
    STEP_S,
    ModelShape,
    kv_capacity,
    named_cost,
    roofline,
)

QWEN_7B = ModelShape(152064, 3584, 28, 28, 4, 128, 18944)
QWEN_72B = ModelShape(152064, 8192, 80, 64, 8, 128, 29568)
MIXTURE = ModelShape(151936, 2048, 48, 32, 4, 128, 768, experts=128, experts_per_token=8)


def test_shapes_have_the_sizes_that_are_published() -> None:
    """Qwen2.5-7B: 7.6e9 parameters, 15.2 GB, 56 KiB of KV a token; 72B: 72.7e9; Qwen3-30B-A3B: 30.5e9, 3.3e9 active."""
    assert QWEN_7B.weight_bytes == pytest.approx(15.23e9, rel=0.01)
    assert QWEN_7B.kv_token_bytes == 56 * 1024
    assert QWEN_72B.weight_bytes / 2 == pytest.approx(72.7e9, rel=0.01)
    assert MIXTURE.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.01)
    active = MIXTURE.dense_weights + MIXTURE.experts_per_token * MIXTURE.expert_weights
    assert active + MIXTURE.vocab_size * MIXTURE.embed == pytest.approx(3.35e9, rel=0.02)


def test_a_single_sequence_takes_the_time_of_reading_the_weights() -> None:
    """Qwen2.5-7B, H800: 14.1 GB / 3.35 TB/s = 4.2 ms at the full bandwidth, and what the host and launches add."""
    cost = roofline(QWEN_7B, GPUS["H800"])
    reading = cost.ptl(1, 1) - STEP_S - QWEN_7B.layers * LAYER_S
    assert reading * BANDWIDTH_SHARE == pytest.approx(4.22e-3, rel=0.01)
    assert 0.0045 < cost.ptl(1, 1) < 0.008


def test_arithmetic_overtakes_reading_on_an_h20_at_a_far_smaller_batch() -> None:
    turning = {name: roofline(QWEN_7B, gpu).batch.knots[1] for name, gpu in GPUS.items()}
    assert turning["H20"] < turning["H800"] / 6
    assert 200 < turning["H800"] < 300 and turning["H100"] == turning["H800"] > turning["H200"]


@pytest.mark.parametrize("shape", [QWEN_7B, QWEN_72B])
def test_an_h20_is_faster_at_small_batches_and_slower_at_large_ones(shape: ModelShape) -> None:
    h20, h800 = (roofline(shape, GPUS[name], 4) for name in ("H20", "H800"))
    assert h20.ptl(1, 2000) < h800.ptl(1, 2000)
    assert h20.ptl(256, 2000) > 1.5 * h800.ptl(256, 2000)
    # Where contexts are what is read, its bandwidth counts again: 4.0 against 3.35 TB/s.
    assert h800.kv_token_s / h20.kv_token_s == pytest.approx(4.0 / 3.35, rel=1e-6)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", [QWEN_7B, QWEN_72B, MIXTURE])
@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_it_never_falls_and_more_gpus_never_slow_large_batches(
    shape: ModelShape, gpu: str, tensor_parallel: int
) -> None:
    cost = roofline(shape, GPUS[gpu], tensor_parallel)
    seconds = cost.ptl(np.geomspace(1, 1e5, 60)[:, None], np.geomspace(1, 1e5, 30))
    assert (np.diff(seconds, axis=0) >= 0).all() and (np.diff(seconds, axis=1) >= 0).all()
    assert seconds[-1, -1] <= roofline(shape, GPUS[gpu]).ptl(1e5, 1e5)


def test_tensor_parallel_pays_for_its_all_reduces() -> None:
    """8 GPUs read a 72B model 8 times as fast; 160 all-reduces of 8 us come on top, and bytes with the batch."""
    one, eight = (roofline(QWEN_72B, GPUS["H800"], count) for count in (1, 8))
    saved = (one.ptl(1, 1) - eight.ptl(1, 1)) / (2 * 71.46e9 / (3.35e12 * BANDWIDTH_SHARE))
    assert saved == pytest.approx(7 / 8 - 160 * 8e-6 / 50.2e-3, rel=0.02)
    slow_link, fast_link = (roofline(QWEN_72B, GPUS[name], 8) for name in ("H800", "H100"))
    assert slow_link.ptl(128, 1) > fast_link.ptl(128, 1)


def test_a_mixture_reads_more_experts_as_the_batch_grows() -> None:
    """One sequence touches 8 of 128 experts, 64 nearly all: reading grows by far more than the batch's arithmetic."""
    cost = roofline(MIXTURE, GPUS["H800"])
    assert cost.ptl(64, 1) > 5 * (cost.ptl(1, 1) - STEP_S - MIXTURE.layers * LAYER_S)
    assert cost.ptl(512, 1) < 1.2 * cost.ptl(64, 1)


def test_the_kv_cache_has_what_the_weights_leave() -> None:
    """H800, 7B: 72 GB - 15.2 GB in pieces of 56 KiB: about a million tokens. A 72B model does not fit on one GPU."""
    assert kv_capacity(QWEN_7B, GPUS["H800"]) == pytest.approx(0.99e6, rel=0.01)
    assert kv_capacity(QWEN_72B, GPUS["H800"]) == 0 < kv_capacity(QWEN_72B, GPUS["H800"], 4)


def test_more_gpus_than_heads_hold_copies() -> None:
    """Qwen2.5-7B has 4 heads of keys and values: each of 8 GPUs holds one, and reads as much as each of 4."""
    h800 = GPUS["H800"]
    assert roofline(QWEN_7B, h800, 8).kv_token_s == roofline(QWEN_7B, h800, 4).kv_token_s
    assert roofline(QWEN_7B, h800, 4).kv_token_s == pytest.approx(roofline(QWEN_7B, h800).kv_token_s / 4)
    four, eight = kv_capacity(QWEN_7B, h800, 4), kv_capacity(QWEN_7B, h800, 8)
    assert four < eight < 1.1 * four, "twice the memory, and each token twice in it"


def config(tmp_path: Path, **changes: object) -> Path:
    fields: dict[str, object] = {
        "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({name: value for name, value in (fields | changes).items() if value is not None})
    )
    return path


def test_a_shape_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    assert ModelShape.from_config_json(config(tmp_path), 4) == ModelShape(
        100, 64, 2, 4, 2, 16, 96, value_bytes=4
    )
    mixture = config(tmp_path, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=24)
    assert ModelShape.from_config_json(mixture) == ModelShape(100, 64, 2, 4, 2, 24, 32, 8, 2)
    older = config(tmp_path, num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=None)
    assert ModelShape.from_config_json(older) == ModelShape(100, 64, 2, 4, 4, 16, 96, 8, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "holds no object"),
        ('{"hidden_size": "wide"}', "field 'hidden_size' is \"wide\""),
    ],
)
def test_a_bad_configuration_is_refused_by_name(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"config\.json: .*{said}"):
        ModelShape.from_config_json(path)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path)
    shape = ModelShape.from_config_json(path, 4)
    said = Conditions("toy", "float32", "cpu:0", 1, "vllm", "2026-11-30", shape=asdict(shape))
    cost = tmp_path / "cost.json"
    measured = roofline(QWEN_7B, GPUS["A100"])
    write_cost(cost, Profile(measured, said, (), (), HeldOut(0, 0.0, 0.0)))
    assert named_cost(str(cost), path, 4) == measured
    with pytest.raises(
        UserError, match=r"of something else \(toy\): gen\.dtype is bfloat16, there float32\. Meas"
    ):
        named_cost(str(cost), path, 2)
    config(tmp_path, vocab_size=128)  # padded
    assert named_cost(str(cost), path, 4) == measured
    config(tmp_path, num_hidden_layers=shape.layers + 1)
    with pytest.raises(
        UserError, match=rf"config\.json says layers = {shape.layers + 1}, there {shape.layers}\. "
    ):
        named_cost(str(cost), path, 4)
    path.unlink()  # a dry run, before the checkpoint is fetched
    assert named_cost(str(cost), path, 4) == measured


def test_a_cost_is_found_by_name(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert named_cost("", path) is FLAT
    assert named_cost("H20", path, 2, 2) == roofline(ModelShape.from_config_json(path, 2), GPUS["H20"], 2)
    with pytest.raises(UserError, match=r"read for 2 bytes a value, and gen\.dtype has 4; set"):
        named_cost("A100", path, 4)
    said = Conditions("toy", "float32", "cpu:0", 1, "vllm", "2026-11-30")
    measured = roofline(QWEN_7B, GPUS["A100"])
    write_cost(tmp_path / "cost.json", Profile(measured, said, (), (), HeldOut(0, 0.0, 0.0)))
    assert named_cost(str(tmp_path / "cost.json"), path, 4) == measured
    with pytest.raises(UserError, match=r"gen\.tensor_parallel_size is 2, there 1\. Measure"):
        named_cost(str(tmp_path / "cost.json"), path, 4, 2)
    with pytest.raises(
        UserError, match=r"dispatch\.cost = 'H9000' is neither a file nor a GPU .*H800, H20, H100"
    ):
        named_cost("H9000", path)
    with pytest.raises(ValueError, match="tensor_parallel = 0"):
        roofline(QWEN_7B, GPUS["H20"], 0)
