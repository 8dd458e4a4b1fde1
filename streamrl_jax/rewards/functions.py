"""Rewards: what an answer is worth. Every reward is a synchronous function of one answer.

Built-in ones (`rules`) compare the answer's text with its row. One's own is `file.py:function`, with
one of three signatures that are told apart by the names of their parameters (`adapt_reward`). Bounding a call
in time is the caller's work.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

from streamrl_jax.config import RewardSection
from streamrl_jax.errors import UserError
from streamrl_jax.rewards.rules import RULES
from streamrl_jax.types import Generation, Prompt
from streamrl_jax.user_code import load_function


@dataclass(frozen=True)
class RewardResult:
    """A reward.

    Attributes:
        score: What the answer is worth. NaN or infinite: the trainer refuses the update, and names the sample.
        extras: Further figures, by name.
    """

    score: float
    extras: Mapping[str, float] = field(default_factory=dict)


RewardFn = Callable[[Prompt, str, Generation], RewardResult]
"""(prompt, text of the answer without special tokens, the answer as generated) -> reward."""

_NATIVE: Final = ("prompt", "text", "generation")
_VERL: Final = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward(section: RewardSection) -> RewardFn:
    """Finds the configured reward.

    Args:
        section: `function` is a built-in's name or "file.py:function", `kwargs` its further arguments.

    Returns:
        The reward function.

    Raises:
        UserError: There is no such function, or its signature or the arguments do not fit.
    """
    name = section.function
    if name in RULES:
        return _built_in(name, section.kwargs)
    if ".py" not in name:
        close = difflib.get_close_matches(name, RULES, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"reward.function = {name!r}: no such reward; {hint}built in are {', '.join(RULES)}, and one's "
            "own is given as file.py:function"
        )
    function = load_function(name, "reward.function")
    assert function is not None  # the name is not empty
    return adapt_reward(function, name, section.kwargs)


def adapt_reward(
    function: Callable[..., Any], name: str = "", kwargs: Mapping[str, Any] | None = None
) -> RewardFn:
    """Makes a reward function out of a function with one of three signatures.

    - TRL's `(completions, **columns)`: called with lists of one. `prompts` and each column of the row that it
      names (all of them if it takes `**kwargs`) are passed too; completions are texts, or lists of one
      assistant message if the prompt is a list of messages. It returns a list of one number; None there means
      0, and `unscored` counts it.
    - verl's `(data_source, solution_str, ground_truth, extra_info)`, or some of them. `ground_truth` is taken
      from the row's `reward_model.ground_truth`, `ground_truth` or `answer`. It returns a number, or a dict
      with `score`, whose other numbers become extras.
    - `(prompt, text, generation)`, as `RewardFn`, returning a number, such a dict or a `RewardResult`.

    Args:
        function: The function; a coroutine function is run to its end.
        name: What errors call it; empty: its own name.
        kwargs: Further keyword arguments.

    Returns:
        The reward function. Exceptions of `function` pass through it unchanged.

    Raises:
        UserError: The signature is none of the three, or takes no such keyword argument.
    """
    where = name or getattr(function, "__qualname__", repr(function))
    further = dict(kwargs or {})
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} shows no signature ({error}); wrap it in a plain function") from error
    _check_kwargs(parameters, further, where)
    call = _finishing(function)
    if "completions" in parameters:
        return _adapt_trl(call, parameters, where, further)
    if "solution_str" in parameters:
        return _adapt_verl(call, parameters, where, further)
    if tuple(parameters)[: len(_NATIVE)] == _NATIVE:
        return lambda prompt, text, generation: _result(call(prompt, text, generation, **further), where)
    raise UserError(
        f"{where} takes ({', '.join(parameters)}), which is no reward's signature; it must take "
        "(completions, **columns) as in TRL, (data_source, solution_str, ground_truth, extra_info) as in "
        "verl, or (prompt, text, generation)"
    )


def _built_in(name: str, kwargs: Mapping[str, Any]) -> RewardFn:
    rule = RULES[name]
    _check_kwargs(inspect.signature(rule).parameters, kwargs, name)

    def reward(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
        return _result(rule(text, prompt.columns, **kwargs), name)

    return reward


def _adapt_trl(
    call: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    kwargs: Mapping[str, Any],
) -> RewardFn:
    takes_all = _takes_any_keyword(parameters)

    def reward(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
        asked = prompt.columns["prompt"]
        completion = text if isinstance(asked, str) else [{"role": "assistant", "content": text}]
        offered: dict[str, Any] = {key: [value] for key, value in prompt.columns.items() if key != "prompt"}
        offered |= {
            "prompts": [asked],
            "completions": [completion],
            "completion_ids": [generation.token_ids.tolist()],
            **kwargs,
        }
        _check_offered(parameters, offered, where, "the row")
        returned = call(
            **(offered if takes_all else {key: offered[key] for key in offered if key in parameters})
        )
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 1:
            raise UserError(
                f"{where} returned {returned!r} for one completion; it must return a list with one number "
                "per completion"
            )
        if returned[0] is None:
            return RewardResult(0.0, {"unscored": 1.0})
        return RewardResult(_number(returned[0], where), {"unscored": 0.0})

    return reward


def _adapt_verl(
    call: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    kwargs: Mapping[str, Any],
) -> RewardFn:
    takes_all = _takes_any_keyword(parameters)
    needs_truth = takes_all or "ground_truth" in parameters

    def reward(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
        columns = prompt.columns
        offered: dict[str, Any] = {
            "data_source": columns.get("data_source", ""),
            "solution_str": text,
            "extra_info": columns.get("extra_info") or {},
            **({"ground_truth": _ground_truth(prompt, where)} if needs_truth else {}),
            **kwargs,
        }
        _check_offered(parameters, offered, where, f"verl's call, which passes {', '.join(_VERL)}")
        return _result(
            call(**{key: offered[key] for key in offered if takes_all or key in parameters}), where
        )

    return reward


def _ground_truth(prompt: Prompt, where: str) -> Any:
    columns = prompt.columns
    model = columns.get("reward_model")
    for holder, key in ((model, "ground_truth"), (columns, "ground_truth"), (columns, "answer")):
        if isinstance(holder, Mapping) and key in holder:
            return holder[key]
    raise UserError(
        f"{where} wants a ground truth, but prompt {prompt.prompt_id} has neither reward_model.ground_truth "
        f"nor ground_truth nor answer; it has {sorted(columns)}"
    )


def _check_kwargs(parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any], where: str) -> None:
    if _takes_any_keyword(parameters):
        return
    for key in kwargs:
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes ({', '.join(parameters)})"
            raise UserError(f"reward.kwargs.{key}: {where} takes no such argument; {hint}")


def _check_offered(
    parameters: Mapping[str, inspect.Parameter], offered: Mapping[str, Any], where: str, source: str
) -> None:
    for key, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if key not in offered and parameter.default is parameter.empty and not variadic:
            raise UserError(
                f"{where} needs the argument {key!r}, which is not in {source}; there are {sorted(offered)}. "
                "Give it in reward.kwargs or as a column"
            )


def _takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _finishing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        return asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    return call


def _result(returned: Any, where: str) -> RewardResult:
    if isinstance(returned, RewardResult):
        return RewardResult(_number(returned.score, where), _numbers(returned.extras))
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise UserError(f"{where} returned a dict without 'score': it has {sorted(map(str, returned))}")
        further = {key: value for key, value in returned.items() if key != "score"}
        return RewardResult(_number(returned["score"], where), _numbers(further))
    return RewardResult(_number(returned, where))


def _numbers(further: Mapping[Any, Any]) -> dict[str, float]:
    return {str(key): float(value) for key, value in further.items() if isinstance(value, Real)}


def _number(value: Any, where: str) -> float:
    # NumPy's booleans and zero-dimensional arrays (also torch's and JAX's) are no Real, but hold one number.
    plain = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if not isinstance(plain, Real):
        raise UserError(f"{where} returned {value!r} ({type(value).__name__}) as a score; a number is needed")
    return float(plain)
