"""Liveness from heartbeats, and which published versions are kept. No clock runs: times are arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    lease.forgive(60, 66)
    assert lease.verdict(84, held=1) == ""
    assert lease.verdict(86, held=1) != ""


def test_what_came_after_an_absence_is_not_shifted_into_the_future() -> None:
    lease = lived(
        [(5, beat(InstanceState.GENERATING, tokens=1)), (66, beat(InstanceState.GENERATING, tokens=1))]
    )
    lease.forgive(60, 66)
    assert lease.verdict(86, held=1) == ""
    assert "nothing was heard for 20.5 s" in lease.verdict(86.5, held=1)


# ---------------------------------------------------------------- what an instance claims


def test_an_instance_that_changes_its_state_all_the_time_is_noticed() -> None:
    """Each state has its bound; going from one to another starts none of them anew for ever."""
    idle = [(float(t), beat((InstanceState.IDLE, InstanceState.GENERATING)[t % 2])) for t in range(1, 31)]
    assert lived(idle).verdict(20, held=2) == ""
    assert "no token for its 2 samples for 21.0 s" in lived(idle).verdict(22, held=2)
    updating = [
        (float(t), beat((InstanceState.UPDATING, InstanceState.PAUSED)[t % 2])) for t in range(1, 150)
    ]
    assert lived(updating).verdict(139, held=2) == ""
    assert "whatever state it claimed" in lived(updating).verdict(141, held=2)
    between = [
        (float(t), beat((InstanceState.UPDATING, InstanceState.IDLE)[t // 15 % 2])) for t in range(1, 150)
    ]
    assert "bridge.update_timeout_s + 2 gen.lease_s = 140" in lived(between).verdict(141, held=2)


def test_after_an_update_the_engine_gets_the_whole_lease_for_its_next_token() -> None:
    states = [
        (5, beat(InstanceState.GENERATING, 4)),
        (6, beat(InstanceState.UPDATING)),
        (90, beat(InstanceState.GENERATING)),
    ]
    assert lived([*states, (109, beat(InstanceState.GENERATING))]).verdict(109, held=3) == ""
    assert "no token" in lived([*states, (111, beat(InstanceState.GENERATING))]).verdict(111, held=3)


def test_tokens_that_are_reported_and_never_arrive() -> None:
    lease = lived([(float(t), beat(InstanceState.GENERATING, tokens=100)) for t in range(1, 51)])
    assert lease.verdict(50, held=4, most_tokens=lambda: 5000) == ""
    lease.observe(beat(InstanceState.GENERATING, tokens=1), 51)
    assert "reports 5001 tokens for its 4 samples, and nothing arrived" in lease.verdict(
        51, 4, most_tokens=lambda: 5000
    )
    lease.heard(51)
    assert lease.verdict(51, held=4, most_tokens=lambda: 5000) == ""


def test_what_it_may_hold_is_asked_only_of_one_that_claims_something() -> None:
    def asked() -> int:
        raise AssertionError("it costs as much as the samples that are held")

    lease = lived([(1.0, beat(InstanceState.GENERATING, tokens=100))])
    lease.heard(1.5)
    assert lease.verdict(2, held=4, most_tokens=asked) == ""
    lease.observe(beat(InstanceState.GENERATING, tokens=100), 2)  # may be of what came before
    assert lease.verdict(2, held=4, most_tokens=asked) == ""
    lease.observe(beat(InstanceState.GENERATING, tokens=100), 3)
    assert "nothing arrived" in lease.verdict(3, held=4, most_tokens=lambda: 99)


def test_a_report_may_be_of_the_answers_that_came_before_it() -> None:
    """A quick instance makes more in a heartbeat's time than it holds at once, and has delivered it all."""
    lease = lived([])
    for second in range(1, 6):
        lease.heard(second - 0.01)
        lease.observe(beat(InstanceState.GENERATING, tokens=1_000_000), second)
        assert lease.verdict(second, held=4, most_tokens=lambda: 5000) == ""
    lease.observe(beat(InstanceState.GENERATING, tokens=5001), 6)
    assert "nothing arrived" in lease.verdict(6, held=4, most_tokens=lambda: 5000)


def test_answers_that_have_to_be_dropped_prove_no_engine() -> None:
    lease = lived([(1, beat(InstanceState.GENERATING, tokens=1))])
    for second in range(2, 23):
        lease.useless(float(second))
    assert "no token for its 3 samples for 21.0 s" in lease.verdict(22, held=3)


def test_one_that_loads_again_is_another_process() -> None:
    lease = lived([(1, beat(InstanceState.LOADING)), (2, beat(InstanceState.IDLE))])
    assert lease.verdict(2, held=0) == ""
    lease.observe(beat(InstanceState.LOADING), 3)
    assert "loading again" in lease.verdict(3, held=0)


def test_a_flood_is_told_from_what_gathered_while_this_process_was_stopped() -> None:
    hour = lived([(3600.0, beat(InstanceState.IDLE)) for _ in range(3600)])
    assert hour.verdict(3600, held=0) == ""
    quick = lived([(t / 15, beat(InstanceState.IDLE)) for t in range(1, 150_000)])
    assert quick.verdict(10_000, held=0) == "", "15 a second are odd, and cost nothing"
    flood = lived([(t / 1000, beat(InstanceState.IDLE)) for t in range(1, 10_500)])
    assert "it floods" in flood.verdict(10.5, held=0)


@given(st.lists(st.tuples(st.sampled_from(list(InstanceState)), st.floats(0.1, 10)), min_size=1, max_size=60))
def test_whatever_it_claims_one_that_makes_nothing_is_found_dead(
    moves: list[tuple[InstanceState, float]],
) -> None:
    """The invariant of `Lease`: any states at any times, no token, work of ours."""
    lease, now = Lease(BOUNDS, now=0.0), 0.0
    lease.observe(beat(InstanceState.IDLE), 0.0)
    lease.worked(0.0)
    while now < BOUNDS.update_timeout_s + 2 * BOUNDS.lease_s + 20:
        for state, pause in moves:
            now += pause
            lease.observe(beat(state), now)
            if lease.verdict(now, held=1):
                return
    raise AssertionError(f"after {now} s it was still taken for alive")


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
