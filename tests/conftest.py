"""What every test runs under: CPU only, no hub, a compilation cache outside the clone."""

from __future__ import annotations

import os
from pathlib import Path

_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

# Set before JAX is first imported; a process that a test starts inherits them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(_USER_CACHE / "streamrl_jax" / "test-compilation-cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
