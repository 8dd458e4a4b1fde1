"""A stage in simulated time against a loop that goes step by step, and against what can be counted by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.plan.generation import Conditions, Outcome, Stage, run_plan, run_pulled
from streamrl_jax.ranker.cost import FLAT, Ramp, TokenLatency
from streamrl_jax.ranker.dispatch import (
    Plan,
    Server,
    lines_of,
    plan_arrival,
    plan_lpt,
    plan_skewness,
    predicted_makespan,
)

GPU = TokenLatency(Ramp(0.006, (1.0, 4.0), (1e-4, 3e-3)), 2e-6, Ramp(0.004, (0.0,), (1e-5,)))
ALONE = Conditions(stealing=False)


def stage_of(
    lengths: Sequence[Sequence[int]],
    prompts: Sequence[int] | None = None,
    predicted: Sequence[float] | None = None,
) -> Stage:
    array = np.asarray(lengths, np.int64).reshape(len(lengths), -1)
    expected = array.mean(1) if predicted is None else np.asarray(predicted, np.float64)
    return Stage(
        array, np.asarray(prompts if prompts is not None else [0] * len(lengths), np.int64), expected
    )


def servers_of(count: int, slots: int = 4, kv_tokens: int = 10**6, cost: TokenLatency = GPU) -> list[Server]:
    return [Server(f"gen-{index}", slots, kv_tokens, cost) for index in range(count)]


def step_by_step(stage: Stage, plan: Plan, servers: Sequence[Server]) -> list[tuple[float, int]]:
    """Each server's end and steps, with nothing but addition."""
    ends: list[tuple[float, int]] = []
    for server, batch, line in zip(servers, plan.batch, lines_of(plan), strict=True):
        queue = [(group, int(length)) for group in line for length in stage.lengths[group]]
        running: list[list[int]] = []  # context, tokens left
        known: set[int] = set()
        seconds, steps = 0.0, 0
        while queue or running:
            prompts = 0
            while queue and len(running) < batch:
                group, length = queue.pop(0)
                prompts += 0 if group in known else int(stage.prompts[group])
                known.add(group)
                running.append([int(stage.prompts[group]), length])
            if prompts:
                seconds += float(server.cost.prefill_s(prompts) - server.cost.prefill_s(0))
            seconds += float(server.cost.step_s(len(running), sum(context for context, _ in running)))
            steps += 1
            running = [[context + 1, left - 1] for context, left in running if left > 1]
        ends.append((seconds, steps))
    return ends


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    groups, n = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rows = draw(
        st.lists(st.lists(st.integers(1, 40), min_size=n, max_size=n), min_size=groups, max_size=groups)
    )
    prompts = draw(st.lists(st.integers(0, 20), min_size=groups, max_size=groups))
    predicted = draw(st.lists(st.integers(1, 40).map(float), min_size=groups, max_size=groups))
    return stage_of(rows, prompts, predicted)


@settings(max_examples=60, deadline=None)
@given(stage=stages(), count=st.integers(1, 3), slots=st.integers(1, 5), lpt=st.booleans())
def test_events_equal_a_loop_over_steps(stage: Stage, count: int, slots: int, lpt: bool) -> None:
    servers = servers_of(count, slots)
    n = stage.lengths.shape[1]
    plan = (plan_lpt if lpt else plan_arrival)(stage.predicted, n, servers, stage.prompts)
    outcome = run_plan(stage, plan, servers, ALONE)
    expected = step_by_step(stage, plan, servers)
    assert outcome.steps.tolist() == [steps for _, steps in expected]
    np.testing.assert_allclose(outcome.finish_s, [seconds for seconds, _ in expected], rtol=1e-9)
    np.testing.assert_allclose(outcome.busy_s, outcome.finish_s, rtol=1e-9)
    assert outcome.makespan_s == outcome.finish_s.max()


def everything(stage: Stage, servers: Sequence[Server], conditions: Conditions) -> list[Outcome]:
    n = stage.lengths.shape[1]
    outcomes = [run_pulled(stage, order, servers, conditions) for order in ("arrival", "lpt")]
    for planner in (plan_lpt, plan_skewness):
        plan = planner(stage.predicted, n, servers, stage.prompts)
        outcomes.append(run_plan(stage, plan, servers, conditions))
    return outcomes


@settings(max_examples=60, deadline=None)
@given(
    stage=stages(),
    count=st.integers(1, 4),
    kv_tokens=st.sampled_from([60, 150, 10**6]),
    conditions=st.builds(
        Conditions,
        stealing=st.booleans(),
        look_ahead=st.integers(0, 3),
        refill_s=st.sampled_from([0.0, 0.001, 0.05]),
    ),
    cost=st.sampled_from([GPU, FLAT]),
)
def test_tokens_and_answers_are_conserved(
    stage: Stage, count: int, kv_tokens: int, conditions: Conditions, cost: TokenLatency
) -> None:
    for outcome in everything(stage, servers_of(count, 3, kv_tokens, cost), conditions):
        assert outcome.tokens.sum() == stage.lengths.sum()
        assert (outcome.ended_s > 0).all()
        assert outcome.makespan_s == outcome.ended_s.max() == outcome.finish_s.max()
        assert outcome.steps.max() >= stage.lengths.max()
        assert (outcome.tokens <= outcome.steps * outcome.slots).all()
        assert (outcome.busy_s <= outcome.makespan_s + 1e-9).all()


def test_a_small_batch_ends_with_what_it_was_small_for() -> None:
    """As in the controller: one answer alone for 10 steps, then the instance helps the other one with all its slots."""
    stage = stage_of([[10]] * 61)
    instance, rank = np.array([0] + [1] * 60, np.int32), np.array([0, *range(60)], np.int32)
    plan = Plan(instance, rank, np.array([1, 4], np.int32), 0.0)
    for look_ahead, ends_s in (
        (0, 80),
        (2, 90),
    ):  # 56 more, 8 at once; at the end what one holds ahead waits for it
        outcome = run_plan(stage, plan, servers_of(2, cost=FLAT), Conditions(look_ahead=look_ahead))
        assert (outcome.ended_s <= 10).sum() == 5
        assert outcome.makespan_s == ends_s
    alone = run_plan(stage, plan, servers_of(2, cost=FLAT), ALONE)
    assert alone.makespan_s == 150 and alone.steps.tolist() == [10, 150]


@pytest.mark.parametrize("kv_token_s", [0.0, 1e-18, 1e-14, 1e-12, 1e-6])
def test_a_small_cost_of_contexts_stops_no_clock(kv_token_s: float) -> None:
    """The steps until a moment are a root in which small numbers would cancel."""
    cost = TokenLatency(Ramp(1e-2, (1.0,), (0.0,)), kv_token_s, Ramp(0.0, (0.0,), (0.0,)))
    outcome = run_pulled(stage_of([[7, 3], [5, 9]]), "arrival", servers_of(2, 1, cost=cost))
    assert outcome.steps.sum() == 24 and outcome.makespan_s == pytest.approx(0.16, rel=1e-3)


def test_with_a_neutral_cost_seconds_are_steps() -> None:
    stage = stage_of([[5], [4], [3], [2], [1]])
    servers = servers_of(2, slots=1, cost=FLAT)
    pulled = run_pulled(stage, "arrival", servers)
    assert (pulled.makespan_s, pulled.steps.tolist()) == (8.0, [8, 7])  # 5, 2, 1 and 4, 3
    planned = run_plan(stage, plan_lpt(stage.predicted, 1, servers), servers, ALONE)
    assert planned.makespan_s == planned.steps.max() == 8
    assert planned.filled == 15 / 16


def test_the_order_of_the_queue_counts() -> None:
    stage = stage_of([[1], [1], [1], [1], [1], [1], [6]])
    servers = servers_of(2, slots=1, cost=FLAT)
    assert run_pulled(stage, "arrival", servers).makespan_s == 9
    assert run_pulled(stage, "lpt", servers).makespan_s == 6


def test_an_instance_that_runs_dry_takes_over_what_was_predicted_wrongly() -> None:
    # All are thought alike; the first line's are long.
    stage = stage_of([[40], [2], [40], [2], [40], [2], [40], [2]], predicted=[10.0] * 8)
    servers = servers_of(2, slots=1, cost=FLAT)
    plan = plan_lpt(stage.predicted, 1, servers)
    kept = run_plan(stage, plan, servers, ALONE)
    shared = run_plan(stage, plan, servers, Conditions(stealing=True))
    assert (kept.makespan_s, kept.stolen) == (160, 0)
    assert shared.makespan_s <= 120
    assert shared.stolen >= 1


def test_a_slow_refill_leaves_slots_empty_and_look_ahead_bridges_it() -> None:
    stage = stage_of([[4]] * 6)
    servers = servers_of(1, slots=1, cost=FLAT)
    at_once, slow, bridged = (
        run_pulled(stage, "arrival", servers, conditions).makespan_s
        for conditions in (
            Conditions(),
            Conditions(refill_s=2.0),
            Conditions(refill_s=2.0, look_ahead=1),
        )
    )
    assert (at_once, slow, bridged) == (24, 34, 24)


def test_a_full_cache_puts_answers_off_and_loses_none() -> None:
    stage = stage_of([[50]] * 6, prompts=[10] * 6)
    servers = servers_of(1, slots=6, kv_tokens=200, cost=FLAT)
    outcome = run_pulled(stage, "arrival", servers)
    assert outcome.put_off > 0
    assert outcome.tokens.tolist() == [300]
    # At most 200 tokens of cache: 300 tokens of answers cannot be had in the 50 steps that six slots would take.
    assert outcome.makespan_s > 50


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), sigma=st.floats(0.1, 1.5), count=st.integers(1, 4))
def test_the_planners_model_foretells_known_lengths(seed: int, sigma: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(200), sigma, 120 * count), 1, 2_000).astype(np.int64)
    stage = stage_of(lengths[:, None].tolist(), [20] * lengths.size)
    servers = servers_of(count, slots=24)
    for planner in (plan_lpt, plan_skewness):
        plan = planner(stage.predicted, 1, servers, stage.prompts)
        predicted = predicted_makespan(plan, stage.predicted, 1, servers, stage.prompts)
        assert predicted == pytest.approx(run_plan(stage, plan, servers, ALONE).makespan_s, rel=0.05)


def test_a_cluster_of_128_takes_seconds() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1_000), 1.0, (2_000, 8)), 10, 16_000).astype(np.int64)
    stage = Stage(lengths, np.full(2_000, 200), lengths.mean(1))
    started = time.process_time()
    outcome = run_pulled(stage, "lpt", servers_of(128, 32))
    assert outcome.tokens.sum() == lengths.sum()
    assert time.process_time() - started < 60


def test_what_is_no_stage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="lengths: 0"):
        stage_of([[1], [0]], predicted=[1.0, 1.0])
    with pytest.raises(ValueError, match="one row a prompt"):
        Stage(np.ones(3, np.int64), np.zeros(3, np.int64), np.ones(3))
    with pytest.raises(UserError, match=r"lengths\[1\]"):
        run_pulled(stage_of([[1], [1]], predicted=[1.0, -1.0]), "lpt", servers_of(1))
