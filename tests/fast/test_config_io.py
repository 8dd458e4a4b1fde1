"""Reading configurations: layers, overrides, and what a user is told when a value is wrong."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.config import Config
from streamrl_jax.config_io import (
    differences,
    dump_config,
    leaves,
    load_config,
    merged,
    parse_override,
    with_absolute_paths,
)
from streamrl_jax.config_schema import keys, near_keys, sections
from streamrl_jax.errors import UserError
from streamrl_jax.toml_text import toml_document

REPOSITORY = Path(__file__).parents[2]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message_of(paths: list[Path], overrides: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(paths, overrides or [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- layers and overrides -----------------------------------------------------------------------------------


def test_later_files_win_key_by_key_and_overrides_win_over_files(tmp_path: Path) -> None:
    base = written(tmp_path, "base.toml", "[actor.optim]\nlr = 1e-4\nbetas = [0.5, 0.6]\n[rollout]\nn = 4\n")
    grpo = written(tmp_path, "grpo.toml", '[actor.optim]\nlr = 2e-4\n[algorithm]\nadv_estimator = "grpo"\n')
    config = load_config([base, grpo], ["rollout.n=6", "rollout.n=7"])
    assert config.actor.optim.lr == 2e-4
    assert config.actor.optim.betas == [0.5, 0.6]
    assert config.rollout.n == 7
    assert config.algorithm.adv_estimator == "grpo"


def test_a_key_given_alone_leaves_the_other_defaults_of_its_place() -> None:
    """sft.optim's defaults are not those of its class: [sft.optim] lr alone must not reset the others."""
    config = load_config([], ["sft.optim.lr=1e-2", "critic.optim.weight_decay=0.1"])
    assert config.sft.optim == Config().sft.optim.model_copy(update={"lr": 1e-2})
    assert config.critic.optim == Config().critic.optim.model_copy(update={"weight_decay": 0.1})


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("actor.optim.lr=3e-4", "actor.optim.lr", 3e-4),
        ("actor.clip_ratio_low=1", "actor.clip_ratio_low", 1.0),
        ("trainer.mesh.fsdp=-1", "trainer.mesh.fsdp", -1),
        ("data.shuffle=false", "data.shuffle", False),
        ("bridge.transport=shm", "bridge.transport", "shm"),
        ("trainer.devices=0", "trainer.devices", "0"),
        ("trainer.devices=0,1", "trainer.devices", "0,1"),
        ("run.name=2024-01-01", "run.name", "2024-01-01"),
        ('run.name="quoted"', "run.name", "quoted"),
        ("data.system_prompt=[be brief]", "data.system_prompt", "[be brief]"),
        ("model.path=a=b", "model.path", "a=b"),
        ('gen.devices=["4,5", "6,7"]', "gen.devices", ["4,5", "6,7"]),
        ("gen.devices=[cpu:0,cpu:1]", "gen.devices", ["cpu:0", "cpu:1"]),
        ("gen.devices=[]", "gen.devices", []),
        ("rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids", [1, 2]),
        ("data.task={digits = 2, name = 'add'}", "data.task", {"digits": 2, "name": "add"}),
    ],
)
def test_overrides_take_toml_values_and_bare_words(override: str, name: str, value: Any) -> None:
    values = dict(leaves(load_config([], [override]).model_dump()))
    expected = dict(leaves({name: value}))
    assert {key: values[key] for key in expected} == expected


def test_keys_below_a_free_table_are_free() -> None:
    config = load_config([], ["data.task.digits=2", "data.task.style.carry-only=true"])
    assert config.data.task == {"digits": 2, "style": {"carry-only": True}}


@pytest.mark.parametrize("override", ["actor.optim.lr", "=3", "a..b=1", ".lr=1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(override)) + ".*section.key=value"):
        parse_override(override)


# --- writing ------------------------------------------------------------------------------------------------

scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.dates()
    | st.datetimes()
    | st.times()
)
key_names = st.text(st.characters(codec="utf-8"), max_size=6)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key_names, inner, max_size=3)
)


@given(st.dictionaries(key_names, values, max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_is_written_reads_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_document(table)) == table


@given(st.dictionaries(key_names, values, max_size=3), st.dictionaries(key_names, values, max_size=3))
@settings(max_examples=50, deadline=None)
def test_merging_changes_neither_table_and_keeps_every_later_leaf(
    base: dict[str, Any], over: dict[str, Any]
) -> None:
    before = toml_document(base)
    result = merged(base, over)
    assert toml_document(base) == before
    assert merged(result, over) == result
    assert set(result) == {*base, *over}


def test_a_dumped_configuration_loads_as_an_equal_one_with_every_key_resolved(tmp_path: Path) -> None:
    config = load_config([], ["data.task={a=1, b=[1, {c=2}]}", "gen.devices=[cpu:0]", "actor.optim.eps=1e-9"])
    text = dump_config(config)
    assert load_config([written(tmp_path, "config.toml", text)]) == config
    assert {name.removeprefix("data.task.") for name, _ in leaves(tomllib.loads(text))} >= {
        key for key in keys() if key != "data.task"
    }


def test_what_toml_cannot_hold_is_named_when_written() -> None:
    config = Config.model_validate({"reward": {"kwargs": {"deep": {"nothing": None}}}})
    with pytest.raises(UserError, match=r"reward\.kwargs\.deep\.nothing.*None"):
        dump_config(config)


def test_differences_name_the_keys_that_changed() -> None:
    changed = load_config([], ["actor.optim.lr=2e-5", "data.task.a=1"])
    assert differences(Config(), changed) == ["actor.optim.lr: 1e-06 → 2e-05", "data.task.a: unset → 1"]
    assert differences(changed, changed) == []


def test_only_what_exists_is_pinned_to_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    written(tmp_path, "reward.py", "")
    config = load_config(
        [],
        [
            "model.path=model",
            "data.train=task:add",
            "reward.function=reward.py:score",
            "model.critic_path=Org/Name",
        ],
    )
    pinned = with_absolute_paths(config)
    assert pinned.model.path == str(tmp_path / "model")
    assert pinned.reward.function == f"{tmp_path}/reward.py:score"
    assert pinned.run.dir == str(tmp_path / "runs")
    assert (pinned.data.train, pinned.model.critic_path, pinned.gen.python) == ("task:add", "Org/Name", "")


# --- faults -------------------------------------------------------------------------------------------------


def test_every_fault_is_told_at_once_with_its_file_key_value_and_remedy(tmp_path: Path) -> None:
    base = written(tmp_path, "base.toml", "[actor]\nlr = 1e-4\nppo_epochs = 0\n[gen]\ndevices = [4]\n")
    other = written(
        tmp_path, "other.toml", '[trainer]\nval_before_train = "True"\nmesh = 3\nlogger = ["wandb"]\n'
    )
    text = message_of([base, other], ["actor.optim.lr=fast", "gen.max_num_seqs=2.0"])
    for fault in (
        f"{base}: actor.lr = 0.0001: there is no such key; did you mean actor.optim.lr",
        f"{base}: actor.ppo_epochs = 0: expected whole number ≥ 1 (default: 1)",
        f'{base}: entry 1 of gen.devices is 4: expected string, so put it in quotes: "4"',
        f'{other}: trainer.val_before_train = "True": expected true or false, written true without quotes',
        f"{other}: trainer.mesh = 3: [trainer.mesh] is a section",
        f'{other}: entry 1 of trainer.logger is "wandb": expected "console" or "tensorboard"',
        'command line: actor.optim.lr = "fast": expected number > 0',
        "command line: gen.max_num_seqs = 2.0: expected whole number ≥ 1, written 2",
    ):
        assert fault in text
    assert "8 faults" in text


def test_rules_over_several_keys_are_numbered_and_name_the_keys_that_they_mean(tmp_path: Path) -> None:
    """Not those whose names merely begin alike; and for a table the keys that were set in it."""
    file = tmp_path / "grpo.toml"
    file.write_text('[data]\ntrain = "task:arithmetic"\n[algorithm]\nadv_estimator = "grpo"\n')
    with pytest.raises(UserError) as caught:
        load_config([file], ["actor.ppo_mini_batch_size=5", "critic.optim.lr=1e-3"])
    text = str(caught.value)
    assert text.startswith(
        "The configuration has 2 faults: (1) actor.ppo_mini_batch_size = 5 does not divide "
    )
    assert "data.train from" not in text and "(actor.ppo_mini_batch_size from command line); (2)" in text
    assert "critic.optim is set" in text and "critic.optim.lr from command line" in text


def test_the_origin_of_a_fault_is_the_layer_that_won(tmp_path: Path) -> None:
    first = written(tmp_path, "first.toml", "[rollout]\nn = 0\n")
    second = written(tmp_path, "second.toml", "[rollout]\nn = -1\n")
    assert message_of([first, second]).count("first.toml") == 0
    assert "command line: rollout.n = -2" in message_of([first, second], ["rollout.n=-2"])


@pytest.mark.parametrize(
    ("unknown", "first"),
    [
        ("lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("rolout.n", "rollout.n"),
        ("data.batch_size", "data.train_batch_size"),
        ("trainer.mesh.fspd", "trainer.mesh.fsdp"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("trainer.save_frequency", "trainer.save_freq"),
        ("train.learning_rate", "actor.optim.lr"),
        ("grpo.num_generations", "rollout.n"),
    ],
)
def test_an_unknown_key_finds_the_near_one_in_any_section(unknown: str, first: str) -> None:
    assert near_keys(unknown)[0] == first


def test_nothing_near_points_to_the_list_of_keys() -> None:
    assert near_keys("zzzz.qqqq") == []
    assert "docs/config.md" in message_of([], ["zzzz.qqqq=1"])


def test_names_that_other_trainers_use_lead_to_keys_that_exist() -> None:
    from streamrl_jax.config_schema import _FOREIGN_NAMES

    assert set(_FOREIGN_NAMES.values()) <= set(keys())


def test_an_unknown_section_finds_the_near_one(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "a.toml",
        "[trainr]\nsave_freq = 1\n[actor.optimizer]\nlr = 1.0\n[empty]\n[train]\nlearning_rate = 1.0\n",
    )
    text = message_of([path])
    assert "[trainr]: there is no such section; did you mean [trainer]" in text
    assert "[actor.optimizer]: there is no such section; did you mean [actor.optim]" in text
    assert "train.learning_rate = 1.0: there is no such key; did you mean actor.optim.lr" in text
    assert f"[empty]: there is no such section; the sections are {', '.join(sections())}" in text


def test_a_rule_over_several_keys_says_where_each_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, "grpo.toml", '[algorithm]\nadv_estimator = "grpo"\n')
    text = message_of([path], ["rollout.n=1"])
    assert f"algorithm.adv_estimator from {path}, rollout.n from command line" in text


def test_broken_toml_names_the_line_and_shows_it(tmp_path: Path) -> None:
    path = written(tmp_path, "bad.toml", "[run]\nseed = 1\n[actor\nppo_epochs = 2\n")
    assert re.search(r"bad\.toml is not valid TOML: .*line 3.*The line reads: \[actor$", message_of([path]))


def test_files_that_cannot_be_read_are_named_with_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    written(tmp_path, "configs/demo.toml", "")
    assert "demo.tml does not exist; did you mean configs/demo.toml" in message_of([Path("demo.tml")])
    assert "did you mean configs/demo.toml" in message_of([Path("configs/dem")])
    assert "is a directory" in message_of([Path("configs")])
    assert "name a file in it: demo.toml" in message_of([Path("configs")])
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe4"\n')
    assert "not a text file in UTF-8" in message_of([Path("latin.toml")])


# --- surroundings -------------------------------------------------------------------------------------------


def test_dates_survive_in_a_free_table(tmp_path: Path) -> None:
    path = written(tmp_path, "a.toml", "[data.task]\nsince = 2024-01-02\n")
    assert load_config([path]).data.task == {"since": datetime.date(2024, 1, 2)}
    assert "since = 2024-01-02" in dump_config(load_config([path]))


def test_reading_a_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, streamrl_jax.config_io as c; c.load_config([], ['rollout.n=2']);"
        "print({'jax', 'torch', 'vllm', 'flax', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_every_shipped_configuration_loads() -> None:
    for path in sorted((REPOSITORY / "configs").glob("*.toml")):
        assert load_config([path]).run.name != "run", f"{path} gives its runs no name of their own"
