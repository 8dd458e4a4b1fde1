"""What the hand-written pages name exists: files, functions, keys, metrics, commands; their examples work.

Only `inline code`, fenced blocks and links count. A name is looked up as a file, as `file.py:function`, as
`module.function` or `Class.method`, as a key of the configuration, and as a metric.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamrl_jax
from streamrl_jax import cli
from streamrl_jax.config import ActorSection, RewardSection
from streamrl_jax.config_io import load_config
from streamrl_jax.config_schema import key_above, sections
from streamrl_jax.errors import UserError
from streamrl_jax.metric_names import METRICS
from streamrl_jax.rewards import RewardFn, load_reward
from streamrl_jax.train.loss import PolicyInputs, PolicyLoss
from streamrl_jax.types import FinishReason, Generation, Prompt, VersionRun
from streamrl_jax.user_code import load_function

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "streamrl_jax"
PAGES = sorted(
    [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + [page for page in REPOSITORY.glob("docs/**/*.md") if page.name not in ("config.md", "metrics.md")]
)

# Dotted names of other packages, and of files that a run or a user makes.
OTHERS = re.compile(
    r"(jax|flax|optax|orbax|torch|vllm|transformers|numpy|grpc|pip)\b.*"
    r"|(run\.json|metrics\.jsonl|config\.json|config\.toml|trace\.json|provenance\.json|checksums\.json)"
    r"|.*\.(jsonl|parquet|safetensors|log|whl|lock|bin|gguf|pth)"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def fences(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    spans = [span for paragraph in prose(page).split("\n\n") for span in re.findall(r"`([^`]+)`", paragraph)]
    return [" ".join(span.split()) for span in spans]


@cache
def tracked() -> frozenset[str]:
    """Files of the repository, and its folders with a `/` at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True,
    ).stdout.splitlines()  # fmt: skip
    folders = {f"{parent}/" for name in listed for parent in Path(name).parents}
    return frozenset(listed) | folders


def find_file(name: str) -> list[str]:
    """Files that a page may mean: from the repository's root, from the package's, or by their bare name."""
    if {name, f"streamrl_jax/{name}"} & tracked():
        return [found for found in (name, f"streamrl_jax/{name}") if found in tracked()]
    if "/" in name.rstrip("/"):
        return []
    return [found for found in tracked() if found.endswith(f"/{name}")]


def names_in(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What the statements of a module or class define or import."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
            case ast.If(body=inner):
                yield from names_in(inner)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name, node) for alias in aliases)
            case _:
                pass


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields and methods of a class, and what its methods set on `self`."""
    found = {name for name, _ in names_in(node.body)}
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return found


@cache
def definitions(file: str) -> Mapping[str, ast.stmt]:
    return dict(names_in(ast.parse((REPOSITORY / file).read_text(encoding="utf-8")).body))


@cache
def modules() -> Mapping[str, list[str]]:
    """Last part of a module's name (a package's: its folder) to its files."""
    found: dict[str, list[str]] = {}
    for file in tracked():
        path = Path(file)
        if path.suffix == ".py" and path.parts[0] in ("streamrl_jax", "tests", "scripts", "examples"):
            found.setdefault(path.parent.name if path.stem == "__init__" else path.stem, []).append(file)
    return found


@cache
def classes() -> Mapping[str, set[str]]:
    """Every class of the package with its attributes; classes of one name are joined."""
    found: dict[str, set[str]] = {}
    for files in modules().values():
        for file in files:
            for name, node in definitions(file).items():
                if isinstance(node, ast.ClassDef):
                    found.setdefault(name, set()).update(attributes(node))
    return found


def defined_in(file: str, dotted: str) -> bool:
    """Whether a module defines `function`, `Class` or `Class.attribute`."""
    first, _, rest = dotted.partition(".")
    node = definitions(file).get(first)
    if node is None:
        return False
    return not rest or (isinstance(node, ast.ClassDef) and rest in attributes(node))


def is_metric(name: str) -> bool:
    return any(re.fullmatch(re.escape(known).replace(r"\*", ".*"), name) for known in METRICS)


def dotted_exists(name: str) -> bool:
    """Whether `a.b.c` is a key, a function of a module, or an attribute of a class."""
    if key_above(name) is not None or name in sections():
        return True
    parts = name.removeprefix("streamrl_jax.").split(".")
    if len(parts) == 1:
        return hasattr(streamrl_jax, parts[0]) or parts[0] in modules()
    if parts[0] in classes() and parts[1] in classes()[parts[0]]:
        return True
    for count in range(1, len(parts)):
        *folders, module = parts[:count]
        for file in modules().get(module, ()):
            inside = "/".join(folders) in file
            if inside and defined_in(file, ".".join(parts[count:])):
                return True
    return f"streamrl_jax/{'/'.join(parts)}.py" in tracked()


def missing(code: str) -> bool:
    """Whether a piece of inline code names something of this project that is not there."""
    code = code.strip()
    if OTHERS.fullmatch(code) or code.startswith(("/", "~", "$", "-", "http")) or "…" in code:
        return False
    if match := re.fullmatch(r"([\w./-]+\.py):([A-Za-z_][\w.]*)", code):
        if match[1] == "file.py":  # the form of a function of one's own
            return False
        files = find_file(match[1])
        return not any(defined_in(file, match[2]) for file in files)
    if re.fullmatch(r"[\w./-]+\.(py|toml|md|proto|sh|txt|yaml)", code):
        return not find_file(code)
    if re.fullmatch(r"[a-z_]+(/[a-z_0-9]+)*/", code):
        return not find_file(code) and code.rstrip("/") not in (
            "samples",
            "checkpoints",
            "logs",
            "superseded",
            "runs",
        )
    if re.fullmatch(r"[a-z_]+/[\w/@*]+", code):
        return not is_metric(code) and not code.startswith(("train/i", "checkpoints/"))
    if match := re.fullmatch(r"((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)(\(.*\))?", code):
        return not dotted_exists(match[1])
    if match := re.fullmatch(r"([A-Z][a-z]+\w*|[a-z]+(?:_[a-z]+)+)(\(.*\))?", code):
        return match[1] not in source_words()  # a class, a function, a parameter, a field of a message
    return False


@cache
def source_words() -> frozenset[str]:
    """Words of the code, tests left out: this file names what does not exist."""
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.proto"), REPOSITORY / "pyproject.toml"]
    return frozenset(re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in sources)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert sorted({code for code in inline_code(page) if missing(code)}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    local = [link for link in links if link and not link.startswith("http")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("train/loop.py", False),
        ("train/loops.py", True),
        ("train/loop.py:train", False),
        ("train/loop.py:training", True),
        ("Trainer.add", False),
        ("Trainer.state", False),
        ("Trainer.adds", True),
        ("loop.train", False),
        ("loop.untrain", True),
        ("streamrl_jax.run", False),
        ("streamrl_jax.ran", True),
        ("actor.optim.lr", False),
        ("actor.optim.rate", True),
        ("timing_s/probe", False),
        ("timings/probe", True),
        ("MicroBatcher", False),
        ("MicroBatchers", True),
        ("jax.jit", False),
    ],
)
def test_a_planted_name_is_found(code: str, wrong: bool) -> None:
    assert missing(code) is wrong


# ------------------------------------------------------------------------- commands and examples


def commands(page: Path) -> list[list[str]]:
    """Command lines of the page's shell blocks, as lists of words."""
    lines: list[list[str]] = []
    for block in fences(page):
        if block.language in ("bash", "sh"):
            joined = block.text.replace("\\\n", " ")
            lines += [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [line for line in lines if line]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def fault_of_command(words: list[str]) -> str:
    """Says what is wrong with a command line; empty: nothing that can be told without running it."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "make":
        return "" if set(rest) <= make_targets() else f"no such target: {rest}"
    if Path(program).name != "streamrl":
        return ""
    name, arguments = cli.split_command(rest)
    if name.startswith("-"):
        return ""
    try:
        parsed = cli._parse(name, cli.COMMANDS[name], arguments)
    except (KeyError, SystemExit, UserError) as error:
        return f"{words}: {error!r}"
    shipped = [file for file in parsed.files if file.parts[0] == "configs"]
    absent = [str(file) for file in shipped if not (REPOSITORY / file).is_file()]
    if absent:
        return f"{words}: there is no {absent}"
    try:
        load_config([REPOSITORY / file for file in shipped], parsed.overrides)
    except UserError as error:
        # A resume or a fork lays its overrides over settings that are not here.
        return "" if not shipped else f"{words}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_command_lines_are_understood(page: Path) -> None:
    assert [fault for words in commands(page) if (fault := fault_of_command(words))] == []


def test_configurations_in_pages_are_valid(tmp_path: Path) -> None:
    for page in PAGES:
        for number, block in enumerate(fences(page)):
            if block.language == "toml":
                file = tmp_path / f"{page.stem}-{number}.toml"
                file.write_text(block.text)
                load_config([file])


def test_the_readme_shows_the_examples_as_they_are() -> None:
    shown = 0
    for block in fences(REPOSITORY / "README.md"):
        first, _, rest = block.text.partition("\n")
        if match := re.fullmatch(r"# (examples/\w+\.py)", first):
            assert rest in (REPOSITORY / match[1]).read_text(encoding="utf-8"), first
            shown += 1
    assert shown == 2


def score(reward: RewardFn, text: str) -> float:
    ids = np.ones(3, np.int32)
    prompt = Prompt("0", ids, {"prompt": "37+85=", "answer": "122"})
    logprobs, runs = np.zeros(3, np.float32), (VersionRun(0, 3),)
    answer = Generation("s", 0, ids, logprobs, runs, FinishReason.STOP, "instance-0")
    return reward(prompt, text, answer).score


def test_the_readmes_reward_scores() -> None:
    reward = load_reward(RewardSection(function=f"{REPOSITORY}/examples/custom_reward.py:close_enough"))
    assert [score(reward, text) for text in ("122", "112", "117", "no")] == [1.0, 0.0, 0.5, 0.0]


def test_the_readmes_loss_is_a_loss() -> None:
    loss = load_function(f"{REPOSITORY}/examples/custom_loss.py:truncated_reinforce", "algorithm.loss_fn")
    assert loss is not None
    check_is_loss(loss)


def check_is_loss(loss: PolicyLoss) -> None:
    shape = (2, 8)
    inputs = PolicyInputs(
        logprobs=jnp.full(shape, -1.0),
        old_logprobs=jnp.full(shape, -1.1),
        behaviour_logprobs=jnp.full(shape, -1.2),
        advantages=jnp.ones(shape),
        mask=jnp.ones(shape, bool),
        segment_ids=jnp.ones(shape, jnp.int32),
    )

    def total(logprobs: jax.Array) -> jax.Array:
        values, statistics = loss(PolicyInputs(logprobs, *list(vars(inputs).values())[1:]), ActorSection())
        assert values.shape == shape
        assert all(value.shape == shape for value in statistics.values())
        return values.sum()

    # Where the advantage is positive, a step down the loss makes the token likelier.
    assert (jax.grad(total)(inputs.logprobs) < 0).all()


def test_the_readme_calls_run_as_it_is() -> None:
    signature = inspect.signature(streamrl_jax.run)
    calls = [
        node
        for block in fences(REPOSITORY / "README.md")
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "streamrl_jax.run"
    ]
    assert calls
    for call in calls:
        signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
