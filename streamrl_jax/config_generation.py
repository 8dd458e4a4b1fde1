"""The configuration of the generation side: instances, pools of them, and what starts them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field

from streamrl_jax.config_section import Section

DEFAULT_POOL: Final = "instance"
"""Name of the pool that ``[gen]`` itself describes, and what the names of its instances begin with."""

_RESERVED: Final = (DEFAULT_POOL, "endpoint")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")


class GenPoolSection(Section):
    """A pool of equal instances. A key that is left out is that of ``[gen]``."""

    name: str = ""
    """Must be given: lower-case letters, digits and dashes. Its instances are ``NAME-0`` and so on."""
    instances: int = Field(default=1, ge=0)
    """How many the run starts."""
    devices: list[str] = Field(default_factory=list)
    """One entry an instance, as in ``gen.devices``; empty: automatic."""
    tensor_parallel_size: int = Field(default=0, ge=0)
    """GPUs (or CPU workers) per instance; 0: ``gen.tensor_parallel_size``."""
    max_num_seqs: int = Field(default=0, ge=0)
    """Sequences an instance runs at once; 0: ``gen.max_num_seqs``."""
    lookahead: int = Field(default=-1, ge=-1)
    """Assignments beyond its slots; -1: ``gen.lookahead``."""
    kv_cache_gib: float = Field(default=0.0, ge=0.0)
    """KV cache on a CPU machine, GiB; 0: ``gen.kv_cache_gib``."""
    gpu_memory_utilization: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of a GPU's memory; 0: ``gen.gpu_memory_utilization``."""


class RaySection(Section):
    """Instances as actors of a Ray cluster (``gen.launcher = "ray"``)."""

    address: str = "auto"
    """The cluster's address; ``auto``: the one that this machine belongs to."""
    cpus_per_worker: float = Field(default=1.0, gt=0.0)
    """CPUs that each tensor-parallel worker of an instance takes; those of one instance are on one node."""
    gpus_per_worker: float = Field(default=1.0, ge=0.0)
    """GPUs that each of them takes; 0 on a cluster without."""
    placement_timeout_s: float = Field(default=300.0, gt=0.0)
    """Bound on the wait for an instance's resources."""


class GenSection(Section):
    """The stream generation service: instances and their engines."""

    launcher: Literal["local", "ray"] = "local"
    """What starts the run's own instances: processes of this machine, or actors of a Ray cluster (docs/clusters.md)."""
    instances: int = Field(default=1, ge=0)
    """Instances that the run starts in the default pool (``instance-0`` and so on); 0 with ``endpoints``, ``pools`` or
    ``min_instances`` only."""
    min_instances: int = Field(default=0, ge=0)
    """So many instances must be ready before the first prompt, those that dial in (``streamrl gen --join``) included.
    0: all that the run starts or names. The run waits ``start_timeout_s`` for them."""
    pools: list[GenPoolSection] = Field(default_factory=list)
    """Further pools of equal instances beside the default one, for several sizes in one run: a ``[[gen.pools]]`` table
    each."""
    endpoints: list[str] = Field(default_factory=list)
    """``host:port`` of instances that were started elsewhere with ``streamrl gen``."""
    python: str = ""
    """Interpreter of the generation environment; empty: the trainer's own."""
    devices: list[str] = Field(default_factory=list)
    """One entry an instance of the default pool: GPU ids (``"4,5"``), or CPU cores (``"cpu:0"``, ``"cpu:0-3"``);
    empty: automatic."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU workers) per instance."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The engine's dtype, in which weights are shipped."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences an instance runs at once."""
    lookahead: int = Field(default=8, ge=0)
    """Assignments an instance holds beyond its slots."""
    max_model_len: int = Field(default=0, ge=0)
    """Tokens of prompt and answer; 0: the two limits of ``data``."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """KV cache on a CPU machine, GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine takes."""
    enforce_eager: bool = True
    """No graph capture: quicker to start, slower to decode on GPUs."""
    enable_prefix_caching: bool = True
    """Shares the prompt's KV between the answers of a group; reset with every update."""
    bind_process: bool = False
    """On cores: the whole instance keeps to its cores, its service too. Without it only the threads that compute do,
    and where there are no cores to spare the services of all instances disturb now this engine, now that one. For
    measurements on small machines."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Bound on an instance's start."""
    heartbeat_interval_s: float = Field(default=1.0, gt=0.0)
    """How often an instance reports."""
    lease_s: float = Field(default=20.0, gt=0.0)
    """An instance silent for so long, or without progress while it generates, is taken for dead and restarted."""
    progress_interval_s: float = Field(default=2.0, ge=0.0)
    """An instance sends what is new of each running answer so often, and another one goes on from it when it is lost.
    0: only finished answers are sent, and what a lost instance had begun starts at its prompt (docs/faults.md)."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts per instance before the run stops with its name."""
    listen: str = "127.0.0.1"
    """Address that instances bind; anything but loopback needs TLS (``security``) and a token."""
    ray: RaySection = RaySection()

    @property
    def all_pools(self) -> tuple[GenPoolSection, ...]:
        """Every pool, that of ``[gen]`` itself first, with nothing left out."""
        own = GenPoolSection(
            name=DEFAULT_POOL,
            instances=self.instances,
            devices=self.devices,
            tensor_parallel_size=self.tensor_parallel_size,
            max_num_seqs=self.max_num_seqs,
            lookahead=self.lookahead,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )
        return (own, *(_filled(pool, own) for pool in self.pools))


def _filled(pool: GenPoolSection, own: GenPoolSection) -> GenPoolSection:
    left_out = {"tensor_parallel_size": 0, "max_num_seqs": 0, "lookahead": -1, "kv_cache_gib": 0.0}
    left_out["gpu_memory_utilization"] = 0.0
    same = {name: getattr(own, name) for name, unset in left_out.items() if getattr(pool, name) == unset}
    return pool.model_copy(update=same)


def pool_faults(gen: GenSection) -> Iterator[str]:
    """Yields one sentence for each thing about the instances that makes no sense, with the remedy."""
    started = sum(pool.instances for pool in gen.all_pools)
    if not started and not gen.endpoints and not gen.min_instances:
        yield (
            "gen.instances = 0 and gen.endpoints is empty: nothing would generate; set gen.min_instances where "
            "instances dial in (streamrl gen --join)"
        )
    known = [pool.name for pool in gen.pools]
    for number, pool in enumerate(gen.pools, 1):
        at = f"entry {number} of gen.pools"
        if not _NAME.fullmatch(pool.name):
            yield (
                f"{at} is named {pool.name!r}: give it a name of lower-case letters, digits and dashes (at most 32), "
                "beginning with a letter"
            )
        if pool.name in _RESERVED:
            yield f"{at} is named {pool.name!r}, which is kept for other instances; choose another name"
        if pool.name in known[: number - 1]:
            yield f"{at} is named {pool.name!r}, as another one before it; give each pool a name of its own"
    for pool in gen.all_pools:
        if pool.devices and gen.launcher == "ray":
            yield f"{pool_key(pool, 'devices')} is not read with gen.launcher = 'ray', which chooses them; remove it"
    if gen.launcher == "local":
        for name, field in RaySection.model_fields.items():
            if getattr(gen.ray, name) != field.default:
                yield f"gen.ray.{name} is set, but gen.launcher = 'local'; remove it, or set launcher to 'ray'"


def pool_key(pool: GenPoolSection, key: str) -> str:
    """How a key of a pool is called in messages."""
    return f"gen.{key}" if pool.name == DEFAULT_POOL else f"gen.pools[{pool.name}].{key}"
