"""The acknowledged plan: go when all said the same, in any order of their coming; else it is said who and what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.plan import Plan, Step
from streamrl_jax.control.readers import Readers

STEP = Step(0, "grad", "rows 4, length 128", b"\x01" * 16)


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_any_order_lets_the_same_steps_go(world: int, steps: int, data: st.DataObject) -> None:
    """Readers that each go on when their step was let go, in any interleaving, repetitions included."""
    plan = Plan(world)
    at = [0] * world  # the step that each is at
    while min(at) < steps:
        able = [reader for reader in range(world) if reader not in plan.waiting]
        reader = data.draw(st.sampled_from(able))
        step = replace(STEP, sequence=at[reader])
        arrived = set(plan.waiting) | {reader}
        assert plan.acknowledge(reader, step) == (len(arrived) == world)
        if data.draw(st.booleans()):
            assert plan.acknowledge(reader, step) == (plan.gone == at[reader]), "a repetition changes nothing"
        if plan.gone == at[reader]:
            at = [number + 1 for number in at]
    assert plan.gone == steps - 1
    assert plan.waiting == []


@given(st.permutations(range(4)), st.sampled_from(["kind", "shape", "digest"]), st.integers(0, 3))
def test_a_difference_is_found_in_any_order(order: list[int], field: str, odd: int) -> None:
    """Never are all let go, and the message names two readers that differ, the odd one among them."""
    plan = Plan(4)
    other = replace(STEP, **{field: b"\x02" * 16 if field == "digest" else "apply"})
    with pytest.raises(ControlError) as raised:
        for reader in order:
            assert not plan.acknowledge(reader, other if reader == odd else STEP)
    text = str(raised.value)
    assert f"{odd}" in text.partition(" are about")[0] and "as step 0" in text and field in text
    assert plan.gone == -1


def test_a_single_process_goes_at_once() -> None:
    plan = Plan(1)
    assert all(plan.acknowledge(0, replace(STEP, sequence=number)) for number in range(3))


def test_a_reader_that_left_a_step_out_is_told() -> None:
    plan = Plan(2)
    plan.acknowledge(0, STEP)
    with pytest.raises(
        ControlError, match=r"trainer process 1 acknowledges step 1 \(grad\); step 0 is the next"
    ):
        plan.acknowledge(1, replace(STEP, sequence=1))


def test_a_step_that_changes_when_repeated_is_refused() -> None:
    plan = Plan(2)
    plan.acknowledge(0, STEP)
    with pytest.raises(
        ControlError, match="process 0 acknowledged step 0 twice, and differently: kind 'apply'"
    ):
        plan.acknowledge(0, replace(STEP, kind="apply"))


def test_who_is_missing_is_named_and_where_the_others_are() -> None:
    plan = Plan(3)
    for reader in range(3):
        plan.acknowledge(reader, STEP, 1.0)
    plan.acknowledge(2, replace(STEP, sequence=1, kind="apply"), 5.0)
    assert plan.overdue(14.0, 10.0) == ""
    text = plan.overdue(16.0, 10.0)
    assert (
        "step 1 (apply, rows 4, length 128) was not acknowledged by all 3 trainer processes within 10 s"
        in text
    )
    assert "2 waited for it" in text
    assert "trainer process 0 was last at step 0 (grad); trainer process 1 was last at step 0" in text
    assert "process 1 has not been at any step" in _never().overdue(99.0, 10.0)


def _never() -> Plan:
    plan = Plan(2)
    plan.acknowledge(0, STEP, 0.0)
    return plan


def test_a_silent_process_is_named_with_where_its_words_are() -> None:
    readers = Readers(2, lease_s=0.0, plan_timeout_s=60.0)
    readers.beat(1)
    with pytest.raises(
        ControlError, match=r"process 1 gave no sign of life .* look at logs/trainer-1\.log of"
    ):
        readers.check()
    readers.left(1)
    readers.beat(0)
    with pytest.raises(ControlError, match=r"process 0 gave no sign of life .* look at what it printed"):
        readers.check()
