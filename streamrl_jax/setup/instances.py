"""From the configuration to the specifications of generation instances."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NoReturn

from streamrl_jax.config import Config
from streamrl_jax.config_generation import GenPoolSection
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.options import EngineOptions, InstanceSpec, JoinSpec, PoolTemplate, write_spec
from streamrl_jax.setup.devices import DeviceSplit, instance_names
from streamrl_jax.setup.model_source import model_directory
from streamrl_jax.types import Fence


def engine_options(
    config: Config, model: str, device: str, vocab_limit: int | None, pool: GenPoolSection | None = None
) -> EngineOptions:
    """The engine that a configuration asks for.

    Args:
        config: `gen` and the limits of `data` count.
        model: The checkpoint's directory; its weights are not read.
        device: The instance's entry of a split, as in `gen.devices`; empty: what vLLM finds.
        vocab_limit: From `Tokenizer.vocab_limit`.
        pool: The instance's pool, with nothing left out; None: the default one.

    Returns:
        The options.
    """
    gen = config.gen
    pool = pool or gen.all_pools[0]
    return EngineOptions(
        model=model,
        max_model_len=gen.max_model_len or config.longest_sample,
        dtype=gen.dtype,
        max_num_seqs=pool.max_num_seqs,
        tensor_parallel_size=pool.tensor_parallel_size,
        seed=config.run.seed,
        device=device,
        kv_cache_gib=pool.kv_cache_gib,
        gpu_memory_utilization=pool.gpu_memory_utilization,
        enforce_eager=gen.enforce_eager,
        enable_prefix_caching=gen.enable_prefix_caching,
        bind_process=gen.bind_process,
        vocab_limit=vocab_limit,
    )


def pool_templates(
    config: Config,
    model: Path,
    split: DeviceSplit,
    access: AccessFiles,
    fence: Fence,
    vocab_limit: int | None,
    blobs: Path,
) -> tuple[PoolTemplate, ...]:
    """The pools of instances that a run starts itself.

    Args:
        config: The run's configuration.
        model: The checkpoint's directory.
        split: Which instance runs on what.
        access: What run and instances share.
        fence: This life of the run; the instances serve no other.
        vocab_limit: From `Tokenizer.vocab_limit`.
        blobs: Where the trainer puts weights that do not fit into shared memory.

    Returns:
        Every pool, the default one first, whose instances are `instance-0` and so on.
    """
    devices: dict[str, list[str]] = {}
    for (_, pool), device in zip(instance_names(config), split.instances, strict=True):
        devices.setdefault(pool.name, []).append(device)
    return tuple(
        PoolTemplate(
            pool.name,
            InstanceSpec(
                name=pool.name,
                engine=engine_options(config, str(model), "", vocab_limit, pool),
                listen=f"{config.gen.listen}:0",
                access=access,
                lookahead=pool.lookahead,
                blob_directories=(str(blobs.absolute()),),
                stores=tuple(config.security.stores),
                fence=fence,
            ),
            tuple(devices.get(pool.name, ())),
        )
        for pool in config.gen.all_pools
    )


def standalone_spec(
    config: Config,
    model: Path,
    listen: str,
    access: AccessFiles,
    name: str = "",
    join: JoinSpec | None = None,
) -> InstanceSpec:
    """An instance that waits for a run to connect (`streamrl gen`), or dials in to one.

    Args:
        config: The configuration.
        model: The checkpoint's directory.
        listen: `HOST:PORT`.
        access: What it shares with the run.
        name: Of the instance; empty: host name and port, or for one that dials in host name and process id.
        join: Whom it announces itself to.

    Returns:
        The specification.

    Raises:
        UserError: `gen.devices` names several instances' devices, or the tokenizer cannot be read.
    """
    devices = config.gen.devices
    if len(devices) > 1:
        raise UserError(
            f"gen.devices has {len(devices)} entries, and streamrl gen is one instance: give it its own, as "
            f"in 'gen.devices=[\"{devices[0]}\"]', or gen.devices=[] for what vLLM finds."
        )
    masked = config.rollout.mask_padded_vocab
    vocab_limit = Tokenizer.load(model).vocab_limit(masked=True) if masked else None
    suffix = os.getpid() if join else listen.rpartition(":")[2]
    return InstanceSpec(
        name=name or f"{socket.gethostname()}-{suffix}",
        engine=engine_options(config, str(model), devices[0] if devices else "", vocab_limit),
        listen=listen,
        access=access,
        lookahead=config.gen.lookahead,
        stores=tuple(config.security.stores),
        join=join,
    )


def serve_standalone(
    config: Config, listen: str, access: AccessFiles, name: str, join: JoinSpec | None = None
) -> NoReturn:
    """Turns this process into an instance and its guard.

    Args:
        config: The configuration.
        listen: `HOST:PORT`.
        access: What it shares with the run.
        name: Of the instance; empty: host name and port.
        join: Whom it announces itself to.

    Raises:
        UserError: Something given is wrong.
    """
    from streamrl_jax.gen.instance import become_instance

    model = model_directory(config.model.path, "model.path")
    spec = standalone_spec(config, model, listen, access, name, join)
    # A file in memory, open across the exec: the instance finds it, and nothing is left behind.
    file = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('instance-spec', 0)}")
    write_spec(spec, file)
    become_instance(["--spec", str(file)])
