"""Whole runs, started as a user starts them: a command in a process of its own, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from streamrl_jax.config_io import load_config
from streamrl_jax.data import PromptSet, load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.gen import codec, net
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.samples_log import iteration_file, read_samples
from streamrl_jax.setup.model_source import model_directory
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.types import InstanceStatus, Sample

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
STREAMRL = (sys.executable, "-m", "streamrl_jax")
TAIL_BYTES = 4000
GRACE_S = 20.0


class Command:
    """A command that runs, in a session of its own as a shell or a scheduler would give it.

    Args:
        arguments: The whole command line.
        log: Takes its output.
    """

    def __init__(self, arguments: tuple[str, ...], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """Its process and all descendants."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def tell(self, number: signal.Signals) -> None:
        """Sends it, and nothing that it started, a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Its exit code; fails with the end of its output when it takes longer."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done within {timeout_s:g} s:\n{self.output()[-TAIL_BYTES:]}") from None

    def succeed(self, timeout_s: float) -> str:
        """Waits for a good end; gives the output."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.output()[-TAIL_BYTES:]}"
        return self.output()

    def until(self, happened: Callable[[], bool], what: str, within_s: float, every_s: float = 0.1) -> float:
        """Waits for something while the command runs; gives the seconds."""

        def check() -> bool:
            done = happened()
            code = self._process.poll()
            ended = f"ended with {code} before {what}:\n{self.output()[-TAIL_BYTES:]}"
            assert done or code is None, ended
            return done

        try:
            return until(check, what, within_s, every_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.output()[-TAIL_BYTES:]}") from None

    def end(self) -> None:
        """Ends it in good order, or else what is left of it, with everything that it started."""
        if self._process.poll() is not None:
            return
        processes = self.tree()
        self.tell(signal.SIGTERM)  # killed at once, vLLM would leave its shared memory behind
        try:
            until(lambda: not alive(processes), "a good end", GRACE_S)
        except TimeoutError:
            for process in alive(processes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(30)
        until(lambda: not alive(processes), "the end of all processes", 30)


@contextlib.contextmanager
def running(*arguments: str | Path, log: Path, program: tuple[str, ...] = STREAMRL) -> Iterator[Command]:
    """Runs a command, of `streamrl` unless another program is named; nothing of it is left at the end."""
    command = Command((*program, *map(str, arguments)), log)
    try:
        yield command
    finally:
        command.end()


def streamrl(*arguments: str | Path, log: Path, within_s: float) -> str:
    """Runs a command of `streamrl` to its good end; gives its output."""
    with running(*arguments, log=log) as command:
        return command.succeed(within_s)


def until(happened: Callable[[], bool], what: str, within_s: float, every_s: float = 0.1) -> float:
    """Waits, bounded; gives the seconds.

    Raises:
        TimeoutError: It did not happen in time.
    """
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(every_s)
    return time.monotonic() - began


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # between the two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def called(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that have not ended; vLLM's processes rename themselves."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found.append(f"{process.name()} {' '.join(process.cmdline())}")
    return found


def has_step(run_dir: Path, step: int) -> bool:
    """Whether an iteration is done, and its record written."""
    return step in steps(run_dir)


def steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, an evaluation's among those of the version that was evaluated."""
    path = run_dir / "metrics.jsonl"
    found: dict[int, dict[str, float]] = defaultdict(dict)
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        record = json.loads(line)
        found[record["step"]] |= record["metrics"]
    return dict(found)


def trained(run_dir: Path) -> dict[int, dict[str, float]]:
    """`steps` without the evaluation before training."""
    return {step: metrics for step, metrics in steps(run_dir).items() if "training/samples" in metrics}


def consumed(run_dir: Path) -> dict[int, list[Sample]]:
    """The samples of each iteration, as recorded."""
    folder = run_dir / "samples"
    iterations = [i for i in range(1000) if iteration_file(folder, i).exists()]
    return {i: read_samples(run_dir, i) for i in iterations}


def dispatched_ids(run_dir: Path, iteration: int) -> set[str]:
    """What an iteration has to consist of, from the run's configuration alone."""
    prompts, n = _prompts_of(run_dir)
    return {f"train/{iteration}/{p.prompt_id}/{k}" for p in prompts.iteration(iteration) for k in range(n)}


@functools.cache
def _prompts_of(run_dir: Path) -> tuple[PromptSet, int]:
    """A run's prompts, and its answers to each; they do not change with its lives."""
    cfg = load_config([run_dir / "config.toml"], [])
    tokenizer = Tokenizer.load(model_directory(cfg.model.path, "model.path"))
    return load_prompts(cfg.data, tokenizer, "train", cfg.run.seed), cfg.rollout.n


def instance_of(run_dir: Path, name: str) -> dict[str, Any]:
    """Address and process id of a local instance, as it wrote them; its id is its process group's too."""
    return json.loads((run_dir / "instances" / f"{name}.address").read_text())


def instance_status(run_dir: Path, name: str) -> InstanceStatus | None:
    """What a local instance is doing; None while it does not answer."""
    if not (run_dir / "instances" / f"{name}.address").exists():
        return None
    token = (run_dir / "token").read_text().strip()
    return status_at(instance_of(run_dir, name)["address"], token)


def status_at(address: str, token: str) -> InstanceStatus | None:
    """What the instance at an address is doing; None while it does not answer."""
    with grpc.insecure_channel(address, options=net.CHANNEL_OPTIONS) as channel:
        call = rpc.StreamGenerationStub(channel).GetStatus
        try:
            reply = call(pb.StatusRequest(), timeout=5.0, metadata=net.bearer(token))
        except grpc.RpcError:
            return None
    return codec.status_from_proto(reply)


def kill_group(group: int) -> None:
    """What a crash or the kernel's memory killer does."""
    os.killpg(group, signal.SIGKILL)


def blobs(run_dir: Path) -> list[Path]:
    """A run's weights in shared memory."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    return sorted(Path("/dev/shm").glob(f"streamrl-{run_id}-*"))


def warm_start(folder: Path, config: str, *overrides: str) -> Path:
    """A toy model that `streamrl sft` has taught the task of a shipped configuration."""
    begun = write_toy_checkpoint(folder / "random", seed=0)
    out = folder / "warm"
    arguments = ["sft", CONFIGS / config, f"model.path={begun}", *overrides, "--out", out]
    streamrl(*arguments, log=folder / "sft.log", within_s=600)
    return out
