"""The controller's part of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamrl_jax.config import Config
from streamrl_jax.control.dispatching import ARRIVAL, DispatchSettings
from streamrl_jax.control.lease import LeaseBounds
from streamrl_jax.ranker.cost import FLAT, TokenLatency


@dataclass(frozen=True)
class ControlSettings:
    """Bounds and choices of the controller; the defaults are those of the configuration."""

    start_timeout_s: float = 600.0  # from the start of an instance until it is loaded
    heartbeat_interval_s: float = 1.0
    progress_interval_s: float = 2.0  # 0: only finished answers are sent
    lease_s: float = 20.0  # see `control.lease`
    max_restarts: int = 5  # per instance
    min_instances: int = 0  # so many must be ready before the run begins; above 0: instances dial in
    update_timeout_s: float = 300.0  # one update of one instance
    drain_timeout_s: float = 3600.0  # what runs before it, which the lease watches, may take so long
    transport: Literal["auto", "shm", "grpc"] = "auto"
    in_flight: bool = False  # updates do not wait for what runs
    reward_timeout_s: float = 30.0  # one call of the reward function
    reward_workers: int = 2  # threads
    max_buffered_samples: int = 65_536  # finished, and not taken by the trainer; see `control.intake`
    readers: int = 1  # trainer processes
    reader_lease_s: float = 30.0  # silence of a trainer process, or of the controller, that ends the run
    plan_timeout_s: float = 600.0  # between the first and the last reader at a step of the plan
    grace_s: float = 60.0  # a failed run ends a reader whose main thread hangs, after so long
    max_attempts: int = 20  # of one sample, before the run stops with its name
    close_timeout_s: float = (
        25.0  # bound on the end of everything; a launcher's `stop` takes 22 s at the most
    )
    dispatch: DispatchSettings = ARRIVAL

    @classmethod
    def of(cls, config: Config, readers: int = 1, cost: TokenLatency = FLAT) -> ControlSettings:
        """Reads them off a run's configuration.

        Args:
            config: of the run.
            readers: trainer processes.
            cost: of a decode step, which ``dispatch.cost`` names; see `setup.step_cost`.
        """
        gen, bridge, control = config.gen, config.bridge, config.control
        return cls(
            dispatch=DispatchSettings(config.dispatch.policy, config.dispatch.alpha, cost),
            readers=readers,
            start_timeout_s=gen.start_timeout_s,
            heartbeat_interval_s=gen.heartbeat_interval_s,
            progress_interval_s=gen.progress_interval_s,
            lease_s=gen.lease_s,
            max_restarts=gen.max_restarts,
            min_instances=gen.min_instances,
            update_timeout_s=bridge.update_timeout_s,
            transport=bridge.transport,
            in_flight=bridge.in_flight,
            reward_timeout_s=config.reward.timeout_s,
            max_buffered_samples=control.max_buffered_samples,
            reader_lease_s=control.lease_s,
            plan_timeout_s=control.plan_timeout_s,
            grace_s=control.grace_s,
        )

    @property
    def longest_update_s(self) -> float:
        """Bound on an update with the wait for what runs before it."""
        return self.drain_timeout_s + self.update_timeout_s

    @property
    def lease(self) -> LeaseBounds:
        """The bounds of an instance's lease."""
        return LeaseBounds(
            self.lease_s, self.update_timeout_s, self.start_timeout_s, self.heartbeat_interval_s
        )
