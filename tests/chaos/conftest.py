"""The tests see eight CPU devices. Set in this process alone: what a test starts counts its own."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
