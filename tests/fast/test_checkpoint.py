"""What is chosen is whole and bitwise what was saved: after kill -9, damage, a full disk, on another mesh."""

from __future__ import annotations

import logging
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from streamrl_jax.config import OptimSection
from streamrl_jax.errors import UserError
from streamrl_jax.train import seal
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import Frontier, Meta, best_step, meta_from_json, outdated
from streamrl_jax.train.mesh import replicated
from streamrl_jax.train.optim import make_optimizer
from streamrl_jax.train.state import TrainState, abstract_network, abstract_state

from .tiny import tiny_arch, tiny_model

REPO = Path(__file__).resolve().parents[2]
OPTIMIZER = make_optimizer(OptimSection(), grad_clip=1.0, total_steps=10)
META = Meta(
    step=4,
    version=4,
    incarnation=1,
    frontier=Frontier(4, in_flight=(4, 5)),
    config_digest="ab12",
    metrics={"val/accuracy": 0.1 + 0.2},
)


def _state(value: float) -> dict[str, Any]:
    """A small state whose numbers say which save they are of."""
    weights = jnp.arange(4096, dtype=jnp.float32).reshape(64, 64) * value
    return {"params": {"w": weights, "b": jnp.full(4, value, jnp.bfloat16)}, "count": jnp.int32(value)}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def _assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _write(directory: Path, *steps: int) -> None:
    with Checkpointer(directory, keep=10) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(step), replace(META, step=step))


def _assert_latest_is(directory: Path, step: int) -> None:
    """The newest whole checkpoint is this one, and it holds what was saved."""
    with Checkpointer(directory, keep=10) as checkpointer:
        assert checkpointer.latest() == step
        restored, meta = checkpointer.restore(None, _abstract(_state(0)))
    _assert_same_bits(restored, _state(step))
    assert meta == replace(META, step=step)


def _abstract_train_state(mesh: tuple[int, int, int], **changes: Any) -> TrainState:
    actor = tiny_model(tiny_arch(**changes), mesh)
    critic = replace(actor, head="value")
    networks = (abstract_network(model, OPTIMIZER) for model in (actor, critic))
    return abstract_state(*networks, whole=replicated(actor.mesh))


def _filled(abstract: TrainState) -> TrainState:
    """Random numbers wherever the abstract state has a place."""
    rng = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put((rng.standard_normal(leaf.shape) * 100).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    """A whole train state (actor, critic, Adam's moments, statistics), saved from eight devices."""
    directory = tmp_path_factory.mktemp("trained") / "checkpoints"
    state = _filled(_abstract_train_state((2, 2, 2)))
    with Checkpointer(directory, keep=2) as checkpointer:
        checkpointer.save(4, state, META)
    return directory, state


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 8, 1), (1, 1, 1)])
def test_a_checkpoint_is_read_bitwise_on_any_mesh(
    trained: tuple[Path, TrainState], mesh: tuple[int, int, int]
) -> None:
    directory, state = trained
    abstract = _abstract_train_state(mesh)
    with Checkpointer(directory, keep=2) as checkpointer:
        restored, meta = checkpointer.restore(None, abstract)
    _assert_same_bits(restored, state)
    jax.tree.map(lambda leaf, want: _assert_lies_so(leaf, want), restored, abstract)
    assert meta == META


def _assert_lies_so(leaf: jax.Array, abstract: jax.ShapeDtypeStruct) -> None:
    assert abstract.sharding is not None
    assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def test_the_parameters_alone_are_read_without_an_optimizer(trained: tuple[Path, TrainState]) -> None:
    directory, state = trained
    params = tiny_model(tiny_arch()).abstract_params()
    on_host = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    with Checkpointer(directory, keep=2) as checkpointer:
        placed = checkpointer.restore_part(None, ("actor", "params"), params)
        plain = checkpointer.restore_part(4, ("critic", "params", "value_head"), on_host_head(state))
        arrays = checkpointer.restore_part(4, ("actor", "params"), on_host)
    _assert_same_bits(placed, state.actor.params)
    _assert_same_bits(arrays, state.actor.params)
    assert state.critic is not None
    _assert_same_bits(plain, state.critic.params["value_head"])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))


def on_host_head(state: TrainState) -> Any:
    """The value head's structure, to be read as NumPy arrays."""
    assert state.critic is not None
    head = state.critic.params["value_head"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), head)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"intermediate_size": 44},
            r"mlp/gate/kernel is float32\[2,32,40\] in the checkpoint, expected float32\[2,32,44\]",
        ),
        (
            {"tie_word_embeddings": False},
            r"actor/params/lm_head/weight is missing in the checkpoint \(expected float32\[48,32\]\)",
        ),
        (
            {"architecture": "LlamaForCausalLM"},
            r"actor/params/layers/attention/key/bias is in the checkpoint",
        ),
    ],
    ids=["width", "head", "bias"],
)
def test_another_model_is_refused_with_the_differences(
    trained: tuple[Path, TrainState], changes: dict[str, Any], told: str
) -> None:
    directory, _ = trained
    with Checkpointer(directory, keep=2) as checkpointer:
        with pytest.raises(UserError, match=told):
            checkpointer.restore(4, _abstract_train_state((1, 1, 1), **changes))
        params = tiny_model(tiny_arch(**changes)).abstract_params()
        with pytest.raises(UserError, match="step_4 was written by another model"):
            checkpointer.restore_part(4, ("actor", "params"), params)


def test_a_run_without_critic_does_not_take_one_with(trained: tuple[Path, TrainState]) -> None:
    directory, _ = trained
    whole = _abstract_train_state((1, 1, 1))
    with (
        Checkpointer(directory, keep=2) as checkpointer,
        pytest.raises(UserError, match=r"critic/opt/.*not expected"),
    ):
        checkpointer.restore(4, replace(whole, critic=None))


def test_a_state_that_is_donated_after_the_call_is_saved_as_it_was(tmp_path: Path) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 7, tree), donate_argnums=0)
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((512, 1024)), jnp.float32)}
    wanted = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        checkpointer.save(1, state, META)
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        restored, _ = (
            checkpointer.restore(1, _abstract(state)) if checkpointer.wait() is None else (None, None)
        )
    _assert_same_bits(restored, wanted)


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    scores = {1: 0.2, 2: 0.9, 3: 0.5, 4: float("nan"), 5: 0.6}
    with Checkpointer(tmp_path, 2, "val/accuracy") as checkpointer:
        for step, score in scores.items():
            checkpointer.save(step, _state(step), replace(META, step=step), {"val/accuracy": score})
        checkpointer.wait()
        assert checkpointer.steps() == (2, 4, 5)
        assert checkpointer.read_meta(2).metrics == {"val/accuracy": 0.9}
    # Another life of the run knows the best one still.
    with Checkpointer(tmp_path, 2, "val/accuracy") as checkpointer:
        for step in (6, 7):
            checkpointer.save(step, _state(step), META)
        checkpointer.wait()
        assert checkpointer.steps() == (2, 6, 7)
        checkpointer.save(8, _state(8), META, {"val/accuracy": 0.95})
        checkpointer.wait()
        assert checkpointer.steps() == (7, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_7", "step_8"]


@pytest.mark.parametrize(
    ("steps", "scores", "keep", "removed"),
    [
        ([], {}, 1, []),
        ([1, 2, 3], {}, 5, []),
        ([1, 2, 3, 4], {}, 2, [1, 2]),
        ([1, 2, 3, 4], {1: 0.5}, 2, [2]),
        ([1, 2, 3, 4], {1: 0.5, 2: 0.5}, 1, [1, 3]),
        ([1, 2, 3], {1: float("inf"), 2: float("nan"), 9: 5.0}, 1, [1, 2]),
    ],
)
def test_which_checkpoints_are_removed(
    steps: list[int], scores: dict[int, float], keep: int, removed: list[int]
) -> None:
    assert outdated(steps, scores, keep) == removed


def test_the_best_of_equals_is_the_newest() -> None:
    assert best_step({1: 0.5, 3: 0.5, 2: 0.4}) == 3
    assert best_step({}) is None


def test_meta_survives_json_and_names_what_another_release_wrote() -> None:
    assert meta_from_json(asdict(META), "here") == META
    with pytest.raises(UserError, match=r"here was written by another release.*colour"):
        meta_from_json({**asdict(META), "colour": 1}, "here")
    with pytest.raises(UserError, match="KeyError: 'frontier'"):
        meta_from_json({"step": 1}, "here")


def test_there_is_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "absent", keep=1) as checkpointer:
        assert checkpointer.latest() is None and checkpointer.steps() == ()
        with pytest.raises(UserError, match="absent holds no whole checkpoint"):
            checkpointer.restore(None, _abstract(_state(0)))
        with pytest.raises(UserError, match=r"step_3 does not exist; there are the steps \[\]"):
            checkpointer.restore(3, _abstract(_state(0)))
    assert not (tmp_path / "absent").exists()


def test_orbax_own_manager_reads_the_layout(trained: tuple[Path, TrainState]) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="step", read_only=True)
    with ocp.CheckpointManager(trained[0], options=options) as manager:
        assert list(manager.all_steps()) == [4]
        assert manager.restore(4, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta["step"] == 4


# ---------------------------------------------------------------- damage


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_every_file_that_is_cut_changed_or_lost_makes_its_checkpoint_unfit(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    whole = tmp_path / "step_1"
    assert seal.faults(whole) == [] and len(_files(whole)) > 8
    for path in _files(whole):
        data = path.read_bytes()
        if path.name == seal.SEAL:
            broken = [
                data[: len(data) // 2],
                b"{}",
                b"[]",
                b'{"files": 3}',
                b'{"files": []}',
                b'{"files": {}}',
            ]
            broken.append(b"[" * 100_000)
        else:
            broken = [data[:-1], bytes([data[0] ^ 1]) + data[1:]] if data else [b"x"]
        for other in broken:
            path.write_bytes(other)
            faults = seal.faults(whole)
            assert len(faults) == 1 and str(path.relative_to(whole)) in faults[0]
        path.unlink()
        assert len(seal.faults(whole)) == 1
        path.write_bytes(data)
    assert seal.faults(whole) == []


def test_a_damaged_checkpoint_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, 1, 2, 3)
    largest = max(_files(tmp_path / "step_3" / "state"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    (tmp_path / "step_2" / seal.SEAL).unlink()
    with caplog.at_level(logging.WARNING):
        _assert_latest_is(tmp_path, 1)
    assert f"{tmp_path}/step_3 is passed over: state/" in caplog.text and "bytes instead of" in caplog.text
    assert f"{tmp_path}/step_2 is passed over: it was never completed" in caplog.text
    with Checkpointer(tmp_path, keep=10) as checkpointer:
        with pytest.raises(UserError, match=r"step_3 is damaged: .*Besides, there are the steps \[1, 3\]"):
            checkpointer.restore(3, _abstract(_state(0)))
        # The run goes on from 1 and comes by 2 and 3 again.
        for step in (2, 3):
            checkpointer.save(step, _state(step), replace(META, step=step))
    _assert_latest_is(tmp_path, 3)


def test_a_reader_sees_a_checkpoint_as_soon_as_it_is_complete(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    mark = (tmp_path / "step_1" / seal.SEAL).rename(tmp_path / "kept")
    with Checkpointer(tmp_path, keep=10) as reader:
        assert reader.latest() is None
        mark.rename(tmp_path / "step_1" / seal.SEAL)
        assert reader.latest() == 1


def test_a_whole_checkpoint_is_not_overwritten_but_can_be_set_aside(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 3)
    with Checkpointer(tmp_path, keep=10) as checkpointer:
        with pytest.raises(UserError, match="step_2 exists and is whole; it is not overwritten"):
            checkpointer.save(2, _state(9), META)
        moved = checkpointer.set_aside(after=1)
        assert moved == [tmp_path / "superseded" / "step_2", tmp_path / "superseded" / "step_3"]
        assert [seal.faults(path) for path in moved] == [[], []]
        checkpointer.save(2, _state(2), replace(META, step=2))
    _assert_latest_is(tmp_path, 2)


CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
import jax.numpy as jnp
from tests.fast.test_checkpoint import META, _state
from streamrl_jax.train import seal
from streamrl_jax.train.checkpoint import Checkpointer

directory, moment = Path(sys.argv[1]), sys.argv[2]
checkpointer = Checkpointer(directory, keep=10)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_in_mid_write():
    while not any(path.is_file() for path in directory.glob("step_2.orbax-checkpoint-tmp*/**/*")):
        time.sleep(0.0002)
    die()

checkpointer.save(1, _state(1), META)
checkpointer.wait()
state = _state(2)
if moment == "writing":
    state = {**state, "large": jnp.ones((2000, 2000))}
    killer = threading.Thread(target=die_in_mid_write)
    killer.start()
    os.rename = lambda *paths: killer.join()  # it dies before the folder gets its name, however slow it is
elif moment == "sealing":
    seal.write_seal = die
checkpointer.save(2, state, META)
checkpointer.wait()
"""


@pytest.mark.parametrize("moment", ["writing", "sealing"])
def test_kill_9_in_mid_save_leaves_the_older_checkpoint_and_the_run_goes_on(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = CHILD.replace("META", "META")
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), moment],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert len(list(tmp_path.glob("step_2*"))) == 1  # it died in between
    with Checkpointer(tmp_path, keep=10) as checkpointer, caplog.at_level(logging.WARNING):
        assert checkpointer.steps() == (1,)
        restored, _ = checkpointer.restore(None, _abstract(_state(0)))
        _assert_same_bits(restored, _state(1))
        checkpointer.save(2, _state(2), replace(META, step=2))
    assert "step_2" in caplog.text
    _assert_latest_is(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


@contextmanager
def _file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process grows past ``nbytes``: nearest to a full disk that fills none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's other writers
def test_a_full_disk_reaches_the_user_and_leaves_the_older_checkpoints(tmp_path: Path) -> None:
    noise = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32)
    _write(tmp_path, 1)
    with Checkpointer(tmp_path, keep=10) as checkpointer:
        with _file_size_limit(20_000), pytest.raises(UserError) as caught:
            checkpointer.save(2, {**_state(2), "noise": noise}, META)
            checkpointer.wait()
        message = str(caught.value)
        assert f"{tmp_path}/step_2 could not be written: the disk is full" in message
        assert "What is whole: step_1." in message
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
        checkpointer.save(3, _state(3), replace(META, step=3))
    _assert_latest_is(tmp_path, 3)


def test_a_failure_in_the_background_reaches_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError("controller is gone")

    checkpointer = Checkpointer(tmp_path, keep=10)
    monkeypatch.setattr(seal, "write_seal", fail)
    checkpointer.save(1, _state(1), META)
    with pytest.raises(OSError, match="controller is gone"):
        checkpointer.save(2, _state(2), META)
    monkeypatch.undo()
    checkpointer.save(2, _state(2), replace(META, step=2))
    checkpointer.close()
    _assert_latest_is(tmp_path, 2)


def test_a_removal_that_was_cut_short_is_finished_by_the_next_life(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2)
    (tmp_path / "step_1").rename(tmp_path / "step_1.deleting")
    shutil.rmtree(tmp_path / "step_1.deleting" / "state")
    _write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]
