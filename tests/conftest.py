"""What every test runs under: CPU only, no hub, a compilation cache outside the clone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

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

# A shell that puts a command into the background lets it ignore Ctrl-C, and so would everything that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: what fails somewhere fails everywhere. HYPOTHESIS_PROFILE=default searches anew.
# No bound on an example's time: a pause of the machine is no fault, and what hangs ends by pytest's own.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
