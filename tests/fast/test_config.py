"""The configuration's own rules: every key is read by something, and what contradicts itself is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from streamrl_jax.config import Config

PACKAGE = Path(__file__).resolve().parents[2] / "streamrl_jax"

# They exist to be refused: a user who knows them from elsewhere learns why (DESIGN rule 4).
ONLY_REFUSED = {"rollout.top_p", "rollout.top_k", "rollout.min_p"}


def leaves(model: type[BaseModel], sections: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Each key, the name of the section that holds it, and the section's class."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, (*sections, name))
        else:
            yield ".".join((*sections, name)), sections[-1], model.__name__


def reading_parts(file: Path) -> ast.AST:
    """What of a module may read a key; of `config.py` its properties, for validators only refuse."""
    tree = ast.parse(file.read_text())
    if file != PACKAGE / "config.py":
        return tree
    properties = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    ]
    return ast.Module(list(properties), [])


def names_read(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Attributes that are read, and all names that occur."""
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return read, read | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def unread(model: type[BaseModel], trees: list[ast.AST]) -> set[str]:
    """Keys that no module reads which also names their section."""
    modules = [names_read(tree) for tree in trees]
    return {
        key
        for key, section, kind in leaves(model)
        if not any(key.rpartition(".")[2] in read and {section, kind} & names for read, names in modules)
    }


def test_every_key_is_read() -> None:
    trees = [reading_parts(file) for file in PACKAGE.rglob("*.py")]
    assert unread(Config, trees) == ONLY_REFUSED


def test_a_key_that_nothing_reads_is_found() -> None:
    class Part(BaseModel):
        used: int = 0
        written: int = 0
        elsewhere: int = 0

    class Whole(BaseModel):
        part: Part = Part()

    program = ast.parse("print(cfg.part.used); cfg.part.written = 1")
    assert unread(Whole, [program, ast.parse("print(other.elsewhere)")]) == {"part.written", "part.elsewhere"}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"actor": {"optim": {"betas": [0.9, 1.0]}}}, "betas"),
        ({"algorithm": {"advantage_fn": "a.py:f"}}, "algorithm.advantage_fn = 'a.py:f'"),
        ({"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 1}}, "rollout.n = 1"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p = 0.9"),
        ({"actor": {"ppo_mini_batch_size": 5}}, "actor.ppo_mini_batch_size = 5"),
        ({"bridge": {"in_flight": True}}, "bridge.in_flight"),
        ({"trainer": {"max_staleness": 1}, "agreement": {"probe_prompts": 0}}, "agreement.probe_prompts = 0"),
        ({"gen": {"max_model_len": 100}}, "gen.max_model_len = 100"),
    ],
)
def test_what_contradicts_itself_is_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named.replace("(", r"\(")):
        Config.model_validate(table)


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"run\.seed\s+Input should be greater than or equal to 0"):
        Config.model_validate({"run": {"seed": -1}})


@pytest.mark.parametrize(
    ("table", "streams"),
    [
        ({}, True),
        ({"algorithm": {"whiten_advantages": "batch"}}, False),
        ({"algorithm": {"adv_estimator": "reinforce_plus_plus", "whiten_advantages": "batch"}}, False),
        # Nothing is whitened: a group's advantages are known when the group is.
        ({"algorithm": {"adv_estimator": "grpo"}}, True),
        ({"actor": {"ppo_epochs": 2}}, False),
        ({"actor": {"ppo_mini_batch_size": 16}}, False),
    ],
)
def test_what_streams(table: dict[str, Any], streams: bool) -> None:
    assert Config.model_validate(table).streams is streams
