"""Built-in tasks: prompts with verifiable answers that need no file and no network.

A task is chosen with `task:NAME` where a file of prompts could stand; its arguments are those of
`[data.task]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, get_type_hints

from streamrl_jax.errors import UserError

TASK_PREFIX: Final = "task:"

Row = Mapping[str, Any]
"""One prompt: "prompt", "answer" and whatever the reward function wants to see."""


class Task(Protocol):
    """Where rows come from. Every method is a pure function of the task's arguments and its own."""

    def train_rows(self) -> Sequence[Row]:
        """Prompts for RL."""
        ...

    def test_rows(self) -> Sequence[Row]:
        """Held-out prompts, none of which is a training prompt or an example. Any beginning is a fair draw."""
        ...

    def example_rows(self, seed: int, step: int, count: int) -> Sequence[Row]:
        """`count` examples for the supervised warm start, drawn afresh for each (seed, step)."""
        ...

    def stop_rows(self) -> Sequence[Row]:
        """The stop set: rows whose greedy accuracy tells that the warm start has learned what it is to learn."""
        ...


# Name -> module and class; imported when asked for, since a task may need a package of its own.
_TASKS: Final[Mapping[str, tuple[str, str]]] = {
    "arithmetic": ("streamrl_jax.tasks.arithmetic", "Arithmetic"),
    "counting": ("streamrl_jax.tasks.counting", "Counting"),
    "detours": ("streamrl_jax.tasks.detours", "Detours"),
    "picks": ("streamrl_jax.tasks.picks", "Picks"),
    "reasoning_gym": ("streamrl_jax.tasks.gym", "ReasoningGym"),
}


def load_task(source: str, arguments: Mapping[str, Any]) -> Task:
    """Builds a task.

    Args:
        source: "task:NAME".
        arguments: Its keyword arguments (`[data.task]`).

    Returns:
        The task.

    Raises:
        UserError: There is no such task, it has no such argument, or the value does not fit.
    """
    name = source.removeprefix(TASK_PREFIX)
    if name not in _TASKS:
        raise UserError(
            f"{source}: there is no task {name!r};{_nearest(name, _TASKS)} known are {', '.join(_TASKS)}"
        )
    module, attribute = _TASKS[name]
    kind = getattr(importlib.import_module(module), attribute)
    hints = get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for key, value in arguments.items():
        if key not in fields:
            raise UserError(
                f"data.task: task {name!r} has no argument {key!r};{_nearest(key, fields)} it takes "
                f"{', '.join(fields)}"
            )
        _check_type(name, key, value, fields[key])
    try:
        return kind(**{key: _as_declared(value, fields[key]) for key, value in arguments.items()})
    except TypeError as error:
        missing = [field.name for field in dataclasses.fields(kind) if _is_required(field)]
        raise UserError(
            f"data.task: task {name!r} needs the arguments {', '.join(missing)} ({error})"
        ) from error


def held_out(key: str, one_in: int) -> bool:
    """Says whether a prompt is held out: a hash of its text decides, so that it never changes sides."""
    return int.from_bytes(_digest(key)[:4], "big") % one_in == 0


def draw_of(key: str) -> float:
    """A number from 0 to less than 1, evenly distributed over keys: a hash of the text."""
    return int.from_bytes(_digest(f"draw:{key}")[:6], "big") / 2**48


def in_hash_order(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows by a hash of their prompts, so that any beginning of the list is a fair draw."""
    return sorted(rows, key=lambda row: _digest(f"order:{row['prompt']}"))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" did you mean {close[0]!r}?" if close else ""


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check_type(task: str, key: str, value: Any, wanted: Any) -> None:
    plain = getattr(wanted, "__origin__", wanted)  # dict[str, Any] -> dict
    fits = isinstance(value, plain) or (plain is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and plain is not bool):
        raise UserError(f"data.task.{key} = {value!r}: task {task!r} needs a {plain.__name__} here")


def _as_declared(value: Any, wanted: Any) -> Any:
    return float(value) if wanted is float else value
