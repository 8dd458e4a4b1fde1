"""Instances that are killed and started anew while a plan says what each of them answers: every sample once."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control.dispatching import DispatchSettings
from streamrl_jax.control.events import EventKind
from streamrl_jax.ranker.cost import FLAT, Ramp, TokenLatency
from tests.fast.control_world import prompts

from .harness import CHAOS, PACE, TICK_S, local, scene

RISING = TokenLatency(Ramp(0.01, (1.0, 2.0), (0.0, 0.01)), 0.0, Ramp(0.0, (0.0,), (0.0,)))
"""More than two answers at once bring nothing: the plan keeps batches small."""

COUNT, N = 80, 2


def foreseen(count: int) -> list[float]:
    """The lengths that the counting instances will give these prompts, every tenth of them off by a half."""
    shortest, longest = PACE["shortest"], PACE["longest"]
    exact = [
        shortest + int(prompt.token_ids.sum()) * 7919 % (longest - shortest + 1) for prompt in prompts(count)
    ]
    return [length * (1.5 if number % 10 == 0 else 1.0) for number, length in enumerate(exact)]


@pytest.mark.parametrize(("policy", "cost"), [("paper", FLAT), ("skewness", RISING)])
def test_one_of_three_is_killed_in_the_middle_of_a_plan(
    tmp_path: Path, policy: Policy, cost: TokenLatency
) -> None:
    """kill -9: its line goes to the others, those that it had first; back again it takes on what is left."""
    settings = replace(CHAOS, dispatch=DispatchSettings(policy, 0.2, cost))
    with scene(local(tmp_path, "abc"), tmp_path, settings) as found:
        job_id = found.submit(0, COUNT, N, predicted=foreseen(COUNT))
        killed: list[float] = []
        found.take(job_id, {COUNT // 4: lambda: killed.append(found.signal("a", signal.SIGKILL))})
        found.wait_for(lambda: found.seen(EventKind.RESTART, "a"))  # its remains are tidied up before
        counts = found.adds_up()
        seconds, why = found.noticed_after("a", killed[0])
        assert seconds < min(0.5, TICK_S) + found.slack_s and "killed by SIGKILL" in why
        assert counts["restarts"] == 1 and counts["taken_back"] > 0
        (told,) = found.controller.dispatched()
        assert told.in_lines and told.policy == policy and told.samples == COUNT * N
        assert told.steals > 0 and 0 < told.as_planned < told.samples
        shares = Counter(sample.generation.instance for sample in found.samples)
        print(
            f"\n{policy}: {told.as_planned} of {told.samples} as planned, {told.steals} taken over, {dict(shares)}"
        )


def test_one_that_is_killed_again_and_again_strands_nothing(tmp_path: Path) -> None:
    """Two iterations are open, with small batches; one of two instances dies three times."""
    settings = replace(CHAOS, dispatch=DispatchSettings("skewness", 0.2, RISING))
    with scene(local(tmp_path, "ab"), tmp_path, settings) as found:
        jobs = [found.submit(number, COUNT, 1, predicted=foreseen(COUNT)) for number in (0, 1)]

        killed: list[float] = []

        def kill() -> None:
            found.wait_for(
                lambda: (
                    len(found.seen(EventKind.LOST, "a")) == len(killed)
                    and len(found.seen(EventKind.READY, "a")) == len(killed) + 1
                )
            )
            killed.append(found.signal("a", signal.SIGKILL))

        found.take(jobs[0], {10: kill, 40: kill})
        found.take(jobs[1], {20: kill})
        found.adds_up()
        assert {one.job_id for one in found.controller.dispatched()} == set(jobs)
