"""Reads, layers, overrides and writes configurations.

Order of precedence, the later wins: the defaults of `config.py`, the files in the order given, the overrides
in the order given. Tables merge key by key; any other value, a list too, replaces. Relative paths mean the
directory in which the command runs, whichever file they stand in; `with_absolute_paths` pins them before a
run directory keeps them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from streamrl_jax.config import Config
from streamrl_jax.config_faults import configuration_error, describe_faults, shown
from streamrl_jax.config_schema import Key, keys
from streamrl_jax.errors import UserError
from streamrl_jax.toml_text import toml_document

COMMAND_LINE: Final = "command line"
SHIPPED_CONFIGS: Final = Path("configs")

_PATH_KEYS: Final = (
    "run.dir",
    "model.path",
    "model.critic_path",
    "data.train",
    "data.test",
    "sft.data",
    "security.token_file",
    "security.ca_file",
    "security.cert_file",
    "security.key_file",
    "gen.python",
    "ranker.path",
    "trainer.compilation_cache",
)
FUNCTION_KEYS: Final = ("reward.function", "algorithm.loss_fn", "algorithm.advantage_fn")  # file.py:function


@dataclass(frozen=True)
class Layer:
    """One source of values.

    Attributes:
        origin: What an error calls it: a file's path, or "command line".
        table: Nested values as TOML gives them.
    """

    origin: str
    table: Mapping[str, Any]


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Builds the configuration of a run.

    Args:
        paths: TOML files, the later over the earlier.
        overrides: `section.key=value` each; the value in TOML syntax, bare words are strings.

    Returns:
        The validated configuration.

    Raises:
        UserError: A file cannot be read, or any value is wrong; all faults of the values at once, each with
            file, key, value and remedy.
    """
    return config_from_layers([*map(read_layer, paths), *map(parse_override, overrides)])


def config_from_layers(layers: Sequence[Layer]) -> Config:
    """Validates layered values over the defaults.

    Args:
        layers: The later over the earlier.

    Returns:
        The configuration.

    Raises:
        UserError: Any value is wrong.
    """
    # Merged over the defaults as they stand at each place: a file that sets sft.optim.lr alone keeps the
    # other defaults of [sft.optim], which are not those of the class.
    values: dict[str, Any] = Config().model_dump()
    origins: dict[str, str] = {}
    for layer in layers:
        values = merged(values, layer.table)
        origins.update({name: layer.origin for name, _ in leaves(layer.table)})
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise configuration_error(describe_faults(error.errors(), origins)) from error


def dump_config(config: Config) -> str:
    """Writes every key of a configuration as TOML.

    Args:
        config: The configuration.

    Returns:
        A document that `load_config` reads back as an equal configuration.

    Raises:
        UserError: A free table (`data.task`, `reward.kwargs`), set from Python, holds what TOML cannot.
    """
    try:
        return toml_document(config.model_dump())
    except TypeError as error:
        raise UserError(
            f"The configuration cannot be written: {error}. Use strings, numbers and lists."
        ) from error


def differences(old: Config, new: Config) -> list[str]:
    """What changed between two configurations, a line a key: `actor.optim.lr: 1e-05 → 2e-05`."""
    before, after = dict(leaves(old.model_dump())), dict(leaves(new.model_dump()))
    return [
        f"{name}: {shown(before[name]) if name in before else 'unset'} → "
        f"{shown(after[name]) if name in after else 'unset'}"
        for name in {**before, **after}
        if (before.get(name) or None) != (after.get(name) or None)
    ]


def with_absolute_paths(config: Config) -> Config:
    """Pins relative paths to the present directory, so that a run can be resumed from another one.

    Only what exists is pinned: a hub id, `task:NAME` and the name of a built-in reward are no paths.

    Args:
        config: The configuration.

    Returns:
        The same with absolute paths.
    """
    values = config.model_dump()
    for name in (*_PATH_KEYS, *FUNCTION_KEYS):
        section, key = name.split(".")
        text = values[section][key]
        path, separator, function = text.rpartition(":") if name in FUNCTION_KEYS else (text, "", "")
        if path and (name == "run.dir" or Path(path).exists()):
            values[section][key] = f"{Path(path).absolute()}{separator}{function}"
    return Config.model_validate(values)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges tables key by key; any other value of `over` replaces that of `base`. Changes neither."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = (
            merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return result


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of whatever is not a table with something in it."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_layer(path: Path) -> Layer:
    """Reads one TOML file.

    Args:
        path: The file.

    Returns:
        Its values.

    Raises:
        UserError: There is no such file, or it is not TOML; names near files, or the faulty line.
    """
    if path.is_dir():
        inside = sorted(entry.name for entry in path.glob("*.toml"))
        remedy = f"name a file in it: {', '.join(inside)}" if inside else "it holds no .toml file"
        raise UserError(f"{path} is a directory, and a configuration file is needed: {remedy}.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"Configuration file {path} does not exist; {_near_files(path)}.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a text file in UTF-8 (byte {error.start}); give a TOML file."
        ) from error
    except OSError as error:
        raise UserError(f"Configuration file {path} cannot be read: {error.strerror}.") from error
    try:
        return Layer(str(path), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.{_quoted_line(text, str(error))}") from error


def parse_override(text: str) -> Layer:
    """Reads one override.

    Args:
        text: `section.key=value`. The value is TOML, and a bare word is a string; where the key takes a
            string, the text is taken as it stands (`trainer.devices=0`), and a list may have bare entries
            (`[cpu:0,cpu:1]`).

    Returns:
        The value at its place.

    Raises:
        UserError: It has no key or no value.
    """
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"Override {text!r} is not of the form section.key=value, as in actor.optim.lr=1e-5.")
    table: Any = _override_value(value.strip(), keys().get(".".join(parts)))
    for part in reversed(parts):
        table = {part: table}
    return Layer(COMMAND_LINE, table)


def _override_value(text: str, key: Key | None) -> Any:
    takes_text = key is not None and key.annotation is str
    if text.startswith("[") and text.endswith("]"):
        entries_are_text = key is not None and key.annotation == list[str]
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = [
                _scalar(entry.strip(), entries_are_text) for entry in text[1:-1].split(",") if entry.strip()
            ]
        return text if takes_text else value
    return _scalar(text, takes_text)


def _scalar(text: str, takes_text: bool) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if takes_text and not isinstance(value, str) else value


def _near_files(path: Path) -> str:
    """Says which file may have been meant: those beside it and the shipped ones."""
    candidates = {
        entry.name: entry for folder in (SHIPPED_CONFIGS, path.parent) for entry in folder.glob("*.toml")
    }
    wanted = path.name if path.suffix == ".toml" else f"{path.name}.toml"
    near = difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(str(candidates[name]) for name in near)}"
    if candidates:
        return f"there are {', '.join(str(entry) for entry in sorted(candidates.values()))}"
    return f"and neither {path.parent}/ nor {SHIPPED_CONFIGS}/ holds a .toml file"


def _quoted_line(text: str, message: str) -> str:
    """The line that the parser stumbled over; its message ends in "(at line 3, column 5)"."""
    _, found, place = message.rpartition("at line ")
    digits = place.split(",")[0]
    if not found or not digits.isdigit():
        return ""
    lines = text.splitlines()
    number = int(digits)
    return f" The line reads: {lines[number - 1].strip()}" if number <= len(lines) else ""
