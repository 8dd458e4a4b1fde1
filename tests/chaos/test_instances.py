"""Instances that are killed, stopped, revived and slow: every sample once, and noticed within the stated bound."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl_jax.control.events import EventKind
from streamrl_jax.gen.launch import StaticLauncher

from .harness import CHAOS, LEASE_S, MEASURED, TICK_S, endpoints, local, scene

LATE_LEASE_S = 5.0


def test_killed_instances_are_noticed_at_the_next_tick(tmp_path: Path) -> None:
    """kill -9 of two of three, one of them a second time: its work goes to the others, and it comes back."""
    with scene(local(tmp_path, "abc"), tmp_path) as found:
        job_id = found.submit(0, 120)
        killed: dict[int, float] = {}

        def kill(name: str, number: int) -> None:
            killed[number] = found.signal(name, signal.SIGKILL)

        found.take(job_id, {40: lambda: kill("a", 0), 120: lambda: kill("b", 1)})
        found.wait_for(lambda: {event.instance for _, event in found.seen(EventKind.RESTART)} == {"a", "b"})
        counts = found.adds_up()
        for number, name in enumerate("ab"):
            seconds, why = found.noticed_after(name, killed[number])
            assert seconds < min(0.5, TICK_S) + found.slack_s and "killed by SIGKILL" in why
        assert counts["restarts"] == 2 and counts["taken_back"] > 0
        found.wait_for(lambda: len(found.seen(EventKind.READY)) == 5)


def test_a_stopped_instance_is_noticed_within_the_lease(tmp_path: Path) -> None:
    with scene(local(tmp_path, "ab"), tmp_path, MEASURED) as found:
        job_id = found.submit(0, 100)
        stopped: list[float] = []
        found.take(job_id, {30: lambda: stopped.append(found.signal("a", signal.SIGSTOP))})
        seconds, why = found.noticed_after("a", stopped[0])
        assert seconds < LEASE_S + TICK_S + found.slack_s
        # A last heartbeat may have told of no token: then its tokens are missed first.
        missed = r"(?:nothing was heard|it made no token for its \d+ samples)"
        (silence,) = re.findall(rf"{missed} for ([\d.]+) s \(gen\.lease_s = {LEASE_S:g}\)", why)
        assert float(silence) >= LEASE_S
        assert found.adds_up()["taken_back"] > 0


@pytest.mark.parametrize("prompts", [4, 10], ids=["after the job", "in the job"])
def test_late_samples_of_one_that_goes_on_again_are_dropped_and_counted(tmp_path: Path, prompts: int) -> None:
    """An instance that nobody may kill is stopped past its lease and goes on: what it held is done elsewhere, and what
    it still answers of that belongs to attempts that are over.
    """
    with (
        # The first answer comes after three seconds: until then each holds its first six.
        endpoints(tmp_path, "ab", tokens_per_s=10.0, shortest=30, longest=30) as addresses,
        # Without progress, of which late pieces would be dropped and counted too.
        scene(
            StaticLauncher(addresses), tmp_path, replace(CHAOS, lease_s=LATE_LEASE_S, progress_interval_s=0.0)
        ) as found,
    ):
        job_id = found.submit(0, prompts)
        found.wait_for(
            lambda: all(v.held == v.running + v.waiting == 6 for v in found.controller.pool()),
        )
        stopped = found.signal("a", signal.SIGSTOP)
        assert found.noticed_after("a", stopped)[0] < LATE_LEASE_S + TICK_S + found.slack_s
        found.wait_for(lambda: found.controller.counters()["redispatched"] == 6)
        if prompts == 4:
            found.take(job_id)
        gone_on = found.signal("a", signal.SIGCONT)
        if prompts == 10:
            found.take(job_id)
            assert any(s.generation.instance == "a" and s.arrived_s > gone_on for s in found.samples)
        found.wait_for(lambda: found.controller.counters()["stale_attempts_dropped"] == 6)
        counts = found.adds_up()
        assert sum(n for name, n in counts.items() if name.endswith("_dropped")) == 6


def test_one_that_is_stopped_for_less_than_its_lease_loses_nothing(tmp_path: Path) -> None:
    with scene(local(tmp_path, "ab"), tmp_path, replace(CHAOS, lease_s=8.0)) as found:
        job_id = found.submit(0, 60)
        found.signal("a", signal.SIGSTOP)
        time.sleep(8.0 / 4)
        found.signal("a", signal.SIGCONT)
        found.take(job_id)
        counts = found.adds_up()
        assert counts["taken_back"] == counts["restarts"] == 0
        assert not found.seen(EventKind.LOST)


def test_a_slow_instance_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    """One of three at a tenth of the speed: it keeps what its slots hold, and the run takes as long as two would,
    and the time of the slow one's last answers.
    """
    seconds: dict[str, float] = {}
    fast = {
        "tokens_per_s": 50.0,
        "shortest": 2,
        "longest": 6,
    }  # few wake-ups: a busy machine delays all alike
    paces = dict.fromkeys("abc", fast)
    for name, found_paces in (("all", paces), ("slow", paces | {"a": fast | {"tokens_per_s": 5.0}})):
        folder = tmp_path / name
        with scene(local(folder, "abc", found_paces), folder) as found:
            began = time.monotonic()
            found.take(found.submit(0, 120))
            seconds[name] = time.monotonic() - began
            slack_s = found.slack_s
            assert found.adds_up()["taken_back"] == 0
            share = Counter(sample.generation.instance for sample in found.samples)["a"] / found.submitted
    assert share < 0.15, "of three alike each has a third"
    answer_s = 6 / 5.0
    assert seconds["slow"] < 2 * seconds["all"] + 5 * answer_s + slack_s, (
        "its third would take it half a minute"
    )
    print(
        f"\nall at full speed {seconds['all']:.1f} s, one at a tenth {seconds['slow']:.1f} s, its share {share:.0%}"
    )
