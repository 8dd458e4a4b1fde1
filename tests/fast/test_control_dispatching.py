"""From predictions to lines: when nothing is planned, what a plan becomes, and what a run reports of it."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control.dispatched import Accounts, Dispatched
from streamrl_jax.control.dispatched_codec import dispatched_from_proto, dispatched_to_proto
from streamrl_jax.control.dispatching import (
    ARRIVAL,
    Arrangement,
    DispatchSettings,
    Ready,
    arrange,
    waiting_of,
)
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job, members
from streamrl_jax.control.placing import Placement, Room
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.work import Work
from streamrl_jax.proto import control_pb2 as pb
from streamrl_jax.ranker.cost import Ramp, TokenLatency
from streamrl_jax.ranker.plans import Plan, Server
from streamrl_jax.ranker.risk import KNOWN, USUAL, Spread
from streamrl_jax.ranker.skewness import plan_skewness
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Prompt,
    Rejection,
    RejectReason,
    Sampling,
    VersionRun,
)

LIFE = Fence("run", 0)
POLICIES: tuple[Policy, ...] = ("lpt", "paper", "skewness")

RISING = TokenLatency(Ramp(0.01, (1.0, 2.0), (0.0, 0.01)), 0.0, Ramp(0.0, (0.0,), (0.0,)))
"""A step takes longer with every sequence in it: small batches pay."""

TWO = [Ready("a", 8, 0), Ready("b", 8, 0)]


def job(lengths: Sequence[float] | None, n: int = 1, number: int = 3, **rest: Any) -> Job:
    count = len(lengths) if lengths is not None else 4
    prompts = [Prompt(str(row), np.asarray([1, row], np.int32), {}) for row in range(count)]
    sampling = Sampling(1.0, 1024, (0,), seed=1)
    return Job(f"train/{number}", prompts, n, sampling, number, 0, number, predicted=lengths, **rest)


def by(policy: Policy, cost: TokenLatency = RISING) -> DispatchSettings:
    return DispatchSettings(policy, 0.2, cost)


LONG_TAIL = [400.0, 380.0] + [10.0] * 60


# ---------------------------------------------------------------- when lines are made


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_planned_where_nothing_is_predicted_or_nothing_is_to_be_chosen(policy: Policy) -> None:
    how = by(policy)
    for unplanned in (job(None), job(LONG_TAIL, probe=True), job(LONG_TAIL, pinned="a")):
        assert is_arrival(arrange(unplanned, how, TWO, ()))
        asked = next(members(unplanned))
        assert waiting_of(unplanned, asked, how, late=False) == waiting_of(
            unplanned, asked, ARRIVAL, late=False
        )
    assert is_arrival(arrange(job(LONG_TAIL), ARRIVAL, TWO, ()))
    assert is_arrival(arrange(job(LONG_TAIL, policy="arrival"), how, TWO, ()))


def is_arrival(found: Arrangement) -> bool:
    """Nothing was planned."""
    return found.policy == "arrival" and found.order is None and found.lines is None and found.planned_s == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_even_lengths_and_a_single_instance_cost_nothing(policy: Policy) -> None:
    even = arrange(job([7.0] * 40), by(policy), TWO, ())
    assert even.lines is None and even.order is None, "as if nothing was predicted"
    single = arrange(job(LONG_TAIL), by(policy), TWO[:1], ())
    assert single.lines is None and single.order is not None and single.order.tolist()[:2] == [0, 1]
    nobody = arrange(job(LONG_TAIL), by(policy), [], ())
    assert nobody.lines is None and nobody.order is not None


def test_lines_are_made_where_they_end_sooner() -> None:
    """A step that takes as long whatever the batch leaves nothing to gain from small batches; a rising one does."""
    assert (
        arrange(
            job(LONG_TAIL), by("skewness", replace(RISING, batch=Ramp(0.01, (1.0,), (0.0,)))), TWO, ()
        ).lines
        is None
    )
    found = arrange(job(LONG_TAIL), by("skewness"), TWO, ())
    assert found.lines is not None
    plan = plan_skewness(
        LONG_TAIL, 1, [Server(one.name, one.slots, 1 << 50, RISING) for one in TWO], [2] * 62, limit=1024
    )
    assert found.planned_s == plan.makespan_s < arrange(job(LONG_TAIL), by("lpt"), TWO, ()).planned_s
    places = [(TWO[int(seat)].name, int(rank)) for seat, rank in zip(plan.instance, plan.rank, strict=True)]
    made = [(found.lines.planned(unit), int(rank)) for unit, rank in enumerate(found.lines.rank)]
    assert made == places
    own = np.bincount(plan.instance)
    caps = {
        one.name: min(int(batch), int(count)) for one, batch, count in zip(TWO, plan.batch, own, strict=True)
    }
    assert found.lines.caps == {name: cap for name, cap in caps.items() if cap < 8} != {}


@pytest.mark.parametrize("odd", [Ready("c", 8, 600), Ready("c", 1, 9000)])
def test_one_odd_instance_does_not_make_the_papers_batches_small(
    odd: Ready, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model knows equal instances alone. A little less KV cache makes no difference."""
    ready = [Ready("a", 8, 9000), Ready("b", 8, 8800)]
    even = arrange(job(LONG_TAIL), by("paper"), ready, ())
    assert even.lines is not None and not even.note
    found = arrange(job(LONG_TAIL), by("paper"), [*ready, odd], ())
    assert found.lines is None and found.order is not None and found.order.tolist()[:2] == [0, 1]
    jobs = work(by("paper"))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            jobs.submit(job(LONG_TAIL, number=number), None, [*ready, odd])
    assert [record.message for record in caplog.records] == [found.note]


def test_no_plan_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for whole prompts and one for single answers, whichever is followed."""
    made: list[int] = []

    def counted(lengths: Sequence[float], *rest: Any) -> Plan:
        made.append(len(lengths))
        return plan_skewness(lengths, *rest)

    monkeypatch.setattr("streamrl_jax.ranker.dispatch.plan_skewness", counted)
    for lengths, n in (([400.0, 10.0], 8), (LONG_TAIL, 2)):
        made.clear()
        arrange(job(lengths, n), by("skewness"), TWO, ())
        assert made == [len(lengths), len(lengths) * n]


@settings(deadline=None)
@given(
    st.lists(st.floats(1, 1e4), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 4),
    st.sampled_from(POLICIES), st.lists(st.floats(1, 1e4), max_size=20),
)  # fmt: skip
def test_every_answer_has_one_place(
    lengths: list[float], n: int, instances: int, policy: Policy, recent: list[float]
) -> None:
    ready = [Ready(f"i{number}", 4 + number, 1000 * (number % 2)) for number in range(instances)]
    asked = job(lengths, n)
    found = arrange(asked, by(policy), ready, recent)
    if (lines := found.lines) is not None:
        assert len(lines.seat) * lines.answers == asked.size and found.order is None
        assert [lines.planned(answer) for answer in range(asked.size)]
        for seat in range(instances):
            mine = np.flatnonzero(lines.seat == seat)
            falling = lines.tokens[mine[np.argsort(lines.rank[mine])]]
            assert (np.diff(falling) <= 0).all() and sorted(lines.rank[mine]) == list(range(len(mine)))
        slots = {one.name: one.slots for one in ready}
        assert all(1 <= cap < slots[name] for name, cap in lines.caps.items())
    elif found.order is not None:
        assert sorted(found.order) == list(range(len(lengths)))
        assert (np.diff(np.floor(256 * np.asarray(lengths)[found.order])) <= 0).all()


# ---------------------------------------------------------------- through the queue


def work(how: DispatchSettings) -> Work:
    rewards = RewardWorkers(lambda *_: RewardResult(0.0), lambda ids: "", 1.0, 1)
    return Work(LIFE, rewards, HeldQueue(), 3, Intake(10_000), lambda coroutine, name: coroutine.close(), how)


def rooms(held: dict[str, int], capacity: int = 10) -> list[Room]:
    return [Room(name, 99, capacity, count) for name, count in held.items()]


def taken(work: Work, held: dict[str, int], capacity: int = 10) -> list[tuple[str, Assignment]]:
    found = work.take(rooms(held, capacity))
    for name, _ in found:
        held[name] += 1
    return found


def test_arrival_is_as_without_a_policy() -> None:
    """With the policy "arrival" predictions change neither who answers what nor in which order."""
    plain, told = work(ARRIVAL), work(by("arrival"))
    for number in range(3):
        plain.submit(job(None, 3, number))
        told.submit(job([4.0, 1.0, 9.0, 2.0], 3, number))
    held: tuple[dict[str, int], ...] = ({"a": 0, "b": 3}, {"a": 0, "b": 3})
    for _ in range(4):
        left, right = taken(plain, held[0]), taken(told, held[1])
        assert [(name, one.sample_id) for name, one in left] == [(name, one.sample_id) for name, one in right]
        for counts in held:
            counts["a"], counts["b"] = 6, 8


def test_longest_first_from_the_shared_queue_and_late_ones_before_all() -> None:
    jobs = work(by("lpt"))
    outbox = jobs.submit(job([4.0, 1.0, 9.0, 2.0], 2))
    late = replace(job([3.0], 1), job_id="train/3+0")
    outbox.grow(0)
    jobs.submit(late, outbox)
    handed = [one for _, one in taken(jobs, {"a": 0})]
    assert [one.priority for one in handed] == sorted(one.priority for one in handed), "inside the engine too"
    assert handed[0].priority < handed[1].priority
    found = [one.sample_id.removeprefix("train/3") for one in handed]
    assert found == ["+0/0/0", "/2/0", "/2/1", "/0/0", "/0/1", "/3/0", "/3/1", "/1/0", "/1/1"]


def test_priorities_tell_the_engine_which_is_longer() -> None:
    jobs = work(by("lpt"))
    jobs.submit(job([4.0, 90.0]))
    (_, first), (_, second) = taken(jobs, {"a": 0})
    assert first.priority < second.priority


def test_a_small_batch_lasts_while_anything_waits() -> None:
    """No look-ahead beyond it either: the engine would run that. With the last sample that waits it is over."""
    jobs = work(by("skewness"))
    arranged = arrange(job(LONG_TAIL), by("skewness"), TWO, ()).lines
    assert arranged is not None and set(arranged.caps) == {"a", "b"}
    jobs.submit(job(LONG_TAIL), None, TWO)
    jobs.submit(job(None, 9, number=4))
    held = {"a": 0, "b": 0}
    assert all(one.sample_id.startswith("train/3/") for _, one in taken(jobs, held))
    assert held == arranged.caps
    assert taken(jobs, held) == [], "nothing of the next iteration either"
    while jobs.sizes()["waiting"] > 36:
        held = {"a": 0, "b": 0}
        taken(jobs, held)
    assert sum(held.values()) == 20, "the last of them, and at once what follows"


def test_an_evaluation_is_not_held_up_by_a_plan() -> None:
    jobs = work(by("skewness"))
    jobs.submit(job(LONG_TAIL), None, TWO)
    held = {"a": 0, "b": 0}
    taken(jobs, held)
    jobs.submit(replace(job(None, 9), job_id="eval/3", evaluation=True, priority=-1))
    found = taken(jobs, held)
    assert all(one.sample_id.startswith("eval/3/") for _, one in found) and held == {"a": 10, "b": 10}


def test_the_older_iteration_goes_first_also_from_lines_of_others() -> None:
    jobs = work(by("skewness"))
    jobs.submit(job(LONG_TAIL, number=3), None, TWO)
    jobs.submit(job(LONG_TAIL, number=4), None, TWO)
    held = {"a": 0, "b": 0, "new": 0}
    found = taken(jobs, held)
    assert all(one.sample_id.startswith("train/3/") for _, one in found)
    assert held["new"] == 10, "one that joins takes over from the older one"


def generation(assignment: Assignment, instance: str, tokens: int = 2) -> Generation:
    ids = np.full(tokens, 5, np.int32)
    return Generation(
        assignment.sample_id, assignment.attempt, ids, np.zeros(tokens, np.float32), (VersionRun(9, tokens),),
        FinishReason.STOP, instance,
    )  # fmt: skip


def test_what_became_of_a_plan_is_told() -> None:
    """Two instances as planned, a third that takes over, an answer that was refused once: all add up."""
    jobs = work(by("skewness"))
    arranged = arrange(job(LONG_TAIL), by("skewness"), TWO, ())
    jobs.submit(job(LONG_TAIL), None, TWO)
    held = {"a": 0, "b": 0, "new": 0}
    ran: dict[str, list[int]] = defaultdict(list)
    refused = False
    while found := taken(jobs, held):
        for name, one in found:
            held[name] -= 1
            if not refused:
                refused = True
                jobs.rejected(LIFE, Rejection(one.sample_id, 0, RejectReason.DRAINING, "later"), name)
                continue
            jobs.finished(LIFE, generation(one, name), name)
            ran[name].append(int(one.sample_id.split("/")[2]))
    (told,) = jobs.accounts.finished
    assert arranged.lines is not None
    as_planned = sum(
        arranged.lines.planned(answer) == name for name, answers in ran.items() for answer in answers
    )
    assert told == replace(told, job_id="train/3", policy="skewness", samples=62, planned_s=arranged.planned_s,
                           in_lines=True, as_planned=as_planned)  # fmt: skip
    assert told.steals >= len(ran["new"]) > 0 and 0 < told.as_planned < 62 and told.actual_s > 0
    assert len(jobs.accounts) == 0 and list(jobs.accounts.recent()) == [2.0] * 62
    assert (
        dispatched_from_proto(pb.DispatchedRow.FromString(dispatched_to_proto(told).SerializeToString()))
        == told
    )


def test_recent_lengths_are_of_whole_iterations_and_bounded() -> None:
    accounts = Accounts()
    for number in range(7):
        asked = job([3.0] * 5000, number=number)
        accounts.open(asked, Arrangement("arrival"), None)
        assert len(accounts.recent()) == 4096 * min(number, 4), "what is under way does not count"
        for member in members(asked):
            answer = generation(
                Assignment(member.sample_id, 0, asked.prompts[0].token_ids, asked.sampling), "a", 1 + number
            )
            accounts.answered(asked, member, answer, 0.0)
    assert sorted(set(accounts.recent())) == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("field", ["policy", "samples", "actual_s", "as_planned", "job_id"])
def test_what_is_told_is_checked(field: str) -> None:
    row = dispatched_to_proto(Dispatched("train/3", "lpt", 4, 1.0, 2.0, True, 1, 3))
    setattr(
        row, field, {"policy": "best", "samples": 0, "actual_s": -1.0, "as_planned": 5, "job_id": ""}[field]
    )
    with pytest.raises(ValueError, match=rf"dispatched\.{field}"):
        dispatched_from_proto(row)


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("policy", ["arrival", "lpt", "skewness"])
def test_a_thousand_instances_and_a_hundred_thousand_prompts(policy: Policy) -> None:
    """A placement costs the logarithm of what waits, whatever the policy: bounds far above what it takes, for a busy
    machine.
    """
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6, 1, 100_000), 16_000).round().tolist()
    ready = [Ready(f"i{number}", 32, 0) for number in range(1000)]
    jobs = work(by(policy, replace(RISING, batch=Ramp(0.01, (1.0, 16.0), (1e-5, 1e-3)))))
    asked = job(lengths)
    began = time.perf_counter()
    jobs.submit(asked, None, ready)
    submitted = time.perf_counter()
    held = {one.name: 0 for one in ready}
    placed: list[Placement] = jobs.queue.take(rooms(held, 40))
    first = time.perf_counter()
    for one in placed:
        held[one.instance] += 1
    alone = 0
    while alone < 5000:
        name = ready[alone % 1000].name
        alone += len(jobs.queue.take([Room(name, 99, 40, held[name] - 1)])) or 1
    end = time.perf_counter()
    plan, each, single = submitted - began, (first - submitted) / len(placed), (end - first) / alone
    print(
        f"{policy}: planned in {plan:.2f} s, {each * 1e6:.0f} us a placement, {single * 1e6:.0f} us one by one"
    )
    assert plan < 20 and each < 1e-3 and single < 2e-3


def test_the_spread_of_predictions_is_learned_from_answers_and_is_none_where_lengths_are_forced() -> None:
    accounts, asked = Accounts(), job([100.0] * 4)
    assert accounts.spread() is USUAL
    accounts.open(asked, Arrangement("lpt"), None)
    for length, member in zip((50, 100, 100, 200), members(asked), strict=True):
        given_out = Assignment(member.sample_id, 0, asked.prompts[0].token_ids, asked.sampling)
        accounts.answered(asked, member, generation(given_out, "a", length), 1.0)
    assert accounts.spread().deviation == pytest.approx(math.log(2) / math.sqrt(2), rel=1e-6)
    np.testing.assert_allclose(accounts.spread().seen, np.log([0.5, 1, 1, 2]), atol=1e-6)
    known = replace(job(LONG_TAIL), forced=[int(length) for length in LONG_TAIL], evaluation=True)
    sure = arrange(known, by("skewness"), TWO, (), Spread(5.0))
    assert sure.lines is not None
    assert sure.planned_s == arrange(job(LONG_TAIL), by("skewness"), TWO, (), KNOWN).planned_s
