"""The configuration as data: each key's name, type, bounds, default and meaning, read off `config.py`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamrl_jax.config import Config

_TYPE_NAMES: Final[Mapping[Any, str]] = {
    str: "string",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict[str, Any]: "table",
}
_BOUND_SIGNS: Final = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))

# What other trainers (TRL, OpenRLHF, verl) call a thing -> what it is called here.
_FOREIGN_NAMES: Final[Mapping[str, str]] = {
    "learning_rate": "actor.optim.lr",
    "max_grad_norm": "actor.grad_clip",
    "clip_ratio": "actor.clip_ratio_low",
    "cliprange": "actor.clip_ratio_low",
    "epsilon": "actor.clip_ratio_low",
    "epsilon_high": "actor.clip_ratio_high",
    "beta": "actor.kl_loss_coef",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "rollout_batch_size": "data.train_batch_size",
    "train_files": "data.train",
    "val_files": "data.test",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "model_name_or_path": "model.path",
}


@dataclass(frozen=True)
class Key:
    """One key that a configuration may set.

    Attributes:
        name: Dotted, as in `actor.optim.lr`.
        type: In words: "number", "list of string", `"a" or "b"`.
        bounds: In words, as in "> 0, ≤ 1"; empty: none.
        default: The value at this place (`critic.optim.lr` has another than `actor.optim.lr`).
        meaning: The field's docstring.
        annotation: The field's type.
    """

    name: str
    type: str
    bounds: str
    default: Any
    meaning: str
    annotation: Any

    @property
    def takes(self) -> str:
        """Type and bounds, for a message: "number > 0"."""
        return f"{self.type} {self.bounds}".rstrip()

    @property
    def is_table(self) -> bool:
        """Whether keys below this one are free (`data.task`, `reward.kwargs`)."""
        return self.annotation == dict[str, Any]


@cache
def keys() -> Mapping[str, Key]:
    """Every key of the configuration by its dotted name, in the order of `config.py`."""
    return {key.name: key for key in _walk(Config, Config(), "")}


@cache
def sections() -> Mapping[str, str]:
    """Every section's dotted name and its docstring, in the order of `config.py`."""
    return dict(_walk_sections(Config, ""))


@cache
def tables() -> Mapping[str, tuple[str, tuple[Key, ...]]]:
    """Each list of tables (`[[gen.pools]]`) by its dotted name: what an entry is, and its keys."""
    found = {}
    for key in keys().values():
        if get_origin(key.annotation) is list and _is_section(model := get_args(key.annotation)[0]):
            entry = tuple(
                _key(f"{key.name}.", name, field, field.get_default(call_default_factory=True))
                for name, field in model.model_fields.items()
            )
            found[key.name] = (" ".join((model.__doc__ or "").split()), entry)
    return found


def key_above(name: str) -> Key | None:
    """The key that `name` is, or lies within when it belongs to a free table (`data.task.digits`)."""
    found = keys().get(name)
    if found is not None:
        return found
    table, _, _ = name.rpartition(".")
    if table in tables():
        return next((key for key in tables()[table][1] if key.name == name), None)
    return next((key for key in keys().values() if key.is_table and name.startswith(key.name + ".")), None)


def near_keys(name: str, limit: int = 3) -> list[str]:
    """Keys that an unknown name may have meant, the likeliest first.

    The last part counts most (`lr` finds `actor.optim.lr`), the sections before it break ties; names that
    other trainers use are known too.

    Args:
        name: The unknown key, dotted.
        limit: How many at most.

    Returns:
        Dotted keys; empty when nothing is near.
    """
    section, _, leaf = name.rpartition(".")
    if leaf in _FOREIGN_NAMES:
        return [_FOREIGN_NAMES[leaf]]

    def closeness(key: str) -> float:
        key_section, _, key_leaf = key.rpartition(".")
        leaf_ratio = _ratio(leaf, key_leaf)
        return leaf_ratio + 0.5 * _ratio(section, key_section) if leaf_ratio > 0.6 else 0.0

    names = [key.name for key in tables()[section][1]] if section in tables() else [*keys()]
    scores = {key: closeness(key) for key in names}
    best = max(scores.values())
    near = [key for key, score in scores.items() if score > max(0.0, best - 0.3)]
    return sorted(near, key=lambda key: -scores[key])[:limit]


def near_sections(name: str) -> list[str]:
    """Sections that an unknown section's name may have meant."""
    return difflib.get_close_matches(name, sections(), n=2, cutoff=0.7)


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _walk(model: type[BaseModel], values: BaseModel, prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        value = getattr(values, name)
        if isinstance(value, BaseModel):
            yield from _walk(type(value), value, f"{prefix}{name}.")
        else:
            yield _key(prefix, name, field, value)


def _key(prefix: str, name: str, field: FieldInfo, value: Any) -> Key:
    return Key(
        name=prefix + name,
        type=_type_text(field.annotation),
        bounds=_bounds_text(field),
        default=value,
        meaning=" ".join((field.description or "").split()),
        annotation=field.annotation,
    )


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _walk_sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and _is_section(annotation):
            yield prefix + name, " ".join((annotation.__doc__ or "").split())
            yield from _walk_sections(annotation, f"{prefix}{name}.")


def _type_text(annotation: Any) -> str:
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is list:
        if _is_section(get_args(annotation)[0]):
            return "list of tables"
        return f"list of {_type_text(get_args(annotation)[0])}"
    raise TypeError(f"config.py uses a type that the documentation has no words for: {annotation!r}")


def _bounds_text(field: FieldInfo) -> str:
    texts = []
    for constraint in field.metadata:
        texts += [
            f"{sign} {getattr(constraint, attribute):g}"
            for attribute, sign in _BOUND_SIGNS
            if getattr(constraint, attribute, None) is not None
        ]
    lengths = {
        getattr(constraint, attribute)
        for constraint in field.metadata
        for attribute in ("min_length", "max_length")
        if hasattr(constraint, attribute)
    }
    if lengths:
        texts.append("of " + " to ".join(str(length) for length in sorted(lengths)) + " entries")
    return ", ".join(texts)
