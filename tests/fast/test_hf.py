"""Hugging Face checkpoints in and out: transformers computes the same, no bit changes on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.train import hf
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.models import Compute, Model, Params, arch_from_hf
from streamrl_jax.train.models.layers import rope_tables
from streamrl_jax.train.rope import Llama3Scaling, Rope
from streamrl_jax.train.tensorfile import map_tensors, write_tensors

from .tiny import LLAMA3_ROPE, hf_config, pack, random_params, random_sequences, shardings, tiny_model, unpack

Checkpoint = tuple[Path, Model, Params]

SEQUENCES = random_sequences(1, [[9, 6, 5], [14, 7]])
TOLERANCE = 1e-4  # the promise; what is measured goes into the test report

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM"},
    "qwen2-untied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": False},
    "llama-tied": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    "llama-untied": {
        "architecture": "LlamaForCausalLM",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "llama-stretched-tied": {"architecture": "LlamaForCausalLM", "rope_parameters": LLAMA3_ROPE},
    "llama-stretched-untied": {
        "architecture": "LlamaForCausalLM",
        "tie_word_embeddings": False,
        "head_dim": 32,
        "rope_parameters": LLAMA3_ROPE,
    },
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "qwen3-untied": {"architecture": "Qwen3ForCausalLM", "head_dim": 6, "tie_word_embeddings": False},
    "qwen3moe-untied": {"architecture": "Qwen3MoeForCausalLM", "head_dim": 16},
    "qwen3moe-tied": {
        "architecture": "Qwen3MoeForCausalLM",
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
    },
}


def transformers_model(config: dict[str, Any], kind: str = "AutoModelForCausalLM") -> Any:
    """A random float32 model; the biases and norms are random too."""
    import torch
    import transformers

    torch.manual_seed(0)
    fields = {key: value for key, value in config.items() if key != "architectures"}
    auto = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, initializer_range=0.2)
    model = getattr(transformers, kind).from_config(auto)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=float("norm" in name), std=0.3)
    return model.eval()


def logits_of_transformers(model: Any) -> list[np.ndarray]:
    import torch

    with torch.no_grad():
        return [
            model(torch.tensor(part[None].astype(np.int64))).logits[0].float().numpy()
            for row in SEQUENCES
            for part in row
        ]


def logits_of_ours(model: Model, params: Params) -> list[np.ndarray]:
    batch = pack(SEQUENCES, 24)
    logits = jax.jit(lambda p: model.hidden_states(p, *batch) @ model.head_weight(p).T)(params)
    return unpack(logits, SEQUENCES)


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers_both_ways(
    variant: str, tmp_path: Path, record_property: Any
) -> None:
    import transformers

    theirs = transformers_model(hf_config(**VARIANTS[variant]))
    theirs.save_pretrained(tmp_path / "theirs")
    model = tiny_model(read_arch(tmp_path / "theirs"), compute=Compute(remat="none"))
    params = hf.load_params(tmp_path / "theirs", model)
    expected = logits_of_transformers(theirs)
    inward = difference(logits_of_ours(model, params), expected)

    fresh = random_params(model, 5)
    hf.save_params(fresh, model.arch, tmp_path / "ours", source=None)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    outward = difference(logits_of_ours(model, fresh), logits_of_transformers(reloaded))

    print(f"{variant}: largest difference of a logit {inward:.1e} from theirs, {outward:.1e} to theirs")
    record_property("max_logit_difference", [inward, outward])
    assert inward < TOLERANCE and outward < TOLERANCE


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("Qwen2", "ForTokenClassification"),
        ("Llama", "ForSequenceClassification"),
        ("Qwen3", "ForTokenClassification"),
        ("Qwen3Moe", "ForSequenceClassification"),
    ],
)
def test_a_critic_starts_from_a_scalar_head_as_transformers_computes_it(
    family: str, kind: str, tmp_path: Path, record_property: Any
) -> None:
    import torch

    theirs = transformers_model(
        hf_config(f"{family}{kind}", tie_word_embeddings=False, num_labels=1), f"AutoModel{kind}"
    )
    theirs.save_pretrained(tmp_path)
    policy = arch_from_hf(
        json.loads((tmp_path / "config.json").read_text()) | {"architectures": [f"{family}ForCausalLM"]}
    )
    assert read_arch(tmp_path, critic=True).same_body(policy)
    critic = tiny_model(policy, (1, 2, 1), head="value", compute=Compute(remat="none"))
    params = hf.load_critic(tmp_path, critic)
    assert shardings(params) == shardings(critic.abstract_params())
    batch = pack(SEQUENCES, 24)
    found = unpack(jax.jit(lambda p: critic.values(p, *batch))(params), SEQUENCES)
    with torch.no_grad():
        expected = [
            theirs(torch.tensor(part[None].astype(np.int64))).logits[0].numpy().reshape(-1)
            for row in SEQUENCES
            for part in row
        ]
    # Of a sequence transformers gives the last token's number alone.
    largest = difference([a[-len(b) :] for a, b in zip(found, expected, strict=True)], expected)
    print(f"{family}{kind}: largest difference of a value {largest:.1e}")
    record_property("max_value_difference", largest)
    assert largest < TOLERANCE and max(np.ptp(values) for values in found) > 0.1


def test_a_critic_from_a_policy_has_a_head_of_zeros(checkpoint: Checkpoint) -> None:
    directory, model, params = checkpoint
    critic = hf.load_critic(directory, tiny_model(model.arch, (2, 2, 2), head="value"))
    assert "lm_head" not in critic and not any(np.any(leaf) for leaf in jax.tree.leaves(critic["value_head"]))
    assert_same(critic["layers"], params["layers"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_labels": 2}, "'num_labels' is 2: .*only num_labels = 1"),
        ({"id2label": {"0": "bad", "1": "good"}}, "'id2label' is .*only num_labels = 1"),
        ({}, "'id2label' is missing: .*only num_labels = 1"),  # transformers then means 2
    ],
)
def test_a_head_of_several_labels_is_no_critic(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        arch_from_hf(hf_config("Qwen2ForTokenClassification", **changes), critic=True)


def test_a_scalar_head_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(hf_config("LlamaForSequenceClassification", num_labels=1))
    )
    with pytest.raises(UserError, match=r"LlamaForSequenceClassification.*it is for model\.critic_path"):
        read_arch(tmp_path)


# Llama 3.1's own figures, and others that put pairs into each of the three ranges.
@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (1e4, None),
        (1e6, None),
        (5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        (1e4, Llama3Scaling(32.0, 0.7, 1.9, 300)),
    ],
)
def test_rotary_angles_of_far_positions_equal_those_of_transformers(
    theta: float, scaling: Llama3Scaling | None
) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = np.array([[0, 1, 1000, 32_767, 131_071]], np.int32)
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, rope_parameters=parameters))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.tensor(positions))
    frequencies = Rope(theta, scaling).frequencies(64)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, np.asarray(rotary.inv_freq))
    ours = jax.jit(lambda positions: rope_tables(positions, frequencies))(positions)
    np.testing.assert_allclose(ours[0], cos[..., :32].numpy(), atol=1e-6)
    np.testing.assert_allclose(ours[1], sin[..., :32].numpy(), atol=1e-6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """An untied Qwen2 checkpoint with companions, and its parameters on a 2 x 2 x 2 mesh."""
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    config = hf_config(tie_word_embeddings=False, torch_dtype="bfloat16", _note="kept")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": [7,  9]}')
    (directory / "tokenizer.json").write_text('{"of": "no meaning here"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}\n\n")
    (directory / "pytorch_model.bin").write_bytes(b"not to be copied")
    model = tiny_model(read_arch(directory), (2, 2, 2))
    params = random_params(model, 11)
    write_tensors(
        directory / hf.SINGLE_FILE,
        names.checkpoint_shapes(model.arch),
        "float32",
        (np.asarray(array) for _, array in names.to_checkpoint(model.arch, params)),
    )
    return directory, model, params


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_loading_shards_the_parameters_and_keeps_every_bit(checkpoint: Checkpoint) -> None:
    directory, model, params = checkpoint
    loaded = hf.load_params(directory, model)
    assert_same(loaded, params)
    assert shardings(loaded) == shardings(model.abstract_params())
    one_device = tiny_model(model.arch)
    assert_same(hf.load_params(directory, one_device), params)


def test_a_mixtures_experts_are_loaded_where_they_lie_and_written_one_by_one(tmp_path: Path) -> None:
    arch = arch_from_hf(hf_config("Qwen3MoeForCausalLM"))
    model = tiny_model(arch, (1, 2, 4))
    params = random_params(model, 2)
    hf.save_params(params, arch, tmp_path / "out", source=None, max_shard_bytes=30_000)
    loaded = hf.load_params(tmp_path / "out", model)
    assert_same(loaded, params)
    assert shardings(loaded) == shardings(params)
    tensors = hf.map_tensors_of(tmp_path / "out", arch)
    assert sum(".mlp.experts." in name for name in tensors) == 2 * 8 * 3
    up = np.asarray(params["layers"]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.6.up_proj.weight"], up[1, 6].T)


def test_shards_with_an_index_equal_a_single_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import safetensors.numpy

    directory, model, params = checkpoint
    out = tmp_path / "sharded"
    hf.save_params(params, model.arch, out, source=directory, max_shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / hf.INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(names.checkpoint_shapes(model.arch))
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for file in files:
        theirs = safetensors.numpy.load_file(out / file)
        assert theirs.keys() == {name for name, value in index["weight_map"].items() if value == file}
        assert_same(theirs, map_tensors(out / file))
    assert_same(hf.load_params(out, model), params)


def test_bfloat16_is_the_masters_rounded_to_nearest_even(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import torch
    import transformers

    directory, model, params = checkpoint
    hf.save_params(params, model.arch, tmp_path / "half", source=directory, dtype="bfloat16")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert reloaded.dtype == torch.bfloat16
    state = reloaded.state_dict()
    for name, array in names.to_checkpoint(model.arch, params, fetch=np.asarray):
        assert torch.equal(state[name], torch.tensor(np.ascontiguousarray(array)).to(torch.bfloat16)), name
    loaded = hf.load_params(tmp_path / "half", model)
    half = np.dtype(ml_dtypes.bfloat16)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(half).astype(np.float32), params)
    assert_same(loaded, rounded)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded))


def test_ties_are_rounded_to_even(tmp_path: Path) -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0xBF808000], np.uint32)
    write_tensors(tmp_path / "f", {"x": (5,)}, "bfloat16", [bits.view(np.float32)])
    read = map_tensors(tmp_path / "f")["x"].view(np.uint16)
    np.testing.assert_array_equal(read, np.array([0x3F80, 0x3F82, 0x3F81, 0x3F81, 0xBF80], np.uint16))


def test_float16_checkpoints_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import safetensors.numpy

    directory, model, params = checkpoint
    shutil.copy(directory / "config.json", tmp_path)
    tensors = {name: np.asarray(a).astype(np.float16) for name, a in names.to_checkpoint(model.arch, params)}
    safetensors.numpy.save_file(tensors, tmp_path / hf.SINGLE_FILE)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float16).astype(np.float32), params)
    assert_same(hf.load_params(tmp_path, model), rounded)


def test_an_export_keeps_what_belongs_to_the_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, model, params = checkpoint
    out = tmp_path / "deep" / "export"
    hf.save_params(params, model.arch, out, source=directory, dtype="bfloat16")
    copied = ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*copied, "config.json", hf.SINGLE_FILE])
    for name in copied:
        assert (out / name).read_bytes() == (directory / name).read_bytes()
    before = json.loads((directory / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == before | {"dtype": "bfloat16"}
    assert [path.name for path in out.parent.iterdir()] == ["export"]
    with pytest.raises(UserError, match="exists already"):
        hf.save_params(params, model.arch, out, source=directory)


def test_a_failed_export_leaves_nothing_behind(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, model, params = checkpoint
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        hf.save_params(params, model.arch, tmp_path / "file" / "out", source=directory)
    torn = params | {"norm": {"scale": np.zeros(5, np.float32)}}
    with pytest.raises(ValueError, match="5"):
        hf.save_params(torn, model.arch, tmp_path / "out", source=directory)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def copy_of(checkpoint: Checkpoint, tmp_path: Path) -> tuple[Path, Model]:
    directory, model, _ = checkpoint
    return Path(shutil.copytree(directory, tmp_path / "copy")), model


def test_a_missing_directory_or_file_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_arch(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        read_arch(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_arch(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="a JSON object is needed, found list"):
        read_arch(tmp_path)
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        hf.load_params(tmp_path, checkpoint[1])


def test_names_that_do_not_fit_the_configuration(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, model = copy_of(checkpoint, tmp_path)
    deeper = hf_config(tie_word_embeddings=False, num_hidden_layers=3, vocab_size=49)
    (directory / "config.json").write_text(json.dumps(deeper))
    with pytest.raises(
        UserError, match=r"copy: .*12 missing: model\.layers\.2.*2 of a wrong shape: model\.embed"
    ):
        hf.load_params(directory, Model(read_arch(directory), model.mesh))


def test_a_tied_checkpoint_with_a_head_of_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, model = copy_of(checkpoint, tmp_path)
    (directory / "config.json").write_text(json.dumps(hf_config(tie_word_embeddings=True)))
    tied = Model(read_arch(directory), model.mesh)
    with pytest.raises(UserError, match=r"tie_word_embeddings = true, but lm_head\.weight differs"):
        hf.load_params(directory, tied)
    tensors = map_tensors(directory / hf.SINGLE_FILE)
    equal = dict(tensors) | {names.HEAD_NAME: tensors[names.EMBEDDING_NAME]}
    redone = tmp_path / "redone.safetensors"
    write_tensors(redone, {name: a.shape for name, a in equal.items()}, "float32", equal.values())
    redone.rename(directory / hf.SINGLE_FILE)
    assert "lm_head" not in hf.load_params(directory, tied)


@pytest.mark.parametrize(
    "damage", ["truncated", "no header", "cut", "not JSON", "integer", "offsets", "empty"]
)
def test_a_broken_file_is_named(checkpoint: Checkpoint, tmp_path: Path, damage: str) -> None:
    directory, model = copy_of(checkpoint, tmp_path)
    path = directory / hf.SINGLE_FILE
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    broken, says = {
        "truncated": (whole[:-100], "truncated"),
        "no header": (b"abc", "announces a header"),
        "cut": (whole[: header - 50], "announces a header"),
        "not JSON": (whole[:8] + b"#" + whole[9:], "not JSON"),
        "integer": (whole.replace(b'"F32"', b'"I32"', 1), "dtype 'I32'"),
        "offsets": (whole.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1), "bytes"),
        "empty": ((2).to_bytes(8, "little") + b"{}", "no tensors"),
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(UserError, match=rf"copy/model\.safetensors: .*{says}"):
        hf.load_params(directory, model)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        (None, "'weight_map'"),
        ({"x": "../secret.safetensors"}, "not the name of a file"),
        ({"x": "gone.safetensors"}, r"gone\.safetensors: cannot be read"),
        (
            {"model.norm.weight": "moved.safetensors"},
            r"does not list the tensors that moved\.safetensors holds",
        ),
    ],
)
def test_a_broken_index_is_named(checkpoint: Checkpoint, tmp_path: Path, weight_map: Any, says: str) -> None:
    directory, model = copy_of(checkpoint, tmp_path)
    (directory / hf.SINGLE_FILE).rename(directory / "moved.safetensors")
    (directory / hf.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=says):
        hf.load_params(directory, model)
