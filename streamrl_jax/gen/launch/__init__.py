"""Where instances come from: local processes, static endpoints."""

from streamrl_jax.gen.launch.protocol import Launched, Launcher
from streamrl_jax.gen.launch.static import StaticInstance, StaticLauncher, endpoint_names

__all__ = ["Launched", "Launcher", "StaticInstance", "StaticLauncher", "endpoint_names"]
