"""The import rule of the design: which part of the system may load which heavy library.

Checked on the source, so that an import inside a function counts too, and along the project's own imports, so
that no part gets a library by way of another. Imports under `if TYPE_CHECKING` load nothing and do not count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "streamrl_jax"

JAX = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "chex"})
TORCH = frozenset({"torch", "transformers", "accelerate"})
VLLM = frozenset({"vllm"})


@dataclass(frozen=True)
class Rule:
    """Modules whose dotted name starts with one of `parts` must not load `forbidden`; `exempt` ones may."""

    parts: tuple[str, ...]
    forbidden: frozenset[str]
    exempt: frozenset[str] = frozenset()

    def covers(self, module: str) -> bool:
        inside = any(module == part or module.startswith(f"{part}.") for part in self.parts)
        return inside and module not in self.exempt


RULES = {
    "seams": Rule(("streamrl_jax.types", "streamrl_jax.config", "streamrl_jax.errors"), JAX | TORCH | VLLM),
    "train": Rule(("streamrl_jax.train",), TORCH | VLLM),
    "gen": Rule(("streamrl_jax.gen",), JAX),
    "control": Rule(("streamrl_jax.control",), JAX | TORCH | VLLM),
    "bridge": Rule(("streamrl_jax.bridge",), JAX, exempt=frozenset({"streamrl_jax.bridge.publish"})),
    "ranker": Rule(("streamrl_jax.ranker",), TORCH | VLLM),
    # What the controller, the planner and the simulator use: NumPy alone.
    "planning": Rule(
        ("streamrl_jax.ranker", "streamrl_jax.plan"),
        JAX | TORCH | VLLM,
        exempt=frozenset(f"streamrl_jax.ranker.{name}" for name in ("fit", "loss", "model", "online")),
    ),
}


@dataclass(frozen=True)
class Imports:
    """What one module imports: dotted names, everywhere in it and at module level only."""

    everywhere: frozenset[str]
    on_loading: frozenset[str]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that an import statement loads; `from a import b` may load `a.b`, so both are given."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")[
                : None if is_package and node.level == 1 else (is_package - node.level)
            ]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Imports:
    everywhere: set[str] = set()
    on_loading: set[str] = set()

    def walk(node: ast.AST, loading: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                continue
            names = set(imported_names(child, module, is_package))
            everywhere.update(names)
            if loading:
                on_loading.update(names)
            walk(
                child, loading and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            )

    walk(tree, loading=True)
    return Imports(frozenset(everywhere), frozenset(on_loading))


def scan(package: Path) -> dict[str, Imports]:
    """Dotted module name to its imports, for all files of a package, generated ones included."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found[module] = imports_of(ast.parse(file.read_text(), str(file)), module, is_package)
    return found


def with_parents(module: str) -> Iterator[str]:
    """`a.b.c` loads `a`, `a.b` and `a.b.c`."""
    parts = module.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def violations(modules: Mapping[str, Imports], rule: Rule) -> list[str]:
    """One line per chain from a covered module to a forbidden library."""
    lines = []
    for start in filter(rule.covers, modules):
        chains = {name: [start, name] for name in modules[start].everywhere}
        chains |= {name: [start, name] for name in with_parents(start) if name != start}
        seen: set[str] = {start}
        while chains:
            name, chain = chains.popitem()
            if name.split(".")[0] in rule.forbidden:
                lines.append(" -> ".join(chain))
            for own in with_parents(name):
                if own in modules and own not in seen:
                    seen.add(own)
                    chains |= {further: [*chain, further] for further in modules[own].on_loading}
    return lines


@pytest.mark.parametrize("name", RULES)
def test_the_package_keeps_the_rule(name: str) -> None:
    broken = violations(scan(PACKAGE), RULES[name])
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        ({"streamrl_jax/train/a.py": "import torch.nn as nn"}, True),
        ({"streamrl_jax/train/a.py": "def f():\n    from torch import nn"}, True),
        ({"streamrl_jax/train/a.py": "try:\n    import torch\nfinally:\n    pass"}, True),
        ({"streamrl_jax/train/a.py": "from . import b", "streamrl_jax/train/b.py": "import vllm"}, True),
        ({"streamrl_jax/train/a.py": "from ..gen import b", "streamrl_jax/gen/b.py": "import vllm"}, True),
        (
            {
                "streamrl_jax/train/a.py": "import streamrl_jax.gen.b",
                "streamrl_jax/gen/__init__.py": "import torch",
            },
            True,
        ),
        (
            {
                "streamrl_jax/train/a.py": "import streamrl_jax.go",
                "streamrl_jax/go.py": "def f():\n  import torch",
            },
            False,
        ),
        ({"streamrl_jax/train/a.py": "if TYPE_CHECKING:\n    import torch"}, False),
        ({"streamrl_jax/train/a.py": "import torchlike, jax"}, False),
        ({"streamrl_jax/gen/a.py": "import torch"}, False),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, files: dict[str, str], broken: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(violations(scan(tmp_path / "streamrl_jax"), RULES["train"])) is broken


def test_no_module_hides_the_function_run() -> None:
    """A loaded submodule is bound to its name in the package: `run.py` would replace the function."""
    assert "streamrl_jax.run" not in scan(PACKAGE)


def test_types_and_config_load_no_heavy_library() -> None:
    heavy = sorted(JAX | TORCH | VLLM)
    program = (
        "import sys, streamrl_jax.types, streamrl_jax.config\n"
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_every_imported_package_is_declared() -> None:
    """Each third-party import of the package is a dependency or an extra in pyproject.toml."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = project["dependencies"] + [line for extra in extras for line in extra]
    names = (re.split(r"[\[<>=~!]", requirement)[0] for requirement in requirements)
    declared = {name.lower().replace("_", "-") for name in names}
    # Halves of a declared package, and the torch that vLLM brings.
    declared |= {"pydantic-core", "jaxlib", "torch"}
    providers = metadata.packages_distributions()
    undeclared = {
        f"{module} imports {name}"
        for module, imports in scan(PACKAGE).items()
        for name in {imported.split(".")[0] for imported in imports.everywhere}
        if name not in sys.stdlib_module_names and name != "streamrl_jax"
        if not declared & {provider.lower().replace("_", "-") for provider in providers.get(name, [name])}
    }
    assert not undeclared, "\n".join(sorted(undeclared))
