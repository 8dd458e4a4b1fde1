"""Signals and Ctrl-C: a run that is told to end does so soon, with a checkpoint, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl_jax.cli import main
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.rundir import look
from streamrl_jax.samples_log import recorded_iterations
from streamrl_jax.train.checkpoint import Checkpointer

from .job_world import (
    child_environment,
    jax_settings_kept,
    left_behind,
    metrics_of,
    training_lines,
    wait_until,
    write_config,
    write_python,
    write_world,
)

SOON_S = 300.0


# ---------------------------------------------------------------- the signal itself


@pytest.fixture(autouse=True)
def no_signal_reaches_the_tests() -> Iterator[None]:
    """What comes too late for a run would end the process."""
    earlier = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


def test_a_signal_is_kept_until_a_wait_and_ends_that_at_once() -> None:
    with StopSignal().listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop_later = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
            raise AssertionError("the signal had come before")
    with StopSignal().listening() as stop:
        stop_later.start()
        begun = time.monotonic()
        with pytest.raises(StopRequested, match="SIGUSR1"), stop.interruptible():
            time.sleep(120)
        assert time.monotonic() - begun < 60


def test_a_second_signal_does_not_interrupt_what_the_first_brought_about() -> None:
    with StopSignal().listening() as stop:
        with pytest.raises(StopRequested, match="SIGUSR1"), stop.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # the checkpoint is being written
        with pytest.raises(StopRequested, match="SIGUSR1"):
            stop.check()


def test_a_ctrl_c_that_python_drops_is_raised_at_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # the handler runs here, and its exception goes no further

    dropped: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    with StopSignal().listening() as stop:
        Dropping()
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt), stop.interruptible():
            raise AssertionError("it was forgotten")


def test_earlier_handlers_come_back() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with StopSignal().listening():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]


def test_a_run_in_another_thread_takes_no_signals() -> None:
    entered: list[StopSignal] = []

    def work() -> None:
        with StopSignal().listening() as stop, stop.interruptible():
            entered.append(stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert entered


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        yield write_world(tmp_path_factory.mktemp("world"))


def signalled_at(world: Path, at: str, number: int, times: int = 1) -> dict[str, object]:
    """`reward` of a run that is signalled at a sample of a job."""
    return {
        "function": f"{world / 'functions.py'}:signalling",
        "kwargs": {"at": at, "number": int(number), "times": times},
    }


def checkpoints(run: Path) -> tuple[int, ...]:
    with Checkpointer(run / "checkpoints", 1) as found:
        return found.steps()


def test_a_run_stops_with_its_last_whole_iteration_and_goes_on(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the midst of an iteration, where the scheduler insists; then in an evaluation; then to the end."""
    run = world / "runs" / "stopped"
    config = write_config(
        world,
        run={"name": "stopped"},
        reward=signalled_at(world, "train/1/", signal.SIGUSR1, times=8),
        trainer={"total_training_steps": 3, "save_freq": 0, "test_freq": 2},
    )
    assert main(["train", str(config)]) == 75
    assert "SIGUSR1 after step 1; go on with streamrl train --resume" in capfd.readouterr().err
    assert checkpoints(run) == (1,) and recorded_iterations(run / "samples") == [0]
    assert left_behind(run) == []

    kwargs = f'reward.kwargs={{at = "eval/2/", number = {int(signal.SIGTERM)}}}'
    assert main(["train", "--resume", str(run), kwargs]) == 75
    assert checkpoints(run) == (1, 2)
    assert [line.step for line in metrics_of(run)] == [0, 1, 2], "version 2 is trained and not evaluated"

    assert main(["train", "--resume", str(run), 'reward.kwargs={at = "never", number = 0}']) == 0
    assert [line.step for line in training_lines(run)] == [1, 2, 3]
    evaluated = [line.step for line in metrics_of(run) if "val/accuracy" in line.metrics]
    assert evaluated == [0, 2, 3], "what the signal left out is done before the run goes on"
    assert left_behind(run) == []


def test_a_process_that_is_told_to_end_is_gone_soon(world: Path) -> None:
    # Held back, its last steps do not come before the signal does.
    reward = {"kwargs": {"hold": "train/2/*"}, "timeout_s": 600.0}
    config = write_config(world, run={"name": "process"}, reward=reward, trainer={"save_freq": 0})
    run = world / "runs" / "process"
    command = [sys.executable, "-m", "streamrl_jax", "train", str(config)]
    process = subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(lambda: training_lines(run) if run.exists() else process.poll(), 500)
    process.terminate()
    output, _ = process.communicate(timeout=SOON_S)
    assert process.returncode == 75, output.decode()
    assert checkpoints(run) == (training_lines(run)[-1].step,)
    assert left_behind(run) == []


def test_a_signal_ends_a_run_that_still_compiles(world: Path) -> None:
    loss = {"loss_fn": f"{world / 'functions.py'}:signalling_loss"}
    config = write_config(world, run={"name": "compiling"}, algorithm=loss)
    begun = time.monotonic()
    assert main(["train", str(config)]) == 75
    assert time.monotonic() - begun < SOON_S
    run = world / "runs" / "compiling"
    assert checkpoints(run) == () and metrics_of(run) == [] and left_behind(run) == []


def test_a_signal_ends_a_run_whose_instances_do_not_come_up(world: Path) -> None:
    """Everything is ready and waits for them; a version lies there for them."""
    python = write_python(world / "slow-python", before="sleep 617")
    config = write_config(world, run={"name": "waiting"}, gen={"python": str(python)})
    run = world / "runs" / "waiting"

    def tell() -> None:
        wait_until(lambda: run.exists() and any("/dev/shm" in entry for entry in left_behind(run)), 500)
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    assert main(["train", str(config)]) == 75
    teller.join(60)
    assert look(run).fence.incarnation == 0 and checkpoints(run) == ()
    assert left_behind(run) == []
    assert not any(
        process.info["cmdline"] == ["sleep", "617"] for process in psutil.process_iter(["cmdline"])
    )


def test_ctrl_c_leaves_nothing(world: Path) -> None:
    reward = signalled_at(world, "train/2/", signal.SIGINT)
    config = write_config(world, run={"name": "interrupted"}, reward=reward)
    assert main(["train", str(config)]) == 130
    run = world / "runs" / "interrupted"
    assert [line.step for line in training_lines(run)] in ([1], [1, 2]), (
        "the second one was just being recorded, or was"
    )
    assert left_behind(run) == []
