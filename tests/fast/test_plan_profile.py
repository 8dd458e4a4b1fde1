"""`streamrl plan profile`: its grid, the loads that it asks for, and what it makes of the answers' times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamrl_jax.cli import main
from streamrl_jax.commands import plan_profile
from streamrl_jax.commands.plan_profile import Profiler, Wanted, chosen
from streamrl_jax.config import Config
from streamrl_jax.config_generation import GenPoolSection, GenSection
from streamrl_jax.control.events import InstanceView
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.plan.profile import (
    LEAD,
    Cell,
    Grid,
    Limits,
    Load,
    by_cell,
    default_batches,
    fault,
    held_out_cells,
    load_of,
    longer_lead,
    make_grid,
    rounds,
    spread,
    timed_step,
)
from streamrl_jax.progress import Display
from streamrl_jax.ranker.cost import Ramp, StepPoint, TokenLatency, read_cost
from streamrl_jax.ranker.hardware import ModelShape, named_cost
from streamrl_jax.setup.serving import Served
from streamrl_jax.types import (
    Assignment,
    FinishReason,
    Generation,
    InstanceState,
    Prompt,
    Sample,
    Timings,
)
from tests.fakes import FakeEngine

from .control_world import SETTINGS, World, running
from .tiny import hf_config

LIMITS = Limits(slots=8, max_model_len=512, kv_tokens=4000)
KNOWN = TokenLatency(Ramp(0.004, (1.0, 4.0), (1e-4, 5e-4)), 2e-7, Ramp(0.002, (1.0,), (3e-5,)))

cells = st.builds(Cell, st.integers(1, 64), st.integers(32, 4096))


@given(cells, st.integers(1, 40))
def test_the_timed_answer_runs_around_the_cells_context_and_ends_before_the_others(
    cell: Cell, steps: int
) -> None:
    load = load_of(cell, steps)
    contexts = load.prompt + np.arange(1, steps + 1)
    assert abs(contexts.mean() - cell.context) <= 0.5
    assert len(load.lengths) == cell.batch and load.lengths[-1] == steps + 1
    assert all(length - load.lengths[-1] == load.lead >= LEAD for length in load.lengths[:-1])


@given(cells, st.integers(1, 40), st.integers(1, 10**4), st.integers(0, 10**6))
def test_a_longer_lead_fits_where_the_first_one_did(
    cell: Cell, steps: int, longest: int, kv_tokens: int
) -> None:
    limits = Limits(64, longest, kv_tokens)
    load = load_of(cell, steps)
    lead = longer_lead(load, limits)
    assert load.lead <= lead <= 2 * load.lead
    if not fault(cell, steps, limits):
        again = load_of(cell, steps, lead)
        assert again.prompt + max(again.lengths) <= longest
        assert not kv_tokens or cell.batch * (again.prompt + max(again.lengths)) <= kv_tokens


@pytest.mark.parametrize(
    ("batches", "contexts", "steps", "said"),
    [
        ((1, 16), (), 32, r"--batches 16: an instance runs 8 at once \(gen.max_num_seqs\)"),
        ((), (64, 500), 32, r"--contexts 500 .* sequences of 5\d\d tokens: an instance has room for 512"),
        ((), (10, 64), 32, r"--contexts 10: 32 steps are timed, .* give 17 or more, or fewer --steps"),
        (
            (1, 8),
            (64, 480),
            8,
            r"--batches 8 with --contexts 480 takes 4,\d\d\d tokens of KV cache: .* holds 4,000",
        ),
        ((4,), (), 32, r"two batches and two contexts at least: batches \[4\] and contexts"),
        ((), (64,), 32, r"two batches and two contexts at least: batches \[1, 2, 4, 8\] and contexts \[64\]"),
        ((1, 10**15), (), 32, r"--batches 1000000000000000: an instance runs 8 at once"),
        ((), (), 500, r"two batches and two contexts at least: --contexts"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    batches: tuple[int, ...], contexts: tuple[int, ...], steps: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_grid(LIMITS, batches, contexts, steps)


@given(st.integers(2, 300), st.integers(200, 9000), st.integers(0, 10**6))
def test_what_is_not_asked_for_fits(slots: int, longest: int, kv_tokens: int) -> None:
    limits = Limits(slots, longest, kv_tokens and kv_tokens + 4 * longest)
    grid = make_grid(limits, (), (), 32)
    assert not any(fault(cell, grid.steps, limits) for cell in grid.cells)
    assert all(0 < tokens < longest for tokens in grid.prompts)
    assert len({cell.batch for cell in grid.cells}) >= 2 <= len({cell.context for cell in grid.cells})


def test_a_kv_cache_that_is_not_known_bounds_nothing() -> None:
    assert Cell(8, 480) in make_grid(replace(LIMITS, kv_tokens=0), (1, 8), (64, 480), 8).cells


def test_the_defaults() -> None:
    assert default_batches(1) == (1,) and default_batches(8) == (1, 2, 4, 8)
    assert default_batches(24) == (1, 2, 4, 8, 16, 24)
    assert spread(10, 1000, 3) == (10, 100, 1000) and spread(1, 2, 4) == (1, 2) and spread(16, 5, 4) == (5,)


def test_each_round_has_everything_once_in_an_order_of_its_own() -> None:
    grid = Grid(tuple(Cell(batch, context) for batch in (1, 2, 4) for context in (50, 100)), (16, 64), 8)
    everything = [*grid.cells, *grid.prompts]
    order = list(rounds(grid, 5, seed=1))
    each = [order[start : start + 8] for start in range(0, 40, 8)]
    assert all(sorted(map(str, one)) == sorted(map(str, everything)) for one in each)
    assert len({tuple(map(str, one)) for one in each}) == 5


@given(st.sets(cells, min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(0, 9))
def test_only_cells_inside_the_grid_are_held_out(every: set[Cell], share: float, seed: int) -> None:
    found = held_out_cells(every, share, seed)
    assert found <= every and len(found) <= round(share * len(every))
    for values, held in (
        ({cell.batch for cell in every}, {cell.batch for cell in found}),
        ({cell.context for cell in every}, {cell.context for cell in found}),
    ):
        assert not held & {min(values), max(values)}


def answer(place: int, length: int, timings: Timings, arrived_s: float, **changes: Any) -> Sample:
    generation = Generation(
        f"s{place}",
        0,
        np.zeros(length, np.int32),
        np.zeros(length, np.float32),
        (),
        FinishReason.LENGTH,
        "a",
        timings,
    )
    prompt = Prompt(str(place), np.zeros(4, np.int32), {})
    return Sample(f"s{place}", 0, prompt, 0, replace(generation, **changes), 0.0, arrived_s=arrived_s)


def test_a_steps_time_is_the_timed_answers_decode_time_over_its_steps() -> None:
    load = load_of(Cell(3, 100), steps=10)
    lengths = load.lengths
    # The first began 3 steps of 20 ms before the last, the second 1.
    samples = [
        answer(0, lengths[0], Timings(0.0, 0.05, 0.7), 9.0),
        answer(1, lengths[1], Timings(0.05, 0.04, 0.7), 8.0),
        answer(2, lengths[2], Timings(0.07, 0.04, 0.2), 7.0),
    ]
    point = timed_step(load, samples)
    assert point is not None and point.seconds == pytest.approx(0.02)
    assert point.kv_tokens == pytest.approx(3 * (load.prompt + 5.5) + 3 + 1)
    assert timed_step(load, [replace(samples[0], arrived_s=6.0), *samples[1:]]) is None, (
        "another one ended first"
    )
    torn = answer(0, lengths[0], Timings(0.0, 0.05, 0.7), 9.0, attempt=1)
    assert timed_step(load, [torn, *samples[1:]]) is None, "another attempt went on with it"
    aborted = answer(1, 3, Timings(), 9.0, finish_reason=FinishReason.ABORT)
    assert timed_step(load, [samples[0], aborted, samples[2]]) is None


def test_repeats_of_a_cell_are_one_point_of_the_fit() -> None:
    cell = Cell(2, 100)
    found = by_cell({cell: [StepPoint(2, tokens, 0.1) for tokens in (200.0, 203.0, 230.0)]})
    assert [point.kv_tokens for point in found[cell]] == [203.0] * 3


def view(name: str, slots: int = 8) -> InstanceView:
    return InstanceView(name, "", InstanceState.IDLE, 0, 0, 0, 0, 0.0, 0, 0, slots=slots, kv_tokens=100)


def test_unequal_instances_are_profiled_one_by_one() -> None:
    pool = (view("a"), view("b", 4))
    assert chosen(pool, "b") == (pool[1],)
    assert chosen((view("a"), view("c")), "") == (view("a"), view("c"))
    with pytest.raises(UserError, match=r"differ \(a: 8 slots, .*b: 4 slots, .* --instance NAME"):
        chosen(pool, "")
    with pytest.raises(UserError, match="--instance d: there are a, b"):
        chosen(pool, "d")


class KnownEngine(FakeEngine):
    """Says of its answers that they took what `KNOWN` gives for what runs at the end of them."""

    def _delta(self, assignment: Assignment, index: int, last: bool, full: bool, timings: Timings) -> Any:
        delta = super()._delta(assignment, index, last, full, timings)
        if not last:
            return delta
        prompt = len(assignment.prompt_ids)
        step_s = float(KNOWN.ptl(self._running, prompt + (index + 1) / 2))
        return replace(
            delta, timings=Timings(timings.queued_s, float(KNOWN.prefill_s(prompt)), index * step_s)
        )


@contextmanager
def profiled(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = ("a", "b")) -> Iterator[Path]:
    """`streamrl plan profile` finds fake instances where it would start real ones; gives the model's config.json."""
    world = World(names, engine=lambda name, life: KnownEngine(slots=8, max_model_len=512, tokens_per_s=2000))
    with (
        TemporaryDirectory() as model,
        running(world, SETTINGS) as run,
        StopSignal().listening() as stop,
        Display("profile", console=Console(quiet=True)) as shown,
    ):
        run.controller.wait_ready(60)
        config_json = Path(model) / "config.json"
        config_json.write_text(json.dumps(hf_config()))
        inputs: Any = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=90), model_dir=Path(model))
        served = Served(run.controller, inputs, stop, shown, ())

        @contextmanager
        def serving(*_: object) -> Iterator[Served]:
            yield served

        monkeypatch.setattr(plan_profile, "serving", serving)
        yield config_json


def config(slots: int = 8) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "toy"},
            "data": {"train": "x.jsonl", "max_prompt_length": 12, "max_response_length": 500},
            "gen": {"max_num_seqs": slots, "instances": 2},
        }
    )


def test_a_profile_finds_what_steps_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted(batches=(1, 2, 4, 6, 8), contexts=(40, 100, 200), steps=16, repeats=1)
    with profiled(monkeypatch) as config_json:
        profile = plan_profile.run(config(), tmp_path / "cost.json", wanted)
        assert named_cost(str(tmp_path / "cost.json"), config_json, 4) == profile.cost
        with pytest.raises(UserError, match=r"gen\.dtype is bfloat16, there float32"):
            named_cost(str(tmp_path / "cost.json"), config_json, 2)
    assert read_cost(tmp_path / "cost.json") == profile
    batches, contexts = np.meshgrid([1, 3, 8], [30, 300])
    np.testing.assert_allclose(profile.cost.ptl(batches, contexts), KNOWN.ptl(batches, contexts), rtol=0.01)
    np.testing.assert_allclose(profile.cost.prefill_s(300), KNOWN.prefill_s(300), rtol=0.01)
    assert profile.held_out.points == 3 and profile.held_out.largest < 0.01
    assert len(profile.points) == 2 * 15, "each cell once, on both instances"
    assert (profile.conditions.model, profile.conditions.note) == ("toy", "a, b at the same time")
    printed = capsys.readouterr().out
    assert printed.count("held out") == 3 and len(printed.splitlines()) == 1 + 15 + 1 + 4


def test_a_profile_that_cannot_be_written_is_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, profile: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(plan_profile, "write_cost", full)
    wanted = Wanted(batches=(1, 2, 4), contexts=(40, 60, 100), steps=8, repeats=1)
    with (
        profiled(monkeypatch, ("a",)),
        pytest.raises(UserError, match=r"cost\.json cannot be written: No space left on device; .*--out"),
    ):
        plan_profile.run(config(), tmp_path / "cost.json", wanted)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 9 + 1 + 4


def test_a_later_round_goes_without_a_cell_whose_answers_do_not_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured_once: list[StepPoint] = []
    notes: list[str] = []

    def once(load: Load, samples: Sequence[Sample]) -> StepPoint | None:
        found = timed_step(load, samples)
        if len(samples) != 2 or found is None:
            return found
        measured_once.append(found)
        return found if len(measured_once) == 1 else None

    monkeypatch.setattr(plan_profile.plan, "timed_step", once)
    with profiled(monkeypatch, ("a",)), plan_profile.serving(config(), "profile") as served:
        monkeypatch.setattr(served.display, "note", notes.append)
        profiler = Profiler(config(), served, LIMITS, ["a"])
        grid = Grid((Cell(1, 40), Cell(2, 60), Cell(3, 60)), (16,), 4)
        measured = profiler.measure(grid, Wanted(repeats=2))
    assert {cell.batch: len(points) for cell, points in measured.cells.items()} == {1: 2, 2: 1, 3: 2}
    (note,) = notes
    assert note.startswith("round 2 goes without a cell: batch 2, context 60: in 4 tries")


def test_a_profile_says_how_many_gpus_the_instance_of_a_pool_has() -> None:
    pools = [GenPoolSection(name="big", tensor_parallel_size=4)]
    cfg = config().model_copy(update={"gen": GenSection(pools=pools)})
    for name, parallel in (("big-0", 4), ("instance-0", 1), ("endpoint-0", 1)):
        views: Any = [SimpleNamespace(name=name)]
        shape = ModelShape(90, 64, 2, 4, 2, 16, 96)
        assert plan_profile.conditions(cfg, views, Wanted(), shape).tensor_parallel == parallel


def test_no_further_round_begins_after_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = Wanted(batches=(1, 2, 4), contexts=(40, 60, 100), steps=8, repeats=50, instance="b", limit_s=0.0)
    with profiled(monkeypatch):
        profile = plan_profile.run(config(), tmp_path / "cost.json", wanted)
    assert len(profile.points) == 9
    assert profile.conditions.note == "b alone"


def test_answers_that_never_run_at_once_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_profile.plan, "timed_step", lambda load, samples: None)
    with profiled(monkeypatch, ("a",)), plan_profile.serving(config(), "profile") as served:
        profiler = Profiler(config(), served, LIMITS, ["a"])
        with pytest.raises(
            UserError, match="batch 1, context 40: in 4 tries its answers did not all run at once"
        ):
            profiler.measure(Grid((Cell(1, 40), Cell(2, 60)), (16,), 4), Wanted())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batches", "1,x"], "no list of numbers"),
        (["--contexts", "0"], "no list of numbers"),
        (["--repeats", "0"], "no number of them"),
        (["--holdout", "1"], "no share"),
        (["--limit-s", "-1"], "no time in seconds"),
    ],
)
def test_bad_options_are_refused_by_name(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "profile", "--out", "cost.json", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_place_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out .*no/cost\.json: .*no is no directory"):
        plan_profile.run(config(), tmp_path / "no" / "cost.json", Wanted())


def test_what_is_no_file_is_refused_and_a_profile_may_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out .* cannot be written: Is a directory; name another file"):
        plan_profile.run(config(), tmp_path, Wanted())
    with pytest.raises(UserError, match=r"cannot be written: File name too long; name another file"):
        plan_profile.run(config(), tmp_path / ("x" * 300), Wanted())
    (tmp_path / "cost.json").write_text("an earlier one")
    plan_profile.check_place(tmp_path / "cost.json")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an earlier one"]


@pytest.mark.parametrize(
    ("slots", "wanted", "said"),
    [
        (
            2,
            Wanted(),
            r"--batches 1,2 with --contexts .* no cell is inside .* three batches .*gen\.max_num_seqs",
        ),
        (16, Wanted(batches=(1, 16)), "--batches 1,16 with --contexts .* three batches and three contexts"),
        (
            8,
            Wanted(contexts=(64, 256)),
            "--batches 1,2,4,8 with --contexts 64,256: .* three contexts or more",
        ),
        (8, Wanted(holdout=0.02), r"--holdout 0\.02 of 16 cells is none, .* give 0\.07 or more"),
    ],
)
def test_a_grid_that_leaves_no_cell_to_hold_out_is_refused_before_anything_starts(
    slots: int, wanted: Wanted, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_profile, "serving", None)
    with pytest.raises(UserError, match=said):
        plan_profile.run(config(slots), tmp_path / "cost.json", wanted)
    assert list(tmp_path.iterdir()) == []
