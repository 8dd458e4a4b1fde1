"""A model is a directory or a hub id; what is neither, or cannot be fetched, is named with the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.setup.model_source import model_directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_directory("owner/name", "model.path") == Path("owner/name"), "before the hub is asked"


@pytest.mark.parametrize(
    ("name", "said"), [("", "is empty"), ("/no/such", "no such directory"), ("a b", "hub id")]
)
def test_what_is_neither_is_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"model.path .*{said}"):
        model_directory(name, "model.path")


def test_without_the_hubs_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="install the extra `hub`"):
        model_directory("owner/name", "model.path")
