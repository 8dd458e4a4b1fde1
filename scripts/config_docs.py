"""Writes docs/config.md and docs/metrics.md from the code that they describe (`make docs`).

With `--check` it writes nothing and fails when a page is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from streamrl_jax.config_schema import Key, keys, sections, tables
from streamrl_jax.metric_names import metrics_page
from streamrl_jax.toml_text import toml_value

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"

_INTRODUCTION: Final = """\
# Configuration

Generated from `streamrl_jax/config.py` by `make docs`.

A configuration is one or more TOML files, layered in the order given, and overrides:

    streamrl train base.toml cluster.toml actor.optim.lr=1e-5 --trainer.max_staleness 1

Later files win over earlier ones, and overrides over files. Tables merge key by key; any other value, a list
too, replaces. An override's value is TOML; a bare word is a string. Relative paths mean the directory in
which the command runs. `streamrl train ... --dry-run` prints the result. Unknown keys and wrong types are
errors. Words are verl's where it has one. Batch sizes count prompts unless they say otherwise; lengths count
tokens; names in `_s` are seconds.
"""


def config_page() -> str:
    """docs/config.md: a table for each section."""
    blocks = [_INTRODUCTION]
    for section, meaning in sections().items():
        own = [key for key in keys().values() if key.name.rpartition(".")[0] == section]
        if own:
            blocks.append("\n".join([f"## [{section}]", "", meaning, "", *_table(own)]) + "\n")
        for table, (what, entry) in tables().items():
            if table.rpartition(".")[0] == section:
                blocks.append("\n".join([f"## [[{table}]]", "", what, "", *_table(list(entry))]) + "\n")
    return "\n".join(blocks)


def pages() -> Mapping[Path, str]:
    """Every generated page and its text."""
    return {DOCS / "config.md": config_page(), DOCS / "metrics.md": metrics_page()}


def main(arguments: list[str]) -> int:
    """Writes the pages, or with `--check` says which are not up to date."""
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is not up to date: run make docs", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages()[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _table(own: list[Key]) -> list[str]:
    rows = [
        (f"`{key.name.rpartition('.')[2]}`", _cell(key.takes), f"`{toml_value(key.default)}`", key)
        for key in own
    ]
    lines = [f"| {name} | {takes} | {default} | {_cell(key.meaning)} |" for name, takes, default, key in rows]
    return ["| key | takes | default | meaning |", "|---|---|---|---|", *lines]


def _cell(text: str) -> str:
    """Text for a table: reStructuredText's double backticks become Markdown's single ones."""
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
