"""What JAX must be told before its devices are touched: which GPUs, how much of them, where compiled programs go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from streamrl_jax.config import Config


def prepare_jax(cfg: Config, environment: Mapping[str, str]) -> None:
    """Sets the environment of the trainer's devices, the precision, and the compilation cache.

    Args:
        cfg: ``model.compute_dtype``, ``trainer.compilation_cache`` and ``dispatch.policy`` are read.
        environment: From `devices.trainer_environment`.
    """
    os.environ.update(environment)
    import jax

    platforms = os.environ.get("JAX_PLATFORMS", "")
    if cfg.dispatch.policy != "arrival" and platforms and "cpu" not in platforms.split(","):
        # The ranker computes on the host beside the trainer's GPUs; what JAX_PLATFORMS names first stays the default.
        jax.config.update("jax_platforms", f"{platforms},cpu")

    if cfg.model.compute_dtype == "float32":
        # GPUs multiply float32 in TF32 otherwise, and trainer and generator would not agree to float32's precision.
        jax.config.update("jax_default_matmul_precision", "highest")
    directory = cache_directory(cfg.trainer.compilation_cache)
    if directory is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # The shapes of a run are few, and a toy's compile in under the default second each, but there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory(setting: str) -> Path | None:
    """Where compiled programs are kept.

    Args:
        setting: ``trainer.compilation_cache``: a directory, ``auto`` or ``off``.

    Returns:
        The directory; None: nowhere.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "streamrl_jax" / "jax"
