"""Rule 6 on the real vLLM: a version is whole or not at all, and every token knows the one it came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.types import Assignment, Generation, Manifest, Sampling, UpdateReport, expand_runs
from tests.engine.conftest import (
    ARCHITECTURE,
    FENCE,
    Rig,
    checkpoint_arrays,
    make_model,
    reference_logprobs,
)

GREEDY = Sampling(0.0, 24, (), evaluation=True)
LONG = Sampling(1.0, 480, ())
PROMPT = np.array([7, 8, 9], np.int32)

Damage = Callable[[dict[str, np.ndarray]], tuple[Manifest, bytearray]]


def offer(version: int, arrays: dict[str, np.ndarray], architecture: str = ARCHITECTURE) -> tuple[Any, Any]:
    """Manifest and blob of the next version."""
    return pack(FENCE, version, architecture, arrays)


def torn(version: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """One flipped bit."""
    manifest, blob = offer(version, arrays)
    blob[manifest.tensors[5].offset] ^= 1
    return manifest, blob


def short(version: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """The last bytes did not come."""
    manifest, blob = offer(version, arrays)
    return manifest, blob[:-64]


def other_names(version: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """One name missing, one unknown, one of another shape, one of another dtype."""
    arrays = dict(arrays)
    del arrays["model.norm.weight"]
    arrays["model.norm.bias"] = np.zeros(128, np.float32)
    arrays["lm_head.weight"] = arrays["lm_head.weight"][:-1]
    arrays["model.layers.1.mlp.down_proj.weight"] = arrays["model.layers.1.mlp.down_proj.weight"].astype(
        np.float16
    )
    return offer(version, arrays)


def swapped(version: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Two names of one shape exchanged after the digests were taken."""
    manifest, blob = offer(version, arrays)
    tensors = list(manifest.tensors)
    first, second = (
        next(i for i, t in enumerate(tensors) if t.name == f"model.layers.{layer}.self_attn.o_proj.weight")
        for layer in (0, 1)
    )
    tensors[first], tensors[second] = (
        replace(tensors[first], name=tensors[second].name),
        replace(tensors[second], name=tensors[first].name),
    )
    return replace(manifest, tensors=tuple(tensors)), blob


def other_architecture(version: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """The right tensors for another model."""
    return offer(version, arrays, "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (torn, ["do not match digest"]),
        (short, ["bytes, expected"]),
        (
            other_names,
            [
                "model.norm.weight: missing",
                "model.norm.bias: no tensor of this model",
                "lm_head.weight: is float32[103,128], expected float32[104,128]",
                "model.layers.1.mlp.down_proj.weight: is float16",
            ],
        ),
        (swapped, ["does not match its own digest"]),
        (other_architecture, ["LlamaForCausalLM"]),
    ],
)
def test_a_bad_version_is_refused_whole_and_the_old_one_serves_on(
    rig: Rig, damage: Any, named: list[str]
) -> None:
    def probe() -> Generation:
        return rig.answer([Assignment(rig.sample_id(), 0, PROMPT, GREEDY)])[0]

    before = probe()
    manifest, blob = damage(rig.version + 1, checkpoint_arrays(make_model(99)))
    report = rig.update(manifest, blob)
    assert (report.accepted, report.quarantined, report.version) == (False, False, rig.version)
    for fault in named:
        assert fault in report.reason
    after = probe()
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_array_equal(after.logprobs, before.logprobs)
    assert after.versions == before.versions


def run_during_update(rig: Rig, in_flight: bool) -> tuple[list[Assignment], list[Generation], UpdateReport]:
    """Long answers, with an update to the next version in their middle."""
    model = make_model(rig.version + 1)
    given = [Assignment(rig.sample_id(), 0, PROMPT[: 1 + i % 3], LONG) for i in range(8)]
    manifest, blob = pack(FENCE, rig.version + 1, ARCHITECTURE, checkpoint_arrays(model))

    async def work() -> tuple[list[Generation], UpdateReport]:
        before = (await rig.status()).tokens_total
        await rig.assign(given)
        while (await rig.status()).tokens_total < before + 8 * 40:
            await asyncio.sleep(0.005)
        update = asyncio.create_task(rig.offer(manifest, blob, in_flight=in_flight))
        answers = await rig.collect(len(given))
        return answers, await update

    answers, report = rig.loop.run(work())
    assert report.accepted, report.reason
    found = {answer.sample_id: answer for answer in answers}
    rig.version, rig.model = manifest.version, model
    return given, [found[assignment.sample_id] for assignment in given], report


def test_each_token_of_an_answer_in_flight_carries_the_version_that_sampled_it(rig: Rig) -> None:
    older, old_version = rig.model, rig.version
    assert older is not None
    given, answers, report = run_during_update(rig, in_flight=True)
    assert rig.model is not None
    worst = 0.0
    for assignment, answer in zip(given, answers, strict=True):
        versions = expand_runs(answer.versions)
        assert [run.version for run in answer.versions] == [old_version, old_version + 1]
        prompt, ids = assignment.prompt_ids.tolist(), answer.token_ids.tolist()
        told = rig.progress[answer.sample_id]
        assert len(told) > 3
        assert [p.offset for p in told] == np.cumsum([0, *(len(p.token_ids) for p in told[:-1])]).tolist()
        for field, whole in (("token_ids", answer.token_ids), ("logprobs", answer.logprobs)):
            parts = np.concatenate([getattr(part, field) for part in told])
            np.testing.assert_array_equal(parts, whole[: len(parts)])
        parts = np.concatenate([expand_runs(part.versions) for part in told])
        np.testing.assert_array_equal(parts, versions[: len(parts)])
        # The KV of what runs is recomputed: each half agrees with its own weights over the whole context.
        for version, model in ((old_version, older), (rig.version, rig.model)):
            mine = versions == version
            expected = reference_logprobs(model, prompt, ids, 1.0)
            worst = max(worst, float(np.abs(expected - answer.logprobs)[mine].max()))
    before = [answer.versions[0].length for answer in answers]
    print(
        f"\nin-flight update: paused {report.paused_s * 1e3:.0f} ms after {min(before)} to {max(before)} of "
        f"{LONG.max_new_tokens} tokens, largest difference {worst:.2e}"
    )
    assert worst < 1e-5


def test_without_in_flight_what_runs_finishes_first(rig: Rig) -> None:
    old_version = rig.version
    _, answers, _ = run_during_update(rig, in_flight=False)
    assert [[run.version for run in answer.versions] for answer in answers] == [[old_version]] * len(answers)
    after = rig.answer([Assignment(rig.sample_id(), 0, PROMPT, GREEDY, min_version=rig.version)])[0]
    assert after.versions[0].version == rig.version
