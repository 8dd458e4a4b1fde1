"""Whether an instance is alive, judged from what it reports. Pure: the clock is an argument, and no other is used.

=========== =========================================================== ===================================
symbol      meaning                                                     bound
=========== =========================================================== ===================================
silence     since the last message of any kind                          ``lease_s``
age         of an answer that the engine (not its API process) owes     ``lease_s``
standstill  GENERATING, or holding work of ours, without a new token    ``lease_s``
updating    UPDATING or PAUSED without a new token (what runs may end)  ``update_timeout_s``
hesitation  holding work of ours, no new token, whatever the states     ``update_timeout_s`` + 2 ``lease_s``
claims      tokens reported since anything of them arrived              what it may hold, in tokens
uselessness heartbeats and messages that had to be dropped              `FLOOD`, 20 a heartbeat are forgiven
loading     LOADING without a break, at first                           ``start_timeout_s``
again       LOADING after another state: a process that began anew      at once
=========== =========================================================== ===================================

Example: ``lease_s = 20``, judged each half second: an instance that is stopped or stuck is noticed 20.5 s
after its last sign of life at the latest; a broken stream at once.

What an instance says of itself is not taken for more than it is. A report of new tokens counts as movement, but
only as many as it could have made; another state restarts the count of a standstill only where an update ended; an
answer that had to be dropped proves that its process talks, not that its engine works. One that really makes a token
a second is slow, not dead: the others take the work, and ``trainer.sample_timeout_s`` bounds the wait for the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamrl_jax.control.absence import leave_out
from streamrl_jax.types import InstanceState, InstanceStatus

FLOOD: Final = 10_000
"""Messages of no use beyond those that are forgiven; a controller that was stopped for hours finds fewer."""

_FORGIVEN: Final = 20  # messages of no use in a heartbeat's time
_UPDATE_STATES = frozenset({InstanceState.UPDATING, InstanceState.PAUSED})


@dataclass(frozen=True)
class LeaseBounds:
    """How long each kind of waiting may last, seconds."""

    lease_s: float
    update_timeout_s: float
    start_timeout_s: float
    heartbeat_interval_s: float = 1.0


class Lease:
    """The signs of life of one instance, since it was last connected.

    Invariant: whatever an instance reports, one that holds work and answers none of it is found dead within the
    bounds of the module's table.

    Args:
        bounds: see the table of the module.
        now: monotonic seconds.
    """

    def __init__(self, bounds: LeaseBounds, now: float) -> None:
        self._bounds = bounds
        self._heard = now
        self._moved = now  # a token, an answer, or new work after idleness
        self._resumed = now  # an update or a pause ended
        self._claimed = 0  # tokens reported since something arrived
        self._arrived = False  # something did since the last report, whose tokens may be of that
        self._state = InstanceState.LOADING
        self._state_since = now
        self._again = False
        self._engine_age = 0.0
        self._message = ""
        self._useless = 0.0
        self._useless_s = now

    def observe(self, status: InstanceStatus, now: float) -> None:
        """Takes a heartbeat."""
        self.useless(now)
        self._engine_age = status.engine_age_s
        self._message = status.message
        if status.state is not self._state:
            self._again |= status.state is InstanceState.LOADING
            if self._state in _UPDATE_STATES or self._state is InstanceState.LOADING:
                self._resumed = now
            self._state, self._state_since = status.state, now
        if status.tokens_since_last:
            self._moved = now
            self._claimed += 0 if self._arrived else status.tokens_since_last
        self._arrived = False

    def heard(self, now: float) -> None:
        """Takes what the engine made: a finished answer, or tokens of one, that were not known yet."""
        self._heard = self._moved = now
        self._claimed, self._arrived = 0, True
        self._engine_age = 0.0

    def useless(self, now: float) -> None:
        """Takes a message that moved nothing on: one that was dropped, or a heartbeat."""
        self._heard = now
        forgiven = (now - self._useless_s) * _FORGIVEN / self._bounds.heartbeat_interval_s
        self._useless, self._useless_s = max(0.0, self._useless - forgiven) + 1, now

    def worked(self, now: float) -> None:
        """Notes that an instance without work was just given some: its standstill counts from here."""
        self._moved = now
        self._claimed = 0

    def forgive(self, seconds: float, now: float) -> None:
        """Shifts every limit by the time in which this process itself was stopped and could not listen.

        What has come since is not shifted into the future.
        """
        self._heard = leave_out(self._heard, seconds, now)
        self._moved = leave_out(self._moved, seconds, now)
        self._resumed = leave_out(self._resumed, seconds, now)
        self._state_since = leave_out(self._state_since, seconds, now)

    def verdict(self, now: float, held: int, most_tokens: Callable[[], int | None] = lambda: None) -> str:
        """Says why the instance must be taken for dead.

        Args:
            now: monotonic seconds.
            held: samples that it has of ours.
            most_tokens: that it can make before an answer is finished: its slots and look-ahead, each with the
                longest answer asked for; None: not known. Asked only while something is claimed.

        Returns:
            The reason, with the bound and what was measured; "" while it lives.
        """
        bounds = self._bounds
        if self._state is InstanceState.FAILED:
            return f"it reports that it failed: {self._message or 'no message'}"
        if self._again:
            return "it is loading again: another process answers in its place"
        if self._useless > FLOOD:
            return (
                f"it floods: {FLOOD} messages of no use beyond {_FORGIVEN} in each gen.heartbeat_interval_s"
            )
        if now - self._heard > bounds.lease_s:
            return f"nothing was heard for {now - self._heard:.1f} s (gen.lease_s = {bounds.lease_s:g})"
        if self._state is InstanceState.LOADING:
            loading = now - self._state_since
            return _over(loading, bounds.start_timeout_s, "it was loading", "gen.start_timeout_s")
        if self._engine_age > bounds.lease_s:
            return _over(self._engine_age, bounds.lease_s, "its engine did not answer", "gen.lease_s")
        return self._standstill(now, held) or self._falsehood(held, most_tokens)

    def _standstill(self, now: float, held: int) -> str:
        bounds = self._bounds
        hesitation = now - self._moved
        if held and hesitation > (most := bounds.update_timeout_s + 2 * bounds.lease_s):
            doing = f"it made no token for its {held} samples, whatever state it claimed,"
            return _over(hesitation, most, doing, "bridge.update_timeout_s + 2 gen.lease_s")
        if self._state in _UPDATE_STATES:
            doing = f"it was {self._state} and made no token"
            still = now - max(self._moved, self._state_since)
            return _over(still, bounds.update_timeout_s, doing, "bridge.update_timeout_s")
        still = now - max(self._moved, self._resumed)
        if held:
            return _over(still, bounds.lease_s, f"it made no token for its {held} samples", "gen.lease_s")
        if self._state is InstanceState.GENERATING:
            still = now - max(self._moved, self._state_since)
            return _over(still, bounds.lease_s, "it generated without a token", "gen.lease_s")
        return ""

    def _falsehood(self, held: int, most_tokens: Callable[[], int | None]) -> str:
        most = most_tokens() if held and self._claimed else None
        if most is None or self._claimed <= most:
            return ""
        return (
            f"it reports {self._claimed} tokens for its {held} samples, and nothing arrived; with {most} at the "
            "most one of them is finished"
        )


def _over(seconds: float, bound: float, what: str, field: str) -> str:
    return f"{what} for {seconds:.1f} s ({field} = {bound:g})" if seconds > bound else ""
