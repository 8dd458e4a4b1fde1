"""What is wrong with a configuration, in words that a user can act on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import ErrorDetails

from streamrl_jax.config_rules import CombinationFaultsError
from streamrl_jax.config_schema import key_above, near_keys, near_sections, sections
from streamrl_jax.errors import UserError
from streamrl_jax.toml_text import toml_value

_SHOWN_VALUE_CHARACTERS: Final = 80
_SHOWN_UNKNOWN_KEYS: Final = 8
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def configuration_error(faults: Sequence[str]) -> UserError:
    """Puts every fault into one error, so that a user mends them in one go.

    Args:
        faults: One sentence each.

    Returns:
        The error; several faults are numbered.
    """
    if len(faults) == 1:
        return UserError(f"The configuration has a fault. {faults[0]}.")
    numbered = "; ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
    return UserError(f"The configuration has {len(faults)} faults: {numbered}.")


def describe_faults(errors: Sequence[ErrorDetails], origins: Mapping[str, str]) -> list[str]:
    """Words each of pydantic's findings: where the value came from, key, value, what is wrong, what to write.

    Args:
        errors: `ValidationError.errors()`.
        origins: Dotted key of each value that was given -> the file it stands in, or "command line".

    Returns:
        One sentence a fault, without a full stop.
    """
    return [fault for error in errors for fault in _describe(error, origins)]


def origin_of(name: str, origins: Mapping[str, str]) -> str:
    """Where a value came from: its own origin, else that of a key within or around it, else the defaults."""
    if name in origins:
        return origins[name]
    for key, origin in origins.items():
        if key.startswith(name + ".") or name.startswith(key + "."):
            return origin
    return "default"


def shown(value: Any) -> str:
    """The value as it would be written in a file, shortened."""
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARACTERS else text[: _SHOWN_VALUE_CHARACTERS - 1] + "…"


def _describe(error: ErrorDetails, origins: Mapping[str, str]) -> list[str]:
    location = error["loc"]
    name = ".".join(part for part in location if isinstance(part, str))
    entries = [part for part in location if isinstance(part, int)]
    if error["type"] == "extra_forbidden":
        return _unknown(name, error["input"], origins)
    if error["type"] == "value_error":
        broken = error.get("ctx", {}).get("error", error["msg"])
        faults = broken.faults if isinstance(broken, CombinationFaultsError) else [str(broken)]
        return [_broken_rule(fault, origins) for fault in faults]
    origin = origin_of(name, origins)
    subject = f"{origin}: {name} = {shown(error['input'])}"
    if entries:
        subject = f"{origin}: entry {entries[0] + 1} of {name} is {shown(error['input'])}"
    if name in sections():
        return [f"{subject}: [{name}] is a section; give its keys, as in `[{name}]` or `{name}.KEY=VALUE`"]
    key = key_above(name)
    if key is None:
        return [f"{subject}: {error['msg']}"]
    expected = key.takes.removeprefix("list of ") if entries else key.takes
    return [f"{subject}: expected {expected}{_hint(error)} (default: {shown(key.default)})"]


def _hint(error: ErrorDetails) -> str:
    """The slip that a value of the wrong kind most often is."""
    value = error["input"]
    if error["type"] == "string_type" and not isinstance(value, list | dict):
        return f", so put it in quotes: {shown(str(value))}"
    if error["type"] == "bool_type" and str(value).lower() in ("true", "false"):
        return f", written {str(value).lower()} without quotes"
    if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        return f", written {int(value)}"
    if error["type"] in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return ", without quotes"
    if error["type"] == "list_type":
        return f", in brackets: [{shown(value)}]"
    return ""


def _unknown(name: str, value: Any, origins: Mapping[str, str]) -> list[str]:
    if isinstance(value, dict):
        near = next((section for section in near_sections(name) if _fits(value, section)), None)
        if near or not value:
            remedy = f"did you mean [{near}]" if near else f"the sections are {', '.join(sections())}"
            return [f"{origin_of(name, origins)}: [{name}]: there is no such section; {remedy}"]
        inner = [fault for key, item in value.items() for fault in _unknown(f"{name}.{key}", item, origins)]
        if len(inner) > _SHOWN_UNKNOWN_KEYS:
            inner[_SHOWN_UNKNOWN_KEYS:] = [f"and {len(inner) - _SHOWN_UNKNOWN_KEYS} more keys under [{name}]"]
        return inner
    return [
        f"{origin_of(name, origins)}: {name} = {shown(value)}: there is no such key; {did_you_mean(name)}"
    ]


def _fits(table: Mapping[str, Any], section: str) -> bool:
    """Whether a misspelt section would hold at least one key that the near one knows."""
    return any(key_above(f"{section}.{key}") is not None for key in table)


def did_you_mean(name: str) -> str:
    """The remedy for an unknown key: the near ones, else where all of them are listed."""
    near = near_keys(name)
    if not near:
        return "docs/config.md lists all keys"
    others = f" (or {', '.join(near[1:])})" if len(near) > 1 else ""
    return f"did you mean {near[0]}{others}"


def _broken_rule(message: str, origins: Mapping[str, str]) -> str:
    """A rule over several keys names them itself; what it cannot know is where their values came from."""
    named = {key: origin for key, origin in origins.items() if _names(message, key)}
    if not named:
        return message
    return f"{message} ({', '.join(f'{key} from {origin}' for key, origin in named.items())})"


def _names(message: str, key: str) -> bool:
    """Whether a rule's message names the key, or the table within a section that it stands in."""
    table = key.rpartition(".")[0]
    names = [key, table] if "." in table else [key]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", message) for name in names)
