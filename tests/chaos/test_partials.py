"""Partial work between real processes: kept over deaths and broken streams, continued elsewhere, freed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from streamrl_jax.control.events import EventKind
from streamrl_jax.gen.launch import StaticLauncher

from .harness import CHAOS, Scene, endpoints, known_tokens, local, scene
from .proxies import LoopThread, Wire

OFTEN = replace(CHAOS, progress_interval_s=0.1)
LONG = {"tokens_per_s": 5.0, "shortest": 30, "longest": 30}
"""Answers take 6 s, and a token longer than the interval of progress: each is told."""


def least_known(found: Scene, name: str) -> int:
    """Tokens that the controller has of each answer that an instance has begun and not finished, the fewest."""
    return min(known_tokens(found.controller, name), default=0)


def tokens_of(found: Scene, name: str) -> int:
    """That an instance's heartbeats have told of."""
    return sum(view.tokens for view in found.controller.pool() if view.name == name)


def test_killed_in_mid_answer_nothing_is_written_twice_that_was_told(tmp_path: Path) -> None:
    """Every answer is killed about half-way: what was told of it, but for one interval, is not made again."""
    with scene(local(tmp_path, "ab", {"a": LONG, "b": LONG}), tmp_path, OFTEN) as found:
        job_id = found.submit(0, 2)
        found.wait_for(lambda: found.controller.sizes()["partials"] == 8)
        found.wait_for(lambda: tokens_of(found, "a") >= 4 * 10)
        found.signal("a", signal.SIGKILL)
        found.take(job_id)  # looks at every token of every answer
        counts = found.adds_up()
        assert {len(sample.generation.token_ids) for sample in found.samples} == {30}
        assert counts["continued"] == counts["taken_back"] == 4
        assert counts["tokens_kept"] >= 4 * 8
        made = sum(view.tokens for view in found.controller.pool())
        assert made <= 8 * 30 + 4 * 5, "tokens that heartbeats told of; an interval is a token"


def test_what_was_told_to_a_stream_that_broke_is_told_again(tmp_path: Path) -> None:
    """A stream breaks and is opened again, then the instance dies: what it wrote before the break is not lost."""
    with (
        endpoints(tmp_path, "ab", **LONG) as addresses,
        LoopThread("proxies") as loop,
    ):
        wire = Wire(loop, addresses["a"]).open()
        launcher = StaticLauncher({"a": wire.address, "b": addresses["b"]})
        # A killed endpoint, which nobody of the run's started, is noticed by the lease.
        with scene(launcher, tmp_path, replace(OFTEN, lease_s=5.0)) as found:
            job_id = found.submit(0, 2)
            found.wait_for(lambda: found.controller.sizes()["partials"] == 8)
            wire.reset()
            found.wait_for(lambda: found.seen(EventKind.RECONNECTED, "a"))
            # What came after a gap would not be kept: more is known only where the break's tokens were told again.
            before = least_known(found, "a")
            found.wait_for(lambda: least_known(found, "a") >= max(10, before + 3))
            found.signal("a", signal.SIGKILL)
            found.take(job_id)
            counts = found.adds_up()
            assert counts["continued"] == 4 and counts["tokens_kept"] >= 4 * 10
