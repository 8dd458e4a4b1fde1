"""`make demo` as it is shipped, what it exports, and a generation instance that a user starts by hand."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl_jax.config_io import load_config
from streamrl_jax.data import load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.gen.guard import shared_segments
from streamrl_jax.ranker.lengths import ObservedLengths, read_lengths
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Model
from streamrl_jax.types import InstanceState, Prompt, Sample, VersionRun
from tests.engine.run_world import (
    CONFIGS,
    Command,
    blobs,
    consumed,
    dispatched_ids,
    has_step,
    running,
    status_at,
    steps,
    streamrl,
    trained,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CONFIG = CONFIGS / "demo.toml"
BOUND = 1e-3  # on the log-prob difference of every single token, as in the configuration
START_S = 600.0
DEMO_S = 1800.0  # ten times what it takes
LOADED = (InstanceState.IDLE, InstanceState.PAUSED)
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
# By default it takes nearly all of a machine's memory, and rounds float32 to bfloat16.
SERVED = ("--dtype", "float32", "--gpu-memory-utilization", "0.2", "--enforce-eager")


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody who asks for any: it is bound much later."""
    given, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(10_000, given), *range(last + 1, 65_536)] or [0]
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.choice(others)))
            return probe.getsockname()[1]


# ------------------------------------------------------------------ the demo


@dataclass(frozen=True)
class Demo:
    """What `streamrl demo` left."""

    folder: Path
    output: str

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def export(self) -> Path:
        return self.folder / "export"

    @property
    def last(self) -> int:
        """Its number of iterations."""
        return load_config([self.run_dir / "config.toml"]).trainer.total_training_steps

    def held_out(self) -> tuple[Prompt, ...]:
        """The prompts that it was evaluated on."""
        cfg = load_config([CONFIG])
        return load_prompts(cfg.data, Tokenizer.load(self.export), "test", cfg.run.seed).all()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    output = streamrl("demo", "--run-dir", folder / "demo", log=folder / "log", within_s=DEMO_S)
    return Demo(folder / "demo", output)


def test_the_demo_learns_what_it_is_said_to_learn(demo: Demo) -> None:
    accuracy = {step: m["val/accuracy"] for step, m in steps(demo.run_dir).items() if "val/accuracy" in m}
    print(f"\nheld-out accuracy {accuracy}; {demo.output.splitlines()[-1]}")
    assert accuracy[0] < 0.5
    # The median of the last three: at a constant learning rate each wanders by one or two sums in a hundred.
    assert statistics.median([accuracy[step] for step in sorted(accuracy)][-3:]) > 0.9
    assert accuracy[demo.last] > 0.85
    assert f"held-out accuracy  {accuracy[0]:.3f} before, {accuracy[demo.last]:.3f} after" in demo.output


def test_each_step_of_the_demo_is_whole_and_agrees(demo: Demo) -> None:
    found = trained(demo.run_dir)
    assert sorted(found) == list(range(1, demo.last + 1))
    for step, metrics in found.items():
        assert metrics["training/rollout_logprobs_diff_max"] < BOUND, step
        assert metrics["training/staleness/max"] == 0, step
        assert metrics["training/rollout_tokens_other_version"] == 0, step
    for iteration, samples in consumed(demo.run_dir).items():
        assert len(samples) == 256
        assert {sample.sample_id for sample in samples} == dispatched_ids(demo.run_dir, iteration)


def test_grpo_one_step_stale_learns_it_as_well(demo: Demo, tmp_path: Path) -> None:
    run_dir, last = tmp_path / "run", 30
    settings = (
        "trainer.max_staleness=1",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={last}",
        f"trainer.test_freq={last}",
    )
    warm = f"model.path={demo.folder / 'warm_start'}"
    config = CONFIGS / "demo_grpo.toml"
    streamrl(
        "train", config, warm, *settings, "--run-dir", run_dir, log=tmp_path / "log", within_s=2 * START_S
    )
    found = trained(run_dir)
    accuracy = steps(run_dir)[last]["val/accuracy"]
    print(f"\nheld-out accuracy {accuracy:.3f} after {last}")
    assert accuracy > 0.9
    assert found[1]["training/staleness/max"] == 0
    assert max(metrics["training/staleness/max"] for metrics in found.values()) == 1
    assert max(metrics["training/probe_logprobs_diff_max"] for metrics in found.values()) < BOUND
    for iteration, samples in consumed(run_dir).items():
        assert len(samples) == 256
        assert {sample.sample_id for sample in samples} == dispatched_ids(run_dir, iteration)


# ------------------------------------------------------------------ the export


def reference_logprobs(model: Any, sample: Sample, temperature: float) -> np.ndarray:
    """Transformers' log-probs of a recorded answer's tokens."""
    prompt, answer = sample.prompt.token_ids, sample.generation.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    picked = logprobs[len(prompt) - 1 : -1].gather(1, torch.from_numpy(answer.astype(np.int64))[:, None])
    return picked[:, 0].numpy()


def test_the_export_has_the_logits_of_the_trainer(demo: Demo) -> None:
    ids = np.stack([prompt.token_ids for prompt in demo.held_out()[:64]])
    theirs = AutoModelForCausalLM.from_pretrained(demo.export, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    model = Model(read_arch(demo.export), make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    with Checkpointer(demo.run_dir / "checkpoints", keep=3) as checkpoints:
        newest = checkpoints.latest()
        assert newest == demo.last
        params = checkpoints.restore_part(newest, ("actor", "params"), model.abstract_params())
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = model.hidden_states(params, jnp.asarray(ids), positions, jnp.ones_like(ids))
    difference = float(np.abs(np.asarray(hidden @ model.head_weight(params).T) - expected).max())
    print(f"\nlargest logit difference {difference:.2e}")
    assert difference < 1e-4


def test_an_exported_step_has_the_log_probs_that_the_instances_sampled_with(
    demo: Demo, tmp_path: Path
) -> None:
    # Iteration i was answered by version i: recorded by vLLM, trained on by JAX, scored here by transformers.
    step = load_config([demo.run_dir / "config.toml"]).trainer.save_freq
    assert 0 < step < demo.last
    arguments = ("export", demo.run_dir, "--step", str(step), "--out", tmp_path / "out")
    streamrl(*arguments, log=tmp_path / "log", within_s=START_S)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    worst = max(
        float(np.abs(reference_logprobs(model, sample, 1.0) - sample.generation.logprobs).max())
        for sample in consumed(demo.run_dir)[step]
    )
    print(f"\nlargest log-prob difference {worst:.2e}")
    assert worst < 1e-4


def ask(url: str, body: dict[str, Any]) -> Any:
    """Posts JSON, gets JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def is_up(url: str) -> bool:
    """Whether an HTTP server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_vllm_serves_the_export_and_answers_sums(demo: Demo, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ("serve", demo.export, "--port", str(port), *SERVED)
    with running(*arguments, log=tmp_path / "log", program=VLLM) as server:
        server.until(lambda: is_up(f"{url}/health"), "vllm serve answers", START_S, every_s=1.0)
        sums = [prompt.columns for prompt in demo.held_out()[:60]]
        body = {"model": str(demo.export), "max_tokens": 8, "temperature": 0}
        answers = [ask(f"{url}/v1/completions", body | {"prompt": row["prompt"]}) for row in sums]
        texts = [answer["choices"][0]["text"] for answer in answers]
    right = sum(text == row["answer"] for text, row in zip(texts, sums, strict=True))
    print(f"\n{sums[0]['prompt']} {texts[0]}; {right} of {len(sums)} right")
    assert right >= 0.8 * len(sums)
    # To the letter what transformers answers with the same weights.
    model: Any = AutoModelForCausalLM.from_pretrained(demo.export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo.export)
    for row, text in zip(sums, texts, strict=True):
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == text


# ------------------------------------------------------------------ an instance started by hand


@dataclass(frozen=True)
class ByHand:
    """An instance of two tensor-parallel ranks that `streamrl gen` started, for whatever run comes."""

    command: Command
    address: str
    token_file: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a run needs to use it, and it alone."""
        return (
            "gen.instances=0",
            "gen.devices=[]",
            f'gen.endpoints=["{self.address}"]',
            f"security.token_file={self.token_file}",
            "bridge.transport=grpc",
        )


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    folder = tmp_path_factory.mktemp("by_hand")
    token_file = folder / "secret"
    token_file.write_text("between us\n")
    address = f"127.0.0.1:{free_port()}"
    model = write_toy_checkpoint(folder / "model", seed=0)  # its architecture; no run has these weights
    settings = (f"model.path={model}", 'gen.devices=["cpu:0,1"]', "gen.tensor_parallel_size=2")
    with running(
        "gen", CONFIG, *settings, "--listen", address, "--token-file", token_file, log=folder / "log"
    ) as command:

        def loaded() -> bool:
            status = status_at(address, "between us")
            return status is not None and status.state in LOADED

        command.until(loaded, "the instance is loaded", START_S, every_s=0.5)
        yield ByHand(command, address, token_file)


def short_run(
    by_hand: ByHand, folder: Path, seed: int, iterations: int
) -> tuple[Path, tuple[str | Path, ...]]:
    """The demo's task from random weights: the run directory, and the arguments that make it."""
    model = write_toy_checkpoint(folder / "model", seed=seed)
    run_dir = folder / "run"
    settings = (f"model.path={model}", f"run.seed={seed}", f"trainer.total_training_steps={iterations}")
    return run_dir, (
        "train",
        CONFIG,
        *settings,
        "eval.max_prompts=32",
        *by_hand.arguments,
        "--run-dir",
        run_dir,
    )


def check_short_run(run_dir: Path) -> None:
    """Weights that nobody else has came over gRPC to both ranks, each version whole and in its time."""
    for iteration, samples in consumed(run_dir).items():
        assert {sample.sample_id for sample in samples} == dispatched_ids(run_dir, iteration)
        for answer in (sample.generation for sample in samples):
            assert answer.instance == "endpoint-0"
            assert answer.versions == (VersionRun(iteration, len(answer.token_ids)),)
    for metrics in trained(run_dir).values():
        assert metrics["training/rollout_logprobs_diff_max"] < BOUND
        assert metrics["rollouter/restarts"] == 0


def test_an_instance_started_by_hand_outlives_a_killed_run_and_serves_the_next(
    by_hand: ByHand, tmp_path: Path
) -> None:
    killed, arguments = short_run(by_hand, tmp_path / "killed", seed=1, iterations=1000)
    with running(*arguments, log=tmp_path / "killed.log") as command:
        command.until(lambda: has_step(killed, 2), "two steps", START_S)
        assert blobs(killed), "the newest version lies in shared memory until a newer one does"
        command.tell(signal.SIGKILL)
        command.wait(60)
    check_short_run(killed)  # no guard is there to tidy up after it; the next start does
    whole, arguments = short_run(by_hand, tmp_path / "whole", seed=2, iterations=2)
    streamrl(*arguments, log=tmp_path / "whole.log", within_s=START_S)
    check_short_run(whole)
    assert sorted(consumed(whole)) == [0, 1]
    assert blobs(killed) == []

    def idle() -> bool:
        status = status_at(by_hand.address, "between us")
        return status is not None and status.state is InstanceState.IDLE

    by_hand.command.until(idle, "it waits for the next run", START_S)
    assert status_at(by_hand.address, "a guess") is None


def test_eval_of_the_export_finds_what_the_run_found(demo: Demo, by_hand: ByHand, tmp_path: Path) -> None:
    output = streamrl(
        *("eval", CONFIG, "--checkpoint", demo.export, *by_hand.arguments),
        log=tmp_path / "log",
        within_s=START_S,
    )
    found = re.search(r"accuracy +([\d.]+)\n +answers +(\d+)", output)
    assert found is not None, output
    accuracy, count = float(found[1]), int(found[2])
    assert count == len(demo.held_out())
    expected = steps(demo.run_dir)[demo.last]["val/accuracy"]
    print(f"\naccuracy {accuracy:.4f}, the run's own {expected:.4f}")
    assert abs(accuracy - expected) < 1.5 / count  # greedy: one answer may hang on the last bit


def test_lengths_are_collected_as_training_samples_them(by_hand: ByHand, tmp_path: Path) -> None:
    model = write_toy_checkpoint(tmp_path / "model", seed=3)
    digits = Tokenizer.load(model).encode("0123456789").tolist()
    # From random weights any token is about as likely as another: one in six ends an answer.
    settings = (f"model.path={model}", f"rollout.stop_token_ids={digits}", *by_hand.arguments)

    def collect(name: str, seed: int) -> list[ObservedLengths]:
        out = tmp_path / name
        wanted = ("--split", "test", "--prompts", "24", "--n", "4", "--seed", str(seed), "--out", out)
        streamrl("rank", "collect", CONFIG, *settings, *wanted, log=tmp_path / "log", within_s=START_S)
        return read_lengths(out)

    cfg = load_config([CONFIG])
    held_out = load_prompts(cfg.data, Tokenizer.load(model), "test", cfg.run.seed).all()[:24]
    first, same, other = collect("first", 1), collect("same", 1), collect("other", 2)
    for rows in (first, same, other):
        assert [row.token_ids.tolist() for row in rows] == [p.token_ids.tolist() for p in held_out]
        answers = [answer for row in rows for answer in zip(row.lengths, row.cut, strict=True)]
        lengths, limit = [length for length, _ in answers], cfg.data.max_response_length
        assert len(answers) == 24 * 4 and len(set(lengths)) > 3
        assert all(1 <= length <= limit and (length == limit or not cut) for length, cut in answers)
        assert 0.0 < sum(cut for _, cut in answers) / len(answers) < 0.6

    def share_alike(rows: list[ObservedLengths]) -> float:
        return float(np.mean([a.lengths == b.lengths for a, b in zip(first, rows, strict=True)]))

    print(
        f"\nprompts with all lengths alike: {share_alike(same):.2f} with the same seed, {share_alike(other):.2f} else"
    )
    assert share_alike(same) > 0.9  # the last bit may decide one
    assert share_alike(other) < 0.1


def test_an_instance_of_two_ranks_that_is_killed_leaves_no_shared_memory(by_hand: ByHand) -> None:
    """kill -9 of all its processes at once; nobody launched it, but its own guard. Last: it ends the instance."""
    (instance,) = psutil.Process(by_hand.command.pid).children()
    segments = [Path(os.fsdecode(path)) for path in shared_segments(instance.pid)]
    assert segments, "the ranks speak to each other through some"
    os.killpg(instance.pid, signal.SIGKILL)
    assert by_hand.command.wait(60) == 128 + signal.SIGKILL
    assert not any(path.exists() for path in segments)
