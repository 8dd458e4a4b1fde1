"""Built-in tasks: right answers are right, held-out prompts stay out, what a teacher forgets is what it is
said to.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM

from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.tasks import Row, Task, load_task
from streamrl_jax.tasks.counting import count_on
from streamrl_jax.tasks.detours import Detours
from streamrl_jax.tasks.picks import verdict
from streamrl_jax.tasks.smollm import find_gguf, prepare_smollm
from streamrl_jax.tasks.toy_model import ToyShape, write_toy_checkpoint

GYM = {
    "dataset": "chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
    "size": 300,
    "test_size": 40,
}
TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {},
    "counting": {},
    "detours": {},
    "picks": {},
    "reasoning_gym": GYM,
}


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return load_task(f"task:{request.param}", TASKS[request.param])


def prompts(rows: Iterable[Row]) -> set[str]:
    return {row["prompt"] for row in rows}


def test_held_out_prompts_are_in_no_training_row_and_no_example(task: Task) -> None:
    train, test = prompts(task.train_rows()), prompts(task.test_rows())
    examples = {prompt for step in range(20) for prompt in prompts(task.example_rows(0, step, 100))}
    assert train and test and not test & train and not test & examples
    assert len(test) == len(task.test_rows())


def test_rows_are_pure_functions(task: Task) -> None:
    again = load_task(f"task:{_name(task)}", TASKS[_name(task)])
    assert list(again.train_rows()) == list(task.train_rows())
    assert list(again.test_rows()) == list(task.test_rows())
    assert list(again.example_rows(3, 7, 20)) == list(task.example_rows(3, 7, 20))
    others = [list(task.example_rows(3, 8, 20)), list(task.example_rows(4, 7, 20))]
    assert list(task.example_rows(3, 7, 20)) not in others


def _name(task: Task) -> str:
    name = type(task).__name__.lower()
    return name if name in TASKS else "reasoning_gym"


def _operands(prompt: str) -> tuple[int, int]:
    left, right = prompt.rstrip("=").split("+")
    return int(left), int(right)


def _carries(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


# ------------------------------------------------------------------ arithmetic


def test_arithmetic_asks_for_carries_and_holds_out_one_pair_in_ten() -> None:
    task = load_task("task:arithmetic", {})
    for rows in (task.train_rows(), task.test_rows()):
        for row in rows:
            a, b = _operands(row["prompt"])
            assert _carries(a, b) and min(a, b) >= 10 and max(a, b) <= 99
            assert row["answer"] == str(a + b)
    train, test = len(task.train_rows()), len(task.test_rows())
    assert train + test == sum(_carries(a, b) for a in range(10, 100) for b in range(10, 100))
    assert 0.08 < test / (train + test) < 0.12


def test_the_arithmetic_teacher_forgets_carries_and_nothing_else() -> None:
    task = load_task("task:arithmetic", {"forget": 0.6})
    forgotten, carried = 0, 0
    for row in (row for step in range(20) for row in task.example_rows(0, step, 200)):
        a, b = _operands(row["prompt"])
        if _carries(a, b):
            carried += 1
            forgotten += row["answer"] == str(a + b - 10)
            assert row["answer"] in (str(a + b), str(a + b - 10))
        else:
            assert row["answer"] == str(a + b)
    assert abs(forgotten / carried - 0.6) < 0.04
    for row in task.stop_rows():
        a, b = _operands(row["prompt"])
        assert not _carries(a, b) and row["answer"] == str(a + b)


# ------------------------------------------------------------------ counting


def test_counting_on_is_a_chain_of_equal_sums_that_ends_in_the_sum() -> None:
    rng = random.Random(0)
    for left, right in [(10, 19), (17, 25), (39, 60), (98, 1)]:
        *terms, last = count_on(left, right, 0.0, rng).split("=")
        assert [_operands(term) for term in terms] == [(left + k, right - k) for k in range(1, right)]
        assert last == str(left + right)
    assert count_on(18, 4, 1.0, rng) == "19+3=10+2=11+1=12"


def test_counting_answers_have_a_hundred_tokens_and_more_and_vary() -> None:
    task = load_task("task:counting", {})
    lengths, rng = [], random.Random(0)
    for row in [*task.train_rows(), *task.test_rows()]:
        left, right = _operands(row["prompt"])
        assert row["answer"] == str(left + right)
        lengths.append(len(count_on(left, right, 0.5, rng)) + 1)  # a token a character, and the EOS
    assert min(lengths) == 102 and max(lengths) <= 348
    assert np.quantile(lengths, 0.9) > 1.5 * np.median(lengths)


def test_the_counting_teacher_forgets_carries_and_nothing_else() -> None:
    task = load_task("task:counting", {"forget": 0.3})
    forgotten, carried = 0, 0
    for row in (row for step in range(10) for row in task.example_rows(0, step, 50)):
        left, right = _operands(row["prompt"])
        *terms, last = row["answer"].split("=")
        chain = [_operands(term) for term in terms]
        for left_after, right_after in [*chain, (int(last), 0)]:
            assert right_after == right - 1
            if left % 10 == 9:
                carried += 1
                forgotten += left_after == left - 9
                assert left_after in (left + 1, left - 9)
            else:
                assert left_after == left + 1
            left, right = left_after, right_after
        assert right == 0
    assert abs(forgotten / carried - 0.3) < 0.05


def test_the_stop_set_of_counting_is_the_rest_after_the_last_carry() -> None:
    task = load_task("task:counting", {})
    held_out = prompts(task.test_rows())
    rows = task.stop_rows()
    assert len(rows) > 50
    for row in rows:
        first, *_, last = row["prompt"].removesuffix("=").split("=")
        assert f"{first}=" in held_out
        left, right = _operands(last)
        assert not _carries(left, right) and row["answer"] == count_on(left, right, 0.0, random.Random(0))


# ------------------------------------------------------------------ detours


def test_detours_asks_for_sums_whose_right_operand_is_seldom_large() -> None:
    task = Detours()
    train, test = task.train_rows(), task.test_rows()
    rights = []
    for row in [*train, *test]:
        left, right = _operands(row["prompt"])
        assert row["answer"] == str(left + right) and len(str(left)) == len(row["answer"]) == 3
        rights.append(right)
    assert len(train) > 4000 and 0.17 < len(test) / len(rights) < 0.23
    assert min(rights) == 2 and max(rights) <= 80
    # Of the operands from 2 on, a share of exp(-8 / 8) is larger by 8, of exp(-24 / 8) by 24.
    for more in (8, 24):
        expected = np.exp(-more / 8)
        deviation = (expected * (1 - expected) / len(rights)) ** 0.5
        assert abs(np.mean([right >= 2 + more for right in rights]) - expected) < 4 * deviation + 0.005


def test_a_decades_last_term_may_be_repeated_and_every_term_keeps_the_sum() -> None:
    task = Detours(again=0.2, again_hard=0.8)
    repeats: dict[str, list[bool]] = {"37": [], "01245689": []}
    for row in (row for step in range(20) for row in task.example_rows(0, step, 100)):
        left, right = _operands(row["prompt"])
        total = left + right
        *terms, last = re.split("[=:]", row["answer"])
        signs = ["=", *re.findall("[=:]", row["answer"])]
        chain = [*map(_operands, terms), (int(last), 0)]
        assert len(chain) <= task.most_terms and {len(term) for term in terms} <= {6}
        for number, (sign, (after, remaining)) in enumerate(zip(signs, chain, strict=True)):
            assert after + remaining == total
            assert after == (left if sign == ":" else left + 1)
            if number and left % 10 == 9 and number + right < task.most_terms:
                (kind,) = [digits for digits in repeats if str(left // 10 % 10) in digits]
                repeats[kind].append(sign == ":")
            else:
                assert sign == "="
            left, right = after, remaining
    for chance, (_, seen) in zip((0.8, 0.2), repeats.items(), strict=True):
        assert abs(np.mean(seen) - chance) < 4 * (chance * (1 - chance) / len(seen)) ** 0.5


def test_the_lengths_of_detours_have_a_long_tail_that_the_prompt_tells_in_part() -> None:
    """As its docstring says: P50 of about 53 tokens, P99 of about 550, one answer in 300 over 700."""
    task, rng = Detours(most_terms=10_000), random.Random(0)
    pairs = [_operands(row["prompt"]) for row in [*task.train_rows(), *task.test_rows()]]
    # A token a character, and the EOS.
    lengths = np.array([[len(task.answer(*pair, rng)) + 1 for _ in range(4)] for pair in pairs])
    p50, p99 = np.quantile(lengths, [0.5, 0.99])
    assert 46 <= p50 <= 60 and 500 <= p99 <= 600 and p99 > 6 * p50
    assert 0.002 < np.mean(lengths > 700) < 0.005
    between = 1 - lengths.var(axis=1, ddof=1).mean() / lengths.var()
    assert 0.6 < between < 0.8
    means = lengths.mean(axis=1)
    like = [index for index, (_, right) in enumerate(pairs) if 8 <= right <= 12]
    hard = [index for index in like if _ends_a_hard_decade(*pairs[index])]
    easy = sorted({*like} - {*hard})
    assert len(hard) > 100 and means[hard].mean() > 1.5 * means[easy].mean(), "of equal right operands"
    bounded = Detours()
    assert max(len(bounded.answer(*pair, rng)) + 1 for pair in pairs) <= 7 * bounded.most_terms


def _ends_a_hard_decade(left: int, right: int) -> bool:
    return any(number % 10 == 9 and number // 10 % 10 in (3, 7) for number in range(left, left + right))


def test_the_stop_set_of_detours_is_the_rest_after_the_last_decades_end() -> None:
    task = Detours()
    held_out = prompts(task.test_rows())
    rows = task.stop_rows()
    assert len(rows) > 300
    for row in rows:
        first, *_, last = row["prompt"].removesuffix("=").split("=")
        assert f"{first}=" in held_out
        left, right = _operands(last)
        assert left % 10 == 0 and not _carries(left, right)
        assert row["answer"] == task.answer(left, right, random.Random(0))


# ------------------------------------------------------------------ picks


def test_picks_asks_for_the_largest_digit_where_there_is_a_choice_and_holds_out_one_prompt_in_ten() -> None:
    task = load_task("task:picks", {})
    train, test = task.train_rows(), task.test_rows()
    for row in [*train, *test]:
        offer = row["prompt"].removesuffix("=")
        assert len(offer) == 4 and len(set(offer)) > 1
        assert int(row["answer"]) == max(int(digit) for digit in offer)
    assert len(train) + len(test) == 10_000 - 10
    assert 0.08 < len(test) / 9_990 < 0.12


def test_the_teacher_of_picks_picks_at_random_and_judges_its_first_pick_well() -> None:
    task = load_task("task:picks", {"shortest": 3, "longest": 6})
    places, further_lengths, right = [0, 0, 0, 0], set(), 0
    rows = [row for step in range(20) for row in task.example_rows(0, step, 200)]
    long_rows = [row for row in rows if row["prompt"].endswith("=")]
    for row in rows:
        offer, answer = row["prompt"][:-1], row["answer"]
        pick, sign = answer[0], answer[1]
        assert sign == verdict(offer, pick)
        right += sign == "+"
        if row in long_rows:
            picks = answer.split(sign)
            assert set(picks) <= set(offer) and answer == sign.join(picks)
            further_lengths.add(len(picks) - 1)
            if len(set(offer)) == 4:
                for pick in picks:
                    places[offer.index(pick)] += 1
        else:
            assert row["prompt"].endswith(".") and len(answer) == 2
    assert further_lengths == {3, 4, 5, 6}
    assert 0.07 < len(long_rows) / len(rows) < 0.13
    offers = [row["prompt"].removesuffix("=") for row in task.train_rows()]
    at_random = np.mean([offer.count(max(offer)) / 4 for offer in offers])
    assert abs(right / len(rows) - at_random) < 0.03
    assert max(places) < 1.3 * min(places)


def test_the_stop_set_of_picks_is_the_verdict_on_a_pick_from_a_held_out_prompt() -> None:
    task = load_task("task:picks", {})
    held_out = prompts(task.test_rows())
    rows = task.stop_rows()
    assert len(rows) == 300
    for row in rows:
        offer, pick = row["prompt"].split(".")
        assert f"{offer}=" in held_out and pick in offer
        assert row["answer"] == ("+" if all(pick >= digit for digit in offer) else "-")
    assert {row["answer"] for row in rows} == {"+", "-"}


# ------------------------------------------------------------------ reasoning-gym


def test_reasoning_gym_rows_are_scored_right_by_their_own_answers() -> None:
    from streamrl_jax.tasks.gym import score

    task = load_task("task:reasoning_gym", GYM | {"instruction": "Give the number alone."})
    for row in task.test_rows():
        assert row["prompt"].endswith("\n\nGive the number alone.")
        assert score(row["answer"], row) == 1.0
        assert score(None, row) == 0.0


def test_reasoning_gym_without_single_answers_has_prompts_but_no_examples() -> None:
    task = load_task("task:reasoning_gym", {"dataset": "propositional_logic", "size": 5, "test_size": 2})
    assert all(row["answer"] is None for row in task.train_rows())
    with pytest.raises(
        UserError, match=r"no problem of reasoning-gym's 'propositional_logic' comes with an answer"
    ):
        task.example_rows(0, 0, 1)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("arithmetik", {}, "no task 'arithmetik'; did you mean 'arithmetic'"),
        ("arithmetic", {"forgot": 0.5}, "task 'arithmetic' has no argument 'forgot'; did you mean 'forget'"),
        (
            "arithmetic",
            {"forget": "0.5"},
            r"data\.task\.forget = '0\.5': task 'arithmetic' needs a float here",
        ),
        ("arithmetic", {"low": True}, r"data\.task\.low = True"),
        ("arithmetic", {"forget": 1.5}, r"data\.task\.forget = 1\.5"),
        ("arithmetic", {"low": 95}, "low = 95, high = 99"),
        ("arithmetic", {"hold_out_one_in": 1}, r"hold_out_one_in = 1"),
        ("counting", {"longest": 95}, "longest = 95"),
        ("detours", {"longest": 100}, r"data\.task\.longest = 100: a number from 2 to 99"),
        ("detours", {"scale": 0.5}, r"data\.task\.scale = 0\.5"),
        ("detours", {"again": 1.0}, r"data\.task\.again = 1\.0: a chance from 0 to less than 1"),
        ("detours", {"again_hard": -0.1}, r"data\.task\.again_hard = -0\.1"),
        ("detours", {"hard": "3,7"}, r"data\.task\.hard = '3,7': tens digits are needed"),
        ("detours", {"most_terms": 79}, "most_terms = 79: at least longest = 80"),
        ("detours", {"hold_out_one_in": 1}, r"hold_out_one_in = 1"),
        ("picks", {"digits": 6}, r"data\.task\.digits = 6"),
        ("picks", {"shortest": 37}, "shortest = 37, longest = 36"),
        ("picks", {"hold_out_one_in": 1}, r"hold_out_one_in = 1"),
        ("reasoning_gym", {}, "task 'reasoning_gym' needs the arguments dataset"),
        (
            "reasoning_gym",
            {"dataset": "chain_sums"},
            r"data\.task\.dataset = 'chain_sums'.*has no such data set",
        ),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"terms": 2}}, "'chain_sum' refuses it"),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"min_terms": 0}}, "'chain_sum' refuses it"),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"seed": 0}}, r"data\.task\.config\.seed"),
        ("reasoning_gym", {"dataset": "chain_sum", "size": 0}, r"data\.task\.size = 0"),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task(f"task:{name}", arguments)


# ------------------------------------------------------------------ models


def test_the_toy_checkpoint_is_one_that_transformers_loads(tmp_path: Path) -> None:
    shape = ToyShape(embed=64, layers=3, heads=4, kv_heads=2, mlp=96)
    directory = write_toy_checkpoint(tmp_path / "sub" / "toy", seed=1, shape=shape)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, loading = loaded
    assert not any(
        loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    assert model.config.num_hidden_layers == 3 and model.dtype == torch.float32
    assert model.config.vocab_size == Tokenizer.load(directory).vocab_size == 64
    assert model.generation_config.eos_token_id == list(Tokenizer.load(directory).eos_ids)
    for name, tensor in safetensors.numpy.load_file(directory / "model.safetensors").items():
        if tensor.ndim == 2:
            assert abs(tensor.std() * tensor.shape[1] ** 0.5 - 1.0) < 0.1, name


def test_the_toy_checkpoint_depends_on_the_seed_alone_and_replaces_nothing(tmp_path: Path) -> None:
    first, same, other = (
        write_toy_checkpoint(tmp_path / name, seed) for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    )
    blobs = [(path / "model.safetensors").read_bytes() for path in (first, same, other)]
    assert blobs[0] == blobs[1] != blobs[2]
    with pytest.raises(UserError, match="a exists; remove it"):
        write_toy_checkpoint(first, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # no scratch left


def test_smollm_is_not_written_over_something_else_nor_twice(tmp_path: Path) -> None:
    assert find_gguf().is_file()
    with pytest.raises(UserError, match=r"is not this checkpoint \(it lacks config\.json"):
        prepare_smollm(tmp_path)
    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    )
    for name in names:
        (tmp_path / name).write_text(json.dumps({}))
    assert prepare_smollm(tmp_path) is False
