"""A fork starts a new run from another one's checkpoint, with other settings and also with another algorithm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from streamrl_jax.cli import main
from streamrl_jax.commands.starts import without_the_estimators
from streamrl_jax.config_io import config_from_layers, parse_override, read_layer
from streamrl_jax.rundir import look
from streamrl_jax.samples_log import recorded_iterations
from streamrl_jax.setup.inputs import read_inputs
from streamrl_jax.train.assemble import Restore, build_steps, build_trainer
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.state import TrainState

from .job_world import (
    jax_settings_kept,
    left_behind,
    metrics_of,
    training_lines,
    write_config,
    write_world,
)

GRPO = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A PPO run of two iterations with a checkpoint after each."""
    with jax_settings_kept():
        world = write_world(tmp_path_factory.mktemp("world"))
        config = write_config(
            world,
            run={"name": "origin"},
            trainer={"total_training_steps": 2, "save_freq": 1, "test_freq": 0, "val_before_train": False},
        )
        assert main(["train", str(config)]) == 0
        yield world / "runs" / "origin"


def state_of(run: Path, step: int, *, forked: bool = False, overrides: tuple[str, ...] = ()) -> TrainState:
    changes = [parse_override(override) for override in overrides]
    cfg = config_from_layers([without_the_estimators(read_layer(run / "config.toml"), changes), *changes])
    inputs = read_inputs(cfg)
    with Checkpointer(run / "checkpoints", 1) as source:
        trainer, _ = build_trainer(build_steps(cfg, inputs), inputs, Restore(source, step, forked))
    return trainer.state


def leaves(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_another_learning_rate_from_an_older_step(origin: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Numbering, optimizer and critic go on; the first run is left as it is."""
    fork = origin.with_name("slower")
    before = sorted(path for path in origin.rglob("*") if path.is_file())
    arguments = ["--fork-from", f"{origin}@1", "--run-dir", str(fork), "actor.optim.lr=1e-3"]
    assert main(["train", *arguments]) == 0
    assert "actor.optim.lr: 0.003 → 0.001" in capfd.readouterr().err
    (line,) = training_lines(fork)
    assert line.step == 2 and line.number("actor/lr") == pytest.approx(1e-3)
    assert recorded_iterations(fork / "samples") == [1]
    assert look(fork).forked_from == f"{origin}@1"
    # The same samples from the same state: the gradient is the origin's, the step is not.
    twin = training_lines(origin)[1]
    assert line.number("actor/grad_norm") == pytest.approx(twin.number("actor/grad_norm"), rel=1e-4)
    assert sorted(path for path in origin.rglob("*") if path.is_file()) == before
    assert left_behind(fork) == []


def test_a_fork_that_would_train_nothing_is_refused(origin: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fork = origin.with_name("nothing")
    assert main(["train", "--fork-from", str(origin), "--run-dir", str(fork)]) == 2
    assert "the fork starts at step 2" in (said := capfd.readouterr().err)
    assert "trainer.total_training_steps = 2" in said
    assert not fork.exists()


def test_a_fork_whose_first_life_left_no_checkpoint_starts_from_its_origin_again(
    origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the origin has moved on meanwhile: the step was pinned when the fork was made."""
    monkeypatch.chdir(origin.parent)
    fork = origin.with_name("again")
    overrides = ["trainer.total_training_steps=3", "trainer.save_freq=0"]
    assert main(["train", "--fork-from", "origin", "--run-dir", str(fork), *overrides]) == 0
    first = training_lines(fork)
    for checkpoint in (fork / "checkpoints").iterdir():  # as if it had been killed before it wrote one
        shutil.rmtree(checkpoint)
    assert main(["train", "--resume", str(fork)]) == 0
    assert look(fork).forked_from == f"{origin}@2"
    assert [line.step for line in training_lines(fork)] == [line.step for line in first] == [3]
    with Checkpointer(fork / "checkpoints", 1) as checkpoints:
        assert checkpoints.latest() == 3


def test_a_fork_without_critic_leaves_the_critic_behind(origin: Path) -> None:
    forked = state_of(origin, 2, forked=True, overrides=GRPO)
    kept = state_of(origin, 2)
    assert forked.critic is None and kept.critic is not None
    assert int(forked.updates) == int(kept.updates) == 2
    for mine, theirs in zip(leaves(forked.actor), leaves(kept.actor), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_fork_that_lacks_a_critic_begins_one_on_the_forked_policy(origin: Path) -> None:
    fork = origin.with_name("grpo")
    overrides = [*GRPO, "trainer.total_training_steps=3"]
    assert main(["train", "--fork-from", str(origin), "--run-dir", str(fork), *overrides]) == 0
    assert [line.step for line in training_lines(fork)] == [3]
    assert not any(name.startswith("critic/vf_loss") for line in metrics_of(fork) for name in line.metrics)

    back = state_of(fork, 3, forked=True, overrides=("algorithm.adv_estimator=gae",))
    assert back.critic is not None
    policy, critic = back.actor.params, back.critic.params
    np.testing.assert_array_equal(
        np.asarray(critic["embedding"]["weight"]), np.asarray(policy["embedding"]["weight"])
    )
    assert all(not leaf.any() for leaf in leaves(critic["value_head"]))
    assert not any(np.any(leaf) for leaf in leaves(back.critic.opt))
