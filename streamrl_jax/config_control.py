"""The section of the controller: where it runs, and how long it and the trainer processes wait for each other."""

from __future__ import annotations

from pydantic import Field

from streamrl_jax.config_section import Section


class ControlSection(Section):
    """The controller: queue, streams from the instances, rewards, and the order of the trainer processes' work."""

    process: bool = True
    """Whether it is a process of its own, without JAX. ``false``: a thread of the trainer's process, as it is anyway
    when ``streamrl_jax.run`` is given a reward function."""
    listen: str = "127.0.0.1:0"
    """``host:port`` at which it serves trainer processes and ``streamrl pool``; port 0 takes a free one."""
    lease_s: float = Field(default=30.0, ge=1.0)
    """A controller, or a trainer process, that is silent for so long is taken for dead, and the run ends."""
    plan_timeout_s: float = Field(default=600.0, gt=0.0)
    """Bound between the first and the last of several trainer processes at the same collective, with compilation."""
    grace_s: float = Field(default=60.0, gt=0.0)
    """When a run with several trainer processes has failed, a process whose main thread hangs in a collective is ended
    after so long."""
    max_buffered_samples: int = Field(default=65_536, ge=1)
    """Finished samples that may wait for the trainer before nothing further is handed out."""
