"""Rewards: the built-in rules, TRL's and verl's signatures called as those libraries call them, and every
fault named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.config import RewardSection
from streamrl_jax.errors import UserError
from streamrl_jax.rewards import RewardFn, RewardResult, adapt_reward, answers, load_reward
from streamrl_jax.tasks import load_task
from streamrl_jax.types import Generation, Prompt
from tests.fast.answered import ANSWERED


def prompt_of(columns: Mapping[str, Any]) -> Prompt:
    return Prompt("7", np.array([1], np.int32), {"prompt": "1+1="} | dict(columns))


def score(reward: RewardFn, text: str, **columns: Any) -> float:
    return reward(prompt_of(columns), text, ANSWERED).score


def built_in(name: str, **kwargs: Any) -> RewardFn:
    return load_reward(RewardSection(function=name, kwargs=kwargs))


# ------------------------------------------------------------------ reading answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        ("-7", -7),
        ("1,234,567.50", Fraction("1234567.5")),
        (" $5. ", 5),
        ("12%", 12),
        ("3/4", Fraction(3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\frac{1}{2}", Fraction(-1, 2)),
        ("1/0", None),
        ("12,34", None),
        ("x = 3", None),
        ("", None),
    ],
)
def test_parse_number(text: str, expected: Fraction | None) -> None:
    assert answers.parse_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("41+1=42", 42),
        ("the result is -3.", -3),
        ("5-3", 3),  # a minus between numbers subtracts
        ("(5)-3", 3),
        ("= -3", -3),
        ("it costs $1,200.50 today", Fraction("1200.5")),
        ("2023,2024", 2024),  # a list, no thousands
        ("12345", 12345),
        ("none", None),
    ],
)
def test_last_number(text: str, expected: Fraction | None) -> None:
    assert answers.last_number(text) == expected


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_a_number_written_with_separators_is_read_back(number: Any) -> None:
    for written in (f"{number}", f"{number:,}"):
        assert answers.parse_number(written) == answers.last_number(f"so: {written}") == Fraction(number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{ {a}{b} }", "{a}{b}"),
        ("\\boxed{cut off", None),
        ("none", None),
    ],
)
def test_boxed(text: str, expected: str | None) -> None:
    assert answers.boxed(text) == expected


# ------------------------------------------------------------------ built-in rules


@pytest.mark.parametrize(
    ("name", "kwargs", "answer", "right", "wrong"),
    [
        ("exact_match", {}, "122", ["122", " 122\n"], ["1220", "=122", ""]),
        ("exact_match", {}, 122, ["122"], ["12"]),
        ("last_number", {}, "42", ["17+25=…=42", "it is 42.", "42.0"], ["42 or 43", "", "none"]),
        (
            "leading_number",
            {},
            "7",
            ["7", "7+3+3", " 7-9, and more", "7.0 7"],
            ["70", "3+7", "-7", "is 7", "", "7.5"],
        ),
        (
            "gsm8k",
            {},
            "9+9=18\n#### 1,018",
            ["so\n#### 1018", "the answer is 1,018."],
            ["#### 18", "1018 #### 5"],
        ),
        ("gsm8k", {"strict": True}, "18", ["#### 18", "#### $18.00"], ["18", "the answer is 18"]),
        (
            "boxed",
            {},
            "\\frac{1}{2}",
            ["\\boxed{0.5}", "\\boxed{\\dfrac{1}{2}}", "\\boxed{1/2}"],
            ["0.5", "\\boxed{2}"],
        ),
        ("boxed", {}, "so \\boxed{x + 1}", ["\\boxed{x+1}", "\\boxed{\\left x+1 \\right}"], ["\\boxed{x+2}"]),
    ],
)
def test_built_in_rule(
    name: str, kwargs: dict[str, Any], answer: Any, right: list[str], wrong: list[str]
) -> None:
    reward = built_in(name, **kwargs)
    assert [score(reward, text, answer=answer) for text in right] == [1.0] * len(right)
    assert [score(reward, text, answer=answer) for text in wrong] == [0.0] * len(wrong)
    renamed = built_in(name, answer_key="solution", **kwargs)
    assert score(renamed, right[0], solution=answer) == 1.0


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("exact_match", {}, "field 'answer' of the row is missing"),
        ("exact_match", {"answer": None}, "field 'answer' of the row is None"),
        ("last_number", {"answer": "x"}, "field 'answer' of the row is 'x'"),
        ("leading_number", {"answer": "x"}, "field 'answer' of the row is 'x'"),
        ("gsm8k", {"answer": "no number"}, "field 'answer' of the row is 'no number'"),
        ("reasoning_gym", {"answer": "1"}, "needs rows of 'task:reasoning_gym'"),
    ],
)
def test_a_row_without_a_usable_answer_is_an_error(name: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(built_in(name), "1", **columns)


def gym_row(dataset: str, **config: Any) -> dict[str, Any]:
    task = load_task("task:reasoning_gym", {"dataset": dataset, "config": config, "size": 1, "test_size": 1})
    return dict(task.test_rows()[0])


def test_reasoning_gym_gives_nothing_for_being_wrong_in_the_right_form() -> None:
    # This scorer gives 0.01 to every wrong answer; within a group of 0 and 0.01 that would count as much as
    # being right.
    row = gym_row("fraction_simplification")
    assert score(built_in("reasoning_gym", floor=0.0), "wrong", **row) == 0.01
    assert score(built_in("reasoning_gym"), "wrong", **row) == 0.0
    assert score(built_in("reasoning_gym"), row["answer"], **row) == 1.0


@pytest.mark.parametrize(
    ("extract", "form"),
    [
        ("text", " {} "),
        ("tags", "so <answer> {} </answer>."),
        ("last_number", "1 and 2 give {}."),
        ("boxed", "\\boxed{{{}}}"),
    ],
)
def test_reasoning_gym_scores_what_is_extracted(extract: str, form: str) -> None:
    row = gym_row("chain_sum", min_terms=2, max_terms=2)
    reward = built_in("reasoning_gym", extract=extract)
    result = reward(prompt_of(row), form.format(row["answer"]), ANSWERED)
    assert (result.score, result.extras) == (1.0, {"unparsed": 0.0, "scorer_raised": 0.0})
    if extract != "text":
        assert reward(prompt_of(row), "nothing here", ANSWERED).extras["unparsed"] == 1.0


def test_reasoning_gym_without_a_single_answer_and_with_a_scorer_that_raises() -> None:
    assert gym_row("propositional_logic")["answer"] is None
    assert score(built_in("reasoning_gym"), "", **gym_row("propositional_logic")) == 0.0
    row = gym_row("prime_factorization")
    result = built_in("reasoning_gym")(prompt_of(row), "no factors", ANSWERED)
    assert (result.score, result.extras["scorer_raised"]) == (0.0, 1.0)


# ------------------------------------------------------------------ functions of one's own


def trl_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def trl_answer(completions: list[str], answer: list[str], bonus: float = 0.0) -> list[float]:
    return [float(c == a) + bonus for c, a in zip(completions, answer, strict=True)]


def trl_chat(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float | None]:
    assert kwargs["answer"] == ["2"] and kwargs["completion_ids"] == [[5, 6]]
    assert "prompt" not in kwargs
    assert prompts == [[{"role": "user", "content": "1+1="}]]
    return [
        float(completion[0]["content"] == "2" and completion[0]["role"] == "assistant")
        for completion in completions
    ]


def trl_nothing(completions: list[str]) -> list[float | None]:
    return [None for _ in completions]


async def trl_async(completions: list[str]) -> list[float]:
    return [0.25 for _ in completions]


def verl_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    assert data_source == "openai/gsm8k" and extra_info == {"index": 3}
    return float(solution_str == ground_truth)


def verl_dict(solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}


def native(prompt: Prompt, text: str, generation: Generation, scale: float = 1.0) -> float:
    return scale * len(generation.token_ids) * float(text == prompt.columns["answer"])


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3},
    "answer": "another",
}


@pytest.mark.parametrize(
    ("function", "kwargs", "columns", "expected"),
    [
        (trl_length, {}, {}, RewardResult(1.0, {"unscored": 0.0})),
        (trl_answer, {}, {"answer": "2"}, RewardResult(1.0, {"unscored": 0.0})),
        (trl_answer, {"bonus": 0.5}, {"answer": "3"}, RewardResult(0.5, {"unscored": 0.0})),
        (
            trl_chat,
            {},
            {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"},
            RewardResult(1.0, {"unscored": 0.0}),
        ),
        (trl_nothing, {}, {}, RewardResult(0.0, {"unscored": 1.0})),
        (trl_async, {}, {}, RewardResult(0.25, {"unscored": 0.0})),
        (verl_score, {}, VERL_ROW, RewardResult(1.0)),
        (verl_dict, {}, {"ground_truth": "2"}, RewardResult(0.5, {"acc": 1.0})),
        (verl_dict, {}, {"answer": "3"}, RewardResult(0.5, {"acc": 0.0})),
        (native, {"scale": 2.0}, {"answer": "2"}, RewardResult(4.0)),
        (
            lambda prompt, text, generation: RewardResult(1.0, {"x": 2.0}),
            {},
            {},
            RewardResult(1.0, {"x": 2.0}),
        ),
        (lambda completions: [np.float32(0.5)], {}, {}, RewardResult(0.5, {"unscored": 0.0})),
        (lambda solution_str: np.bool_(True), {}, {}, RewardResult(1.0)),
        (lambda solution_str: float("inf"), {}, {}, RewardResult(math.inf)),
    ],
)
def test_functions_of_ones_own(
    function: Callable[..., Any], kwargs: dict[str, Any], columns: dict[str, Any], expected: RewardResult
) -> None:
    result = adapt_reward(function, "mine", kwargs)(prompt_of(columns), "2", ANSWERED)
    assert result == expected
    assert type(result.score) is float


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (
            lambda completions: 1.0,
            {},
            "mine returned 1.0 for one completion; it must return a list with one number",
        ),
        (lambda completions: [1.0, 2.0], {}, r"mine returned \[1.0, 2.0\] for one completion"),
        (lambda completions: "1", {}, "mine returned '1' for one completion"),
        (lambda completions: ["1"], {}, r"mine returned '1' \(str\) as a score; a number is needed"),
        (lambda solution_str: None, {}, r"mine returned None \(NoneType\) as a score"),
        (lambda solution_str: {"acc": 1.0}, {}, r"mine returned a dict without 'score': it has \['acc'\]"),
        (lambda prompt, text, generation: [1.0], {}, r"mine returned \[1.0\] \(list\) as a score"),
        (
            lambda completions, solution: [1.0],
            {"answer": "2"},
            "mine needs the argument 'solution'.*'answer'",
        ),
        (lambda solution_str, judge: 1.0, {}, "mine needs the argument 'judge'"),
        (lambda solution_str, ground_truth: 1.0, {}, "mine wants a ground truth, but prompt 7 has neither"),
    ],
)
def test_a_wrong_return_or_a_missing_column_names_the_function(
    function: Callable[..., Any], columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        adapt_reward(function, "mine")(prompt_of(columns), "2", ANSWERED)


def test_what_the_function_raises_passes_through() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("of my own")

    with pytest.raises(KeyError, match="of my own"):
        adapt_reward(broken)(prompt_of({}), "2", ANSWERED)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (lambda x, y: 0.0, {}, r"mine takes \(x, y\), which is no reward's signature"),
        (lambda **columns: 0.0, {}, r"mine takes \(columns\)"),
        (
            trl_answer,
            {"bonis": 1.0},
            r"reward\.kwargs\.bonis: mine takes no such argument; did you mean 'bonus'",
        ),
    ],
)
def test_a_wrong_signature_is_refused_at_once(
    function: Callable[..., Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        adapt_reward(function, "mine", kwargs)


FILE = """
from dataclasses import dataclass

@dataclass
class Scale:
    value: float = 2.0

def reward(completions, factor=1.0, **columns):
    return [Scale().value * factor for _ in completions]

number = 3
"""


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    section = RewardSection(function=f"{tmp_path}/mine.py:reward", kwargs={"factor": 2.0})
    assert score(load_reward(section), "x") == 4.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("exact_macth", FILE, "'exact_macth': no such reward; did you mean 'exact_match'"),
        ("mine.py", FILE, "the form file.py:function is needed"),
        ("nowhere.py:reward", FILE, "there is no file .*nowhere.py"),
        ("mine.py:rewrad", FILE, "mine.py has no function 'rewrad'; did you mean 'reward'"),
        ("mine.py:number", FILE, "'number' in .*mine.py is int; a function is needed"),
        ("mine.py:reward", "def reward(:", r"importing .*mine.py raises SyntaxError.*\(line 1\)"),
        ("mine.py:reward", "\nimport no_such_module\n", r"raises ModuleNotFoundError.*\(line 2\)"),
        (
            "mine.py:reward",
            "def reward(a, b): ...",
            r"mine.py:reward takes \(a, b\), which is no reward's signature",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(
    name: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserError, match=message):
        load_reward(RewardSection(function=name))


def test_an_unknown_argument_of_a_built_in_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.kwargs\.answer_kye.*did you mean 'answer_key'"):
        built_in("exact_match", answer_kye="x")
