"""A ranker learns what can be known of lengths, the same from the same seed, and ends in time."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.fit import FitOptions, fit_ranker, refresh_rate
from streamrl_jax.ranker.held_back import digests, split
from streamrl_jax.ranker.lengths import ObservedLengths
from streamrl_jax.ranker.loss import LOSSES, LossName
from streamrl_jax.ranker.measure import measure, pair_up
from streamrl_jax.ranker.model import LengthRanker, scratch_arch
from streamrl_jax.train.hf import save_params

from .tiny import random_params, tiny_arch, tiny_model

LIMIT = 400
QUICK = FitOptions(steps=150, learning_rate=3e-3, average=0.9, check_every=25, patience=4, seed=1)


def expected_tokens(prompt: np.ndarray) -> float:
    """The rule to be learned: each 7 makes an answer half as long again, and each 9 two thirds as long."""
    return 40.0 * 1.5 ** float((prompt == 7).sum() - (prompt == 9).sum())


def observe(count: int, seed: int, sampling: int = 0) -> list[ObservedLengths]:
    """Prompts of 4 to 12 tokens with three answers each, whose lengths vary by chance and are cut at the limit."""
    rng, chance = np.random.default_rng(seed), np.random.default_rng([seed, sampling])
    rows: list[ObservedLengths] = []
    for number in range(count):
        prompt = rng.choice([1, 2, 3, 7, 9], int(rng.integers(4, 13))).astype(np.int32)
        drawn = np.maximum(expected_tokens(prompt) * np.exp(chance.normal(0, 0.2, 3)), 1)
        lengths = np.minimum(drawn, LIMIT).astype(int).tolist()
        rows.append(ObservedLengths(str(number), prompt, tuple(lengths), tuple(n == LIMIT for n in lengths)))
    return rows


@lru_cache(maxsize=1)
def learned() -> LengthRanker:
    return fit_ranker(observe(500, 0), QUICK)


def test_it_learns_a_rule_up_to_the_ceiling() -> None:
    held_out = observe(400, 99)
    samplings = pair_up(held_out, observe(400, 99, sampling=1), "the second")
    ranker = {"ranker": learned().scores([row.token_ids for row in samplings.rows])}
    for view in ("answers", "means"):
        line, _ = measure(samplings, ranker, view, draws=2)
        assert line.of_ceiling is not None and line.of_ceiling[-1].value > 0.95


def test_its_lengths_are_expected_tokens() -> None:
    rows = observe(400, 98)
    lengths = learned().lengths([row.token_ids for row in rows])
    truth = np.array([min(expected_tokens(row.token_ids), LIMIT) for row in rows])
    assert float(np.median(np.abs(np.log(lengths / truth)))) < 0.15
    assert lengths.max() <= LIMIT


def test_equal_seeds_give_equal_rankers_and_others_do_not() -> None:
    asked = [row.token_ids for row in observe(50, 5)]
    options = replace(QUICK, steps=20)
    rows = observe(100, 2)
    first, second, other = (fit_ranker(rows, replace(options, seed=seed)).scores(asked) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(loss: LossName) -> None:
    lines: list[str] = []
    ranker = fit_ranker(observe(300, 4), replace(QUICK, loss=loss, steps=100), report=lines.append)
    assert float(ranker.conditions["concordance"]) > 0.8
    assert re.match(r"step 25/100: loss \d+\.\d{4}, order of held-back answers 0\.\d{4} \(best", lines[0])


def test_it_goes_on_from_a_policy_from_a_directory_and_from_a_ranker(tmp_path: Path) -> None:
    policy = tiny_model(tiny_arch())
    save_params(random_params(policy, 1), policy.arch, tmp_path / "policy", source=None)
    options = replace(QUICK, steps=50)
    rows = observe(200, 4)
    from_policy = fit_ranker(rows, replace(options, steps=5), tmp_path / "policy")
    assert from_policy.model.arch.vocab_size == 48 and from_policy.conditions["start"] == "policy"
    from_policy.save(tmp_path / "ranker")
    one, other = (fit_ranker(rows, options, start) for start in (tmp_path / "ranker", from_policy))
    asked = [row.token_ids for row in observe(20, 9)]
    np.testing.assert_array_equal(one.scores(asked), other.scores(asked))
    assert not np.array_equal(one.scores(asked), from_policy.scores(asked))


def test_it_knows_all_prompts_again_that_it_has_met(tmp_path: Path) -> None:
    first, later, never = observe(80, 4), observe(80, 5), observe(20, 9)
    once = fit_ranker(first, replace(QUICK, steps=5))
    np.testing.assert_array_equal(once.met, digests([*first[::-1], first[0]]))
    once.save(tmp_path / "ranker")
    for start in (once, tmp_path / "ranker"):
        np.testing.assert_array_equal(
            fit_ranker(later, replace(QUICK, steps=5), start).met, digests([*first, *later])
        )
    assert not np.isin(digests(never), once.met).any()


def test_the_best_order_is_kept_and_no_patience_ends_the_fit() -> None:
    lines: list[str] = []
    options = replace(QUICK, steps=1000, check_every=5, patience=3, learning_rate=0.02)
    ranker = fit_ranker(observe(60, 6), options, report=lines.append)
    seen = [float(re.findall(r"answers (0\.\d+)", line)[0]) for line in lines]
    assert len(lines) < 200
    assert ranker.conditions["concordance"] == max(seen) and ranker.conditions["best_step"] == 5 * (
        1 + int(np.argmax(seen))
    )
    assert ranker.conditions["steps"] == ranker.conditions["best_step"] + 3 * 5


@pytest.mark.parametrize("kind", ["ranker", "directory"])
def test_a_ranker_is_kept_where_nothing_better_is_found(kind: str, tmp_path: Path) -> None:
    """Steps that are far too large ruin it; what comes back is what was there, calibrated on the newer answers."""
    learned().save(tmp_path / "ranker")
    start = learned() if kind == "ranker" else tmp_path / "ranker"
    longer = [
        replace(row, lengths=tuple(2 * length for length in row.lengths), cut=(False,) * 3)
        for row in observe(200, 11)
    ]
    lines: list[str] = []
    ruinous = replace(QUICK, steps=30, check_every=10, learning_rate=0.5, average=0.0)
    kept = fit_ranker(longer, ruinous, start, report=lines.append)
    asked = [row.token_ids for row in observe(50, 12)]
    np.testing.assert_array_equal(kept.scores(asked), learned().scores(asked))
    assert kept.conditions["best_step"] == 0 and kept.conditions["steps"] == 30
    assert "at step 0)" in lines[-1]
    assert float(np.median(kept.lengths(asked) / learned().lengths(asked))) == pytest.approx(2.0, rel=0.1)


def test_a_policy_has_no_order_to_be_kept(tmp_path: Path) -> None:
    policy = tiny_model(tiny_arch())
    save_params(random_params(policy, 1), policy.arch, tmp_path / "policy", source=None)
    ruinous = replace(QUICK, steps=4, check_every=2, learning_rate=0.5)
    assert int(fit_ranker(observe(60, 6), ruinous, tmp_path / "policy").conditions["best_step"]) > 0


def test_the_rate_of_a_refresh_is_under_that_of_a_first_fit_and_falls_with_the_width() -> None:
    small = refresh_rate(scratch_arch("small", 64))
    assert small < refresh_rate(scratch_arch("tiny", 64)) < FitOptions().learning_rate
    wide = replace(scratch_arch("small", 64), embed=1024)
    assert refresh_rate(wide) == pytest.approx(small / 8)


def test_time_ends_the_fit() -> None:
    ranker = fit_ranker(observe(60, 6), replace(QUICK, steps=100_000, patience=100_000, seconds=1e-9))
    assert ranker.conditions["steps"] == 1


def test_prompts_held_back_are_others_than_those_trained_on() -> None:
    rows = observe(100, 7)
    training, held = split(rows, 0.15, 0)
    ids = [row.prompt_id for row in (*training, *held)]
    assert len(ids) == len(set(ids)) == 100 and set(ids) == {row.prompt_id for row in rows}
    assert len(training) == 100 - len(held) and 5 <= len(held) <= 25
    assert {row.prompt_id for row in split(rows, 0.15, 1)[1]} != {row.prompt_id for row in held}


def held_and_trained(rows: list[ObservedLengths]) -> tuple[set[bytes], set[bytes]]:
    training, held = split(rows, 0.15, 3)
    return {row.token_ids.tobytes() for row in held}, {row.token_ids.tobytes() for row in training}


def test_a_window_holds_back_what_another_one_did() -> None:
    """A ranker that is trained on, window after window, is measured on prompts that it never saw."""
    rows = observe(900, 7)
    windows = [held_and_trained(rows[first : first + 500]) for first in (0, 150, 400)]
    held, trained = (set[bytes]().union(*sets) for sets in zip(*windows, strict=True))
    assert not held & trained
    assert held == held_and_trained(rows)[0]
    assert 0.1 < len(held) / len(held | trained) < 0.2


@pytest.mark.parametrize(("count", "share", "held"), [(16, 1e-9, 4), (16, 0.89, 8), (20, 0.89, 12)])
def test_of_few_prompts_some_are_held_back_and_some_trained_on(count: int, share: float, held: int) -> None:
    rows = observe(count, 8)
    found = split(rows, share, 0)
    assert [len(part) for part in found] == [count - held, held]
    turned = split(rows[::-1], share, 0)
    assert [[row.prompt_id for row in part] for part in found] == [
        [row.prompt_id for row in part] for part in turned
    ], "whatever the order in which they come"


def test_a_fit_leaves_the_default_device_alone() -> None:
    before = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    ranker = fit_ranker(observe(60, 6), replace(QUICK, steps=1))
    assert jax.config.jax_default_device == before  # pyright: ignore[reportAttributeAccessIssue]
    used = {device for leaf in jax.tree.leaves(ranker.params) for device in leaf.devices()}
    assert used == {jax.local_devices(backend="cpu")[0]}


def test_too_few_prompts_are_told() -> None:
    with pytest.raises(UserError, match=r"^there are lengths of 9 prompts, a ranker needs 16"):
        fit_ranker(observe(9, 0), QUICK)
    with pytest.raises(UserError, match=r"^a\.jsonl, b\.jsonl: there are lengths of 9 prompts"):
        fit_ranker(observe(9, 0), QUICK, where="a.jsonl, b.jsonl")


def test_answers_of_one_length_are_told() -> None:
    rows = [replace(row, lengths=(LIMIT,), cut=(True,)) for row in observe(40, 0)]
    with pytest.raises(UserError, match="all answers have 400 tokens, so there is nothing to rank"):
        fit_ranker(rows, QUICK)


def test_a_prompt_outside_the_vocabulary_is_told() -> None:
    said = r"^a\.jsonl: prompt '\d+' has the token id 9, but the ranker's vocabulary has 8"
    with pytest.raises(UserError, match=said):
        fit_ranker(observe(40, 0), replace(QUICK, vocab_size=8), where="a.jsonl")


def test_a_loss_that_is_no_number_ends_the_fit() -> None:
    with pytest.raises(UserError, match="the loss is nan; lower the learning rate"):
        fit_ranker(observe(60, 0), replace(QUICK, steps=10, check_every=5, learning_rate=1e38))


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"draws": 0},
        {"list_size": 1},
        {"validation": 0.0},
        {"validation": 0.95},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"seconds": -1.0},
        {"average": 1.0},
        {"seed": -1},
        {"vocab_size": 10**11},
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=f"{name} = {value}"):
        FitOptions(**wrong)  # pyright: ignore[reportArgumentType]


def test_a_token_id_above_any_vocabulary_is_refused() -> None:
    rows = [
        ObservedLengths(str(index), np.array([2**31 - 1 - index], np.int32), (1 + index, 2), (False, False))
        for index in range(40)
    ]
    with pytest.raises(UserError, match="a prompt has the token id 2147483647, above any vocabulary"):
        fit_ranker(rows, FitOptions(steps=1))
