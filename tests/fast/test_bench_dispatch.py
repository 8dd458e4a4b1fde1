"""The dispatch benchmark: the same work under every policy, figures that are what they are called, and the model."""

from __future__ import annotations

import json
import math
import threading
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax import config_ranker
from streamrl_jax.bench.dispatch import read_material
from streamrl_jax.bench.dispatch_checks import check_enough
from streamrl_jax.bench.dispatch_draws import POLICIES, Material, draw, order, turns
from streamrl_jax.bench.dispatch_model import Foretold, Model
from streamrl_jax.bench.dispatch_report import compared, found, worst
from streamrl_jax.bench.dispatch_rounds import Asking, Played, Size, measure
from streamrl_jax.bench.intervals import mean, paired_ratio, student
from streamrl_jax.cli import main
from streamrl_jax.control.dispatching import DispatchSettings
from streamrl_jax.control.faults import ControlError
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.plan.generation import Conditions
from streamrl_jax.ranker.cost import FLAT
from streamrl_jax.ranker.dispatch import Server
from streamrl_jax.ranker.lengths import ObservedLengths, write_lengths
from streamrl_jax.types import Sampling
from tests.fakes import FakeEngine
from tests.fast.control_world import SETTINGS, Run, World, running
from tests.fast.job_world import jax_settings_kept, write_config, write_world


def material(count: int = 12, answers: int = 4) -> Material:
    """Prompt k's answers have about 10 k tokens."""
    rows = [
        ObservedLengths(
            str(row),
            np.asarray([1, row], np.int32),
            tuple(10 * row + 1 + k for k in range(answers)),
            (False,) * answers,
        )
        for row in range(count)
    ]
    said = np.arange(count, dtype=np.float32) * 10 + 2
    return Material(rows, {"history": said, "ranker": said[::-1].copy()})


# ---- intervals


@pytest.mark.parametrize(("rounds", "half"), [(2, 12.7062), (5, 2.7764), (11, 2.2281)])
def test_the_interval_is_students(rounds: int, half: float) -> None:
    """Values of printed tables."""
    assert student(rounds) == pytest.approx(half, abs=1e-4)


def test_what_a_round_has_of_its_own_cancels() -> None:
    """One way takes 0.8 of the other's time in every round, though the rounds differ tenfold."""
    base = [1.0, 10.0, 3.0]
    found = paired_ratio([0.8 * value for value in base], base)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8))
    assert str(found) == "0.800 (0.800 to 0.800)"


def test_the_interval_of_a_ratio_turns_over_with_it() -> None:
    """a over b and b over a tell the same, which the arithmetic mean of ratios does not."""
    a, b = [1.0, 2.0, 4.0], [2.0, 2.0, 3.0]
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert (1 / back.value, 1 / back.high, 1 / back.low) == pytest.approx(
        (there.value, there.low, there.high)
    )


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    found = [mean(random.normal(5.0, 2.0, 4).tolist()) for _ in range(4000)]
    held = sum(one.low <= 5.0 <= one.high for one in found) / len(found)
    assert held == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_one_round_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least two rounds"):
        mean([1.0])


# ---- the work of a round


def test_a_draw_is_of_recorded_lengths_and_known_by_its_seed() -> None:
    known = material()
    one, same, other = (draw(known, 8, 3, (1, number)) for number in (0, 0, 1))
    assert np.array_equal(one.lengths, same.lengths) and not np.array_equal(one.rows, other.rows)
    assert len(set(one.rows.tolist())) == 8
    for row, lengths in zip(one.rows, one.lengths, strict=True):
        assert len(set(lengths.tolist())) == 3, "each answer was recorded once"
        assert set(lengths.tolist()) <= set(known.rows[row].lengths)
    assert one.tokens == one.lengths.sum()


def test_a_larger_pool_draws_prompts_again() -> None:
    work = draw(material(), 100, 4, (1,), again=True)
    assert len(work.rows) == 100 and max(Counter(work.rows.tolist()).values()) > 1


def test_every_policy_meets_the_same_work() -> None:
    known = material()
    work = draw(known, 8, 3, (1, 0))
    all_of_it = sorted(
        (int(row), *map(int, lengths)) for row, lengths in zip(work.rows, work.lengths, strict=True)
    )
    for name, policy in POLICIES.items():
        met = order(policy, work, known)
        here = [(int(row), *map(int, lengths)) for row, lengths in zip(met.rows, met.lengths, strict=True)]
        assert sorted(here) == all_of_it, name
        assert (here == all_of_it) != policy.shuffled, "arrival is the order of the file, unless shuffled"


def test_a_policy_is_told_what_it_knows_and_no_more() -> None:
    known = material()
    work = draw(known, 8, 3, (1, 0))
    for name in ("fcfs", "random"):
        assert order(POLICIES[name], work, known).predicted is None
    for name, source in (("lpt-history", "history"), ("ranker", "ranker"), ("ranker-lpt", "ranker")):
        predicted = order(POLICIES[name], work, known).predicted
        assert predicted is not None
        assert predicted.tolist() == known.predicted[source][work.rows].tolist()
    oracle = order(POLICIES["oracle"], work, known).predicted
    assert oracle is not None
    np.testing.assert_allclose(oracle, work.lengths.mean(axis=1))


def test_no_policy_has_a_place_or_a_forerunner_of_its_own() -> None:
    names = list("abcd")
    found = turns(names, 40, seed=5)
    assert all(sorted(turn) == names for turn in found) and found == turns(names, 40, seed=5)
    for there, back in zip(found[::2], found[1::2], strict=True):
        assert there == back[::-1], "what a round drifts, the next one drifts back"
    for name in names:
        before = Counter(turn[turn.index(name) - 1] for turn in found if turn.index(name))
        assert set(before) == set(names) - {name} and max(before.values()) < 20


def test_history_is_that_of_the_same_prompts_whatever_they_are_called(tmp_path: Path) -> None:
    """Ids are often row numbers, of which another set has the same ones."""
    rows = material(3).rows
    other = [
        ObservedLengths(f"their {row.prompt_id}", row.token_ids, (5, 7, 9 * place + 3), (False,) * 3)
        for place, row in reversed(list(enumerate(rows)))
    ]
    lengths, history = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_lengths(lengths, rows)
    write_lengths(history, other)
    found = read_material(Namespace(lengths=lengths, history=history))
    assert found.predicted["history"].tolist() == [5.0, 8.0, 11.0]
    strange = [replace(row, token_ids=row.token_ids + 1) for row in rows]
    write_lengths(tmp_path / "c.jsonl", strange)
    with pytest.raises(UserError, match=r"--history .*c\.jsonl: 3 of 3 prompts are not there"):
        read_material(Namespace(lengths=lengths, history=tmp_path / "c.jsonl"))


def test_more_than_was_recorded_is_refused_whatever_the_first_round_draws() -> None:
    known = material(500)
    with pytest.raises(UserError, match="--prompts 501 is more than the 500 prompts"):
        check_enough(known, 501, 1)
    short = replace(known.rows[321], lengths=(7, 8), cut=(False, False))
    rows = [short if row.prompt_id == "321" else row for row in known.rows]
    with pytest.raises(UserError, match="--n 3 is more than the 2 answers that --lengths has to prompt 321"):
        check_enough(replace(known, rows=rows), 3, 3)


# ---- rounds on instances


def asking(timeout_s: float = 60.0) -> Asking:
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(0,), seed=5, evaluation=True)
    return Asking(sampling, SETTINGS.heartbeat_interval_s, timeout_s, StopSignal())


def test_every_policy_has_exactly_the_recorded_lengths_answered() -> None:
    """On two instances: each token of each round is made once, and no step of the makespan is lost."""
    known, size = material(), Size(prompts=6, n=3, rounds=2, seed=1)
    names = ["random", "ranker-lpt", "oracle"]
    world = World(
        ("a", "b"), engine=lambda name, life: FakeEngine(slots=3, max_model_len=256, tokens_per_s=2000)
    )
    with running(world) as run:
        rounds = measure(run.controller, known, size, names, asking())
        made = sum(world.now(name).engine.tokens_total for name in ("a", "b"))
    assert made == size.draw(known, 2).tokens + len(names) * sum(one.work.tokens for one in rounds)
    assert [one.work.tokens for one in rounds] == [size.draw(known, number).tokens for number in range(2)]
    for one in rounds:
        assert list(one.played) == names
        for played in one.played.values():
            assert sum(played.answers.values()) == 18 and set(played.answers) == {"a", "b"}
            assert played.longest <= played.total <= one.work.tokens
            assert 0 < played.seconds < 60


def test_a_round_in_which_an_instance_was_lost_is_no_round() -> None:
    known, size = material(), Size(prompts=8, n=4, rounds=2, seed=1)

    def engine(name: str, life: int) -> FakeEngine:
        """What b holds is not answered before it is lost."""
        found = FakeEngine(slots=2, max_model_len=256, tokens_per_s=2000)
        if name == "b" and not life:
            found.hang()
        return found

    with running(World(("a", "b"), engine)) as run:
        killer = threading.Thread(
            target=lambda: (run.wait_for(lambda: held(run, "b")), run.world.now("b").kill())
        )
        killer.start()
        with pytest.raises(ControlError, match="instance b was lost during bench/"):
            measure(run.controller, known, size, ["oracle"], asking())
        killer.join()


def held(run: Run, name: str) -> int:
    return next(view.held for view in run.controller.pool() if view.name == name)


# ---- the model


def model(instances: int, slots: int, policy: config_ranker.Policy = "skewness") -> Model:
    servers = tuple(Server(str(place), slots, 1 << 40, FLAT) for place in range(instances))
    return Model(servers, DispatchSettings(policy, 0.2, FLAT), Conditions())


def test_an_answer_costs_a_step_a_token() -> None:
    """One slot makes all tokens one by one, under whatever policy; with room for all the longest answer is the end."""
    known = material()
    work = draw(known, 6, 3, (1, 0))
    names = list(POLICIES)
    alone, wide = (model(1, slots).round(known, work, names) for slots in (1, 18))
    assert {one.longest for one in alone.values()} == {one.total for one in alone.values()} == {work.tokens}
    assert {one.longest for one in wide.values()} == {work.lengths.max()}
    assert all(one.seconds == one.longest for one in wide.values()), "without a cost, a step is a second"


def test_what_is_known_of_the_lengths_is_worth_something() -> None:
    """Twelve prompts of rising length, two instances of two slots: in the order of the file the longest come last."""
    known = material(12, 2)
    played = model(2, 2).round(known, draw(known, 12, 2, (1, 0)), ["fcfs", "oracle-lpt", "oracle"])
    best = -(-sum(sum(row.lengths) for row in known.rows) // 4)
    assert best <= played["oracle"].longest <= 1.05 * best < played["fcfs"].longest


def test_a_larger_pool_has_work_in_proportion() -> None:
    known, size = material(), Size(prompts=6, n=2, rounds=3, seed=1)
    rounds = model(2, 2).pool(known, size, ["fcfs"], 8)
    assert len(rounds) == 3 and len({one["fcfs"].total for one in rounds}) == 3, "each round has its draw"
    work = draw(known, 24, 2, (1, 8, 0), again=True)
    assert len(rounds[0]["fcfs"].steps) == 8
    assert rounds[0]["fcfs"].total >= work.tokens / 2, "two answers a step, at most"


# ---- the report


def test_ratios_are_of_the_same_rounds_and_the_models_error_is_against_what_was_measured() -> None:
    def played(seconds: float, steps: int) -> Played:
        return Played(seconds, {"a": steps, "b": steps // 2}, {"a": 1, "b": 1})

    rounds = [
        {"random": played(10.0 * scale, 100 * scale), "oracle": played(6.0 * scale, 80 * scale)}
        for scale in (1, 2, 4)
    ]
    measured = found(rounds)
    assert (measured["oracle"].steps, measured["oracle"].seconds, measured["oracle"].total) == (
        160,
        12.0,
        240,
    )
    assert measured["oracle"].against["random"].steps.value == pytest.approx(0.8)
    assert measured["random"].against["oracle"].seconds.value == pytest.approx(10 / 6)


def test_the_models_errors_are_of_the_same_rounds() -> None:
    """20 % too many in one round and as many too few in another are no agreement, though the medians agree."""

    def round_of(random: int, oracle: int) -> dict[str, Played]:
        steps = {"random": random, "oracle": oracle}
        return {name: Played(float(count), {"a": count}, {"a": 1}) for name, count in steps.items()}

    measured = [round_of(100, 80), round_of(200, 100), round_of(400, 120)]
    said = [
        {"random": Foretold(100.0, {"a": 100}), "oracle": Foretold(96.0, {"a": 96})},
        {"random": Foretold(200.0, {"a": 200}), "oracle": Foretold(100.0, {"a": 100})},
        {"random": Foretold(400.0, {"a": 400}), "oracle": Foretold(100.0, {"a": 100})},
    ]
    lines = compared(measured, said, with_seconds=True)
    oracle = lines["oracle"].steps
    assert oracle.error.value == pytest.approx(0.0, abs=1e-12) and oracle.greatest == pytest.approx(0.2)
    assert oracle.error.low < -0.3 and oracle.error.high > 0.3
    assert lines["random"].steps.error.value == lines["random"].steps.greatest == 0.0
    worse = [{"random": one["random"], "oracle": Foretold(1.0, {"a": 88})} for one in said]
    lines = compared(measured, worse, with_seconds=True)
    steps = 88 / (80 * 100 * 120) ** (1 / 3) - 1
    off = worst(lines)
    assert (off.steps, off.round) == pytest.approx((-steps, 32 / 120))
    ratio = lines["oracle"].seconds_ratio
    assert ratio is not None and ratio.model == pytest.approx(1 / 200) and off.seconds_ratio > 0.9
    assert compared(measured, worse, with_seconds=False)["oracle"].seconds_ratio is None


# ---- the command


def test_the_command_measures_real_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through two instances in processes of their own: tables, and all figures as JSON."""
    config = write_config(write_world(tmp_path), gen={"instances": 2})
    lengths, history, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "out.json"))
    random = np.random.default_rng(0)
    for path in (lengths, history):
        rows = [
            ObservedLengths(str(row), np.asarray([1, row], np.int32), tuple(two), (False,) * 2)
            for row, two in enumerate(random.integers(1, 9, (10, 2)).tolist())
        ]
        write_lengths(path, rows)
    options = ["--history", str(history), "--json", str(out)]
    options += ["--prompts", "6", "--rounds", "9", "--limit-s", "0", "--pools", "4"]
    with jax_settings_kept():
        assert main(["bench", "dispatch", str(config), "--lengths", str(lengths), *options]) == 0
    printed = capsys.readouterr().out
    assert "2 rounds of 6 prompts, 12 answers, 1.5 a slot" in printed and "Larger pools" in printed
    (result,) = json.loads(out.read_text())["results"]
    assert set(result["measured"]) == {"fcfs", "random", "lpt-history", "oracle-lpt", "oracle"}
    assert set(result["pools"]["4"]) == set(result["measured"])
    for one in result["rounds"]:
        assert all(sum(played["answers"].values()) == 12 for played in one.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rounds", "1"], "--rounds 1: an interval needs 2 or more"),
        (["--policies", "ranker"], "--policies ranker needs --ranker, which is not given"),
        (["--policies", "best"], "there is no 'best'; there are fcfs, random"),
        (
            ["--ranker", "none"],
            "ranker.path = 'none' has no ranker.json; give a directory that streamrl rank fit wrote",
        ),
        (["--seed", "-1"], "--seed -1: give 0 or more"),
        (["--limit-s", "nan"], "--limit-s nan: give seconds"),
        (["--pools", "8", "0"], "--pools 0: 1 is the least"),
        (
            ["--json", "none/of/it.json"],
            "--json none/of/it.json cannot be written: No such file or directory",
        ),
        (["--history", "{folder}/a.jsonl"], "is the file of --lengths"),
        (["--gen.max_model_len", "93"], "an answer to prompt 9 makes 94 tokens"),
        (["--prompts", "11"], "--prompts 11 is more than the 10 prompts"),
        (["--n", "3"], "--n 3 is more than the 2 answers"),
        (["--cost", "none.json"], "none.json"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    config = write_config(write_world(tmp_path), gen={"max_model_len": 256})
    write_lengths(tmp_path / "a.jsonl", material(10, 2).rows)
    options = [option.format(folder=tmp_path) for option in options]
    options = ["--lengths", str(tmp_path / "a.jsonl"), "--prompts", "6", *options]
    assert main(["bench", "dispatch", str(config), *options]) == 2
    assert says in capsys.readouterr().err
