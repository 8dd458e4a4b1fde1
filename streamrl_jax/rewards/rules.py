"""The built-in rewards: an answer's text against its row. Each is a pure function of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, Literal

from streamrl_jax.errors import UserError
from streamrl_jax.rewards import answers
from streamrl_jax.tasks import gym

Columns = Mapping[str, Any]
Extract = Literal["text", "tags", "last_number", "boxed"]

_EXTRACTORS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "text": str.strip,
    "tags": answers.tagged,
    "last_number": lambda text: None if (number := answers.last_number(text)) is None else _as_text(number),
    "boxed": answers.boxed,
}


def exact_match(text: str, columns: Columns, *, answer_key: str = "answer") -> float:
    """1 if the text is the row's answer, spaces at both ends aside."""
    return float(text.strip() == _answer(columns, answer_key).strip())


def last_number(text: str, columns: Columns, *, answer_key: str = "answer") -> float:
    """1 if the last number in the text equals the row's answer, which must be a number."""
    return float(answers.last_number(text) == _wanted_number(columns, answer_key))


def leading_number(text: str, columns: Columns, *, answer_key: str = "answer") -> float:
    """1 if the text begins with a number that equals the row's answer, which must be one; the rest is not judged."""
    return float(answers.leading_number(text) == _wanted_number(columns, answer_key))


def gsm8k(text: str, columns: Columns, *, answer_key: str = "answer", strict: bool = False) -> float:
    """1 if the number behind `####` equals that of the row's answer (a whole GSM8K solution, or the number alone).

    Without `strict` a text that has no `####` is judged by its last number.
    """
    given = _answer(columns, answer_key)
    wanted = answers.hashes_number(given)
    if wanted is None:
        wanted = answers.parse_number(given)
    if wanted is None:
        raise _no_number(columns, answer_key)
    found = answers.hashes_number(text)
    if found is None and not strict:
        found = answers.last_number(text)
    return float(found == wanted)


def boxed(text: str, columns: Columns, *, answer_key: str = "answer") -> float:
    """1 if the last `\\boxed{…}` of the text equals that of the row's answer, or the answer itself."""
    given = _answer(columns, answer_key)
    wanted, found = answers.boxed(given), answers.boxed(text)
    return float(found is not None and answers.same_answer(found, given if wanted is None else wanted))


def reasoning_gym(
    text: str, columns: Columns, *, extract: Extract = "text", floor: float = 0.05
) -> dict[str, float]:
    """The score that reasoning-gym's own scorer gives to what is extracted from the text.

    Several scorers give 0.01 to 0.05 to any wrong answer and 0 to none at all; normalised within a group this
    would reward being wrong in the right form, so scores up to `floor` count as 0. Some scorers raise on
    answers of a form that they did not expect: such an answer is wrong, and `scorer_raised` counts it.

    Args:
        text: The answer.
        columns: A row of `task:reasoning_gym`; its answer may be None.
        extract: The whole text, the last `<answer>` tag, the last number or the last box.
        floor: Scores up to this count as 0.
    """
    if not {"dataset", "config", "question", "answer", "metadata"} <= columns.keys():
        raise UserError(
            f"reward.function = 'reasoning_gym' needs rows of 'task:reasoning_gym', found {sorted(columns)}; "
            "set data.train = 'task:reasoning_gym' or take another reward"
        )
    found = _EXTRACTORS[extract](text)
    if found is None:
        return {"score": 0.0, "unparsed": 1.0, "scorer_raised": 0.0}
    try:
        score = gym.score(found, columns)
    except UserError:
        raise
    except Exception:  # the scorers' own; the policy's text is to blame, not the program
        return {"score": 0.0, "unparsed": 0.0, "scorer_raised": 1.0}
    return {"score": score if score > floor else 0.0, "unparsed": 0.0, "scorer_raised": 0.0}


RULES: Final[Mapping[str, Callable[..., float | dict[str, float]]]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "leading_number": leading_number,
    "gsm8k": gsm8k,
    "boxed": boxed,
    "reasoning_gym": reasoning_gym,
}


def _answer(columns: Columns, key: str) -> str:
    value = columns.get(key)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    found = f"is {value!r}" if key in columns else f"is missing, found {sorted(columns)}"
    raise UserError(
        f"the reward needs the right answer, but field {key!r} of the row {found}; name the field in "
        "reward.kwargs.answer_key, or take a reward that does without"
    )


def _wanted_number(columns: Columns, key: str) -> Fraction:
    wanted = answers.parse_number(_answer(columns, key))
    if wanted is None:
        raise _no_number(columns, key)
    return wanted


def _no_number(columns: Columns, key: str) -> UserError:
    return UserError(
        f"the reward compares numbers, but field {key!r} of the row is {columns[key]!r}; take 'exact_match' "
        "or 'boxed'"
    )


def _as_text(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else str(float(number))
