"""No code of the system turns bytes into objects or code by a format that can run anything (DESIGN rule 9)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "streamrl_jax"

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Their loaders run what the bytes say."""

BUILTINS = {"eval", "exec", "compile", "__import__"}

ATTRIBUTES = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("pd", "read_pickle"),
}

KEYWORDS = {"allow_pickle", "weights_only"}
"""Arguments whose mention says that somebody thought of it: these must be False and True."""


def offences(tree: ast.AST) -> Iterator[str]:
    """What a module does that it must not, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if MODULES & set(name.split(".")):
                yield f"line {node.lineno}: imports {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in BUILTINS:
        yield f"line {node.lineno}: calls {function.id}"
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if (owner, function.attr) in ATTRIBUTES and not _is_safe(node):
            yield f"line {node.lineno}: calls {owner}.{function.attr}"
        if function.attr == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield f"line {node.lineno}: imports a module by a computed name"
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS and not _is_safe(node):
            yield f"line {node.lineno}: {keyword.arg}"


def _is_safe(node: ast.Call) -> bool:
    wanted = {"allow_pickle": False, "weights_only": True}
    given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    return any(given.get(name) is value for name, value in wanted.items())


ALLOWED: dict[str, tuple[str, ...]] = {
    "tasks/__init__.py": ("imports a module by a computed name",),
}
"""The name of a task comes from the package's own table."""

SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_bytes_become_code(path: Path) -> None:
    found = offences(ast.parse(path.read_text()))
    allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), ())
    assert not [one for one in found if not one.endswith(allowed or ("\0",))]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import reduction\nimport pickle as p",
        "from cloudpickle import loads",
        "import ray.cloudpickle",
        "from ray import cloudpickle",
        "import shelve",
        "def f(x):\n    return eval(x)",
        "exec(code)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import importlib\nimportlib.import_module(name)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["import json", "import numpy as np\nnp.load(path, allow_pickle=False)", "model.eval()", "re.compile(x)"],
)
def test_the_search_finds_nothing_else(source: str) -> None:
    assert not list(offences(ast.parse(source)))
