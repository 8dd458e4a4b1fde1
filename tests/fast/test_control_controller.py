"""The controller over real gRPC: the good way, versions, updates, probes, evaluation, and the end."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from streamrl_jax.control.events import Activity, EventKind
from streamrl_jax.control.faults import ControlError
from tests.fakes import FakeEngine
from tests.fast.control_world import World, check_answer, job, reward_by_length, running
from streamrl_jax.types import FinishReason, expand_runs


def test_five_hundred_samples_from_two_instances() -> None:
    """Each once, right contents, rewarded; both instances took part; nothing is kept afterwards."""
    world = World(("a", "b"), lambda name, life: FakeEngine(slots=8))
    with running(world) as run:
        asked = job(0, count=125, n=4)
        run.controller.submit(asked)
        samples = list(run.controller.samples("train/0", 10))
        assert len({s.sample_id for s in samples}) == len(samples) == 500
        for sample in samples:
            check_answer(sample.prompt, sample.generation)
            assert sample.reward == len(sample.generation.token_ids)
            assert sample.iteration == 0
            assert sample.rewarded_s >= sample.arrived_s > 0
        groups = Counter(s.prompt.prompt_id for s in samples)
        assert set(groups.values()) == {4}
        assert {s.generation.instance for s in samples} == {"a", "b"}
        run.wait_for(lambda: set(run.controller.sizes().values()) == {0})
        counts = run.controller.counters()
        assert counts["dispatched"] == counts["finished"] == counts["delivered"] == 500
        assert not any(n for name, n in counts.items() if name.endswith("_dropped"))
