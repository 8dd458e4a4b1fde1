"""Generated pages are those that the code describes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from streamrl_jax.config_schema import keys, sections

REPOSITORY = Path(__file__).parents[2]


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, "scripts/config_docs.py", "--check"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_key_and_section_says_what_it_means() -> None:
    assert [key.name for key in keys().values() if not key.meaning] == []
    assert [name for name, meaning in sections().items() if not meaning] == []
