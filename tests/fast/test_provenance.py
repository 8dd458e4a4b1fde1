"""Provenance: what is written names code, model, data and machine, and holds no secret."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from blake3 import blake3

from streamrl_jax import provenance, rundir
from streamrl_jax.config_io import dump_config, load_config

REPOSITORY = Path(__file__).parents[2]


def head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def test_a_run_names_what_it_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=1")
    monkeypatch.setenv("STREAMRL_TOKEN", "secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text("[]\n")
    (tmp_path / "reward.py").write_text("def score(): ...\n")
    overrides = {"model.path": model, "data.train": tmp_path / "prompts.jsonl", "data.test": "task:add"}
    overrides["reward.function"] = f"{tmp_path}/reward.py:score"
    config = load_config([], [f"{key}={value}" for key, value in overrides.items()])
    with rundir.create(tmp_path / "r", dump_config(config)) as run:
        provenance.write_provenance(run, config, ["cpu:0", "cpu:1"])
        text = run.provenance.read_text()
        found = json.loads(text)
    assert found["commit"] == head()
    assert found["run_id"] == run.fence.run_id and found["incarnation"] == 0
    assert found["model"] == {str(model / "config.json"): {"bytes": 2, "blake3": blake3(b"{}").hexdigest()}}
    assert list(found["data"]) == [str(tmp_path / "prompts.jsonl")]
    assert found["sources"] == {f"{tmp_path}/reward.py": "def score(): ...\n"}
    assert found["config_digest"] == blake3(run.config.read_bytes()).hexdigest()
    assert found["packages"]["pydantic"] and found["machine"]["cores"] >= 1
    assert found["devices"] == ["cpu:0", "cpu:1"]
    assert found["environment"]["XLA_FLAGS"] == "--xla_x=1"
    assert "STREAMRL_TOKEN" not in text


def test_the_uncommitted_difference_is_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    package = repository / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text("a = 1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "First", "--no-verify"]):
        subprocess.run([*git, *command], check=True, timeout=120)
    (package / "module.py").write_text("a = 2\n")
    (package / "new.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    config = load_config([])
    with rundir.create(tmp_path / "r", dump_config(config)) as run:
        found = provenance.write_provenance(run, config, [])
        assert found.diff_file == "provenance.diff"
        assert "-a = 1\n+a = 2\n" in (run.path / found.diff_file).read_text()
    assert len(found.commit) == 40
    assert sorted(found.dirty) == [" M package/module.py", "?? package/new.py"]
    with rundir.reopen(tmp_path / "r") as run:
        assert provenance.write_provenance(run, config, []).diff_file == "provenance-1.diff"


def test_a_source_tree_without_git_is_told_by_an_empty_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "package" / "provenance.py"))
    (tmp_path / "package").mkdir()
    config = load_config([])
    with rundir.create(tmp_path / "r", dump_config(config)) as run:
        found = provenance.write_provenance(run, config, [])
    assert (found.commit, found.dirty, found.diff_file) == ("", (), "")


def test_large_models_are_known_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(hashlib.sha256(name.encode()).digest() * 2**17)
    monkeypatch.setattr(provenance, "_HASHED_BYTES", 5 * 2**20)
    found = provenance.digests([tmp_path])
    assert set(found[str(tmp_path / "a")]) == {"bytes", "blake3"}
    first = blake3((tmp_path / "b").read_bytes()[: 2**20]).hexdigest()
    assert found[str(tmp_path / "b")] == {"bytes": 4 * 2**20, "blake3_first_mib": first}


def test_secrets_stay_out() -> None:
    environment = {
        "HF_TOKEN": "x",
        "STREAMRL_API_KEY": "x",
        "JAX_PLATFORMS": "cpu",
        "HOME": "/",
        "VLLM_SECRET": "x",
    }
    assert provenance.kept_environment(environment) == {"JAX_PLATFORMS": "cpu"}
