"""The paper's algorithm 2 against a loop that is written from its text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import FLAT, Ramp, TokenLatency
from streamrl_jax.ranker.dispatch import Server, lines_of, plan_paper

GPU = TokenLatency(Ramp(0.006, (1.0, 64.0), (1e-5, 3e-4)), 2e-8, Ramp(0.0, (0.0,), (1e-5,)))


def latency(server: Server, answers: int, length: float) -> float:
    """PTL(BS) · L · ⌈M / BS⌉."""
    size = min(server.slots, max(1, math.floor(server.kv_tokens / length)), answers)
    return float(server.cost.ptl(size, length / 2)) * length * math.ceil(answers / size)


def by_the_text(
    lengths: list[float], n: int, server: Server, instances: int, recent: list[float], alpha: float
) -> tuple[float, list[int]]:
    """The least latency, and the instance of each prompt."""
    order = sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])
    tail = math.ceil(alpha * len(lengths))
    long, regular = order[:tail], order[tail:]
    l_long, l_regular = float(np.quantile(recent, 0.9)), float(np.quantile(recent, 0.5))
    best, split = math.inf, 0
    if instances > 1 and long and regular:
        for n_long in range(1, instances):
            n_regular = instances - n_long
            worst = max(
                latency(server, math.ceil(len(long) * n / n_long), l_long),
                latency(server, math.ceil(len(regular) * n / n_regular), l_regular),
            )
            if worst < best:
                best, split = worst, n_long
        classes = [(long, range(split)), (regular, range(split, instances))]
    else:
        best = latency(server, math.ceil(len(order) * n / instances), l_long)
        classes = [(order, range(instances))]
    placed = [0] * len(lengths)
    for prompts, members in classes:
        loads = dict.fromkeys(members, 0.0)
        for prompt in prompts:
            least = min(members, key=lambda member: (loads[member], member))
            placed[prompt] = least
            loads[least] += lengths[prompt]
    return best, placed


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4_000).map(float), min_size=1, max_size=40),
    recent=st.lists(st.integers(1, 4_000).map(float), min_size=1, max_size=20),
    n=st.integers(1, 4),
    instances=st.integers(1, 40),
    alpha=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]),
    kv_tokens=st.sampled_from([2_000, 20_000, 10**6]),
    cost=st.sampled_from([GPU, FLAT]),
)
def test_the_plan_is_the_papers(
    lengths: list[float],
    recent: list[float],
    n: int,
    instances: int,
    alpha: float,
    kv_tokens: int,
    cost: TokenLatency,
) -> None:
    server = Server("gen", 16, kv_tokens, cost)
    plan = plan_paper(lengths, n, [server] * instances, recent, alpha)
    makespan, placed = by_the_text(lengths, n, server, instances, recent, alpha)
    assert plan.makespan_s == pytest.approx(makespan, rel=1e-12)
    assert plan.instance.tolist() == placed


def test_the_long_get_instances_of_their_own_and_smaller_batches() -> None:
    lengths = [4_000.0] * 20 + [400.0] * 80
    servers = [Server(f"gen-{index}", 64, 50_000, GPU) for index in range(8)]
    plan = plan_paper(lengths, 4, servers, lengths)
    long = set(plan.instance[:20].tolist())
    assert not long & set(plan.instance[20:].tolist())
    assert {int(plan.batch[index]) for index in long} == {12}  # 50,000 / 4,000
    assert sum(line.size for line in lines_of(plan)) == 100


def test_what_its_model_does_not_know_is_refused_by_name() -> None:
    servers = [Server("a", 8, 1_000, FLAT), Server("b", 16, 1_000, FLAT)]
    with pytest.raises(UserError, match=r"dispatch\.policy = 'paper'.*skewness"):
        plan_paper([1.0, 2.0], 1, servers, [1.0])
    with pytest.raises(UserError, match="recent lengths"):
        plan_paper([1.0, 2.0], 1, servers[:1], [])
    with pytest.raises(UserError, match=r"dispatch\.alpha = 1\.5"):
        plan_paper([1.0, 2.0], 1, servers[:1], [1.0], alpha=1.5)
