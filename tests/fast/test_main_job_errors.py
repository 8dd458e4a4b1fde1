"""What a user or a machine gets wrong: one paragraph, exit code 2, nothing half-written, no process left behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from streamrl_jax.cli import main
from streamrl_jax.samples_log import recorded_iterations

from .job_world import jax_settings_kept, left_behind, training_lines, write_config, write_python, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        yield write_world(tmp_path_factory.mktemp("world"))


Changes = dict[str, dict[str, Any]]


def prompts(*lines: str) -> Callable[[Path], Changes]:
    def write(folder: Path) -> Changes:
        (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return {"data": {"train": str(folder / "prompts.jsonl")}}

    return write


def changed_model(change: Callable[[Path], None]) -> Callable[[Path], Changes]:
    def write(folder: Path) -> Changes:
        shutil.copytree(folder.parent / "model", folder / "model")
        change(folder / "model")
        return {"model": {"path": str(folder / "model")}}

    return write


def edited(**fields: Any) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))

    return edit


def without_norm(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(
        tensors | {"model.odd.weight": tensors["model.embed_tokens.weight"]}, model / "model.safetensors"
    )


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


GOOD = '{"prompt": "1+1=", "answer": "2"}'
REFUSED: dict[str, tuple[Callable[[Path], Changes], str]] = {
    "broken line": (prompts(GOOD, '{"prompt": "1+2="'), r"prompts.jsonl.* 2"),
    "missing field": (prompts(GOOD, '{"question": "1+2="}'), r"prompts.jsonl.* 2.*'prompt'.*question"),
    "prompt too long": (prompts(GOOD, '{"prompt": "1234567+1="}'), r"10.*data.max_prompt_length = 8"),
    "no model": (
        lambda folder: {"model": {"path": str(folder / "none")}},
        r"model.path = .*none.*no such dir",
    ),
    "architecture": (
        changed_model(edited(architectures=["GPT2LMHeadModel"])),
        r"config.json.*'architectures'.*GPT2LMHeadModel.*supported are Qwen2ForCausalLM",
    ),
    "too few positions": (
        changed_model(edited(max_position_embeddings=12)),
        r"= 16.*max_position_embeddings = 12",
    ),
    "no experts to balance": (
        lambda folder: {"actor": {"router_aux_loss_coef": 0.01}},
        r"actor.router_aux_loss_coef = 0.01.*Qwen2ForCausalLM has no experts",
    ),
    "a policy with a scalar head": (
        changed_model(edited(architectures=["Qwen2ForTokenClassification"], num_labels=1)),
        r"Qwen2ForTokenClassification.*it is for model.critic_path",
    ),
    "names": (changed_model(without_norm), r"model.norm.weight"),
    "critic of another size": (
        lambda folder: {
            "model": {"critic_path": str(changed_model(edited(rope_theta=5.0))(folder)["model"]["path"])}
        },
        r"model.critic_path = .*differs from the policy's",
    ),
    "reward function": (
        lambda folder: {"reward": {"function": f"{folder.parent / 'functions.py'}:digit"}},
        r"reward.function.*digit",
    ),
    "devices": (
        lambda folder: {"gen": {"devices": ["cpu:0", "cpu:1"]}},
        r"gen.devices has 2 entries.*instances = 1",
    ),
    "listens to the world": (
        lambda folder: {"bridge": {"listen": "0.0.0.0:0"}, "security": {"tls": "off"}},
        r"0.0.0.0:0.*security.insecure",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_wrong_is_refused_before_anything_starts(
    world: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write, message = REFUSED[kind]
    folder = world / kind.replace(" ", "-")
    folder.mkdir()
    refused(world, folder, write(folder), message, capfd)


def test_a_port_in_use_is_refused_before_anything_starts(
    world: Path, taken_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"bridge": {"listen": f"127.0.0.1:{taken_port}"}}
    refused(world, world, changes, rf"cannot listen on 127.0.0.1:{taken_port}: the port is in use", capfd)


def refused(
    world: Path, folder: Path, changes: Changes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:

    config = write_config(world, run={"name": "refused", "dir": str(folder / "runs")}, **changes)
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    # gRPC's core speaks first where a port is taken.
    assert re.fullmatch(rf"streamrl: error: .*{message}.*", error.splitlines()[-1]), error
    assert "Traceback" not in error
    assert not list(folder.glob("runs/*")) and not list(folder.glob("runs/.*"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"the reward function raised KeyError: 'the answer sheet is missing' for sample train/0/"),
        ("nan", r"the evaluation of version 0 has no accuracy: 8 of 8 scores .*eval/0/0/0 \(nan\)"),
        (
            "hangs",
            r"the reward function did not return within 3 s \(reward.timeout_s\) for sample train/0/",
        ),
    ],
)
def test_a_reward_function_that_fails_ends_the_run(
    world: Path, how: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Soon, also where it never returns; with the sample's name and the function's own traceback."""

    bound_s = 3.0 if how == "hangs" else 60.0
    reward = {"function": f"{world / 'functions.py'}:failing", "kwargs": {"how": how}, "timeout_s": bound_s}
    config = write_config(world, run={"name": how}, reward=reward)
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    assert re.match(rf"streamrl: error: .*{message}", error), error
    assert ("Traceback" in error and "in failing" in error) == (how == "raises")
    assert training_lines(world / "runs" / how) == []
    assert left_behind(world / "runs" / how) == []


_OWN = """
def mean_loss(inputs, settings):
    return (-inputs.advantages * inputs.logprobs).mean(), {}

def all_but_one(rewards):
    return rewards[1:]
"""


@pytest.mark.parametrize(
    ("key", "function", "message"),
    [
        (
            "loss_fn",
            "mean_loss",
            r"returned float32 of shape \(\) as the loss; it must be a float of each token",
        ),
        ("advantage_fn", "all_but_one", r"returned float64 of shape \(3,\) for the rewards \[.*\]; it must"),
    ],
)
def test_a_function_of_ones_own_that_returns_something_else_ends_the_run(
    world: Path, key: str, function: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (world / "own.py").write_text(_OWN)
    name = f"{world / 'own.py'}:{function}"
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, key: name}
    trainer = {"test_freq": 0, "val_before_train": False, "pack_row_length": 16}
    config = write_config(world, run={"name": function}, algorithm=algorithm, trainer=trainer)
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    assert re.search(rf"streamrl: error: algorithm.{key} = '{re.escape(name)}' {message}", error), error
    assert "Traceback" not in error
    assert left_behind(world / "runs" / function) == []


def test_a_demo_looks_at_its_functions_before_its_warm_start(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (world / "own.py").write_text(_OWN)
    folder = world / "demo"
    arguments = ["demo", "--run-dir", str(folder), f"algorithm.loss_fn={world / 'own.py'}:mean_los"]
    assert main(arguments) == 2
    assert "did you mean 'mean_loss'" in capfd.readouterr().err and not folder.exists()


def test_an_instance_that_does_not_start_ends_the_run(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its log stays, and the error names it."""
    python = write_python(world / "broken-python", before="echo no such library >&2; exit 3")
    config = write_config(world, run={"name": "broken"}, gen={"python": str(python)})
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    log = world / "runs" / "broken" / "logs" / "instance-0.log"
    assert "instance instance-0 did not start: exit code 3" in error and "no such library" in error
    assert str(log) in error and "no such library" in log.read_text()
    assert left_behind(world / "runs" / "broken") == []


def test_disagreement_ends_the_run_with_the_samples_that_show_it(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(world, run={"name": "apart"}, agreement={"max_logprob_diff": 1e-9})
    assert main(["train", str(config)]) == 2
    assert "iteration 0: trainer and generator disagree" in capfd.readouterr().err
    run = world / "runs" / "apart"
    assert recorded_iterations(run / "samples") == [0] and [line.step for line in training_lines(run)] == [1]
    assert left_behind(run) == []
