"""Liveness from heartbeats, and which published versions are kept. No clock runs: times are arguments."""

from __future__ import annotations

import pytest

from streamrl_jax.control.events import Activity
from streamrl_jax.control.lease import Lease, LeaseBounds
from streamrl_jax.control.meter import ActivityClock, TokenRate
from streamrl_jax.control.shelf import Publication, Shelf
from streamrl_jax.types import Fence, InstanceState, InstanceStatus, Manifest, WeightSource

BOUNDS = LeaseBounds(lease_s=20, update_timeout_s=100, start_timeout_s=300)


def beat(state: InstanceState, tokens: int = 0, age: float = 0.0, message: str = "") -> InstanceStatus:
    return InstanceStatus(state, 0, tokens_since_last=tokens, engine_age_s=age, message=message)


def lived(states: list[tuple[float, InstanceStatus]]) -> Lease:
    lease = Lease(BOUNDS, now=0.0)
    for now, status in states:
        lease.observe(status, now)
    return lease


def test_silence() -> None:
    lease = lived([(5, beat(InstanceState.IDLE))])
    assert lease.verdict(25, held=0) == ""
    assert "nothing was heard for 20.5 s (gen.lease_s = 20)" in lease.verdict(25.5, held=0)


def test_an_answer_is_a_sign_of_life() -> None:
    lease = lived([(5, beat(InstanceState.GENERATING))])
    lease.heard(24)
    assert lease.verdict(43, held=3) == ""


def test_stopped_engine_behind_a_living_process() -> None:
    lease = lived([(t, beat(InstanceState.IDLE, age=t)) for t in range(1, 23)])
    assert "its engine did not answer for 22.0 s" in lease.verdict(22, held=0)


@pytest.mark.parametrize("state", [InstanceState.UPDATING, InstanceState.PAUSED, InstanceState.DRAINING])
def test_an_engine_that_owes_an_answer_is_not_given_the_time_of_an_update(state: InstanceState) -> None:
    lease = lived([(float(t), beat(state, age=t)) for t in range(1, 23)])
    assert "its engine did not answer for 22.0 s (gen.lease_s = 20)" in lease.verdict(22.5, held=0)


def test_generating_without_tokens() -> None:
    beats = [(float(t), beat(InstanceState.GENERATING, tokens=5 if t < 10 else 0)) for t in range(1, 31)]
    lease = lived(beats[:29])
    assert lease.verdict(29, held=4) == ""
    assert "no token for its 4 samples for 21.0 s" in lived(beats).verdict(30, held=4)


def test_idle_with_work_of_ours_is_a_lost_assignment() -> None:
    lease = lived([(float(t), beat(InstanceState.IDLE)) for t in range(1, 31)])
    assert lease.verdict(30, held=0) == ""
    assert "no token for its 2 samples" in lease.verdict(30, held=2)


def test_new_work_after_idleness_gets_the_whole_lease() -> None:
    lease = lived([(float(t), beat(InstanceState.IDLE)) for t in range(1, 101)])
    lease.worked(100)
    assert lease.verdict(101, held=1) == ""


@pytest.mark.parametrize(
    ("state", "bound", "field"),
    [
        (InstanceState.UPDATING, 100, "bridge.update_timeout_s"),
        (InstanceState.PAUSED, 100, "bridge.update_timeout_s"),
        (InstanceState.LOADING, 300, "gen.start_timeout_s"),
    ],
)
def test_own_bounds(state: InstanceState, bound: int, field: str) -> None:
    """These states make no tokens; each has its own bound."""
    lease = lived([(float(t), beat(state, age=0.5)) for t in range(0, bound + 2)])
    assert lease.verdict(bound - 1, held=2) == ""
    assert field in lease.verdict(bound + 1.5, held=2)


def test_failed_says_why() -> None:
    assert "out of memory" in lived([(1, beat(InstanceState.FAILED, message="out of memory"))]).verdict(1, 0)


def test_own_absence_is_forgiven() -> None:
    """Were this process stopped for a minute, every instance would look dead."""
    lease = lived([(5, beat(InstanceState.GENERATING, tokens=1))])
    lease.forgive(60)
    assert lease.verdict(84, held=1) == ""
    assert lease.verdict(86, held=1) != ""


def publication(version: int, released: list[int]) -> Publication:
    manifest = Manifest(Fence("run", 0), version, (), 0, b"", "Tiny")
    return Publication(manifest, WeightSource(path=f"v{version}"), lambda: released.append(version), 0.0)


def test_a_version_is_kept_while_it_is_current_or_loaded() -> None:
    released: list[int] = []
    shelf = Shelf()
    assert shelf.borrow() is None
    shelf.put(publication(0, released))
    zero = shelf.borrow()
    assert zero is not None
    assert shelf.put(publication(1, released)) == []
    assert shelf.borrow() is shelf.current
    assert shelf.put(publication(2, released)) == []
    assert shelf.give_back(zero) == [0]
    assert released == [0]
    assert sorted(shelf.clear()) == [1, 2]
    assert sorted(released) == [0, 1, 2]


def test_versions_only_grow() -> None:
    shelf = Shelf()
    shelf.put(publication(3, []))
    with pytest.raises(ValueError, match="version 3 is published after version 3"):
        shelf.put(publication(3, []))


def test_activity_adds_up() -> None:
    clock = ActivityClock(10.0)
    clock.switch(Activity.BUSY, 12.0)
    clock.switch(Activity.IDLE, 17.0)
    assert clock.seconds(18.0) == {"down": 2.0, "busy": 5.0, "idle": 1.0, "updating": 0.0}
    assert sum(clock.seconds(20.0).values()) == 10.0


def test_token_rate_forgets() -> None:
    rate = TokenRate(window_s=5.0)
    for second in range(10):
        rate.add(100, float(second))
    assert rate.per_s(9.0) == pytest.approx(100, rel=0.25)
    assert rate.per_s(30.0) == 0.0
