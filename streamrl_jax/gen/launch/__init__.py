"""Where instances come from: local processes, static endpoints."""

from streamrl_jax.gen.launch.local import LocalInstance, LocalLauncher
from streamrl_jax.gen.launch.protocol import Launched, Launcher
from streamrl_jax.gen.launch.static import StaticInstance, StaticLauncher, endpoint_names

__all__ = [
    "Launched",
    "Launcher",
    "LocalInstance",
    "LocalLauncher",
    "StaticInstance",
    "StaticLauncher",
    "endpoint_names",
]
