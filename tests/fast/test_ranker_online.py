"""What a run predicts of its answers' lengths: learned from its own samples, never waited for, and kept over a resume.

The answers come from counting engines behind a real controller, or are made by hand; the ranker is the real one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from streamrl_jax.config import Config
from streamrl_jax.config_ranker import RankerSection
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.data.prompts import Order, PromptSet
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.metrics import Missing
from streamrl_jax.ranker import online
from streamrl_jax.ranker.background import Background, check_all
from streamrl_jax.ranker.calibrate import calibrate
from streamrl_jax.ranker.fit import FitOptions, LossNotFiniteError
from streamrl_jax.ranker.knowledge import TAIL, Knowledge, Predicted, grouped, measures
from streamrl_jax.ranker.lengths import ObservedLengths
from streamrl_jax.ranker.metrics import kendall_tau
from streamrl_jax.ranker.model import LengthRanker
from streamrl_jax.ranker.online import OnlineForecast
from streamrl_jax.ranker.restore import begin, check_given
from streamrl_jax.ranker.state import state_directory, state_faults, write_state
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.trace import Trace
from streamrl_jax.train import seal
from streamrl_jax.train.rollouts import Rollouts
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Prompt,
    Sample,
    Sampling,
    TokenIds,
    VersionRun,
)
from tests.fakes import FakeEngine

from .control_world import SETTINGS, World, running

VOCABULARY, LONGEST, ANSWERS = 24, 200, 2
LEARNED_S = 240.0  # bound on a refresh, most of which is compilation on a machine that does other things too


def make_prompts(count: int, seed: int = 0, first: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(2, VOCABULARY, (count, 8)).astype(np.int32)
    return [Prompt(str(first + row), ids, {}) for row, ids in enumerate(rows)]


def length_of(token_ids: TokenIds) -> int:
    """A rule that a reader of the prompt can learn: the last token says it all."""
    return 4 + 4 * int(token_ids[-1]) + (60 if token_ids[-1] >= VOCABULARY - 5 else 0)


def made(prompt: Prompt, iteration: int, index: int, length: int) -> Sample:
    ids, logprobs = np.ones(length, np.int32), np.zeros(length, np.float32)
    sample_id = f"train/{iteration}/{prompt.prompt_id}/{index}"
    runs = (VersionRun(iteration, length),)
    reason = FinishReason.LENGTH if length >= LONGEST else FinishReason.STOP
    return Sample(
        sample_id, iteration, prompt, index, Generation(sample_id, 0, ids, logprobs, runs, reason, "a"), 0.0
    )


def answered(
    prompts: Sequence[Prompt], iteration: int, length: Callable[[TokenIds], int] = length_of
) -> list[Sample]:
    return [
        made(prompt, iteration, index, length(prompt.token_ids) + index)
        for prompt in prompts
        for index in range(ANSWERS)
    ]


@contextmanager
def forecasting(
    run_dir: Path,
    resumed: tuple[Path, int] | None = None,
    ranker: Any = None,
    prompts: PromptSet | None = None,
    **section: Any,
) -> Iterator[OnlineForecast]:
    """A forecast with few steps a refresh; nothing of it is left afterwards."""
    chosen = RankerSection(**{"refresh_steps": 40, "max_wait_s": 60.0, **section})
    known, said = begin(chosen, LengthRanker.load, prompts or all_fresh(), resumed)
    known.ranker = known.ranker or ranker
    found = OnlineForecast(chosen, known, said, run_dir, longest=LONGEST, vocab_size=VOCABULARY, seed=3)
    try:
        yield found
    finally:
        found.close()
        assert not any(thread.name.startswith("ranker-") for thread in threading.enumerate())


def ready(forecast: OnlineForecast, iteration: int) -> bool:
    """Whether `take` has its answer without a wait, as in a run whose iterations are longer than these."""
    asked = forecast._asked.get(iteration)
    return asked is None or asked[1].done()


def until(what: Callable[[], bool], timeout_s: float = LEARNED_S) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.005)


def follow(
    forecast: OnlineForecast,
    iterations: range,
    last: int,
    prompts: Callable[[int], Sequence[Prompt]],
    length: Callable[[TokenIds], int] = length_of,
) -> dict[int, list[float] | None]:
    """A synchronous run's calls, in its order, without generation: what was predicted of each iteration."""
    said: dict[int, list[float] | None] = {}
    forecast.prepare(iterations[0], prompts(iterations[0]))
    for iteration in iterations:
        until(lambda iteration=iteration: ready(forecast, iteration))
        said[iteration] = forecast.take(iteration)
        forecast.prepare(iteration + 1, prompts(iteration + 1))
        for sample in answered(prompts(iteration), iteration, length):
            forecast.observe(sample)
        forecast.learn(iteration, last=iteration == last)
    return said


def fresh(iteration: int, count: int = 24) -> list[Prompt]:
    """Other prompts in each iteration: what is known of them is what the ranker reads."""
    return make_prompts(count, seed=iteration, first=1000 * iteration)


def idle(forecast: OnlineForecast) -> bool:
    """Whether nothing is being learned or trained."""
    return all(begun.done() for begun in forecast._begun())


def tau(said: Sequence[float], prompts: Sequence[Prompt]) -> float:
    """1: what was said of the prompts is in the order of their answers' lengths."""
    observed = np.array([length_of(prompt.token_ids) for prompt in prompts], np.float64)
    return kendall_tau(np.array(said), observed)


def prompt_set(prompts: Sequence[Prompt]) -> PromptSet:
    return PromptSet("made", tuple(prompts), Order(len(prompts), 7), 24)


@cache
def all_fresh() -> PromptSet:
    """The set that `fresh` draws from."""
    return prompt_set([prompt for iteration in range(12) for prompt in fresh(iteration)])


# ---------------------------------------------------------------- in a run


class Recording:
    """The controller, and what it was given."""

    def __init__(self, inner: RunController) -> None:
        self._inner = inner
        self.jobs: list[Job] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, job: Job, into: str = "") -> None:
        self.jobs.append(job)
        self._inner.submit(job, into)


@contextmanager
def rollouts_of(
    folder: Path,
    prompts: Sequence[Prompt],
    batch: int,
    total: int,
    length: Callable[[Assignment], int],
    **section: Any,
) -> Iterator[tuple[Callable[[], Iterator[OnlineForecast]], list[Job]]]:
    """The loop's calls over counting engines: each step gives the forecast when an iteration is consumed."""
    cfg = Config.model_validate(
        {
            "trainer": {"total_training_steps": total, "sample_timeout_s": 60.0},
            "rollout": {"n": ANSWERS},
            "data": {"train_batch_size": batch},
            "dispatch": {"policy": "skewness"},
        }
    )
    source = PromptSet("made", tuple(prompts), Order(len(prompts), 7), batch)
    world = World(
        ("a", "b"), engine=lambda name, life: FakeEngine(slots=8, tokens_per_s=20_000, length=length)
    )
    with (
        running(world, SETTINGS, version=None) as run,
        Trace(folder / "trace.json") as trace,
        forecasting(folder, **section) as forecast,
    ):
        controller = Recording(run.controller)
        sampling = Sampling(1.0, LONGEST, (0,), seed=1)
        door = Rollouts(cfg, cast(Any, controller), source, sampling, trace, StopSignal(), 0, forecast)

        def iterations() -> Iterator[OnlineForecast]:
            run.publish(0)
            door.wait_ready()
            until(lambda: ready(forecast, 0))
            door.open(0)
            for iteration in range(total):
                assert len(list(door.samples(iteration))) == batch * ANSWERS
                run.publish(iteration + 1)
                until(lambda iteration=iteration: ready(forecast, iteration + 1))
                door.open(iteration + 1)
                yield forecast

        yield iterations, controller.jobs


def test_a_run_learns_from_its_samples_to_tell_long_answers(tmp_path: Path) -> None:
    """No prompt comes twice, so that nothing but the reading of prompts can help."""
    total, batch = 13, 24
    prompts = make_prompts(total * batch)
    recalls: list[float | Missing] = []
    with rollouts_of(
        tmp_path,
        prompts,
        batch,
        total,
        lambda asked: length_of(asked.prompt_ids),
        refresh_every=3,
        refresh_steps=120,
    ) as (iterations, jobs):
        for forecast in iterations():
            found = forecast.metrics()
            recalls.append(cast(Any, found["ranker/recall_20"]))
            assert found["ranker/with_history"] == 0.0
    assert [job.job_id for job in jobs] == [f"train/{iteration}" for iteration in range(total)]
    # Refreshed behind iterations 2, 5 and 8; iteration i + 2 is the first that is prepared after i was learned.
    assert all(job.predicted is None for job in jobs[:4])
    assert all(isinstance(recall, Missing) for recall in recalls[:4])
    for job in jobs[4:]:
        assert job.predicted is not None and len(job.predicted) == batch
        assert min(job.predicted) >= 1 and max(job.predicted) <= LONGEST
    chance, late = 0.2, [recall for recall in recalls[10:] if not isinstance(recall, Missing)]
    assert len(late) == 3 and sum(late) / 3 > 3 * chance, recalls


def test_prompts_that_come_again_are_predicted_from_their_own_answers(tmp_path: Path) -> None:
    """Lengths that no reader could guess. The second iteration is prepared before the first is over."""
    lengths = dict(enumerate(np.random.default_rng(0).permutation(np.arange(5, 165, 10)).tolist()))
    prompts = make_prompts(16)
    by_prompt = {prompt.token_ids.tobytes(): lengths[row] for row, prompt in enumerate(prompts)}
    with rollouts_of(
        tmp_path, prompts, 16, 4, lambda asked: by_prompt[asked.prompt_ids.tobytes()], refresh_every=0
    ) as (iterations, jobs):
        found = [forecast.metrics() for forecast in iterations()]
    assert [job.predicted is not None for job in jobs] == [False, False, True, True]
    assert [one["ranker/unpredicted"] for one in found] == [16.0, 16.0, 0.0, 0.0]
    assert [one["ranker/with_history"] for one in found] == [0.0, 0.0, 1.0, 1.0]
    assert found[-1]["ranker/recall_20"] == found[-1]["ranker/kendall_tau"] == 1.0
    assert cast(float, found[3]["ranker/log_error"]) < cast(float, found[2]["ranker/log_error"]) < 0.5


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("step", [5, 6], ids=["refreshed before", "in a refresh"])
def test_a_resumed_run_predicts_what_it_would_have_predicted(tmp_path: Path, step: int) -> None:
    """To the bit: of the iterations in flight, and of those after a refresh that is behind the checkpoint.

    The step 6 is saved just when a refresh has begun, which the resumed run begins again.
    """
    rest = range(step, 10)
    with forecasting(tmp_path, refresh_every=2) as forecast:
        follow(forecast, range(step), 9, fresh)
        until(lambda: ready(forecast, step))
        kept = forecast.take(step)  # as `Rollouts.open` does before the checkpoint of the step is written
        forecast.prepare(step + 1, fresh(step + 1))
        forecast.save(step, [])
        said = {step: kept} | follow_on(forecast, rest)
        forecast.wait()
    assert kept is not None and state_faults(tmp_path, step) == []
    with forecasting(tmp_path, (tmp_path, step), refresh_every=2) as resumed:
        resumed.prepare(step, fresh(step))
        assert resumed.take(step) == kept
        resumed.prepare(step + 1, fresh(step + 1))
        assert {step: kept} | follow_on(resumed, rest) == said
    assert said[8] != said[9]


def follow_on(forecast: OnlineForecast, iterations: range) -> dict[int, list[float] | None]:
    """Goes on with a run whose first iteration here has been taken, and its successor prepared."""
    said: dict[int, list[float] | None] = {}
    for iteration in iterations:
        for sample in answered(fresh(iteration), iteration):
            forecast.observe(sample)
        forecast.learn(iteration, last=False)
        until(lambda iteration=iteration: ready(forecast, iteration + 1))
        said[iteration + 1] = forecast.take(iteration + 1)
        forecast.prepare(iteration + 2, fresh(iteration + 2))
    return said


def test_a_refresh_that_the_end_cuts_off_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(rows: Any, options: Any, start: Any, *, report: Callable[[str], None]) -> LengthRanker:
        while True:
            begun.set()
            report("still at it")
            time.sleep(0.001)

    monkeypatch.setattr(online, "fit_ranker", endless)
    with forecasting(tmp_path, refresh_every=1) as forecast:
        follow_one(forecast, 0)
        until(begun.is_set)
        forecast.save(1, [])
        forecast.wait()
    begun.clear()
    with forecasting(tmp_path, (tmp_path, 1), refresh_every=1) as resumed:
        until(begun.is_set)
        assert resumed._known.ranker is None


def follow_one(forecast: OnlineForecast, iteration: int, **rest: Any) -> None:
    forecast.prepare(iteration, fresh(iteration))
    forecast.take(iteration)
    for sample in answered(fresh(iteration), iteration, **rest):
        forecast.observe(sample)
    forecast.learn(iteration, last=False)


@pytest.mark.parametrize("wrong", ["missing", "damaged"])
def test_a_lost_state_is_made_again_from_the_samples(
    tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").mkdir()
    samples = SampleLog(tmp_path / "samples", Fence("run", 0), lambda ids: "")
    with forecasting(tmp_path, refresh_every=0) as forecast:
        for iteration in range(3):
            follow_one(forecast, iteration)
            samples.write(iteration, answered(fresh(iteration), iteration), iteration)
        forecast.save(3, [])
        forecast.wait()
        known = forecast._known
    if wrong == "damaged":
        path = state_directory(tmp_path, 3) / "predictor.npz"
        path.write_bytes(path.read_bytes()[:-1])
    step = 3 if wrong == "damaged" else 2  # of step 2 nothing was written
    caplog.set_level(logging.WARNING)
    found, said = begin(RankerSection(refresh_every=0), LengthRanker.load, all_fresh(), (tmp_path, step))
    (line,) = caplog.messages
    assert f"step_{step}" in line and "made again from the samples of iterations 0 to" in line
    assert ("predictor.npz has" if wrong == "damaged" else "does not exist") in line
    ids = [prompt.prompt_id for iteration in range(step) for prompt in fresh(iteration)]
    now, before = (one.predictor.history.recall(ids, step) for one in (found, known))
    np.testing.assert_allclose(now.weight, before.weight, rtol=1e-6)
    if step == 3:
        np.testing.assert_allclose(now.tokens, before.tokens, rtol=1e-6)
    assert said == {} and [row.lengths for row in found.recent] == [
        row.lengths for row in list(known.recent)[: 24 * step]
    ]


def saved_of_three(run_dir: Path, same: Sequence[Prompt]) -> None:
    """A run of three iterations that ask the same prompts, saved while the fourth is in flight."""
    with forecasting(run_dir, prompts=prompt_set(same), refresh_every=0) as forecast:
        follow(forecast, range(3), 9, lambda iteration: same)
        until(lambda: ready(forecast, 3))
        assert forecast.take(3) is not None
        forecast.save(3, [])
        forecast.wait()


@pytest.mark.parametrize("given", ["fewer", "in another order"])
def test_predictions_of_other_prompts_are_not_taken_for_theirs(
    tmp_path: Path, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is resumed with another `data.train_batch_size`, or another seed, which change what an iteration asks."""
    same = make_prompts(24)
    saved_of_three(tmp_path, same)
    asked = same[:10] if given == "fewer" else same[::-1]
    caplog.set_level(logging.WARNING)
    with forecasting(tmp_path, (tmp_path, 3), prompts=prompt_set(same), refresh_every=0) as resumed:
        resumed.prepare(3, asked)
        until(lambda: ready(resumed, 3))
        said = resumed.take(3)
    assert said is not None and len(said) == len(asked)
    assert tau(said, asked) == pytest.approx(1.0)
    assert (
        [line for line in caplog.messages if "iteration 3 has other prompts" in line] == caplog.messages != []
    )


@pytest.mark.parametrize("state", ["of the same", "of others", "that does not say"])
def test_histories_go_with_the_prompts(tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt's id is the number of its row, which says nothing in another set."""
    before, now = make_prompts(24), make_prompts(24, seed=1)
    saved_of_three(tmp_path, before)
    directory = state_directory(tmp_path, 3)
    if state == "that does not say":
        record = json.loads((directory / "knowledge.json").read_text())
        del record["prompts"]
        (directory / "knowledge.json").write_text(json.dumps(record))
        (directory / seal.SEAL).unlink()
        seal.write_seal(directory)
    asked = now if state == "of others" else before
    caplog.set_level(logging.WARNING)
    known, said = begin(RankerSection(refresh_every=0), LengthRanker.load, prompt_set(asked), (tmp_path, 3))
    weight = known.predictor.history.recall([prompt.prompt_id for prompt in asked], 3).weight
    assert known.prompts == prompt_set(asked).digest and len(known.recent) == 72
    if state == "of the same":
        assert (weight > 0).all() and list(said) == [3] and caplog.messages == []
        return
    assert not weight.any() and said == {}
    assert not known.predictor.to_arrays()["pending_said"].size
    (line,) = caplog.messages
    assert f"{directory}: " in line and "are left out" in line
    assert ("had other prompts" if state == "of others" else "does not say what prompts") in line


def test_the_choice_between_history_and_ranker_outlasts_the_prompts(tmp_path: Path) -> None:
    ranker = Slow()
    ranker.go.set()
    with forecasting(tmp_path, ranker=ranker, refresh_every=0) as forecast:
        same = make_prompts(24)
        follow(forecast, range(4), 9, lambda iteration: same)
        until(lambda: ready(forecast, 4))
        known = forecast._known
    other = known.of_other_prompts("digest")
    for name in ("choice", "newest"):
        np.testing.assert_array_equal(other.predictor.to_arrays()[name], known.predictor.to_arrays()[name])
    assert other.predictor.to_arrays()["choice"].any() and len(other.predictor.history) == 0
    assert other.recent is known.recent and other.ranker is known.ranker and other.prompts == "digest"


def test_histories_made_again_are_those_of_the_same_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the rows are others now: their recorded answers teach a ranker, and say nothing of the new ones."""
    (tmp_path / "samples").mkdir()
    SampleLog(tmp_path / "samples", Fence("run", 0), lambda ids: "").write(0, answered(fresh(0), 0), 0)
    now = [*fresh(0)[:12], *make_prompts(12, seed=99, first=12)]
    caplog.set_level(logging.WARNING)
    found, _ = begin(RankerSection(refresh_every=0), LengthRanker.load, prompt_set(now), (tmp_path, 1))
    weight = found.predictor.history.recall([prompt.prompt_id for prompt in now], 1).weight
    assert (weight[:12] > 0).all() and not weight[12:].any()
    assert len(found.recent) == 24
    assert "without 12 histories of prompts that data.train has not" in caplog.messages[0]


def test_states_are_whole_and_go_with_their_checkpoints(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "file").write_text(directory.name)

    for step in (2, 4, 6):
        write_state(tmp_path, step, fill, keep=[2, 4])
    left = tmp_path / "ranker" / "step_8.part"
    left.mkdir()
    for name in ("step_2.deleting", "step_8.part.deleting", "mine", "step_mine"):
        (left.with_name(name) / "inner").mkdir(parents=True)
    for name in ("notes.txt", "step_9", "step_9.part"):
        left.with_name(name).write_text("not of a run")

    def fails(directory: Path) -> None:
        fill(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_state(tmp_path, 8, fails, keep=[4, 6])
    assert state_faults(tmp_path, 6) == [] and "does not exist" in state_faults(tmp_path, 8)[0]
    write_state(tmp_path, 6, fill, keep=[4])  # a resumed run comes by it again
    kept = ["mine", "notes.txt", "step_4", "step_6", "step_9", "step_9.part", "step_mine"]
    assert sorted(path.name for path in left.parent.iterdir()) == kept
    assert (left.with_name("mine") / "inner").is_dir(), "what a run did not make it does not touch"


# ---------------------------------------------------------------- bounds and failures


class Slow:
    """A ranker that does not answer before it is let go."""

    model = SimpleNamespace(arch=SimpleNamespace(embed=64))

    def __init__(self) -> None:
        self.go = threading.Event()

    def lengths(self, token_ids: Sequence[TokenIds]) -> np.ndarray:
        assert self.go.wait(200)
        return np.array([length_of(ids) for ids in token_ids], np.float32)


def test_an_iteration_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    ranker = Slow()
    with forecasting(tmp_path, ranker=ranker, refresh_every=0, max_wait_s=0.05) as forecast:
        for iteration in range(3):
            forecast.prepare(iteration, fresh(iteration))
            begun = time.monotonic()
            assert forecast.take(iteration) is None
            assert time.monotonic() - begun < 60.0 and not ranker.go.is_set()
            for sample in answered(fresh(iteration), iteration):
                forecast.observe(sample)
            forecast.learn(iteration, last=False)
            assert forecast.metrics()["ranker/unpredicted"] == 24.0
            assert forecast.metrics()["ranker/recall_20"] == Missing("not within ranker.max_wait_s = 0.05")
        ranker.go.set()
        forecast.prepare(3, fresh(3))
        until(lambda: ready(forecast, 3))
        assert forecast.take(3) == pytest.approx([length_of(prompt.token_ids) for prompt in fresh(3)])


def test_who_comes_early_gets_what_is_known_and_not_what_is_being_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh that takes longer than an iteration costs no prediction."""
    never = threading.Event()

    def long(rows: Any, options: Any, start: Any, *, report: Callable[[str], None]) -> LengthRanker:
        while not never.wait(0.001):
            report("")
        raise AssertionError

    monkeypatch.setattr(online, "fit_ranker", long)
    ranker = Slow()
    ranker.go.set()
    with forecasting(tmp_path, ranker=ranker, refresh_every=1, max_wait_s=30.0) as forecast:
        follow_one(forecast, 0)
        forecast.prepare(1, fresh(1))
        assert forecast.take(1) == pytest.approx([length_of(prompt.token_ids) for prompt in fresh(1)])


def test_a_refresh_whose_loss_is_no_number_leaves_the_ranker_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def diverging(*unused: Any, **unread: Any) -> LengthRanker:
        raise LossNotFiniteError(40, float("nan"), 3e-3)

    monkeypatch.setattr(online, "fit_ranker", diverging)
    caplog.set_level(logging.WARNING)
    ranker = Slow()
    ranker.go.set()
    with forecasting(tmp_path, ranker=ranker, refresh_every=1, max_wait_s=30.0) as forecast:
        follow(forecast, range(3), 9, fresh)
        until(lambda: all(begun.done() for begun in forecast._begun()))
        assert forecast._known.ranker is cast(Any, ranker) and not forecast._known.trained
        forecast.prepare(4, fresh(4))
        assert forecast.take(4) == pytest.approx([length_of(prompt.token_ids) for prompt in fresh(4)])
        forecast.save(4, [])
        forecast.wait()
    said = "at step 40 the loss was nan: it stays as it was"
    assert caplog.messages and all(said in message for message in caplog.messages)


@dataclass(frozen=True, eq=False)
class Told(LengthRanker):
    """A ranker that was told the rule."""

    def lengths(self, token_ids: Sequence[TokenIds], names: Sequence[str] = ()) -> np.ndarray:
        return np.array([length_of(ids) for ids in token_ids], np.float32)

    def save(self, directory: Path) -> None:
        directory.mkdir()


def told() -> Told:
    return Told(cast(Any, Slow.model), {}, calibrate(np.zeros(1), np.ones(1)), {})


def test_a_refresh_that_takes_several_iterations_holds_nothing_else_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits for its end; histories are learned and states written meanwhile."""
    begun: list[tuple[int, float]] = []
    at_work, go = threading.Lock(), threading.Event()

    def slow(rows: Any, options: Any, start: Any, *, report: Callable[[str], None]) -> LengthRanker:
        with at_work:
            begun.append((len(rows), options.learning_rate))
            while not go.wait(0.001):
                report("still at it")
        return told()

    def known_of(forecast: OnlineForecast, iteration: int) -> bool:
        with forecast._lock:
            ids = [prompt.prompt_id for prompt in fresh(iteration)]
            return bool((forecast._known.predictor.history.recall(ids, iteration).weight > 0).all())

    def due(step: int) -> bool:
        return json.loads((state_directory(tmp_path, step) / "knowledge.json").read_bytes())["due"]

    monkeypatch.setattr(online, "fit_ranker", slow)
    with forecasting(tmp_path, refresh_every=1) as forecast:
        for iteration in range(6):
            follow_one(forecast, iteration)
            forecast.save(iteration + 1, [])
            until(lambda step=iteration + 1: state_faults(tmp_path, step) == [])
            until(lambda iteration=iteration: known_of(forecast, iteration))
            until(lambda: len(begun) == 1)
            assert due(iteration + 1) and forecast._known.ranker is None
            assert forecast._refresher._tasks.empty() and forecast._unfinished == 1
        go.set()
        until(lambda: idle(forecast))
        assert forecast._due and forecast._known.ranker is not None and len(begun) == 1
        follow_one(forecast, 6)
        until(lambda: idle(forecast))
        forecast.save(7, [])
        forecast.wait()
    assert begun == [(24, FitOptions().learning_rate), (7 * 24, pytest.approx(0.1 / 64))]
    assert not due(7)


def test_no_refresh_begins_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*unused: Any, **unread: Any) -> LengthRanker:
        raise AssertionError("a ranker was trained")

    monkeypatch.setattr(online, "fit_ranker", unwanted)
    go = threading.Event()
    with forecasting(tmp_path, refresh_every=1) as forecast:
        forecast._learner.do(lambda: go.wait(200))
        follow_one(forecast, 0)
        forecast._ended.set()
        go.set()
        until(lambda: idle(forecast))
        forecast.save(1, [])
        forecast.wait()
    assert json.loads((state_directory(tmp_path, 1) / "knowledge.json").read_bytes())["due"]


def test_of_several_failures_the_first_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, and so a refresh never gets what it was to learn from."""

    def full(*unused: Any, **unread: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(online, "write_state", full)
    go = threading.Event()
    with forecasting(tmp_path, refresh_every=1) as forecast:
        forecast._learner.do(lambda: go.wait(200))
        forecast.save(0, [])
        follow_one(forecast, 0)
        go.set()
        until(lambda: idle(forecast))
        assert forecast._refreshed is not None and forecast._refreshed.cancelled()
        for call in (lambda: forecast.take(0), lambda: forecast.known(fresh(0)[0]), forecast.wait):
            with pytest.raises(UserError, match=r"step_0: .* cannot be written .*No space left"):
                call()


def test_a_ranker_whose_scores_told_nothing_leaves_it_to_the_histories(tmp_path: Path) -> None:
    flat = calibrate(np.array([1.0, 2.0, 3.0, 4.0]), np.array([400.0, 300.0, 200.0, 100.0]))

    class Flat(Slow):
        def lengths(self, token_ids: Sequence[TokenIds]) -> np.ndarray:
            return flat.lengths(np.array([float(ids[-1]) for ids in token_ids]))

    same = fresh(0)
    with forecasting(tmp_path, ranker=Flat(), refresh_every=0) as forecast:
        said = follow(forecast, range(4), 9, lambda iteration: same)
    assert said[0] is None
    for found in (said[2], said[3]):
        assert found is not None and tau(found, same) == pytest.approx(1.0)


def test_an_error_in_a_refresh_reaches_the_user_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*unused: Any, **unread: Any) -> LengthRanker:
        raise KeyError("a bug in the fit")

    monkeypatch.setattr(online, "fit_ranker", broken)
    with forecasting(tmp_path, refresh_every=1) as forecast:
        follow_one(forecast, 0)
        forecast.prepare(1, fresh(1))
        until(lambda: forecast._refresher.failed_at is not None)
        for call in (lambda: forecast.take(1), lambda: forecast.known(fresh(0)[0]), forecast.wait):
            with pytest.raises(KeyError, match="a bug in the fit") as caught:
                call()
            assert "broken" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_answers_of_about_the_same_length_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a refresh nor a prediction, which would take the place of the order that the prompts come in."""

    def unwanted(*unused: Any, **unread: Any) -> LengthRanker:
        raise AssertionError("a ranker was trained")

    monkeypatch.setattr(online, "fit_ranker", unwanted)
    with forecasting(tmp_path, refresh_every=1) as forecast:
        same = make_prompts(24)
        said = follow(forecast, range(4), 9, lambda iteration: same, lambda ids: 4 + int(ids[0]) % 2)
        assert set(said.values()) == {None}
        assert forecast.metrics()["ranker/recall_20"] == Missing("the answers are of about the same length")
        assert forecast.metrics()["ranker/with_history"] == 1.0
        assert forecast.known(same[0]) is None


def test_what_is_predicted_while_even_answers_come_in_is_judged_with_them(tmp_path: Path) -> None:
    """A ranker scores an iteration, and meanwhile it turns out that the answers are of about the same length."""
    scoring, go = threading.Event(), threading.Event()

    class Slow:
        def lengths(self, token_ids: Sequence[TokenIds]) -> np.ndarray:
            scoring.set()
            assert go.wait(200)
            return np.asarray([10.0 + ids[0] for ids in token_ids], np.float32)

    with forecasting(tmp_path, refresh_every=0, ranker=Slow()) as forecast:
        same = make_prompts(24)
        forecast.prepare(1, same)
        assert scoring.wait(200)
        for sample in answered(same, 0, lambda ids: 4):
            forecast.observe(sample)
        forecast.learn(0, last=False)
        until(lambda: idle(forecast))
        go.set()
        until(lambda: ready(forecast, 1))
        assert forecast.take(1) is None
        assert forecast.known(same[0]) is None


def test_a_single_prompt_is_known_by_its_own_answers_alone(tmp_path: Path) -> None:
    with forecasting(tmp_path, refresh_every=0) as forecast:
        follow_one(forecast, 0)
        until(lambda: forecast._learned is not None and forecast._learned.done())
        asked = max(fresh(0), key=lambda prompt: length_of(prompt.token_ids))
        known = forecast.known(asked)
        assert known is not None and known > 0.6 * length_of(asked.token_ids)
        assert forecast.known(fresh(1)[0]) is None


def test_tasks_in_the_background_run_in_order_until_one_fails() -> None:
    done: list[int] = []
    held, go = threading.Event(), threading.Event()
    thread = Background("ranker-test", 10.0)
    thread.do(lambda: (held.set(), go.wait(200)))
    results = [thread.do(lambda number=number: done.append(number)) for number in range(3)]

    def fails() -> None:
        raise ValueError("on purpose")

    failed, never = thread.do(fails), thread.do(lambda: done.append(9))
    assert held.wait(200)
    go.set()
    with pytest.raises(ValueError, match="on purpose"):
        failed.result(60)
    until(never.cancelled)
    assert done == [0, 1, 2] and all(result.done() for result in results)
    with pytest.raises(ValueError, match="on purpose"):
        thread.do(lambda: None)
    thread.close()
    assert not any(one.name == "ranker-test" for one in threading.enumerate())


def test_of_the_failures_of_several_threads_the_first_is_raised() -> None:
    def fails(error: Exception) -> None:
        raise error

    with closing(Background("ranker-one", 10.0)) as one, closing(Background("ranker-other", 10.0)) as other:
        check_all((one, other))
        until(one.do(lambda: fails(ValueError("the first"))).done)
        until(other.do(lambda: fails(KeyError("the second"))).done)
        for threads in ((one, other), (other, one)):
            with pytest.raises(ValueError, match="the first"):
                check_all(threads)


# ---------------------------------------------------------------- pure


def test_groups_are_the_same_whatever_the_order_of_their_answers() -> None:
    """A prompt that an iteration draws twice is one, and what the limit cut is marked."""
    twice = Prompt("3", np.array([2, 3], np.int32), {})
    again = Prompt("3.1", twice.token_ids, {})
    other = Prompt("12", np.array([4], np.int32), {})
    samples = [made(twice, 0, 0, 5), made(twice, 0, 1, LONGEST), made(again, 0, 0, 7), made(other, 0, 0, 9)]
    for order in (samples, samples[::-1]):
        found = {row.prompt_id: (row.lengths, row.cut) for row in grouped(order)}
        assert found == {"3": ((5, LONGEST, 7), (False, True, False)), "12": ((9,), (False,))}
        assert [row.prompt_id for row in grouped(order)] == ["12", "3"]


def test_an_iteration_is_measured_against_what_was_said_before() -> None:
    rows = [ObservedLengths(str(row), np.ones(1, np.int32), (10 * (row + 1),), (False,)) for row in range(10)]
    further = ObservedLengths(
        "77", np.ones(1, np.int32), (5000,), (False,)
    )  # a replacement: nothing was said of it
    ids = tuple(row.prompt_id for row in rows)
    tokens = np.array([20.0 * (row + 1) for row in range(8)] + [1.0, 400.0], np.float32)
    found = measures(Predicted(ids, tokens, 0.5), [*rows, further])
    assert found == {
        "ranker/unpredicted": 0.0,
        "ranker/with_history": 0.5,
        "ranker/recall_20": 0.5,
        "ranker/kendall_tau": pytest.approx((37 - 8) / 45),
        "ranker/log_error": pytest.approx((8 * np.log(2) + np.log(90) + np.log(4)) / 10),
    }
    assert measures(None, rows)["ranker/unpredicted"] == 10.0


@pytest.mark.parametrize(
    ("lengths", "tail"),
    [
        ([10] * 10, True),
        ([10] * 90 + [15] * 10, True),
        ([10] * 90 + [14] * 10, False),
        ([10] * 97 + [99] * 3, False),
    ],
)
def test_a_tail_is_what_the_longest_twentieth_is_beside_the_median(lengths: list[int], tail: bool) -> None:
    """Of fewer than sixteen answers nothing is said yet, and three of a hundred are no tail."""
    row = ObservedLengths("0", np.ones(1, np.int32), tuple(lengths), (False,) * len(lengths))
    assert TAIL == 1.5 and Knowledge(deque([row])).has_tail is tail


def test_a_ranker_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ranker\.path = .* has no ranker\.json"):
        check_given(RankerSection(path=str(tmp_path)))
