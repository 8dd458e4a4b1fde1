"""StreamRL (arXiv 2504.15930) on JAX: a sharded trainer, streamed vLLM generation, a weight bridge.

Importing the package costs nothing: `run` loads the trainer only when it is first asked for, so that a
process without JAX (the controller, a generation instance) can import `streamrl_jax.types`. It lives in
`main_job.py`, because a module `run.py` would, once loaded, replace the function under this name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl_jax.main_job import run as run

__version__ = "0.1.0"
__all__ = ["__version__", "run"]


def __getattr__(name: str) -> object:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamrl_jax.main_job import run

    return run
