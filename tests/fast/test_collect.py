"""Collecting lengths: rows are whole and in order, a broken collection does not look whole, seeds are independent, and
no reward is asked for.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from streamrl_jax.cli import main
from streamrl_jax.commands import rank
from streamrl_jax.config import Config
from streamrl_jax.data import load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.ranker import collect
from streamrl_jax.ranker.collect import check_place, gathered, growing, partial_file, spread_of
from streamrl_jax.ranker.lengths import ObservedLengths, read_lengths, write_lengths
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.setup import serving
from streamrl_jax.types import Fence, FinishReason, Generation, Prompt, Sample, VersionRun

from .job_world import LENGTH, jax_settings_kept, job_config, write_config, write_world

PROMPTS, N = 12, 3


def sample(prompt: int, index: int, length: int, reason: FinishReason = FinishReason.STOP) -> Sample:
    answer = Generation(
        sample_id=f"lengths/0/{prompt}/{index}",
        attempt=0,
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=(VersionRun(0, length),),
        finish_reason=reason,
        instance="instance-0",
    )
    asked = Prompt(str(prompt), np.array([prompt], np.int32), {"prompt": "p"})
    return Sample(answer.sample_id, 0, asked, index, answer, 0.0)


def row(prompt_id: str, *lengths: int) -> ObservedLengths:
    return ObservedLengths(prompt_id, np.zeros(1, np.int32), lengths, (False,) * len(lengths))


# ------------------------------------------------------------------ rows


def test_a_row_is_given_when_its_last_answer_has_come_and_is_in_the_groups_order() -> None:
    samples = [sample(p, i, 10 * p + i + 1, FinishReason.LENGTH if i else FinishReason.STOP)
               for p in range(5) for i in range(2)]  # fmt: skip
    random.Random(0).shuffle(samples)
    last = {each.prompt.prompt_id: position for position, each in enumerate(samples)}
    rows = list(gathered(iter(samples), 2))
    assert [one.prompt_id for one in rows] == sorted(last, key=lambda prompt: last[prompt])
    for one in rows:
        number = int(one.prompt_id)
        assert one.lengths == (10 * number + 1, 10 * number + 2) and one.cut == (False, True)
        assert one.token_ids.tolist() == [number]


def test_a_file_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    with growing(path) as take:
        for name in ("10", "9", "2"):
            take(row(name, 5))
            assert not path.exists()
            assert read_lengths(partial_file(path))[-1].prompt_id == name, "it is readable as it grows"
    assert [one.prompt_id for one in read_lengths(path)] == ["2", "9", "10"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_collection_leaves_what_it_has_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), growing(path, said.append) as take:
        take(row("3", 5))
        raise KeyboardInterrupt
    assert len(said) == 1 and said[0].startswith(f"{partial_file(path)}: the 1 prompts")
    assert "leans to prompts with short answers" in said[0]
    assert list(tmp_path.iterdir()) == [partial_file(path)]
    assert [one.lengths for one in read_lengths(partial_file(path))] == [(5,)]
    check_place(path)
    with pytest.raises(ValueError, match="before any row"), growing(path, said.append):
        raise ValueError("before any row")
    assert [one.lengths for one in read_lengths(partial_file(path))] == [(5,)] and len(said) == 1
    with growing(path) as take:
        take(row("4", 5))
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_at_the_end_names_the_file_and_where_the_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, rows: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(collect, "write_lengths", full)
    path = tmp_path / "lengths.jsonl"
    with (
        pytest.raises(UserError, match=r"jsonl cannot be written: No space .* all rows are in .*\.partial"),
        growing(path) as take,
    ):
        for name in ("2", "1"):
            take(row(name, 5))
    assert [one.prompt_id for one in read_lengths(partial_file(path))] == ["2", "1"]


def test_the_spread_tells_chance_from_what_the_prompt_determines() -> None:
    rng = np.random.default_rng(0)
    expected = rng.normal(1000.0, 30.0, size=4000)
    lengths = np.rint(expected[:, None] + rng.normal(0.0, 40.0, size=(4000, 4))).astype(int)
    spread = spread_of([row(str(index), *each.tolist()) for index, each in enumerate(lengths)])
    assert (spread.prompts, spread.answers, spread.tokens) == (4000, 16_000, lengths.sum())
    assert spread.between == pytest.approx(30**2 / (30**2 + 40**2), abs=0.02)
    assert spread.quantiles == {share: np.quantile(lengths, share) for share in (0.5, 0.9, 0.99)}
    assert spread.longest == lengths.max() and spread.cut == 0.0


def test_the_spread_counts_what_was_cut_and_claims_nothing_of_single_answers() -> None:
    rows = [ObservedLengths(str(i), np.zeros(1, np.int32), (i + 1,), (i == 0,)) for i in range(4)]
    spread = spread_of(rows)
    assert spread.cut == 0.25 and math.isnan(spread.between)
    assert spread.rows()["cut"] == "25.00%"


# ------------------------------------------------------------------ collections


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        yield write_world(tmp_path_factory.mktemp("world"))


def unrewarded(world: Path) -> Config:
    """The reward's function is not there: nothing may load it."""
    return job_config(world, reward={"function": f"{world / 'none.py'}:nothing"}, gen={"instances": 2})


def collected(world: Path, name: str, wanted: rank.Wanted) -> list[ObservedLengths]:
    path = world / name
    rank.collect(unrewarded(world), path, wanted)
    assert not partial_file(path).exists()
    return read_lengths(path)


def test_a_collection_is_a_function_of_its_seed_and_asks_for_no_reward(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, other = (
        collected(world, f"{name}.jsonl", rank.Wanted("test", PROMPTS, N, seed))
        for name, seed in (("first", 5), ("other", 6))
    )
    collected(world, "same.jsonl", rank.Wanted("test", PROMPTS, N, seed=5))
    assert (world / "first.jsonl").read_bytes() == (world / "same.jsonl").read_bytes()
    assert [one.prompt_id for one in first] == [one.prompt_id for one in other], "the prompts stay the same"
    assert [one.lengths for one in first] != [one.lengths for one in other]
    lengths = [length for one in first for length in one.lengths]
    assert len(lengths) == PROMPTS * N and max(lengths) == LENGTH
    held_out = load_prompts(unrewarded(world).data, Tokenizer.load(world / "model"), "test", seed=1).all()
    for one, prompt in zip(first, held_out[:PROMPTS], strict=True):
        assert one.prompt == prompt.columns["prompt"] and (one.token_ids == prompt.token_ids).all()
        assert all(length == LENGTH for length, cut in zip(one.lengths, one.cut, strict=True) if cut)
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert [command for command in commands if str(tmp_path) in command] == []
    assert list(tmp_path.iterdir()) == []


def test_training_prompts_are_those_that_a_run_draws_first(world: Path) -> None:
    cfg = unrewarded(world)
    rows = collected(world, "train.jsonl", rank.Wanted("train", 8))
    prompts = load_prompts(cfg.data, Tokenizer.load(world / "model"), "train", cfg.run.seed)
    drawn = [prompt.prompt_id for iteration in (0, 1) for prompt in prompts.iteration(iteration)]
    assert {one.prompt_id for one in rows} == set(drawn)
    assert {len(one.lengths) for one in rows} == {cfg.rollout.n}
    with pytest.raises(UserError, match=r"--prompts 100000: task:arithmetic holds \d+ prompts"):
        rank.first_drawn(prompts, 100_000)


# ------------------------------------------------------------------ the command line


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["rank", "collect", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_bad_input_is_told_by_name(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "open_generation", None)  # all of it is told before an instance starts
    config = write_config(world)
    taken, new = tmp_path / "taken.jsonl", tmp_path / "new.jsonl"
    taken.write_text("")
    (tmp_path / "file").write_text("")
    assert "taken.jsonl exists already" in told(capsys, config, "--out", taken)
    assert "cannot be written: File exists" in told(capsys, config, "--out", tmp_path / "file" / "a.jsonl")
    assert "cannot be written: File name too long" in told(capsys, config, "--out", tmp_path / ("x" * 300))
    assert "--prompts 999999: task:arithmetic holds" in told(
        capsys, config, "--prompts", "999999", "--out", new
    )
    assert "A configuration file is needed" in told(capsys, "--out", new)
    assert "data.test is empty" in told(capsys, config, "data.test=", "--split", "test", "--out", new)
    assert "no recorded samples" in told(capsys, "--run", tmp_path, "--out", new)
    refused = told(capsys, config, "--run", tmp_path, "--out", new, "--n", "3", "--seed", "0")
    assert "--n, --seed, a configuration cannot be given beside it" in refused
    for option, value, said in (("--prompts", "0", "no number of them"), ("--seed", "-1", "no seed; give")):
        with pytest.raises(SystemExit) as ended:
            main(["rank", "collect", str(config), "--out", str(new), option, value])
        assert ended.value.code == 2 and f"{option}: '{value}' is {said}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.jsonl"]


def test_what_a_run_has_recorded_becomes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "samples").mkdir(parents=True)
    log = SampleLog(tmp_path / "run" / "samples", Fence("run", 0), lambda ids: f"tokens {ids.tolist()}")
    log.write(0, [sample(1, 0, 4), sample(1, 1, 8, FinishReason.LENGTH), sample(2, 0, 6)], 0)
    out = tmp_path / "deep" / "er" / "lengths.jsonl"
    assert main(["rank", "collect", "--run", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert [(one.prompt, one.lengths, one.cut) for one in read_lengths(out)] == [
        ("tokens [1]", (4, 8), (False, True)),
        ("tokens [2]", (6,), (False,)),
    ]
    shown = capsys.readouterr().out
    assert "33.33%" in shown and "lengths.jsonl" in shown


def test_lengths_that_were_written_are_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "lengths.jsonl"
    write_lengths(out, [row("1", 3)])
    with pytest.raises(UserError, match=r"lengths.jsonl exists already"):
        rank.collect_run(tmp_path, out)
    assert read_lengths(out)[0].lengths == (3,)
