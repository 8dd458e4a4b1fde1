"""What state an instance is in, and why."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from streamrl_jax.gen.answers import Answers
from streamrl_jax.gen.protocol import Engine
from streamrl_jax.gen.pulse import Pulse
from streamrl_jax.gen.updates import Updates
from streamrl_jax.types import Fence, InstanceInfo, InstanceState, InstanceStatus, RejectReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What an instance is called and where it runs."""

    name: str
    lookahead: int
    host_id: str
    same_host_weights: bool = True
    fence: Fence | None = None  # of the run that started it: another run is refused


class Condition:
    """Keeps what happened to an instance, and says what that makes of it.

    Call order: `say` while the engine starts, then `ready`; `fail` at most once counts, at any time; `paused` and
    `draining` are set by whoever pauses and drains.

    Invariant: the first failure is the one that is told, for good.

    Args:
        engine: its limits, version and tokens are told.
        identity: of the instance.
        pulse: knows when the engine last answered.
        on_failure: called once, when the failure has been noted.
    """

    def __init__(
        self, engine: Engine, identity: Identity, pulse: Pulse, on_failure: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._pulse = pulse
        self._on_failure = on_failure
        self._started_s = time.monotonic()
        self.phase = "starting"
        self.is_ready = False
        self.failure = ""
        self.failed = asyncio.Event()
        self.paused = False
        self.draining = False

    def say(self, phase: str) -> None:
        """What the engine does while it starts."""
        self.phase = phase
        log.info("%s", phase)

    def ready(self) -> None:
        """The engine has started."""
        self.is_ready, self.phase = True, ""

    def fail(self, reason: str) -> None:
        """The engine must be started anew."""
        if not self.failure:
            self.failure = reason or "the engine failed without a reason"
            log.error("engine failed: %s", self.failure)
        self.failed.set()
        self._on_failure()

    @property
    def serving(self) -> bool:
        """Whether it can take work: loaded, and neither failed nor draining."""
        return self.is_ready and not self.failure and not self.draining

    def not_up(self) -> tuple[RejectReason, str] | None:
        """Why nothing can be done with the engine; None when it is up."""
        if self.failure:
            return RejectReason.ENGINE_FAILED, self.failure
        if not self.is_ready:
            return RejectReason.WRONG_VERSION, f"the instance is still {self.phase}; wait for state IDLE"
        return None

    def info(self) -> InstanceInfo:
        """What the instance says of itself."""
        limits = self._engine.limits
        return InstanceInfo(
            name=self._identity.name,
            slots=limits.slots,
            lookahead=self._identity.lookahead,
            max_model_len=limits.max_model_len,
            version=self._engine.version,
            same_host_weights=self._identity.same_host_weights,
            host_id=self._identity.host_id,
            engine=limits.description,
            kv_tokens=limits.kv_tokens,
        )

    def status(self, answers: Answers, updates: Updates) -> InstanceStatus:
        """What the instance is doing.

        Args:
            answers: its work.
            updates: its updates.
        """
        running = answers.running
        return InstanceStatus(
            state=self._state(answers, updates),
            version=self._engine.version,
            running=running,
            waiting=answers.active - running,
            engine_age_s=self._pulse.age_s,
            message=self.failure,
            phase=self.phase,
            tokens_total=self._engine.tokens_total,
            steps_total=self._engine.steps_total,
            uptime_s=time.monotonic() - self._started_s,
        )

    def _state(self, answers: Answers, updates: Updates) -> InstanceState:
        if self.failure:
            return InstanceState.FAILED
        if not self.is_ready:
            return InstanceState.LOADING
        if updates.busy:
            return InstanceState.UPDATING
        if self.draining:
            return InstanceState.DRAINING
        if self.paused:
            return InstanceState.PAUSED
        return InstanceState.GENERATING if answers.active else InstanceState.IDLE
