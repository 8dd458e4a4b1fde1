"""A slow side stops the others: nobody's memory grows without bound, and all go on when it does."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from streamrl_jax.control.events import EventKind
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Generation, Prompt
from tests.fakes import FakeEngine
from tests.fast.control_world import SETTINGS, Run, World, job, reward_by_length, running

LIMIT = 10
HELD = 2 * (4 + 2)  # two instances of four slots and a look-ahead of two
SLOW = replace(SETTINGS, max_buffered_samples=LIMIT)


def world() -> World:
    return World(("a", "b"), engine=lambda name, life: FakeEngine(slots=4, tokens_per_s=5000))


def until_it_stands(run: Run) -> int:
    """Waits until nothing comes in any more; what is buffered then."""
    run.wait_for(lambda: not any(view.held for view in run.controller.pool()))
    return run.controller.sizes()["buffered"]


def test_a_trainer_that_stops_in_mid_job_stops_the_instances_and_goes_on_when_it_wants() -> None:
    with running(world(), replace(SLOW, lease_s=2.0)) as run:
        run.controller.submit(job(0, count=50))
        stream = run.controller.samples("train/0", 60)
        ids = [next(stream).sample_id for _ in range(30)]
        assert LIMIT <= until_it_stands(run) < LIMIT + 2 * HELD
        time.sleep(4.0)  # an instance that has nothing to do is not dead
        assert not run.seen(EventKind.LOST)
        ids += [sample.sample_id for sample in stream]
        assert len(ids) == len(set(ids)) == 200
        run.wait_for(lambda: not any(run.controller.sizes().values()))


def test_what_is_read_first_comes_although_what_is_read_later_fills_the_buffer() -> None:
    """The next iteration waits in full when a sample of this one is lost with its instance, and an evaluation comes."""
    with running(world(), SLOW) as run:
        run.controller.submit(job(1, count=50, min_version=0))
        until_it_stands(run)
        run.controller.submit(job(0, count=3))
        evaluation = replace(job(2, count=3, min_version=0), job_id="eval/0", evaluation=True, priority=1)
        run.controller.submit(evaluation)
        first = [sample.sample_id for sample in run.controller.samples("train/0", 60)]
        assert len(first) == len(set(first)) == 12
        run.world.now("a").kill()
        assert len(list(run.controller.samples("eval/0", 60))) == 12
        assert len(list(run.controller.samples("train/1", 60))) == 200


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reward_that_hangs_for_a_while_stops_the_instances(workers: int) -> None:
    go = threading.Event()

    def slow(prompt: Prompt, text: str, answer: Generation) -> RewardResult:
        assert go.wait(60)
        return reward_by_length(prompt, text, answer)

    with running(world(), replace(SLOW, reward_timeout_s=20, reward_workers=workers), slow) as run:
        run.controller.submit(job(0, count=50))
        assert LIMIT <= until_it_stands(run) < LIMIT + 2 * HELD
        go.set()
        assert len(list(run.controller.samples("train/0", 60))) == 200


def test_a_view_tells_the_size_of_the_kv_cache_and_the_steps_made() -> None:
    with running(World(("a",), engine=lambda name, life: FakeEngine(slots=4, kv_tokens=777))) as run:
        engine = run.world.now("a").engine
        run.controller.submit(job(0, count=3))
        assert len(list(run.controller.samples("train/0", 60))) == 12
        assert 15 <= engine.steps_total <= engine.tokens_total == 60, "12 answers of 5 tokens, 4 at once"
        run.wait_for(lambda: run.controller.pool()[0].steps_total == engine.steps_total)
        assert run.controller.pool()[0].kv_tokens == 777
