"""What the controller tells the outside: events as they happen, and a view of each instance on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from streamrl_jax.types import NO_VERSION, InstanceState


class EventKind(StrEnum):
    """What happened."""

    PHASE = "phase"  # an instance starts: text says what it does, seconds for how long
    READY = "ready"  # an instance is loaded and connected
    LOST = "lost"  # an instance is taken for dead: text says why
    RESTART = "restart"  # it is started anew: count says which restart this is
    ADDED = "added"  # an instance joins the run while it goes on
    GONE = "gone"  # an instance has left the pool: text says why (it was drained, or given up)
    RECONNECTED = "reconnected"  # the stream broke, the instance lives
    REDISPATCH = "redispatch"  # count samples were taken back from an instance
    UPDATED = "updated"  # an instance serves a new version, seconds after it was published
    RELEASED = "released"  # nobody needs the source of this version any more


@dataclass(frozen=True)
class ControlEvent:
    """One line for the progress display and the log."""

    kind: EventKind
    instance: str = ""
    text: str = ""
    version: int = NO_VERSION
    count: int = 0
    seconds: float = 0.0


class Activity(StrEnum):
    """What an instance spends its time on."""

    BUSY = "busy"  # it holds samples
    IDLE = "idle"  # it is up and holds none
    UPDATING = "updating"  # it is given weights and holds none
    DOWN = "down"  # it starts, or is dead


@dataclass(frozen=True)
class InstanceView:
    """One instance as the controller sees it."""

    name: str
    address: str
    state: InstanceState
    version: int
    held: int  # samples that it has of ours
    running: int  # of them in the engine's batch
    waiting: int  # of them queued inside the instance
    tokens_per_s: float  # over the last few seconds
    tokens: int  # since the start of the run
    restarts: int
    seconds: Mapping[Activity, float] = field(default_factory=dict)  # spent so far, by activity
    slots: int = 0  # answers that it runs at once; 0: not known yet
    kv_tokens: int = 0  # tokens of context that its KV cache holds; 0: not known
    steps_total: int = 0  # steps of its engine that sampled a token, in its present life

    @property
    def idle_ratio(self) -> float:
        """Share of its life that the instance was up and had nothing to do."""
        total = sum(self.seconds.values())
        return self.seconds.get(Activity.IDLE, 0.0) / total if total else 0.0
