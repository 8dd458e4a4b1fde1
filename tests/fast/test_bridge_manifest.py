"""A version is whole or not at all: each kind of damage to a manifest or its bytes is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3

from streamrl_jax.bridge.manifest import (
    ALIGNMENT,
    Target,
    build_manifest,
    check,
    check_targets,
    lay_out,
    manifest_digest,
    pack,
    read_tensor,
    summarise,
)
from streamrl_jax.types import Fence, Manifest, TensorSpec

FENCE = Fence("run", 2)


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.standard_normal((5, 3)).astype(np.float32),
        "head": rng.standard_normal((5, 3)).astype(np.float32),
        "norm": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "scale": np.array(rng.standard_normal(), np.float16),
    }


def _resealed(manifest: Manifest) -> Manifest:
    """The manifest with a digest of its own that fits again, as a publisher with a fault would send it."""
    return replace(manifest, digest=manifest_digest(manifest))


def _with_tensor(manifest: Manifest, index: int, **changes: object) -> Manifest:
    tensors = list(manifest.tensors)
    tensors[index] = replace(tensors[index], **changes)  # type: ignore[arg-type]
    return _resealed(replace(manifest, tensors=tuple(tensors)))


def test_a_packed_version_is_whole_and_reads_back_bitwise() -> None:
    arrays = _arrays()
    manifest, blob = pack(FENCE, 3, "Qwen2ForCausalLM", arrays)
    assert check(manifest, blob) == []
    assert check_targets(manifest, {k: Target(v.shape, v.dtype.name) for k, v in arrays.items()}) == []
    for spec in manifest.tensors:
        read = read_tensor(blob, spec)
        assert read.dtype == arrays[spec.name].dtype and not read.flags.writeable
        assert read.tobytes() == arrays[spec.name].tobytes()
        assert spec.offset % ALIGNMENT == 0
        assert spec.digest == blake3(arrays[spec.name].tobytes()).digest()


DAMAGE: dict[str, tuple[Callable[[Manifest], Manifest], list[str]]] = {
    "digest": (lambda m: _with_tensor(m, 0, digest=bytes(32)), ["embed: its 60 bytes do not match"]),
    "short digest": (lambda m: _with_tensor(m, 0, digest=b"x"), ["embed: the digest has 1 bytes"]),
    "size": (lambda m: _with_tensor(m, 0, shape=(5, 4)), ["embed: has 60 bytes, but float32[5,4] takes 80"]),
    "negative shape": (
        lambda m: _with_tensor(m, 0, shape=(-5, -3)),
        ["embed: shape [-5, -3] has a size under 1"],
    ),
    "dtype": (lambda m: _with_tensor(m, 0, dtype="int8"), ["embed: unknown dtype 'int8'"]),
    "misaligned": (lambda m: _with_tensor(m, 0, offset=1), ["embed: offset 1 is not a multiple of 64"]),
    "overlap": (
        lambda m: _with_tensor(m, 1, offset=0),
        ["head: begins at byte 0, inside embed, which ends at 60"],
    ),
    "name": (lambda m: _with_tensor(m, 1, name="embed"), ["embed: listed more than once"]),
    "delta": (lambda m: _resealed(replace(m, base_version=2)), ["base_version 2: a delta"]),
    "version": (lambda m: _resealed(replace(m, version=-1)), ["version -1 is negative"]),
    "empty": (lambda m: _resealed(replace(m, tensors=())), ["the manifest lists no tensor"]),
    "total": (
        lambda m: _resealed(replace(m, total_bytes=9)),
        ["total_bytes is 9, but the tensors end", "has 194 bytes"],
    ),
    "own digest": (lambda m: replace(m, version=4), ["does not match its own digest"]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_to_a_manifest_is_named(kind: str) -> None:
    damage, wanted = DAMAGE[kind]
    manifest, blob = pack(FENCE, 3, "Qwen2ForCausalLM", _arrays())
    faults = check(damage(manifest), blob)
    for text in wanted:
        assert any(text in fault for fault in faults), faults


def test_an_offset_past_the_end_is_a_fault_and_not_read() -> None:
    manifest, blob = pack(FENCE, 0, "a", _arrays())
    faults = check(_with_tensor(manifest, 3, offset=1 << 60), blob)
    assert any("lie outside the blob" in fault for fault in faults)


def test_every_flipped_bit_is_found_and_only_its_tensor_blamed() -> None:
    manifest, blob = pack(FENCE, 0, "a", _arrays())
    for spec in manifest.tensors:
        for at in range(spec.offset, spec.offset + spec.nbytes):
            blob[at] ^= 0x10
            assert [fault.split(":")[0] for fault in check(manifest, blob)] == [spec.name]
            blob[at] ^= 0x10
    assert check(manifest, blob) == []


def test_a_short_blob_blames_the_size_and_the_tensors_that_are_cut() -> None:
    manifest, blob = pack(FENCE, 0, "a", _arrays())
    last = manifest.tensors[-1]
    faults = check(manifest, memoryview(blob)[: last.offset])
    assert len(faults) == 2
    assert "but the blob has 192 bytes" in faults[0] and "lie outside the blob" in faults[1]


def test_swapped_names_of_equal_shape_are_found() -> None:
    manifest, blob = pack(FENCE, 0, "a", _arrays())
    first, second, *rest = manifest.tensors
    swapped = (replace(first, name=second.name), replace(second, name=first.name), *rest)
    faults = check(replace(manifest, tensors=swapped), blob)
    assert faults == [f"the manifest does not match its own digest {manifest.digest.hex()[:16]}…"]


def test_all_faults_are_reported_at_once() -> None:
    manifest, blob = pack(FENCE, 0, "a", _arrays())
    bad = _with_tensor(_with_tensor(manifest, 0, dtype="int8"), 1, shape=(1,))
    blob[bad.tensors[2].offset] ^= 1
    assert {fault.split(":")[0] for fault in check(bad, blob)} == {"embed", "head", "norm"}


def test_targets_missing_unexpected_and_misshaped_are_all_named() -> None:
    specs = lay_out(
        {"a": Target((2, 2), "float32"), "b": Target((3,), "bfloat16"), "d": Target((4,), "float32")}
    )
    manifest = build_manifest(FENCE, 0, "a", [replace(s, digest=bytes(32)) for s in specs])
    expected = {
        "a": Target((2, 3), "float32"),
        "b": Target((3,), "float32"),
        "c": Target((1,), "float32"),
    }
    assert check_targets(manifest, expected) == [
        "c: missing (expected float32[1])",
        "d: no tensor of this model (float32[4])",
        "a: is float32[2,2], expected float32[2,3]",
        "b: is bfloat16[3], expected float32[3]",
    ]


def test_layout_leaves_no_overlap_and_no_waste() -> None:
    specs = lay_out({str(i): Target((i + 1,), "bfloat16") for i in range(200)})
    reached = 0
    for spec in specs:
        assert 0 <= spec.offset - reached < ALIGNMENT
        reached = spec.offset + spec.nbytes


def test_a_scalar_has_a_place() -> None:
    (spec,) = lay_out({"s": Target((), "float32")})
    assert spec == TensorSpec("s", (), "float32", 0, 4, b"")


def test_summary_is_bounded() -> None:
    assert summarise(["a", "b"], limit=2) == "a; b"
    assert summarise(["a", "b", "c", "d"], limit=2) == "a; b; and 2 more"
