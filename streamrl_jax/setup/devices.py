"""Which devices of this machine belong to which instance, and which to the trainer.

GPUs: the instances take the last ones, the trainer the first, unless the configuration names them. CPU cores: the
instances share them out evenly, and the trainer may use all of them, since it mostly waits while they generate. One
that joins a run later takes free GPUs, or the cores that the fewest instances use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.config_generation import GenPoolSection, pool_key
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
        instances: One entry an instance, pool after pool, in the form of `gen.devices`: `cpu:0-3`, or GPU ids `4,5`.
        trainer: GPU ids of the trainer; empty: it runs on the CPU, on all cores.
    """

    instances: tuple[str, ...]
    trainer: tuple[str, ...]


def instance_names(config: Config) -> tuple[tuple[str, GenPoolSection], ...]:
    """The instances that a run starts, pool after pool: name and pool of each."""
    return tuple(
        (f"{pool.name}-{index}", pool) for pool in config.gen.all_pools for index in range(pool.instances)
    )


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
        config: The pools of `gen` and `trainer.devices` count. With `gen.launcher = "ray"` the instances take none of
            this machine's.
        machine: What there is. Ids that the configuration names are not held against it: a dry run may be on
            another machine.

    Returns:
        The split.

    Raises:
        UserError: The devices do not suffice, are named twice, or are written wrongly; every fault at once.
    """
    trainer = _ids(config.trainer.devices)
    if config.gen.launcher == "ray":
        return DeviceSplit(tuple("" for _ in instance_names(config)), trainer or machine.gpus)
    faults = [fault for pool in config.gen.all_pools for fault in _pool_faults(pool)]
    if not faults:
        instances = _instances(config, machine, trainer, faults)
        taken = {gpu for entry in instances for gpu in gpus_of(entry)}
        trainer = trainer or tuple(gpu for gpu in machine.gpus if gpu not in taken)
        faults += _overlaps(config, instances, trainer)
        if machine.gpus and not trainer:
            faults.append(
                f"The instances take all GPUs of this machine ({', '.join(machine.gpus)}) and leave none for the "
                "trainer; lower gen.instances or gen.tensor_parallel_size, name both sides in gen.devices and "
                "trainer.devices, or train on the CPU with JAX_PLATFORMS=cpu"
            )
        if not faults:
            return DeviceSplit(instances, trainer)
    raise UserError("; ".join(faults))


def device_for_another(machine: Machine, taken: Sequence[str], trainer: Sequence[str], size: int) -> str:
    """Devices of this machine for an instance that joins a run.

    Args:
        machine: What there is.
        taken: What the instances have, in the form of `gen.devices`.
        trainer: GPU ids of the trainer.
        size: Tensor-parallel workers of the new one.

    Returns:
        An entry as in `gen.devices`: free GPUs; without GPUs the cores that the fewest use.

    Raises:
        UserError: Too few are free.
    """
    if machine.gpus:
        used = {gpu for entry in taken for gpu in gpus_of(entry)}.union(trainer)
        free = [gpu for gpu in machine.gpus if gpu not in used]
        if len(free) < size:
            raise UserError(
                f"another instance needs {size} GPUs, and {len(free)} of this machine's {len(machine.gpus)} are free "
                f"({', '.join(free) or 'none'}); name its devices (--devices), or start it on another host "
                "(streamrl gen --join)"
            )
        return ",".join(free[-size:])
    if len(machine.cores) < size:
        raise UserError(f"another instance needs {size} cores, and this machine has {len(machine.cores)}")
    used_by = Counter(core for entry in taken if entry.startswith("cpu:") for core in parse_cores(entry))
    share = max(size, len(machine.cores) // (len(taken) + 1))
    cores = sorted(machine.cores, key=lambda core: (used_by[core], core))[:share]
    return "cpu:" + ",".join(map(str, sorted(cores)))


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


def _pool_faults(pool: GenPoolSection) -> Iterator[str]:
    devices, instances = pool_key(pool, "devices"), pool_key(pool, "instances")
    if pool.devices and len(pool.devices) != pool.instances:
        yield (
            f"{devices} has {len(pool.devices)} entries for {instances} = {pool.instances}; give one "
            "entry an instance, or none for an automatic split"
        )
    size = pool.tensor_parallel_size
    for entry in pool.devices:
        try:
            check_entry(entry, size, pool)
        except UserError as error:
            yield str(error)


def _instances(
    config: Config, machine: Machine, trainer: Sequence[str], faults: list[str]
) -> tuple[str, ...]:
    """An entry for each instance: what its pool names, else a share of what is left."""
    pools = config.gen.all_pools
    named = {gpu for pool in pools for entry in pool.devices for gpu in gpus_of(entry)}
    sizes = [pool.tensor_parallel_size for pool in pools for _ in range(pool.instances) if not pool.devices]
    if machine.gpus:
        free = [gpu for gpu in machine.gpus if gpu not in trainer and gpu not in named]
        shares = _automatic_gpus(config, sizes, free, faults)
    else:
        shares = _automatic_cores(sizes, machine.cores, faults)
    automatic = iter(shares)
    return tuple(
        pool.devices[index] if pool.devices else next(automatic, "")
        for pool in pools
        for index in range(pool.instances)
    )


def _automatic_gpus(
    config: Config, sizes: Sequence[int], free: Sequence[str], faults: list[str]
) -> list[str]:
    if len(free) < sum(sizes):
        faults.append(
            f"{_asked(config)} needs {sum(sizes)} GPUs, and {len(free)} are free ({', '.join(free) or 'none'}); lower "
            "one of them, or change trainer.devices"
        )
        return []
    last = list(free[len(free) - sum(sizes) :])
    return [",".join(last[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _asked(config: Config) -> str:
    return "; ".join(
        f"{pool_key(pool, 'instances')} = {pool.instances} with {pool_key(pool, 'tensor_parallel_size')} = "
        f"{pool.tensor_parallel_size}"
        for pool in config.gen.all_pools
        if pool.instances and not pool.devices
    )


def _automatic_cores(sizes: Sequence[int], cores: Sequence[int], faults: list[str]) -> list[str]:
    """Even shares of whole cores, by tensor-parallel size; with fewer cores than instances they take turns."""
    if (largest := max(sizes, default=0)) > len(cores):
        faults.append(
            f"gen.tensor_parallel_size = {largest} needs as many cores for each instance, and this machine has "
            f"{len(cores)}"
        )
        return []
    shares, before, total = [], 0, sum(sizes)
    for size in sizes:
        share = cores[before * len(cores) // total : (before + size) * len(cores) // total]
        if len(share) < size:
            share = [cores[(before + offset) % len(cores)] for offset in range(size)]
        shares.append("cpu:" + ",".join(map(str, share)))
        before += size
    return shares


def check_entry(entry: str, size: int, pool: GenPoolSection) -> None:
    """Refuses an entry of `devices` that does not fit the pool's tensor-parallel size.

    Raises:
        UserError: It does not, or is written wrongly.
    """
    if entry.startswith("cpu:"):
        split_cores(entry, size)
        return
    gpus = gpus_of(entry)
    if len(gpus) != size:
        raise UserError(
            f"{pool_key(pool, 'devices')} = {entry!r} names {len(gpus)} GPUs for "
            f"{pool_key(pool, 'tensor_parallel_size')} = {size}; give so many ids, as in '4,5', or cores, as in "
            "'cpu:0-3'"
        )


def _overlaps(config: Config, instances: Sequence[str], trainer: Sequence[str]) -> Iterator[str]:
    """A GPU may serve two only where their shares of its memory add up to no more than all of it."""
    used = dict.fromkeys(trainer, config.trainer.xla_memory_fraction)
    shares = [pool.gpu_memory_utilization for _, pool in instance_names(config)]
    for entry, share in zip(instances, shares, strict=True):
        for gpu in gpus_of(entry):
            used[gpu] = used.get(gpu, 0.0) + share
    for gpu, total in used.items():
        if total > 1.0:
            yield (
                f"GPU {gpu} is given out {total:.0%}: gen.gpu_memory_utilization = "
                f"{' and '.join(f'{share:g}' for share in sorted(set(shares)))} for each instance on it, "
                f"trainer.xla_memory_fraction = {config.trainer.xla_memory_fraction:g} for the trainer; "
                "name others in gen.devices or trainer.devices, or lower the shares"
            )
            break
    cores = [core for entry in instances if entry.startswith("cpu:") for core in parse_cores(entry)]
    doubled = sorted(core for core, times in Counter(cores).items() if times > 1)
    if doubled and any(pool.devices for pool in config.gen.all_pools):
        yield (
            f"gen.devices gives the cores {', '.join(map(str, doubled))} to more than one instance, which "
            "would halve its speed; name each core once"
        )


def gpus_of(entry: str) -> tuple[str, ...]:
    """The GPU ids of an entry of `devices`; none for cores."""
    return () if entry.startswith("cpu:") else _ids(entry)


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
