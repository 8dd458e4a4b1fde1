"""Which devices of this machine belong to which instance, and which to the trainer.

GPUs: the instances take the last ones, the trainer the first, unless the configuration names them. CPU cores: the
instances share them out evenly, and the trainer may use all of them, since it mostly waits while they generate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError
from streamrl_jax.gen.options import parse_cores, split_cores

_SMI_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Machine:
    """What a machine has to share out.

    Attributes:
        gpus: Ids that this process may use, in order; empty: none, or none that JAX is allowed to use.
        cores: Ids of the CPU cores that this process may use, ascending.
    """

    gpus: tuple[str, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True)
class DeviceSplit:
    """Who has what.

    Attributes:
        instances: One entry an instance, in the form of `gen.devices`: `cpu:0-3`, or GPU ids `4,5`.
        trainer: GPU ids of the trainer; empty: it runs on the CPU, on all cores.
    """

    instances: tuple[str, ...]
    trainer: tuple[str, ...]


def look_around(environment: Mapping[str, str]) -> Machine:
    """Finds this machine's devices without importing JAX or CUDA.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` limits the GPUs; `JAX_PLATFORMS=cpu` leaves none.

    Returns:
        The machine; without GPUs where `nvidia-smi` is missing or fails (`streamrl doctor` tells why).
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if environment.get("JAX_PLATFORMS") == "cpu":
        return Machine((), cores)
    if "CUDA_VISIBLE_DEVICES" in environment:
        visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
        return Machine(tuple(entry.strip() for entry in visible if entry.strip()), cores)
    if shutil.which("nvidia-smi") is None:
        return Machine((), cores)
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Machine((), cores)
    return Machine(tuple(done.stdout.split()) if done.returncode == 0 else (), cores)


def split_devices(config: Config, machine: Machine) -> DeviceSplit:
    """Shares a machine's devices out between the instances and the trainer.

    Args:
        config: `gen.instances`, `gen.tensor_parallel_size`, `gen.devices` and `trainer.devices` count.
        machine: What there is. Ids that the configuration names are not held against it: a dry run may be on
            another machine.

    Returns:
        The split.

    Raises:
        UserError: The devices do not suffice, are named twice, or are written wrongly.
    """
    named = tuple(config.gen.devices)
    if named and len(named) != config.gen.instances:
        raise UserError(
            f"gen.devices has {len(named)} entries for gen.instances = {config.gen.instances}; give one "
            "entry an instance, or none for an automatic split"
        )
    trainer = _ids(config.trainer.devices)
    if named:
        instances = named
    elif machine.gpus:
        instances = _automatic_gpus(config, [gpu for gpu in machine.gpus if gpu not in trainer])
    else:
        instances = _automatic_cores(config, machine.cores)
    for entry in instances:
        _check_entry(entry, config.gen.tensor_parallel_size)
    taken = {gpu for entry in instances for gpu in _gpus(entry)}
    trainer = trainer or tuple(gpu for gpu in machine.gpus if gpu not in taken)
    _check_overlap(config, instances, trainer)
    if machine.gpus and not trainer:
        raise UserError(
            f"The instances take all GPUs of this machine ({', '.join(machine.gpus)}) and leave none for the "
            "trainer; lower gen.instances or gen.tensor_parallel_size, name both sides in gen.devices and "
            "trainer.devices, or train on the CPU with JAX_PLATFORMS=cpu"
        )
    return DeviceSplit(instances, trainer)


def trainer_environment(config: Config, split: DeviceSplit) -> dict[str, str]:
    """Variables that must be set before the trainer's process imports JAX.

    Args:
        config: `trainer.xla_memory_fraction` counts.
        split: The devices.

    Returns:
        Names and values; empty on the CPU.
    """
    if not split.trainer:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(split.trainer),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{config.trainer.xla_memory_fraction:g}",
    }


def _automatic_gpus(config: Config, free: Sequence[str]) -> tuple[str, ...]:
    instances, size = config.gen.instances, config.gen.tensor_parallel_size
    needed = instances * size
    if len(free) < needed:
        raise UserError(
            f"gen.instances = {instances} with gen.tensor_parallel_size = {size} needs {needed} GPUs, and "
            f"{len(free)} are free ({', '.join(free) or 'none'}); lower one of them, or change "
            "trainer.devices"
        )
    last = free[len(free) - needed :]
    return tuple(",".join(last[index * size : (index + 1) * size]) for index in range(instances))


def _automatic_cores(config: Config, cores: Sequence[int]) -> tuple[str, ...]:
    """Even shares of whole cores; with fewer cores than instances they take turns."""
    instances, size = config.gen.instances, config.gen.tensor_parallel_size
    if len(cores) < size:
        raise UserError(
            f"gen.tensor_parallel_size = {size} needs as many cores for each instance, and this machine has "
            f"{len(cores)}"
        )
    shares = []
    for index in range(instances):
        share = cores[index * len(cores) // instances : (index + 1) * len(cores) // instances]
        if len(share) < size:
            share = [cores[(index * size + offset) % len(cores)] for offset in range(size)]
        shares.append("cpu:" + ",".join(map(str, share)))
    return tuple(shares)


def _check_entry(entry: str, size: int) -> None:
    if entry.startswith("cpu:"):
        split_cores(entry, size)
        return
    gpus = _gpus(entry)
    if len(gpus) != size:
        raise UserError(
            f"gen.devices = {entry!r} names {len(gpus)} GPUs for gen.tensor_parallel_size = {size}; give so "
            "many ids, as in '4,5', or cores, as in 'cpu:0-3'"
        )


def _check_overlap(config: Config, instances: Sequence[str], trainer: Sequence[str]) -> None:
    """A GPU may serve two only where their shares of its memory add up to no more than all of it."""
    share = config.gen.gpu_memory_utilization
    used = dict.fromkeys(trainer, config.trainer.xla_memory_fraction)
    for entry in instances:
        for gpu in _gpus(entry):
            used[gpu] = used.get(gpu, 0.0) + share
    full = {gpu: total for gpu, total in used.items() if total > 1.0}
    if full:
        gpu, total = next(iter(full.items()))
        raise UserError(
            f"GPU {gpu} is given out {total:.0%}: gen.gpu_memory_utilization = {share:g} for each instance "
            f"on it, trainer.xla_memory_fraction = {config.trainer.xla_memory_fraction:g} for the trainer; "
            "name others in gen.devices or trainer.devices, or lower the shares"
        )
    cores = [core for entry in instances if entry.startswith("cpu:") for core in parse_cores(entry)]
    doubled = sorted({core for core in cores if cores.count(core) > 1})
    if doubled and config.gen.devices:
        raise UserError(
            f"gen.devices gives the cores {', '.join(map(str, doubled))} to more than one instance, which "
            "would halve its speed; name each core once"
        )


def _gpus(entry: str) -> tuple[str, ...]:
    return () if entry.startswith("cpu:") else _ids(entry)


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
