"""How one instance is set up: plain data that travels to its process as a JSON file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.types import Fence

_LOOKS: Final = 16  # at the threads of this process
NO_ADDRESS_EXIT_CODE: Final = 74
"""Of an instance that could not write its address file; its log may be on the same full disk."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is started with."""

    model: str  # directory that holds config.json; weights are not read
    max_model_len: int  # prompt and answer, tokens
    dtype: str = "float32"
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    seed: int = 0
    device: str = ""  # "cpu:0-3", or GPU ids "4,5"; empty: what vLLM finds
    kv_cache_gib: float = 1.0  # CPU
    gpu_memory_utilization: float = 0.9  # GPU
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    bind_process: bool = False  # on cores: all of the instance keeps to them, not its computing threads alone
    vocab_limit: int | None = None  # ids from here on pad the vocabulary and are never sampled

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on cores."""
        return self.device.startswith("cpu")


@dataclass(frozen=True)
class JoinSpec:
    """Whom an instance announces itself to; either is given."""

    run_dir: str = ""  # a run directory, on a file system that both sides see
    address: str = ""  # HOST:PORT of a run's controller
    advertise: str = ""  # host that the run reaches the instance by; empty: found out
    patience_s: float = 300.0  # the instance ends when no controller answered for so long


@dataclass(frozen=True)
class InstanceSpec:
    """One instance: what `python -m streamrl_jax.gen --spec FILE.json` reads."""

    name: str
    engine: EngineOptions
    listen: str = "127.0.0.1:0"
    access: AccessFiles = field(default_factory=AccessFiles)
    lookahead: int = 8
    address_file: str = ""  # where it writes the address that it bound
    blob_directories: tuple[
        str, ...
    ] = ()  # where the publisher's blobs may lie, beside shared memory and /tmp
    stores: tuple[str, ...] = ()  # patterns of hosts that weights may be fetched from; empty: any
    fence: Fence | None = None  # of the run that starts it; None: whoever says Hello first
    join: JoinSpec | None = None  # it dials in; None: it is called


@dataclass(frozen=True)
class PoolTemplate:
    """A pool of equal instances."""

    name: str  # the instances are called name-0, name-1, ...
    spec: InstanceSpec  # of any of them, but for name and device
    devices: tuple[str, ...] = ()  # of the instances that the run begins with, one entry each

    def instance(self, index: int, device: str) -> InstanceSpec:
        """The specification of one of them."""
        engine = dataclasses.replace(self.spec.engine, device=device)
        return dataclasses.replace(self.spec, name=f"{self.name}-{index}", engine=engine)


def write_spec(spec: InstanceSpec, path: Path) -> None:
    """Writes a spec as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(spec), indent=1))


def read_spec(path: Path) -> InstanceSpec:
    """Reads what `write_spec` wrote.

    Raises:
        UserError: no JSON, or no spec; names the file and the fault.
    """
    try:
        return spec_from_fields(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no instance spec: {type(error).__name__}: {error}") from error


def spec_from_fields(fields: dict[str, Any]) -> InstanceSpec:
    """The spec of which ``fields`` is what `dataclasses.asdict` and JSON made.

    Raises:
        KeyError, TypeError, ValueError: it is not.
    """
    fields = dict(fields)
    fields["engine"] = EngineOptions(**fields["engine"])
    fields["access"] = AccessFiles(**fields["access"])
    for name in ("blob_directories", "stores"):
        fields[name] = tuple(fields[name])
    fields["fence"] = Fence(**fields["fence"]) if fields.get("fence") else None
    fields["join"] = JoinSpec(**fields["join"]) if fields.get("join") else None
    return InstanceSpec(**fields)


def engine_seed(run_seed: int, name: str, incarnation: int, start: int) -> int:
    """A seed that no other start of any instance of the run has.

    An engine draws its noise from one generator: with equal seeds two instances, or an instance and its
    successor after a restart, would answer equal prompts equally.

    Args:
        run_seed: ``run.seed``.
        name: of the instance.
        incarnation: of the run.
        start: how often this instance was started before in this life of the run.

    Returns:
        31 bits.
    """
    digest = hashlib.blake2b(f"{run_seed}/{name}/{incarnation}/{start}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def split_cores(device: str, ranks: int) -> str:
    """Shares the cores of ``cpu:LIST`` out among tensor-parallel ranks.

    Args:
        device: such as ``cpu:0-3`` or ``cpu:0,2``.
        ranks: how many.

    Returns:
        vLLM's ``VLLM_CPU_OMP_THREADS_BIND``: ``0-1|2-3`` as ``0,1|2,3``.

    Raises:
        UserError: no such list, or fewer cores than ranks.
    """
    cores = parse_cores(device)
    if len(cores) < ranks:
        raise UserError(
            f"gen.devices = {device!r} has {len(cores)} cores for gen.tensor_parallel_size = {ranks}; give "
            "each rank at least one"
        )
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    shares = (cores[low:high] for low, high in pairwise(bounds))
    return "|".join(",".join(map(str, share)) for share in shares)


def parse_cores(device: str) -> list[int]:
    """Reads ``cpu:0-3,6`` as ``[0, 1, 2, 3, 6]``.

    Raises:
        UserError: another form.
    """
    cores: list[int] = []
    for part in device.removeprefix("cpu:").split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UserError(f"gen.devices = {device!r}: cores are written like 'cpu:0' or 'cpu:0-3,6'")
        cores += range(int(low), int(high or low) + 1)
    return cores


def check_cores(device: str, usable: Collection[int]) -> None:
    """Refuses cores that are not there: OpenMP would end the engine, and say less.

    Args:
        device: such as ``cpu:0-3``.
        usable: cores that the process may use.

    Raises:
        UserError: some are missing.
    """
    missing = sorted(set(parse_cores(device)).difference(usable))
    if missing:
        raise UserError(
            f"gen.devices = {device!r}: there is no core {', '.join(map(str, missing))} here, or this process may not "
            f"use it; it may use {', '.join(map(str, sorted(usable)))}"
        )


def bind_process(device: str) -> None:
    """Keeps this process to the cores of its device, every thread of it and what it starts from here on.

    Args:
        device: such as ``cpu:0-3``.
    """
    cores, bound = parse_cores(device), set[str]()
    for _ in range(_LOOKS):  # one that was not bound yet may have started another meanwhile
        if not (found := set(os.listdir("/proc/self/task")) - bound):
            return
        for thread in found:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
        bound |= found


def engine_environment(options: EngineOptions) -> Mapping[str, str]:
    """Environment that vLLM reads while it is imported, here and in the processes it starts."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        # gRPC's threads are running: a forked child could inherit a lock that nobody will release.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
        # A kernel that this processor cannot run ends EngineCore without a word otherwise.
        "PYTHONFAULTHANDLER": "1",
    }
    if options.on_cpu:
        environment |= _cpu_environment(options)
    elif options.device and not options.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = options.device
    return environment


def _cpu_environment(options: EngineOptions) -> dict[str, str]:
    environment: dict[str, str] = {}
    if options.enforce_eager:
        # One small function (the rank of a log-prob, which nobody reads) would still be compiled, in 40 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if options.tensor_parallel_size > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = split_cores(options.device, options.tensor_parallel_size)
        return environment
    # The only worker then lives in EngineCore: one import of vLLM and one process less, and no hop between
    # the two. vLLM prefers a process of its own, whose OpenMP it can bind; here the whole engine is bound.
    cores = parse_cores(options.device)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["OMP_NUM_THREADS"] = str(len(cores))
    environment["OMP_PLACES"] = f"{{{','.join(map(str, cores))}}}"
    environment["OMP_PROC_BIND"] = "true"
    return environment
