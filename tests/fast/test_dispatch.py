"""Plans: every prompt once, the longest first, within slots and cache, never worse than what they are held against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.plan.generation import Stage, run_plan
from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.cost import FLAT, Ramp, TokenLatency
from streamrl_jax.ranker.dispatch import (
    Line,
    Plan,
    Server,
    Theft,
    lines_of,
    plan_answers,
    plan_arrival,
    plan_lpt,
    plan_paper,
    plan_skewness,
    predicted_makespan,
    steal,
)
from streamrl_jax.ranker.risk import KNOWN, Spread

GPU = TokenLatency(Ramp(0.006, (1.0, 64.0), (1e-5, 3e-4)), 2e-8, Ramp(0.0, (0.0,), (1e-5,)))
QUICK = TokenLatency(Ramp(0.002, (1.0,), (5e-5,)), 1e-8, Ramp(0.0, (0.0,), (1e-5,)))

Policy = Callable[[Sequence[float], int, Sequence[Server]], Plan]


def paper(lengths: Sequence[float], n: int, servers: Sequence[Server]) -> Plan:
    return plan_paper(lengths, n, servers, lengths if len(lengths) else [1.0])


POLICIES: dict[str, Policy] = {
    "arrival": plan_arrival,
    "lpt": plan_lpt,
    "paper": paper,
    "skewness": plan_skewness,
}


def servers_of(count: int, slots: int = 8, kv_tokens: int = 10_000, cost: TokenLatency = GPU) -> list[Server]:
    return [Server(f"gen-{index}", slots, kv_tokens, cost) for index in range(count)]


def unequal(count: int) -> list[Server]:
    return [
        replace(server, slots=4 + 3 * (index % 3), cost=(GPU, QUICK)[index % 2])
        for index, server in enumerate(servers_of(count))
    ]


LENGTHS = st.lists(st.integers(1, 3_000).map(float), max_size=40)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, n=st.integers(1, 5), count=st.integers(1, 6), equal=st.booleans())
def test_a_plan_places_every_prompt_once_in_a_line(
    policy: str, lengths: list[float], n: int, count: int, equal: bool
) -> None:
    servers = servers_of(count) if equal or policy == "paper" else unequal(count)
    plan = POLICIES[policy](lengths, n, servers)
    lines = lines_of(plan)
    assert sorted(group for line in lines for group in line.tolist()) == list(range(len(lengths)))
    for index, (server, line) in enumerate(zip(servers, lines, strict=True)):
        assert plan.rank[line].tolist() == list(range(line.size))
        assert (plan.instance[line] == index).all()
        held = np.asarray(lengths)[line]
        if policy != "arrival":
            assert (np.diff(held) <= 0).all(), "not the longest first"
        assert 1 <= plan.batch[index] <= server.slots
        if line.size:
            assert plan.batch[index] * (held**2).sum() / held.sum() / 2 <= max(
                server.kv_tokens, (held**2).sum() / held.sum() / 2
            )
    again = POLICIES[policy](lengths, n, servers)
    assert (again.instance == plan.instance).all()
    assert (again.rank == plan.rank).all()
    assert (again.batch == plan.batch).all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    n=st.integers(1, 4),
    count=st.integers(1, 12),
    cost=st.sampled_from([GPU, QUICK, FLAT]),
    kv_tokens=st.sampled_from([3_000, 10_000, 1_000_000]),
)
def test_the_walk_is_never_worse_than_the_papers_split(
    lengths: list[float], n: int, count: int, cost: TokenLatency, kv_tokens: int
) -> None:
    servers = servers_of(count, kv_tokens=kv_tokens, cost=cost)
    ours = predicted_makespan(plan_skewness(lengths, n, servers, spread=KNOWN), lengths, n, servers)
    theirs = predicted_makespan(paper(lengths, n, servers), lengths, n, servers)
    plain = predicted_makespan(plan_lpt(lengths, n, servers), lengths, n, servers)
    assert ours <= min(theirs, plain) * (1 + 1e-12)


def test_the_walk_gains_where_few_are_long_and_a_step_costs_by_its_batch() -> None:
    lengths = [8_000.0] * 3 + [300.0] * 397
    servers = servers_of(4, slots=256, kv_tokens=10**7, cost=QUICK)
    plain = plan_lpt(lengths, 1, servers).makespan_s
    skewed = plan_skewness(lengths, 1, servers, spread=KNOWN)
    # A long answer alone takes 8,000 steps of 2 ms; with a quarter of the short ones beside it 1.5 s more.
    assert 16 < skewed.makespan_s < 0.95 * plain
    beside = np.bincount(skewed.instance[3:], minlength=4)
    assert beside[skewed.instance[:3]].max() < beside.max() / 2


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("cost", [GPU, QUICK, FLAT])
def test_even_lengths_are_spread_evenly_with_full_batches(count: int, cost: TokenLatency) -> None:
    servers = servers_of(count, slots=16, kv_tokens=10**6, cost=cost)
    lengths = np.full(count * 40, 500.0)
    plan = plan_skewness(lengths, 2, servers)
    assert np.bincount(plan.instance, minlength=count).tolist() == [40] * count
    assert plan.batch.tolist() == [16] * count
    assert plan.makespan_s == plan_lpt(lengths, 2, servers).makespan_s


def optimum(lengths: Sequence[int], machines: int) -> int:
    """The least makespan, by trying all placements but those that only rename machines or are already too long."""
    best = sum(lengths)

    def place(rest: Sequence[int], loads: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if not rest:
            best = max(loads)
            return
        for load in set(loads):
            index = loads.index(load)
            place(rest[1:], (*loads[:index], load + rest[0], *loads[index + 1 :]))

    place(sorted(lengths, reverse=True), (0,) * machines)
    return best


SMALL = st.lists(st.integers(1, 30), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(lengths=SMALL, machines=st.integers(1, 4))
def test_longest_first_is_within_four_thirds_of_the_optimum(lengths: list[int], machines: int) -> None:
    servers = servers_of(machines, slots=1, kv_tokens=10**6, cost=FLAT)
    bound = (4 / 3 - 1 / (3 * machines)) * optimum(lengths, machines)
    for plan in (plan_lpt(lengths, 1, servers), plan_skewness(lengths, 1, servers, spread=KNOWN)):
        loads = np.bincount(plan.instance, weights=lengths, minlength=machines)
        assert plan.makespan_s == pytest.approx(loads.max())
        assert loads.max() <= bound + 1e-9


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30), machines=st.integers(1, 6))
def test_an_instance_more_never_costs_beyond_the_known_anomaly(lengths: list[int], machines: int) -> None:
    """Graham (1966): from m to m' machines a list's makespan grows by at most 1 + (m − 1) / m'; longest first by at
    most 4/3 − 1/(3 m'), since the optimum of m' is none above that of m."""
    before, after = (
        plan_lpt(lengths, 1, servers_of(count, slots=1, kv_tokens=10**6, cost=FLAT)).makespan_s
        for count in (machines, machines + 1)
    )
    bound = min(1 + (machines - 1) / (machines + 1), 4 / 3 - 1 / (3 * (machines + 1)))
    assert after <= max(1.0, bound) * before + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(st.integers(1, 60).map(float), max_size=200),
    busy=st.lists(st.integers(0, 90).map(float), min_size=32, max_size=50),
)
def test_blocks_place_as_one_by_one_does(work: list[float], busy: list[float]) -> None:
    work.sort(reverse=True)
    loads = busy.copy()
    expected: list[int] = []
    for item in work:
        expected.append(loads.index(min(loads)))
        loads[expected[-1]] += item
    assert assign_lpt(np.array(work), np.ones(len(busy)), np.array(busy)).tolist() == expected


def test_a_quicker_server_gets_more() -> None:
    servers = [Server("slow", 4, 10**6, GPU), Server("quick", 8, 10**6, QUICK)]
    lengths = np.linspace(100, 900, 60)
    for policy in (plan_lpt, plan_skewness):
        plan = policy(lengths, 1, servers)
        tokens = np.bincount(plan.instance, weights=lengths)
        assert tokens[1] > 2 * tokens[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_prompt_one_prompt_and_more_instances_than_prompts(policy: str) -> None:
    assert POLICIES[policy]([], 2, servers_of(3)).makespan_s == 0
    assert POLICIES[policy]([7.0], 2, servers_of(3)).rank.tolist() == [0]
    plan = POLICIES[policy]([5.0, 9.0, 7.0], 1, servers_of(8))
    assert len(set(plan.instance.tolist())) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0, math.inf])
def test_what_is_no_length_is_refused_by_name(policy: str, bad: float) -> None:
    with pytest.raises(UserError, match=r"lengths\[1\] = "):
        POLICIES[policy]([5.0, bad], 1, servers_of(2))


def test_other_nonsense_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no server"):
        plan_lpt([1.0], 1, [])
    with pytest.raises(UserError, match="n = 0"):
        plan_lpt([1.0], 0, servers_of(1))
    with pytest.raises(UserError, match="2 prompt_tokens for 1 lengths"):
        plan_lpt([1.0], 1, servers_of(1), [1, 2])
    with pytest.raises(UserError, match=r"prompt_tokens\[0\]"):
        plan_lpt([1.0], 1, servers_of(1), [-1])
    with pytest.raises(ValueError, match="deviation"):
        Spread(-1.0)
    with pytest.raises(ValueError, match="slots = 0"):
        Server("gen-0", 0, 1, FLAT)


def test_answers_stay_together_where_their_prefix_is_dear_and_part_where_one_prompt_is_the_stage() -> None:
    servers = servers_of(4, slots=64, kv_tokens=10**7)
    plan, answers = plan_answers(np.full(64, 50.0), 4, servers, np.full(64, 4_000))
    assert (plan.instance.size, answers) == (64, 4)
    costly = TokenLatency(Ramp(0.001, (1.0,), (0.001,)), 0.0, Ramp(0.0, (0.0,), (1e-6,)))
    apart = servers_of(4, slots=64, kv_tokens=10**7, cost=costly)
    plan, answers = plan_answers([5_000.0, 10.0], 16, apart, [10, 10])
    assert (plan.instance.size, answers) == (32, 1)
    one_by_one = plan_skewness(np.repeat([5_000.0, 10.0], 16), 1, apart, np.repeat([10, 10], 16))
    assert plan.makespan_s == one_by_one.makespan_s
    assert plan_answers([5_000.0, 10.0], 1, apart, [10, 10])[1] == 1


def test_uncertain_lengths_keep_the_plan_from_staking_on_them() -> None:
    rng = np.random.default_rng(0)
    means = np.clip(rng.lognormal(np.log(2_000), 1.0, 256), 10, 20_000)
    servers = servers_of(8, slots=256, kv_tokens=10**6, cost=QUICK)
    known, unsure = (
        plan_skewness(means, 8, servers, spread=Spread(noise), limit=20_000) for noise in (0.0, 0.5)
    )
    assert known.makespan_s < 0.95 * plan_lpt(means, 8, servers).makespan_s
    shared = rng.standard_normal((256, 1)) + rng.standard_normal((256, 8))
    turned = np.clip(means[:, None] * np.exp(0.5 * shared / np.sqrt(2) - 0.125), 1, 20_000)
    stage = Stage(turned.astype(np.int64), np.zeros(256, np.int64), means)
    ends = [run_plan(stage, plan, servers).makespan_s for plan in (known, unsure)]
    assert ends[1] < 0.95 * ends[0]


def test_observed_spreads_are_drawn_as_they_were_observed() -> None:
    rng = np.random.default_rng(0)
    seen = np.append(rng.normal(0, 0.1, 999), 3.0)
    draws = Spread.of(seen).draws(rng, (200, 500, 2))
    assert (draws == 3.0).mean() == pytest.approx(1e-3, rel=0.2)
    assert draws.std() == pytest.approx(seen.std(), rel=0.05)
    assert np.corrcoef(draws[..., 0].ravel(), draws[..., 1].ravel())[0, 1] == pytest.approx(0.5, abs=0.1)


def test_a_heavy_tail_keeps_the_plan_from_staking_on_means() -> None:
    """The deviation of normal errors, but one answer in 200 runs on for 20 times its prediction: then a line of many
    short answers is no safer than any other, and the plan promises less."""
    rng = np.random.default_rng(0)
    means = np.clip(rng.lognormal(np.log(500), 1.0, 256), 10, 20_000)
    servers = servers_of(8, slots=256, kv_tokens=10**6, cost=QUICK)
    seen = np.append(np.zeros(199), math.log(20))
    heavy = Spread.of(seen)
    normal, aware = (
        plan_skewness(means, 8, servers, spread=one, limit=20_000) for one in (Spread(heavy.deviation), heavy)
    )
    assert normal.saves > 0.1 > aware.saves
    assert normal.makespan_s < 0.9 * plan_lpt(means, 8, servers).makespan_s


def test_a_million_prompts_on_a_thousand_instances_take_seconds() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(2_000), 1.0, 10**6), 1, 20_000)
    servers = servers_of(1_000, slots=256, kv_tokens=10**6)
    started = time.process_time()
    plan = plan_skewness(lengths, 1, servers)
    assert time.process_time() - started < 30, "n log n; anything quadratic would take hours"
    assert np.bincount(plan.instance).sum() == 10**6


def line(tokens: float, waiting: Sequence[float], batch: int = 2, step_s: float = 1.0) -> Line:
    return Line(step_s, batch, tokens, waiting, [1] * len(waiting), sum(waiting))


def test_the_dry_one_takes_the_longest_that_it_ends_before_the_latest_line_would() -> None:
    dry, early, late = line(0, []), line(40, [5, 4]), line(40, [90, 30, 20, 1])
    # The late line ends after 90.5 steps: 90 is short enough.
    assert steal([dry, early, late], 0) == Theft(2, 0)
    assert steal([dry, early, line(10, [90, 30, 20, 1])], 0) == Theft(2, 1)


def test_nothing_moves_that_would_end_no_earlier() -> None:
    assert steal([line(0, []), line(0, [])], 0) is None
    assert steal([line(500, []), line(40, [90])], 0) is None
    slow = line(0, [], step_s=100.0)
    assert steal([slow, line(40, [90, 30])], 0) is None
    # Its own longest answer ends after the other's line: help would only slow it down.
    assert steal([replace(line(100, []), running=1, longest=100.0), line(40, [90, 30])], 0) is None


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 500), st.lists(st.integers(1, 100).map(float), max_size=6), st.integers(1, 4)),
        min_size=2,
        max_size=6,
    )
)
def test_stealing_ends_and_shortens(rows: list[tuple[float, list[float], int]]) -> None:
    lines = [line(tokens, sorted(waiting, reverse=True), batch) for tokens, waiting, batch in rows]
    lines[0] = replace(lines[0], waiting=[], answers=[], waiting_tokens=0.0)
    start = max(one.ends_s for one in lines)
    for _ in range(sum(len(waiting) for _, waiting, _ in rows) + 1):
        theft = steal(lines, 0)
        if theft is None:
            break
        victim = lines[theft.victim]
        tokens = victim.waiting[theft.place]
        kept = [value for place, value in enumerate(victim.waiting) if place != theft.place]
        lines[theft.victim] = line(victim.tokens, kept, victim.batch)
        lines[0] = replace(lines[0], tokens=lines[0].tokens + tokens, longest=max(lines[0].longest, tokens))
        assert lines[0].ends_s < victim.ends_s
    else:
        pytest.fail("stealing does not end")
    assert max(one.ends_s for one in lines) <= start
