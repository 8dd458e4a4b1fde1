"""`streamrl export`: what comes out is the checkpoint's policy, and loads elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from streamrl_jax import rundir
from streamrl_jax.cli import main
from streamrl_jax.commands.export import export
from streamrl_jax.config import OptimSection
from streamrl_jax.config_io import dump_config, load_config
from streamrl_jax.errors import UserError
from streamrl_jax.tasks.toy_model import ToyShape, write_toy_checkpoint
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import Frontier, Meta
from streamrl_jax.train.hf import load_params
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.mesh import replicated
from streamrl_jax.train.models import Params
from streamrl_jax.train.moments import Moments
from streamrl_jax.train.optim import make_optimizer
from streamrl_jax.train.state import TrainState, abstract_network, init_network

from .tiny import random_params, tiny_model

SHAPE = ToyShape(embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_positions=64)
OPTIMIZER = make_optimizer(OptimSection(), grad_clip=1.0, total_steps=10)
SCORES = {1: 0.5, 2: 0.9, 3: 0.7}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose generation config names several ids that end an answer (field case 21)."""
    path = write_toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", seed=0, shape=SHAPE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.7}))
    return path


def params_of(source: Path, step: int) -> Params:
    return random_params(tiny_model(read_arch(source)), seed=step)


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of three steps, of which the second is the best."""
    path = tmp_path_factory.mktemp("runs") / "demo"
    model = tiny_model(read_arch(source))
    config = load_config([], [f"model.path={source}"])
    with (
        rundir.create(path, dump_config(config)) as run,
        Checkpointer(run.checkpoints, keep=3) as checkpoints,
    ):
        for step, score in SCORES.items():
            network = init_network(OPTIMIZER, params_of(source, step), abstract_network(model, OPTIMIZER))
            scalars = jax.device_put(
                (np.int32(step), jax.tree.map(np.float32, Moments())), replicated(model.mesh)
            )
            state = TrainState(network, None, *scalars)
            checkpoints.save(step, state, Meta(step, step, 0, Frontier(step), ""), {"val/accuracy": score})
    return path


def exported_tensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


@pytest.mark.parametrize(("step", "chosen"), [("newest", 3), ("best", 2), ("1", 1)])
def test_the_step_asked_for_is_written(
    run_dir: Path, source: Path, tmp_path: Path, step: str, chosen: int
) -> None:
    written = export(run_dir, tmp_path / "out", step=step)
    assert (written.step, written.dtype, written.source) == (chosen, "float32", source)
    loaded = load_params(tmp_path / "out", tiny_model(read_arch(tmp_path / "out")))
    jax.tree.map(np.testing.assert_array_equal, loaded, params_of(source, chosen))


def test_the_command_says_what_it_wrote(
    run_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "export",
        str(run_dir),
        "--out",
        str(tmp_path / "out"),
        "--step",
        "best",
        "--dtype",
        "bfloat16",
    ]
    assert main(command) == 0
    written = f"{tmp_path}/out: step 2 of {run_dir} in bfloat16, the rest from {source}\n"
    assert capsys.readouterr().out == written
    assert main(command) == 2


def test_bfloat16_is_the_masters_rounded_to_nearest_even(run_dir: Path, tmp_path: Path) -> None:
    exact = exported_tensors(export(run_dir, tmp_path / "exact", dtype="float32").path)
    rounded = exported_tensors(export(run_dir, tmp_path / "rounded", dtype="bfloat16").path)
    assert rounded.keys() == exact.keys()
    for name, tensor in exact.items():
        np.testing.assert_array_equal(
            rounded[name].view(np.uint16), tensor.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_loads_it_with_equal_logits_and_everything_beside_the_weights(
    run_dir: Path, source: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export(run_dir, tmp_path / "out").path
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = np.array([[5, 9, 17, 3, 40, 2, 2, 8]], np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    model = tiny_model(read_arch(source))
    params = params_of(source, 3)
    positions = jnp.arange(ids.shape[1])[None]
    hidden = model.hidden_states(params, jnp.asarray(ids), positions, jnp.ones_like(ids))
    logits = hidden @ model.head_weight(params).T
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4)
    assert theirs.generation_config.eos_token_id == [1, 7]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("37+85=", add_special_tokens=False)["input_ids"]) == "37+85="
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("step", ["7", "last", "-1"])
def test_a_step_that_is_not_there_is_named(run_dir: Path, tmp_path: Path, step: str) -> None:
    with pytest.raises(UserError, match=f"{step}"):
        export(run_dir, tmp_path / "out", step=step)
    assert not (tmp_path / "out").exists()


def test_a_directory_in_use_is_refused_before_anything_is_read(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"--out .*out exists already"):
        export(run_dir, tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_run_without_a_checkpoint_or_an_evaluation_says_so(source: Path, tmp_path: Path) -> None:
    with rundir.create(tmp_path / "r", dump_config(load_config([], [f"model.path={source}"]))):
        pass
    with pytest.raises(UserError, match="holds no whole checkpoint yet"):
        export(tmp_path / "r", tmp_path / "out")
    with pytest.raises(UserError, match=r"none of the steps \[\] was evaluated"):
        export(tmp_path / "r", tmp_path / "out", step="best")
    with pytest.raises(UserError, match="does not exist; there are"):
        export(tmp_path / "q", tmp_path / "out")


def test_a_model_directory_that_is_gone_is_named_with_the_file_that_names_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with rundir.create(tmp_path / "r", dump_config(load_config([], [f"model.path={gone}"]))) as run:
        pass
    with pytest.raises(UserError, match=f"{run.config}.*model.path.*{gone}"):
        export(tmp_path / "r", tmp_path / "out")


def test_a_run_of_another_architecture_is_refused_by_the_names_that_differ(
    run_dir: Path, tmp_path: Path
) -> None:
    other = write_toy_checkpoint(
        tmp_path / "other", seed=0, shape=ToyShape(embed=16, layers=2, heads=2, mlp=32)
    )
    config = (run_dir / "config.toml").read_text()
    with rundir.create(
        tmp_path / "r", config.replace(str(load_config([run_dir / "config.toml"]).model.path), str(other))
    ):
        pass
    (tmp_path / "r" / "checkpoints").rmdir()
    (tmp_path / "r" / "checkpoints").symlink_to(run_dir / "checkpoints")
    with pytest.raises(UserError, match="step_3 was written by another model"):
        export(tmp_path / "r", tmp_path / "out")
    assert not (tmp_path / "out").exists()
