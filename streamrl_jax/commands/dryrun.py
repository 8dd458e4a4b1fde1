"""`streamrl train --dry-run`: everything that can be told and checked without devices, engines and JAX.

Functions of one's own are imported, and prompts and tensor files that are there are read, as the run does first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamrl_jax.commands.algorithm_text import algorithm_text
from streamrl_jax.commands.batch_arithmetic import batch_arithmetic
from streamrl_jax.commands.model_size import model_size
from streamrl_jax.commands.starts import Start
from streamrl_jax.config import Config
from streamrl_jax.config_generation import GenPoolSection
from streamrl_jax.config_hints import hints
from streamrl_jax.config_io import dump_config
from streamrl_jax.data import load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.gen.options import engine_environment
from streamrl_jax.ranker.hardware import GPUS
from streamrl_jax.ranker.restore import check_given
from streamrl_jax.rewards import load_reward
from streamrl_jax.setup.devices import (
    DeviceSplit,
    Machine,
    gpus_of,
    instance_names,
    look_around,
    split_devices,
    trainer_environment,
)
from streamrl_jax.setup.inputs import check_body, check_experts, load_advantage, load_loss
from streamrl_jax.setup.instances import engine_options
from streamrl_jax.setup.model_source import looks_like_hub_id
from streamrl_jax.setup.security import check_files
from streamrl_jax.setup.step_cost import step_cost
from streamrl_jax.tasks import TASK_PREFIX, load_task
from streamrl_jax.train.arch import Arch
from streamrl_jax.train.hf_directory import map_tensors_of, read_arch
from streamrl_jax.train.shapes import fill_axes
from streamrl_jax.types import Prompt


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        text: The resolved configuration as TOML, with model, batches, devices and processes as comments below it.
        faults: Everything that would stop the run and can be told from here; empty: nothing.
    """

    text: str
    faults: tuple[str, ...]


def dry_run(start: Start, machine: Machine | None = None) -> DryRun:
    """Says what a run would do.

    Args:
        start: The run.
        machine: Its devices; None: those of this machine.

    Returns:
        What it found. The text is there with faults too, so that a run for another machine can be looked at here.
    """
    config = start.config
    machine = machine or look_around(os.environ)
    report: list[str] = []
    faults: list[str] = []
    parts = (_model, _algorithm, _batches, _dispatch, _devices, partial(_processes, run_dir=start.run_dir))
    for part in parts:
        _collect(faults, lambda part=part: report.append(part(config, machine)))
    for check in (_check_models, _check_data, _check_functions, _check_files, _check_dispatch):
        _collect(faults, lambda check=check: faults.extend(check(config)))
    if not start.resume and start.run_dir.exists() and any(start.run_dir.iterdir()):
        faults.append(
            f"run directory {start.run_dir} exists; go on with it by --resume, or choose another run.name"
        )
    comments = "\n\n".join([f"run directory\n{start.run_dir}", *report])
    text = dump_config(config) + "\n" + "\n".join(f"# {line}".rstrip() for line in comments.splitlines())
    return DryRun(text, tuple(dict.fromkeys(faults)))


def _collect(faults: list[str], act: Callable[[], object]) -> None:
    """Turns the error of one part into a fault, so that the others are still looked at."""
    try:
        act()
    except UserError as error:
        faults.append(str(error).rstrip("."))


def _model(config: Config, machine: Machine) -> str:
    del machine
    path = Path(config.model.path)
    if config.model.path and (path / "config.json").is_file():
        return model_size(read_arch(path), config)
    fetched = not path.is_dir() and looks_like_hub_id(config.model.path)
    found = "no such directory here, so the run fetches it from the hub" if fetched else "not on this machine"
    return f"model\n{config.model.path}: {found}; its size is not known yet"


def _algorithm(config: Config, machine: Machine) -> str:
    del machine
    return "\n".join(["algorithm", algorithm_text(config), *(f"note: {hint}" for hint in hints(config))])


def _batches(config: Config, machine: Machine) -> str:
    devices = _trainer_devices(config, split_devices(config, machine))
    mesh = config.trainer.mesh
    axes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    filled = fill_axes(axes, devices, "trainer")
    shape = ", ".join(f"{name} {size}" for name, size in filled.items())
    arithmetic = batch_arithmetic(config, filled["data"] * filled["fsdp"])
    return f"batches\n{arithmetic}\n\nmesh over {devices} trainer devices: {shape}"


def _trainer_devices(config: Config, split: DeviceSplit) -> int:
    """On a CPU a mesh of fixed axes says how many virtual devices the run is meant for."""
    if split.trainer:
        return len(split.trainer)
    mesh = config.trainer.mesh
    fixed = 1
    for size in (mesh.data, mesh.fsdp, mesh.tensor):
        fixed *= max(size, 1)
    return fixed


def _dispatch(config: Config, machine: Machine) -> str:
    del machine
    policy, ranker = config.dispatch.policy, config.ranker
    if policy == "arrival":
        return (
            "dispatch\narrival: prompts in their order, each to the emptiest instance; nothing is predicted"
        )
    refreshed = (
        f"trained on every {ranker.refresh_every} iterations" if ranker.refresh_every else "not refreshed"
    )
    if ranker.path:
        source = f"the ranker {ranker.path}, {refreshed}"
    elif ranker.refresh_every:
        source = f"a small ranker that is learned during the run, {refreshed}"
    else:
        source = "nothing else"
    plan = {
        "lpt": "the longest predicted answers first",
        "paper": f"the longest {config.dispatch.alpha:.0%} on instances of their own, with smaller batches",
        "skewness": "batches and shares of each instance by the time that the whole takes",
    }
    lines = [
        "dispatch",
        f"policy      {policy}: {plan[policy]}",
        f"lengths     from each prompt's earlier answers and {source}",
        "            (until something is known, prompts go in their order)",
        f"step time   {config.dispatch.cost or 'the same whatever the batch (dispatch.cost is empty)'}",
    ]
    return "\n".join(lines)


def _devices(config: Config, machine: Machine) -> str:
    split = split_devices(config, machine)
    lines = ["devices", f"trainer     {'GPU ' + ','.join(split.trainer) if split.trainer else 'CPU'}"]
    lines += [
        f"{name}  {_device_text(entry)}{_size_text(pool, config)}"
        for (name, pool), entry in zip(instance_names(config), split.instances, strict=True)
    ]
    lines += [f"endpoint-{index}  {address}" for index, address in enumerate(config.gen.endpoints)]
    named = {gpu for entry in (*split.instances, *split.trainer) for gpu in gpus_of(entry)}
    if absent := sorted(named - set(machine.gpus)):
        lines.append(
            f"(this machine does not show the GPUs {', '.join(absent)}; the run needs one that has them)"
        )
    return "\n".join(lines)


def _device_text(entry: str) -> str:
    if not entry:
        return "where Ray places it"
    return f"cores {entry.removeprefix('cpu:')}" if entry.startswith("cpu:") else f"GPU {entry}"


def _size_text(pool: GenPoolSection, config: Config) -> str:
    """What sets a pool apart; empty where there is only one."""
    if not config.gen.pools:
        return ""
    return f", tensor parallel {pool.tensor_parallel_size}, {pool.max_num_seqs} slots"


def _processes(config: Config, machine: Machine, run_dir: Path) -> str:
    split = split_devices(config, machine)
    python = config.gen.python or sys.executable
    trainer = _command(trainer_environment(config, split), "streamrl train ... (this command)")
    lines = ["processes", f"trainer     {trainer}"]
    for (name, pool), device in zip(instance_names(config), split.instances, strict=True):
        options = engine_options(config, config.model.path, device, None, pool)
        command = f"{python} -P -m streamrl_jax.gen.instance --spec {run_dir}/instances/{name}.json"
        lines.append(f"{name}  {_command(engine_environment(options), command)}")
    return "\n".join(lines)


def _command(environment: Mapping[str, str], command: str) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), command])


# --- checks -------------------------------------------------------------------------------------------------


def _check_models(config: Config) -> list[str]:
    if not config.model.path:
        return [
            "model.path is empty; give a checkpoint directory, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        ]
    faults: list[str] = []
    archs: dict[str, Arch] = {}
    for name, text in (("model.path", config.model.path), ("model.critic_path", config.model.critic_path)):
        if text and _is_here(name, Path(text), faults):
            _collect(
                faults, lambda name=name, text=text: archs.update({name: _check_model(name, text, config)})
            )
    if len(archs) == 2:
        critic, policy = archs["model.critic_path"], archs["model.path"]
        _collect(faults, lambda: check_body(Path(config.model.critic_path), critic, policy))
    return faults


def _is_here(name: str, path: Path, faults: list[str]) -> bool:
    if not path.is_dir() and (path.is_absolute() or not looks_like_hub_id(str(path))):
        faults.append(
            f"{name} = {str(path)!r}: there is no such directory, and it has not the form of a hub id"
        )
    return path.is_dir()


def _check_model(name: str, text: str, config: Config) -> Arch:
    path, is_policy = Path(text), name == "model.path"
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: no config.json; {name} is not a Hugging Face checkpoint directory")
    arch = read_arch(path, critic=not is_policy)
    if config.longest_sample > arch.max_positions:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length = {config.longest_sample} is more than the "
            f"model was made for: max_position_embeddings = {arch.max_positions} in {path / 'config.json'}; lower one "
            "of them"
        )
    if is_policy:
        check_experts(config, arch)
    # A copy with config.json alone is enough to look at a run that is for another machine.
    if any(path.glob("*.safetensors")):
        map_tensors_of(path, arch)
    return arch


def _check_data(config: Config) -> list[str]:
    faults: list[str] = []
    prompts: list[Prompt] = []
    if not config.data.train:
        faults.append("data.train is empty; give a .jsonl or .parquet file, or task:NAME")
    for which, source in (("train", config.data.train), ("test", config.data.test)):
        if source.startswith(TASK_PREFIX):
            _collect(faults, lambda source=source: load_task(source, config.data.task))
        elif source and not Path(source).is_file():
            faults.append(
                f"data.{which} = {source!r}: there is no such file; give a .jsonl or .parquet file, or task:NAME"
            )
    if not faults and (Path(config.model.path) / "tokenizer.json").is_file():
        _collect(faults, lambda: prompts.extend(_read_prompts(config)))
    _collect(faults, lambda: check_given(config.ranker, prompts))
    return faults


def _read_prompts(config: Config) -> list[Prompt]:
    """Reads all prompts; gives those of training."""
    tokenizer = Tokenizer.load(config.model.path)
    prompts = load_prompts(config.data, tokenizer, "train", seed=config.run.seed)
    if config.data.test:
        load_prompts(config.data, tokenizer, "test", seed=config.run.seed)
    return list(prompts.all())


def _check_dispatch(config: Config) -> list[str]:
    faults: list[str] = []
    config_json = Path(config.model.path) / "config.json"
    if config.dispatch.cost not in GPUS or config_json.is_file():
        _collect(faults, lambda: step_cost(config, config_json))
    return faults


def _check_functions(config: Config) -> list[str]:
    """One's own are imported, as the run does it first."""
    faults: list[str] = []
    for load in (
        lambda: load_reward(config.reward),
        lambda: load_loss(config),
        lambda: load_advantage(config),
    ):
        _collect(faults, load)
    return faults


def _check_files(config: Config) -> list[str]:
    faults: list[str] = []
    if config.gen.python and shutil.which(config.gen.python) is None:
        faults.append(f"gen.python = {config.gen.python!r} is no command; name the generator's interpreter")
    _collect(faults, lambda: check_files(config.security))
    return faults
