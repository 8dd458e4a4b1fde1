"""Rule 1 on the real vLLM: killed in mid-answer and gone on from there; each process stopped; every sample once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.gen.launch import LocalLauncher, StaticLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Fence,
    FinishReason,
    Manifest,
    Prompt,
    Sample,
    Sampling,
    WeightSource,
    expand_runs,
)
from tests.chaos.harness import Pauses, known_tokens
from tests.engine.conftest import (
    ARCHITECTURE,
    START_S,
    STOP_ID,
    VOCABULARY,
    Loop,
    checkpoint_arrays,
    make_model,
    reference_logprobs,
)
from tests.engine.run_world import alive, until

CHAOS = Fence("chaos", 0)
LEASE_S = 15.0
SETTINGS = ControlSettings(
    start_timeout_s=START_S,
    heartbeat_interval_s=0.5,
    lease_s=LEASE_S,
    max_restarts=5,
    progress_interval_s=0.001,
    max_buffered_samples=20,
)
"""Progress with every token: what a lost instance was writing is known to a token, whatever the machine's pace. And the
instances do not run far ahead of the thread that takes their answers, and stops them at one.
"""
NOTICED_S = LEASE_S + 5.0
"""The silence that the controller counts: the lease, a tick of half a second, the engine's last ping and a heartbeat
before it, and a busy machine."""
LATE_S = 10.0
"""By which a busy machine may be late with what was sent before the stop, and this process with what it is told, beside
the pauses of the whole machine (`Pauses`)."""
MIDWAY = 4
"""Of the eight answers that an instance writes at once: so many are half written when it is killed or stopped."""
SAMPLING = Sampling(temperature=0.8, max_new_tokens=100, stop_token_ids=(STOP_ID,))
TOLERANCE = 1e-4
PROMPTS = 50  # of four answers each
EACH = 15  # where three processes are stopped, one after the other


def launcher(model_dir: Path, run_dir: Path) -> LocalLauncher:
    cores = sorted(os.sched_getaffinity(0))
    specs = [
        InstanceSpec(
            f"instance-{index}",
            EngineOptions(
                str(model_dir),
                max_model_len=256,
                max_num_seqs=8,
                device=f"cpu:{cores[index % len(cores)]}",
                kv_cache_gib=0.25,
                vocab_limit=VOCABULARY,
            ),
            lookahead=2,
            fence=CHAOS,
        )
        for index in range(2)
    ]
    return LocalLauncher(specs, run_dir, run_seed=3, grace_s=2.0)


def named(run_dir: Path, name: str = "") -> list[psutil.Process]:
    """Guards and instances of a run: their command line names the spec in its directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"{run_dir}/instances/{name}" in part for part in process.info["cmdline"] or ())
    ]


def processes_of(run_dir: Path) -> set[psutil.Process]:
    """Those, and all that they started."""
    found: set[psutil.Process] = set()
    for process in named(run_dir):
        with suppress(psutil.NoSuchProcess):
            found |= {process, *process.children(recursive=True)}
    return found


def api_process(run_dir: Path, name: str) -> psutil.Process:
    return next(
        process for process in named(run_dir, name) if "streamrl_jax.gen.guard" not in process.cmdline()
    )


def engine_core(run_dir: Path, name: str) -> psutil.Process:
    """The child that runs the scheduler; with one rank the model too."""
    children = api_process(run_dir, name).children()
    return max(children, key=lambda process: process.memory_info().rss)


def worker(run_dir: Path, name: str) -> psutil.Process:
    """One of several ranks."""
    ranks = engine_core(run_dir, name).children()
    return sorted(ranks, key=lambda process: process.memory_info().rss)[-1]


def half_written(controller: Controller, name: str) -> int:
    """Answers that an instance holds, of which the controller knows more than one token and not all."""
    return sum(tokens > 1 for tokens in known_tokens(controller, name))


def stopped_in_mid_answer(controller: Controller, name: str, process: psutil.Process) -> bool:
    """Stops a process of an instance, and lets it go on unless the instance is in the middle of answers.

    No token is made any more when it is looked at; what was on its way may still finish an answer or two, of the
    `MIDWAY`.
    """
    process.suspend()
    if half_written(controller, name) >= MIDWAY:
        return True
    process.resume()
    return False


@contextmanager
def version_zero(fence: Fence = CHAOS) -> Iterator[tuple[Manifest, WeightSource]]:
    manifest, blob = pack(fence, 0, ARCHITECTURE, checkpoint_arrays(make_model(5)))
    with BlobWriter(SHARED_MEMORY, fence, 0, len(blob)) as writer:
        writer.write(0, bytes(blob))
        path = writer.seal()
    try:
        yield manifest, WeightSource(path=str(path))
    finally:
        path.unlink()


def check(sample: Sample) -> None:
    """The answer is of version 0 with its log-probs, also after a restart: weights come before prompts.

    Of one that was gone on from, that holds for the tokens of both attempts.
    """
    answer = sample.generation
    assert set(expand_runs(answer.versions)) == {0}
    assert STOP_ID not in answer.token_ids[:-1] and len(answer.token_ids) <= SAMPLING.max_new_tokens
    assert (answer.token_ids[-1] == STOP_ID) == (answer.finish_reason is FinishReason.STOP)
    expected = reference_logprobs(
        make_model(5), sample.prompt.token_ids.tolist(), answer.token_ids.tolist(), SAMPLING.temperature
    )
    assert float(np.abs(expected - answer.logprobs).max()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_and_stopped_in_mid_batch(model_dir: Path, tmp_path: Path) -> None:
    events: list[ControlEvent] = []
    controller = Controller(
        SETTINGS,
        CHAOS,
        launcher(model_dir, tmp_path),
        lambda prompt, text, answer: RewardResult(float(len(answer.token_ids))),
        lambda ids: " ".join(map(str, ids)),
        events.append,
    )
    draw = np.random.default_rng(0)
    prompts = [
        Prompt(str(row), draw.integers(2, VOCABULARY, 6).astype(np.int32), {}) for row in range(PROMPTS)
    ]
    samples: list[Sample] = []
    try:
        controller.start()
        controller.wait_ready(START_S)
        started = processes_of(tmp_path)
        with version_zero() as (manifest, source):
            controller.publish(manifest, source).result(START_S)
            controller.submit(Job("train/0", prompts, 4, SAMPLING, 0, 0))
            killed = stopped = False
            for sample in controller.samples("train/0", START_S):
                samples.append(sample)
                if len(samples) >= 30 and not killed:
                    first = api_process(tmp_path, "instance-0"), engine_core(tmp_path, "instance-0")
                    killed = stopped_in_mid_answer(controller, "instance-0", first[1])
                    if killed:
                        os.kill(first[0].pid, signal.SIGKILL)
                elif len(samples) >= 60 and not stopped:
                    core = engine_core(tmp_path, "instance-1")
                    stopped = stopped_in_mid_answer(controller, "instance-1", core)
            started |= processes_of(tmp_path)
            counts = controller.counters()
    finally:
        controller.close()
    assert Counter(sample.sample_id for sample in samples) == Counter(
        f"train/0/{row}/{index}" for row in range(PROMPTS) for index in range(4)
    )
    again = [sample for sample in samples if sample.generation.attempt]
    for sample in [*samples[::10], *again]:
        check(sample)
    assert killed and stopped, "in mid-answer, both"
    assert counts["continued"] > 0 and counts["tokens_kept"] > counts["continued"]
    assert len(again) >= counts["continued"] / 2
    lost = {event.instance: event.text for event in reversed(events) if event.kind is EventKind.LOST}
    assert "its process ended (killed by SIGKILL)" in lost["instance-0"]
    assert "no token" in lost["instance-1"] or "did not answer" in lost["instance-1"]
    assert counts["finished"] == counts["delivered"] == 4 * PROMPTS
    assert counts["dispatched"] == counts["finished"] + counts["taken_back"]
    assert counts["redispatched"] == sum(e.count for e in events if e.kind is EventKind.REDISPATCH) > 0
    until(lambda: not alive(list(started)), "the end of all processes", 60)
    print(f"\n{counts}")


def two_ranks(model_dir: Path, run_dir: Path) -> LocalLauncher:
    """An instance of API process, EngineCore and two workers, started as by hand."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    engine = EngineOptions(
        str(model_dir),
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=2,
        device=f"cpu:{','.join(map(str, cores))}",
        kv_cache_gib=0.25,
        vocab_limit=VOCABULARY,
    )
    spec = InstanceSpec("instance-0", engine, lookahead=2, fence=CHAOS)
    return LocalLauncher([spec], run_dir, run_seed=3, grace_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_process_of_an_instance_is_missed_when_it_stops(model_dir: Path, tmp_path: Path) -> None:
    """SIGSTOP of API process, EngineCore and a worker, one after the other: noticed within the lease, and used again
    after SIGCONT. One start for all three: the instance is an endpoint, which nobody kills.
    """
    told: list[tuple[float, ControlEvent]] = []
    pauses, hand = Pauses(), Loop()
    started = hand.run(two_ranks(model_dir, tmp_path).start("instance-0"))
    controller = Controller(
        SETTINGS,
        CHAOS,
        StaticLauncher({"instance-0": started.address}),
        lambda prompt, text, answer: RewardResult(float(len(answer.token_ids))),
        lambda ids: " ".join(map(str, ids)),
        lambda event: told.append((time.monotonic(), event)),
    )
    draw = np.random.default_rng(0)
    samples: list[Sample] = []
    try:
        controller.start()
        controller.wait_ready(START_S)
        with version_zero() as (manifest, source):
            controller.publish(manifest, source).result(START_S)
            for number, find in enumerate((api_process, engine_core, worker)):
                prompts = [
                    Prompt(f"{number}.{row}", draw.integers(2, VOCABULARY, 6).astype(np.int32), {})
                    for row in range(EACH)
                ]
                controller.submit(Job(f"train/{number}", prompts, 4, SAMPLING, number, 0))
                stream = controller.samples(f"train/{number}", START_S)
                samples += [next(stream) for _ in range(5)]
                process, at = find(tmp_path, "instance-0"), time.monotonic()
                while not stopped_in_mid_answer(controller, "instance-0", process):
                    samples.append(next(stream))
                    at = time.monotonic()
                paused = pauses.seconds
                seconds, why = noticed(told, at)
                process.resume()
                print(f"\n{find.__name__}: after {seconds:.1f} s: {why}")
                (silence,) = re.findall(r"for ([\d.]+) s", why)
                late = pauses.seconds - paused
                assert LEASE_S <= float(silence) < NOTICED_S + late, why
                assert seconds < NOTICED_S + LATE_S + late, why
                samples += stream
        counts = controller.counters()
    finally:
        pauses.close()
        controller.close()
        hand.run(started.stop())
        hand.close()
    assert Counter(sample.sample_id for sample in samples) == Counter(
        f"train/{number}/{number}.{row}/{index}"
        for number in range(3)
        for row in range(EACH)
        for index in range(4)
    )
    for sample in samples:
        check(sample)
    assert (
        counts["dispatched"] == counts["finished"] + counts["taken_back"] and counts["finished"] == 12 * EACH
    )
    assert counts["restarts"] == 3 and counts["continued"] >= 3


def noticed(told: list[tuple[float, ControlEvent]], since: float) -> tuple[float, str]:
    """How long after ``since`` an instance was taken for dead, and why."""
    while time.monotonic() < since + 10 * LEASE_S:
        for when, event in list(told):
            if event.kind is EventKind.LOST and when > since:
                return when - since, event.text
        time.sleep(0.02)
    raise AssertionError(f"nobody noticed: {told[-3:]}")
