"""Whether an instance is alive, judged from what it reports. Pure: the clock is an argument.

========== ===========================================================  ====================
symbol     meaning                                                      bound
========== ===========================================================  ====================
silence    since the last message of any kind                           ``lease_s``
age        of an answer that the engine (not its API process) owes      ``lease_s``
standstill GENERATING, or holding work of ours, without a new token     ``lease_s``
updating   UPDATING or PAUSED without a new token (what runs may end)   ``update_timeout_s``
loading    LOADING without a break                                      ``start_timeout_s``
========== ===========================================================  ====================

Example: ``lease_s = 20``, judged each half second: an instance that is stopped or stuck is noticed 20.5 s
after its last sign of life at the latest; a broken stream at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl_jax.types import InstanceState, InstanceStatus

_UPDATE_STATES = frozenset({InstanceState.UPDATING, InstanceState.PAUSED})


@dataclass(frozen=True)
class LeaseBounds:
    """How long each kind of waiting may last, seconds."""

    lease_s: float
    update_timeout_s: float
    start_timeout_s: float


class Lease:
    """The signs of life of one instance, since it was last connected.

    Args:
        bounds: see the table of the module.
        now: monotonic seconds.
    """

    def __init__(self, bounds: LeaseBounds, now: float) -> None:
        self._bounds = bounds
        self._heard = now
        self._moved = now  # a token, an answer, new work after idleness, or another state
        self._state = InstanceState.LOADING
        self._state_since = now
        self._engine_age = 0.0
        self._message = ""

    def observe(self, status: InstanceStatus, now: float) -> None:
        """Takes a heartbeat."""
        self._heard = now
        self._engine_age = status.engine_age_s
        self._message = status.message
        if status.state is not self._state:
            self._state, self._state_since, self._moved = status.state, now, now
        if status.tokens_since_last:
            self._moved = now

    def heard(self, now: float) -> None:
        """Takes what the engine made: a finished answer, or tokens of one."""
        self._heard = self._moved = now
        self._engine_age = 0.0

    def worked(self, now: float) -> None:
        """Notes that an instance without work was just given some: its standstill counts from here."""
        self._moved = now

    def forgive(self, seconds: float) -> None:
        """Shifts every limit by the time in which this process itself was stopped and could not listen."""
        self._heard += seconds
        self._moved += seconds
        self._state_since += seconds

    def verdict(self, now: float, held: int) -> str:
        """Says why the instance must be taken for dead.

        Args:
            now: monotonic seconds.
            held: samples that it has of ours.

        Returns:
            The reason, with the bound and what was measured; "" while it lives.
        """
        bounds = self._bounds
        if self._state is InstanceState.FAILED:
            return f"it reports that it failed: {self._message or 'no message'}"
        if now - self._heard > bounds.lease_s:
            return f"nothing was heard for {now - self._heard:.1f} s (gen.lease_s = {bounds.lease_s:g})"
        still = now - self._moved
        if self._state is InstanceState.LOADING:
            loading = now - self._state_since
            return _over(loading, bounds.start_timeout_s, "it was loading", "gen.start_timeout_s")
        if self._engine_age > bounds.lease_s:
            return _over(self._engine_age, bounds.lease_s, "its engine did not answer", "gen.lease_s")
        if self._state in _UPDATE_STATES:
            doing = f"it was {self._state} and made no token"
            return _over(still, bounds.update_timeout_s, doing, "bridge.update_timeout_s")
        if held:
            return _over(still, bounds.lease_s, f"it made no token for its {held} samples", "gen.lease_s")
        if self._state is InstanceState.GENERATING:
            return _over(still, bounds.lease_s, "it generated without a token", "gen.lease_s")
        return ""


def _over(seconds: float, bound: float, what: str, field: str) -> str:
    return f"{what} for {seconds:.1f} s ({field} = {bound:g})" if seconds > bound else ""
