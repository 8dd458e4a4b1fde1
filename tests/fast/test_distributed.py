"""Several trainer processes train as one: two of four devices each, with a real controller and instances that compute
in NumPy. One run in three lives serves all: a trainer process killed, a signal to one of them, and the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from jax.errors import JaxRuntimeError

from streamrl_jax.config import Config
from streamrl_jax.config_distributed import DistributedSection
from streamrl_jax.config_io import load_config
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.plan import Step
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.rundir import look
from streamrl_jax.samples_log import read_samples, recorded_iterations
from streamrl_jax.setup.distributed import Member, membership, own_share, trainer_log
from streamrl_jax.setup.inputs import NO_FUNCTIONS, read_inputs
from streamrl_jax.train.answer import generated_answer
from streamrl_jax.train.assemble import Restore, build_steps, build_trainer, missing_named
from streamrl_jax.train.batcher import pack_all
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.plan import Plan
from streamrl_jax.train.shapes import BatchShape, Shape
from streamrl_jax.train.trainer import Trainer

from .job_world import (
    SAMPLES,
    jax_settings_kept,
    left_behind,
    metrics_of,
    training_lines,
    wait_until,
    write_config,
    write_world,
)
from .tiny_training import ROW, samples

pytestmark = pytest.mark.timeout(2400)  # above the bounds within

STEPS = 5
# A killed process, by the others; most of it is compilation that had to end. JAX would take 600 s.
NOTICED_S = 300.0
# Figures of a single token are differences of two log-probs, whose own last bit is worth 4.8e-7 between -4 and -8.
OF_ONE_TOKEN = ("max", "min", "_p50", "_p99")
SINGLE_TOKEN = 10 * 4.8e-7
# Adam divides by the gradient's own size: a larger eps keeps a rounding of it from becoming a step.
OPTIM = {"lr": 3e-3, "betas": [0.9, 0.99], "eps": 1e-3}


@dataclass
class Life:
    """How one life of the run ended."""

    code: int
    said: str  # by the first process
    other: str  # by the second one
    ended_after_s: float  # since what the test did to it
    steps: list[int]


def begin(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "streamrl_jax", "train", *arguments]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def other_trainer(run: Path) -> int:
    """Process id of the second trainer process."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        own = "--trainer.distributed.process_id=1" in words and str(run) in " ".join(words)
        if own and "streamrl_jax.gen.guard" not in words:
            return process.pid
    raise AssertionError("there is no second trainer process")


def recorded_since(run: Path, begun: float) -> int:
    """Steps on record, once this life has cut off or written some itself."""
    path = run / "metrics.jsonl"
    return len(training_lines(run)) if path.exists() and path.stat().st_mtime > begun else 0


def live(arguments: list[str], run: Path, at_steps: int, number: int) -> Life:
    """A life of the run whose second trainer process gets a signal when it has so many steps; 0: none does."""
    log = run.with_suffix(".log")
    begun = time.time()
    trainer = begin(arguments, log)
    try:
        if number:
            wait_until(lambda: recorded_since(run, begun) >= at_steps or trainer.poll(), 600)
            assert trainer.poll() is None, log.read_text()[-3000:]
            os.kill(other_trainer(run), number)
        done = time.monotonic()
        code = trainer.wait(600)
    finally:
        trainer.kill()
    other = trainer_log(run / "logs", 1).read_text(errors="replace")
    steps = [line.step for line in training_lines(run)]
    return Life(code, log.read_text(errors="replace"), other, time.monotonic() - done, steps)


@dataclass
class Run:
    """A run of two trainer processes, and what its lives were."""

    path: Path
    cfg: Config
    lives: list[Life]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with jax_settings_kept():
        world = write_world(tmp_path_factory.mktemp("world"))
        config = write_config(
            world,
            run={"name": "two"},
            algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False},
            actor={"ppo_max_token_len_per_gpu": 16, "optim": OPTIM},
            control={"lease_s": 20.0, "grace_s": 5.0},
            # What is held back keeps a life from its end until its signal comes. It is not handed out before the step
            # that is waited for is recorded: it would keep the threads that compute rewards from that step's.
            reward={"kwargs": {"hold": "train/3/*"}, "timeout_s": 600.0},
            trainer={
                "total_training_steps": STEPS,
                "max_staleness": 1,
                "test_freq": 3,
                "distributed": {
                    "processes": 2,
                    "local_devices": 4,
                    "spawn": True,
                    "heartbeat_timeout_s": 600.0,
                },
            },
            eval={"max_prompts": 2, "n": 1},
        )
        path = world / "runs" / "two"
        path.parent.mkdir()
        lives = [
            live([str(config)], path, 2, signal.SIGKILL),
            live(["--resume", str(path), 'reward.kwargs={hold = "train/4/*"}'], path, 3, signal.SIGTERM),
            live(["--resume", str(path), 'reward.kwargs={hold = ""}'], path, 0, 0),
        ]
        yield Run(path, load_config([path / "config.toml"], []), lives)


def test_a_killed_process_ends_all_of_them_and_is_named(run: Run) -> None:
    killed = run.lives[0]
    assert killed.code not in (0, 75), killed.said
    assert killed.ended_after_s < NOTICED_S
    assert "trainer process 1" in killed.said


def test_a_signal_to_one_process_ends_all_at_one_place_with_one_checkpoint(run: Run) -> None:
    stopped = run.lives[1]
    assert stopped.code == 75, stopped.said[-3000:] + stopped.other[-3000:]
    assert f"stopped by SIGTERM after step {stopped.steps[-1]}" in stopped.said
    assert f"stopped by SIGTERM after step {stopped.steps[-1]}" in stopped.other
    with Checkpointer(run.path / "checkpoints", 1) as checkpoints:
        assert stopped.steps[-1] in checkpoints.steps() or run.lives[2].steps[-1] == STEPS


def test_the_last_life_goes_on_where_the_one_before_ended(run: Run) -> None:
    assert run.lives[2].code == 0, run.lives[2].said[-3000:] + run.lives[2].other[-3000:]
    assert [line.step for line in training_lines(run.path)] == list(range(1, STEPS + 1))
    evaluated = [line.step for line in metrics_of(run.path) if "val/accuracy" in line.metrics]
    assert evaluated[0] == 0 and evaluated[-1] == STEPS
    assert recorded_iterations(run.path / "samples") == list(range(STEPS))
    assert all(len(read_samples(run.path, iteration)) == SAMPLES for iteration in range(STEPS))
    assert look(run.path).fence.incarnation == 2
    assert left_behind(run.path) == []


@pytest.fixture(scope="module")
def alone(run: Run) -> Iterator[tuple[Trainer, list[dict[str, float]]]]:
    """The same samples, in one process with eight devices."""
    inputs = read_inputs(run.cfg, NO_FUNCTIONS)
    trainer, _ = build_trainer(build_steps(run.cfg, inputs), inputs, None)
    metrics: list[dict[str, float]] = []
    for iteration in range(STEPS):
        trainer.begin_iteration(iteration)
        for sample in read_samples(run.path, iteration):
            trainer.add(sample)
        metrics.append(trainer.end_iteration().metrics)
    yield trainer, metrics


def test_losses_and_metrics_are_those_of_one_process(
    run: Run, alone: tuple[Trainer, list[dict[str, float]]]
) -> None:
    assert jax.process_count() == 1 and jax.device_count() == 8
    for line, metrics in zip(training_lines(run.path), alone[1], strict=True):
        for name, value in metrics.items():
            if name != "training/overlapped":  # a matter of time
                bound = SINGLE_TOKEN if name.endswith(OF_ONE_TOKEN) else 1e-6
                assert line.number(name) == pytest.approx(value, rel=1e-6, abs=bound), (line.step, name)


def test_the_parameters_are_those_of_one_process_and_any_number_of_processes_reads_the_checkpoint(
    run: Run, alone: tuple[Trainer, list[dict[str, float]]]
) -> None:
    """Written by two processes of four devices, read by one with eight."""
    inputs = read_inputs(run.cfg, NO_FUNCTIONS)
    steps = build_steps(run.cfg, inputs)
    with Checkpointer(run.path / "checkpoints", 1) as checkpoints:
        restored, meta = build_trainer(steps, inputs, Restore(checkpoints, STEPS))
    assert meta is not None and meta.version == STEPS
    one, two = (jax.device_get(each.state.actor.params) for each in (alone[0], restored))
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- what is told of a program


def test_a_plan_tells_which_answer_lies_where() -> None:
    """Equal for equal micro-batches; another answer, or another place, is told apart."""
    told: list[Step] = []
    plan = Plan(told.append)
    answers = [generated_answer(sample.prompt, sample.generation) for sample in samples()]
    shape = BatchShape((Shape(8, ROW),))
    (whole,) = pack_all(answers[:6], shape)
    (again,) = pack_all(answers[:6], shape)
    (other,) = pack_all(answers[1:7], shape)
    moved = replace(whole, placements=(replace(whole.placements[0], start=1), *whole.placements[1:]))
    for micro in (whole, again, other, moved):
        plan.rows("actor", micro)
    plan.whole("apply", 3)
    assert [step.sequence for step in told] == list(range(5))
    assert {step.kind for step in told[:4]} == {"actor"} and {step.shape for step in told[:4]} == {
        f"8 x {ROW}"
    }
    assert told[0].digest == told[1].digest
    assert len({step.digest for step in told[:4]}) == 3
    assert told[4] == Step(4, "apply", "version 3")


def test_what_is_missing_is_asked_within_a_bound() -> None:
    def refuse(step: Step) -> None:
        raise ControlError("trainer process 1 gave no sign of life")

    assert Plan().missing(0.0) is None
    assert Plan(lambda step: None).missing(60.0) is None
    assert "trainer process 1" in str(Plan(refuse).missing(60.0))
    answered = threading.Event()

    def hang(step: Step) -> None:
        answered.wait(60.0)

    assert Plan(hang).missing(0.01) is None
    answered.set()


def test_a_program_that_fails_because_a_process_is_missing_says_which() -> None:
    def refuse(step: Step) -> None:
        raise ControlError("trainer process 1 gave no sign of life")

    cut = JaxRuntimeError("Gloo allreduce failed: connection closed by peer")
    with pytest.raises(ControlError, match="trainer process 1") as caught, missing_named(Plan(refuse), 60.0):
        raise cut
    assert caught.value.__cause__ is cut
    with (
        pytest.raises(JaxRuntimeError, match="connection closed by peer"),
        missing_named(Plan(lambda step: None), 60.0),
    ):
        raise cut


# ---------------------------------------------------------------------- who is who


def section(**fields: Any) -> DistributedSection:
    return DistributedSection.model_validate(fields)


def config(**fields: Any) -> Config:
    return Config.model_validate({"trainer": {"distributed": fields}})


def test_one_process_is_one_process() -> None:
    assert membership(Config()) == Member(0, 1) and membership(Config()).leads


def test_each_process_is_told_which_it_is() -> None:
    found = membership(config(processes=3, process_id=2, coordinator_address="127.0.0.1:900"))
    assert found == Member(2, 3, "127.0.0.1:900") and not found.leads


def test_a_scheduler_is_asked_as_jax_does(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4"}
    environment |= {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = membership(config(processes=0))
    assert (found.index, found.count, found.local_devices) == (3, 4, (1,))
    assert found.coordinator.startswith("127.0.0.1:")


def test_without_a_scheduler_the_remedy_is_named() -> None:
    with pytest.raises(UserError, match="JAX finds no scheduler here"):
        membership(config(processes=0))


def test_nothing_is_met_beyond_loopback_by_accident() -> None:
    fields = {"processes": 2, "coordinator_address": "10.0.0.1:900"}
    with pytest.raises(UserError, match=r"trainer.distributed.insecure = true"):
        membership(config(**fields))
    assert membership(config(**fields, insecure=True)).coordinator == "10.0.0.1:900"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"processes": 2, "process_id": 2, "coordinator_address": "a:1"}, "numbered from 0"),
        ({"processes": 2}, "without coordinator_address"),
        ({"spawn": True}, "set processes to 2 or more"),
        ({"processes": 2, "coordinator_address": "node-a"}, "'node-a' is no host:port"),
        ({"processes": 2, "coordinator_address": "node-a:0"}, "is no host:port"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        section(**fields)


def test_processes_on_one_machine_share_its_gpus() -> None:
    gpus = ("0", "1", "2", "3")
    two = section(processes=2, spawn=True)
    assert [own_share(gpus, index, two) for index in (0, 1)] == [("0", "1"), ("2", "3")]
    assert own_share(gpus, 1, section(processes=2, spawn=True, local_devices=1)) == ("1",)
    assert own_share(gpus, 1, section(processes=2, coordinator_address="a:1", process_id=1)) == gpus
    with pytest.raises(UserError, match="need more than the 4 GPUs"):
        own_share(gpus, 1, section(processes=2, spawn=True, local_devices=3))


def test_a_signal_is_told_and_raises_nothing_here() -> None:
    told: list[str] = []
    stop = StopSignal()
    with stop.listening():
        with stop.relayed(told.append), stop.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        assert told == ["SIGUSR1", "SIGUSR1"], "the first reason counts"
        with pytest.raises(StopRequested), stop.interruptible():
            pass


def test_a_signal_that_came_before_is_told_at_once() -> None:
    told: list[str] = []
    stop = StopSignal()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with stop.relayed(told.append):
            wait_until(lambda: told, 60)
    assert told == ["SIGTERM"]
