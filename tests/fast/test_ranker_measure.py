"""What is measured of predictors, and the commands that fit a ranker and measure it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.commands import rank_fit
from streamrl_jax.commands.rank_cli import LOSSES as NAMES
from streamrl_jax.commands.rank_fit import makespans
from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import FLAT
from streamrl_jax.ranker.lengths import ObservedLengths, write_lengths
from streamrl_jax.ranker.loss import LOSSES
from streamrl_jax.ranker.measure import CEILING, history_of, measure, pair_up
from streamrl_jax.ranker.model import LengthRanker
from streamrl_jax.ranker.plans import Server


def observe(count: int, sampling: int, answers: int = 4) -> list[ObservedLengths]:
    """Prompts whose first token tells the length in part; samplings of them differ by chance."""
    rng = np.random.default_rng(sampling)
    rows: list[ObservedLengths] = []
    for number in range(count):
        prompt = np.array([number % 20, number // 20 % 20, number // 400, 3], np.int32)
        lengths = np.maximum(30 * 1.2 ** (number % 20) * rng.gamma(4, 0.25, answers), 1).astype(int).tolist()
        rows.append(ObservedLengths(str(number), prompt, tuple(lengths), (False,) * answers))
    return rows


FIRST, SECOND = observe(300, 0), observe(300, 1)


@pytest.mark.parametrize("view", ["answers", "means"])
def test_the_truth_is_above_the_ceiling_and_a_constant_at_chance(view: str) -> None:
    samplings = pair_up(FIRST, SECOND[::-1], "b.jsonl")
    truth = np.array([1.2 ** (number % 20) for number in range(300)])
    told = {"truth": truth, "constant": np.ones(300)}
    lines = {line.name: line for line in measure(samplings, told, view, draws=40)}  # pyright: ignore[reportArgumentType]
    top = lines[CEILING].recall[-1]
    assert top.low <= top.value <= top.high
    ratio, recall = lines["truth"].of_ceiling, lines["truth"].recall[-1]
    assert ratio is not None and ratio[-1].value > 1.0
    assert ratio[-1].value == pytest.approx(recall.value / top.value)
    assert lines["constant"].recall[-1].value == pytest.approx(0.2)
    assert lines["constant"].tau == 0.0 < lines["truth"].tau


def test_a_second_sampling_as_the_predictor_is_the_ceiling() -> None:
    samplings = pair_up(FIRST, SECOND, "b.jsonl")
    assert samplings.second is not None
    one_way = measure(
        replace(samplings, second=None), {"second": samplings.second.mean(axis=1)}, "means", draws=2
    )
    other_way = measure(
        replace(samplings, first=samplings.second, second=None),
        {"first": samplings.first.mean(axis=1)},
        "means",
        draws=2,
    )
    found = measure(samplings, {}, "means", draws=2)[0]
    for place in range(3):
        both = (one_way[0].recall[place].value + other_way[0].recall[place].value) / 2
        assert found.recall[place].value == pytest.approx(both)
    assert one_way[0].of_ceiling is None and len(one_way) == 1


def test_prompts_are_paired_by_their_tokens_and_rows_of_one_prompt_are_joined() -> None:
    renamed = [replace(row, prompt_id=f"other {row.prompt_id}") for row in SECOND]
    samplings = pair_up(FIRST + FIRST, renamed[::-1], "b.jsonl")
    assert samplings.first.shape == (300, 8) and samplings.second is not None
    np.testing.assert_array_equal(samplings.second, pair_up(FIRST, SECOND, "b.jsonl").second)
    np.testing.assert_allclose(history_of(FIRST, renamed, "h"), [row.mean for row in SECOND])


def test_prompts_that_a_file_lacks_are_told() -> None:
    with pytest.raises(UserError, match=r"b\.jsonl: 2 of 300 prompts are not there, the first is '298'"):
        pair_up(FIRST, SECOND[:-2], "b.jsonl")


def test_the_makespan_of_known_lengths_is_shorter_than_that_of_a_random_order() -> None:
    samplings = pair_up(FIRST, None, "")
    servers = [Server(str(index), 16, 10**9, FLAT) for index in range(4)]
    known = makespans(samplings, samplings.first.mean(axis=1), servers)
    chance = makespans(samplings, None, servers)
    least = max(samplings.first.max(), samplings.first.sum() / 64)
    assert least <= known < chance


def test_the_command_line_names_all_losses() -> None:
    assert tuple(LOSSES) == NAMES


def test_fit_and_eval_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("train.jsonl", "a.jsonl", "b.jsonl")]
    for path, rows in zip(files, (observe(360, 5)[200:], FIRST[:60], SECOND[:60]), strict=True):
        write_lengths(path, rows)
    train, first, second = map(str, files)
    out = tmp_path / "rankers" / "one"
    words = ["rank", "fit", train, "--out", str(out), "--steps", "30", "--seed", "3", "--vocabulary", "32"]
    assert main([*words, "--learning-rate", "0.003", "--seconds", "500", "--loss", "pairwise"]) == 0
    said = capsys.readouterr().out
    assert "step 25/30: loss" in said and "fitted to 640 answers to 160 prompts" in said
    told = LengthRanker.load(out).conditions
    assert (told["seed"], told["vocab_size"], told["loss"], told["steps"]) == (3, 32, "pairwise", 30)

    assert (
        main(["rank", "eval", str(out), first, "--second", second, "--history", second, "--slots", "4"]) == 0
    )
    said = capsys.readouterr().out
    assert "60 prompts with 4 answers each (and 4 of a second sampling)" in said
    for word in ("single answers", "means of a", "ranker", "history", "prompt tokens", "random", "ceiling"):
        assert word in said
    assert "ms a prompt" in said and "simulated makespan of the first sampling, decode steps" in said
    assert "note:" not in said

    mixed = tmp_path / "mixed.jsonl"
    write_lengths(mixed, [*observe(360, 5)[200:230], *FIRST[:30]])
    assert main(["rank", "eval", str(out), str(mixed)]) == 0
    assert "note: 30 of these prompts are among those that the ranker was fitted" in capsys.readouterr().out
    (out / "met.npy").unlink()  # earlier versions wrote none
    assert main(["rank", "eval", str(out), str(mixed)]) == 0
    assert "note: this ranker does not record which prompts" in capsys.readouterr().out

    assert main(words) == 2
    assert "exists already; give a new directory for the ranker" in capsys.readouterr().err


def test_a_fit_that_cannot_be_written_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ranker: LengthRanker, directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LengthRanker, "save", full)
    write_lengths(tmp_path / "train.jsonl", observe(360, 5)[200:])
    words = ["rank", "fit", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "r"), "--steps", "5"]
    assert main([*words, "--vocabulary", "32"]) == 2
    assert f"{tmp_path / 'r'} cannot be written: No space left on device" in capsys.readouterr().err


def test_files_that_are_not_there_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lengths(tmp_path / "a.jsonl", FIRST)
    for words, said in (
        (
            ["fit", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "r")],
            "x.jsonl: the file of lengths cannot",
        ),
        (
            ["fit", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "r"), "--model", "no"],
            "no does not exist",
        ),
        (["eval", str(tmp_path), str(tmp_path / "a.jsonl")], "is no ranker"),
        (
            ["fit", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "r"), "--validation", "2"],
            "validation = 2.0",
        ),
    ):
        assert main(["rank", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_what_a_ranker_is_held_against_is_read_before_anything_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LengthRanker, "load", lambda directory: None)
    monkeypatch.setattr(rank_fit, "_timed_lengths", None)
    write_lengths(tmp_path / "a.jsonl", FIRST[:60])
    write_lengths(tmp_path / "b.jsonl", FIRST[:50])
    (tmp_path / "bad.json").write_text("{")
    for option, name, said in (
        ("--cost", "bad.json", "bad.json: is no JSON"),
        ("--history", "b.jsonl", "b.jsonl"),
        ("--history", "none.jsonl", "none.jsonl: the file of lengths cannot be read"),
    ):
        words = ["rank", "eval", "ranker", str(tmp_path / "a.jsonl"), option, str(tmp_path / name)]
        assert main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["fit", "a.jsonl", "--out", "r"], ["eval", "r", "a.jsonl"]])
def test_a_seed_below_zero_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rank", *words, "--seed", "-1"])
    assert ended.value.code == 2
    assert "--seed: '-1' is no seed; give a whole number from 0 up" in capsys.readouterr().err
