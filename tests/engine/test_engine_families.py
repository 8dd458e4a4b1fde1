"""Each model family on real vLLM: from random weights, two versions through the bridge, both sides agree on each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from streamrl_jax.bridge.blob import SHARED_MEMORY
from streamrl_jax.bridge.publish import Publisher
from streamrl_jax.gen.launch import LocalInstance, LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.logprob import token_logprobs
from streamrl_jax.train.models import Model, Params
from streamrl_jax.types import Assignment, Generation, Sampling, WeightSource
from tests.engine.conftest import FENCE, START_S, Loop, Rig, connect
from tests.fast.tiny import LLAMA3_ROPE, hf_config, pack, random_params, tiny_model, unpack

TEMPERATURE = 0.8
BOUND = 1e-3  # the promise; what is measured is printed
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 64},
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    # 48 is no multiple of what the CPU's kernel works on: the experts' matrices are padded in the engine.
    "Qwen3MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 48},
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Rig, Model]]]:
    """An engine of each family with dummy weights, all started at once, and the trainer's models of the same shapes."""
    cores = sorted(os.sched_getaffinity(0))
    launchers: dict[str, LocalLauncher] = {}
    models: dict[str, Model] = {}
    for number, (name, changes) in enumerate(FAMILIES.items()):
        directory = tmp_path_factory.mktemp(name)
        (directory / "config.json").write_text(json.dumps(hf_config(name, **SIZES | changes)))
        device = f"cpu:{cores[number % len(cores)]}"
        engine = EngineOptions(
            str(directory), max_model_len=256, max_num_seqs=8, device=device, kv_cache_gib=0.25
        )
        spec = InstanceSpec("instance-0", engine, fence=FENCE)
        launchers[name] = LocalLauncher([spec], directory / "run", run_seed=7, grace_s=1.0)
        models[name] = tiny_model(read_arch(directory))
    with contextlib.closing(Loop()) as loop:
        instances: dict[str, LocalInstance] = {}
        try:
            for name, launcher in launchers.items():
                instances[name] = loop.run(launcher.start("instance-0"))
            rigs = {name: loop.run(connect(loop, each), START_S + 60) for name, each in instances.items()}
            yield {name: (rig, models[name]) for name, rig in rigs.items()}
            for rig in rigs.values():
                loop.run(rig.client.close())
        finally:
            for instance in instances.values():
                loop.run(instance.stop())


def trainers_logprobs(
    model: Model, params: Params, given: list[Assignment], answers: list[Generation]
) -> list[np.ndarray]:
    """The trainer's log-probs of the answers' tokens, in packed rows of two samples."""
    whole = [
        np.concatenate([one.prompt_ids, answer.token_ids]) for one, answer in zip(given, answers, strict=True)
    ]
    rows = [whole[start : start + 2] for start in range(0, len(whole), 2)]
    batch = pack(rows, max(sum(map(len, row)) for row in rows))
    hidden = jax.jit(model.hidden_states)(params, *batch)
    logp, _ = token_logprobs(
        hidden, model.head_weight(params), batch.tokens, batch.segment_ids, temperature=TEMPERATURE, chunk=0
    )
    pieces = zip(unpack(logp, rows), given, strict=True)
    return [piece[len(one.prompt_ids) :] for piece, one in pieces]


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_agree_on_every_version(
    families: dict[str, tuple[Rig, Model]], family: str
) -> None:
    """The second version matters: what vLLM repacks while loading must not stay behind."""
    rig, model = families[family]
    draw = np.random.default_rng(1)
    with Publisher(model.arch, "float32", FENCE, [SHARED_MEMORY]) as publisher:
        for version in (0, 1):
            params = random_params(model, 10 + version)
            published = publisher.publish(params, version).future.result(60)
            source = WeightSource(path=str(published.path))
            report = rig.loop.run(
                rig.client.update(published.manifest, source, in_flight=False, timeout_s=120)
            )
            assert report.accepted, report.reason
            # Prompts past the stretched embedding's original context of 32.
            prompts = [
                draw.integers(0, 96, length).astype(np.int32) for length in (1, 3, 9, 20, 33, 40, 64, 90)
            ]
            sampling = Sampling(TEMPERATURE, 24, ())
            given = [Assignment(rig.sample_id(), 0, prompt, sampling) for prompt in prompts]
            answers = rig.answer(given)
            assert all(answer.versions[0].version == version for answer in answers)
            expected = trainers_logprobs(model, params, given, answers)
            differences = [
                np.abs(mine - answer.logprobs).max() for mine, answer in zip(expected, answers, strict=True)
            ]
            print(
                f"\n{model.arch.architecture}, version {version}: largest difference {max(differences):.1e}"
            )
            assert all(len(answer.token_ids) == 24 for answer in answers)
            assert max(differences) < BOUND
