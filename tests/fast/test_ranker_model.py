"""The ranker as a model and as a directory: what transformers computes, and the same bits after saving and loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.calibrate import Calibration
from streamrl_jax.ranker.model import RANKER_FILE, LengthRanker, bucket, ranker_model, scratch_arch
from streamrl_jax.train.hf import load_critic, save_params

from .tiny import hf_config, random_params, tiny_arch, tiny_model

VOCABULARY = 48
CALIBRATION = Calibration(np.array([-3.0, 0.0, 4.0]), np.array([5.0, 50.0, 900.0]))


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, VOCABULARY, int(rng.integers(1, longest + 1))).astype(np.int32) for _ in range(count)
    ]


def random_ranker(architecture: str = "Qwen2ForCausalLM", **changes: Any) -> LengthRanker:
    model = ranker_model(tiny_arch(architecture, **changes))
    params = random_params(model, 3)
    params["value_head"]["bias"] = params["value_head"]["bias"] * 0
    return LengthRanker(model, params, CALIBRATION, {"prompts": 7})


def test_what_is_loaded_scores_as_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    ranker = random_ranker()
    ranker.save(tmp_path / "ranker")
    again = LengthRanker.load(tmp_path / "ranker")
    asked = prompts(70)
    np.testing.assert_array_equal(again.scores(asked), ranker.scores(asked))
    np.testing.assert_array_equal(again.lengths(asked), ranker.lengths(asked))
    assert again.conditions == {"prompts": 7}
    again.save(tmp_path / "again")
    for name in ("model.safetensors", "config.json", RANKER_FILE):
        assert (tmp_path / "ranker" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_transformers_computes_the_same_scores(architecture: str, tmp_path: Path) -> None:
    import torch
    import transformers

    ranker = random_ranker(architecture, pad_token_id=0)
    ranker.save(tmp_path / "ranker")
    theirs: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ranker").eval()
    asked = [np.maximum(prompt, 1) for prompt in prompts(5)]  # theirs looks for padding by its id
    with torch.no_grad():
        expected = [float(theirs(torch.tensor(prompt[None].astype(np.int64))).logits) for prompt in asked]
    np.testing.assert_allclose(ranker.scores(asked), expected, atol=1e-4)


def test_a_score_is_the_prompts_own_whatever_stands_beside_it() -> None:
    ranker = random_ranker()
    asked = prompts(300, longest=100)
    together = ranker.scores(asked)
    alone = [float(ranker.scores([prompt])[0]) for prompt in asked[:20]]
    np.testing.assert_allclose(together[:20], alone, atol=1e-5)
    order = np.random.default_rng(1).permutation(300)
    np.testing.assert_allclose(ranker.scores([asked[place] for place in order]), together[order], atol=1e-5)


def test_few_shapes_are_compiled() -> None:
    sizes = [bucket(length) for length in range(1, 5000)]
    assert all(length <= size for length, size in zip(range(1, 5000), sizes, strict=True))
    assert all(size <= max(16, length * 1.5) for length, size in zip(range(1, 5000), sizes, strict=True))
    assert len(set(sizes)) == 18


def test_it_computes_on_one_cpu_device_beside_the_trainers() -> None:
    ranker = random_ranker()
    ranker.scores(prompts(3))
    assert jax.device_count() > 1
    used = {device for leaf in jax.tree.leaves(ranker.params) for device in leaf.devices()}
    assert used == {jax.local_devices(backend="cpu")[0]}


def test_it_starts_from_a_policy_and_from_a_critic(tmp_path: Path) -> None:
    policy = tiny_model(tiny_arch())
    save_params(random_params(policy, 1), policy.arch, tmp_path / "policy", source=None)
    model = ranker_model(policy.arch)
    assert model.arch.architecture == "Qwen2ForSequenceClassification"
    params = load_critic(tmp_path / "policy", model)
    assert not np.any(params["value_head"]["kernel"])
    critic = tiny_model(tiny_arch("Qwen2ForTokenClassification", critic=True, num_labels=1), head="value")
    assert ranker_model(critic.arch).arch.same_body(model.arch)


def test_sizes_from_scratch() -> None:
    arch = scratch_arch("tiny", 64)
    assert (arch.vocab_size, arch.embed, arch.layers, arch.head) == (64, 64, 2, "value")
    assert scratch_arch("small", 64).embed == 128


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt 1 has no tokens"),
        ([3, VOCABULARY], r"prompt 1 has the token id 48, but the ranker's vocabulary has 48 \(vocab_size\)"),
        ([-1], "prompt 1 has the token id -1"),
        ([1] * 129, "prompt 1 has 129 tokens, but the ranker reads 128"),
    ],
)
def test_a_prompt_that_it_cannot_read_is_named(prompt: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        random_ranker().scores([np.array([1], np.int32), np.array(prompt, np.int32)])


def test_a_prompt_that_it_cannot_read_is_called_what_the_caller_calls_it() -> None:
    asked = [np.array(ids, np.int32) for ids in ([1], [VOCABULARY])]
    with pytest.raises(UserError, match=r"^a\.jsonl: prompt '17' has the token id 48"):
        random_ranker().lengths(asked, ["a.jsonl: prompt '3'", "a.jsonl: prompt '17'"])


def broken(directory: Path, **changes: object) -> None:
    path = directory / RANKER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / RANKER_FILE).unlink(), r"is no ranker: it has no ranker\.json"),
        (lambda d: (d / RANKER_FILE).write_text("{"), r"ranker\.json: cannot be read"),
        (lambda d: (d / RANKER_FILE).write_text("[]"), r"field 'format' is \[\]"),
        (lambda d: broken(d, format=9), "field 'format' is 9, this version reads 1"),
        (lambda d: broken(d, conditions=None), "field 'conditions' is None"),
        (lambda d: broken(d, calibration={"scores": [1.0]}), "field 'calibration' is damaged"),
        (lambda d: broken(d, calibration={"scores": [[1.0]], "tokens": [[2.0]]}), "two lists are needed"),
        (
            lambda d: broken(d, calibration={"scores": [1.0], "tokens": [1e300]}),
            "from 1 to 2147483647 tokens",
        ),
        (lambda d: (d / RANKER_FILE).write_text("[" * 100_000), r"ranker\.json: cannot be read"),
        (lambda d: (d / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
        (lambda d: (d / "config.json").unlink(), r"no config\.json"),
        (lambda d: (d / "met.npy").write_bytes(b"\x93NUMPY"), r"met\.npy: cannot be read"),
        (lambda d: np.save(d / "met.npy", np.zeros(3)), r"met\.npy: holds no list of 64-bit numbers"),
        (lambda d: (d / "config.json").write_text(json.dumps(hf_config(hidden_size=64))), "do not fit"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(damage: Any, said: str, tmp_path: Path) -> None:
    random_ranker().save(tmp_path / "ranker")
    damage(tmp_path / "ranker")
    with pytest.raises(UserError, match=said):
        LengthRanker.load(tmp_path / "ranker")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    ranker = random_ranker()
    params = jax.tree.map(lambda leaf: leaf * np.nan, ranker.params)
    replace(ranker, params=params).save(tmp_path / "ranker")
    with pytest.raises(UserError, match="weights hold NaN or infinity; fit the ranker again"):
        LengthRanker.load(tmp_path / "ranker")


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"file/ranker: the ranker cannot be written .*give another directory"
    ):
        random_ranker().save(tmp_path / "file" / "ranker")
    with pytest.raises(UserError, match=r"cannot be written \(File name too long\); give another directory"):
        random_ranker().save(tmp_path / ("x" * 300))


def test_a_directory_in_use_is_not_written_over(tmp_path: Path) -> None:
    ranker = random_ranker()
    ranker.save(tmp_path / "ranker")
    before = (tmp_path / "ranker" / RANKER_FILE).stat().st_mtime_ns
    with pytest.raises(UserError, match="exists already; give a new directory for the ranker"):
        ranker.save(tmp_path / "ranker")
    assert (tmp_path / "ranker" / RANKER_FILE).stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranker"]
