"""One real instance for the whole session: a process with vLLM on a tiny random model, driven over gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from streamrl_jax.bridge.blob import SHARED_MEMORY, BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.gen.client import InstanceClient, InstanceStream
from streamrl_jax.gen.launch import LocalLauncher
from streamrl_jax.gen.options import EngineOptions, InstanceSpec
from streamrl_jax.types import (
    Assignment,
    Fence,
    Generation,
    Hello,
    InstanceState,
    InstanceStatus,
    Manifest,
    Progress,
    UpdateReport,
    WeightSource,
)

T = TypeVar("T")

ARCHITECTURE = "Qwen2ForCausalLM"
STOP_ID = 1
VOCABULARY = 96
"""Ids of a tokenizer, if there were one; the models' vocabularies are padded beyond it."""
PADDED_VOCABULARY = 104
FENCE = Fence("engine-tests", 0)
START_S = 600.0
ANSWER_S = 60.0
"""Bound on an answer that comes at once where nothing hangs: busy, a machine takes seconds for it."""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker of the test that ends the shared instance."""
    config.addinivalue_line("markers", "ends_the_engine: the last one that uses the shared instance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared instance come first, the one that ends it last of them: out of the others' way."""

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("ends_the_engine"):
            return 1
        return 0 if "rig" in getattr(item, "fixturenames", ()) else 2

    items.sort(key=rank)


def make_model(seed: int) -> Qwen2ForCausalLM:
    """A tiny tied Qwen2 model with random float32 weights, wide enough that probabilities differ.

    Left to themselves, the ids that pad its vocabulary would be sampled more often than all others together.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=PADDED_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        architectures=[ARCHITECTURE],
    )
    model = Qwen2ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Hugging Face initialises them with 0, which would hide a lost one
            torch.nn.init.normal_(parameter, std=0.08)
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY:] *= 8
    return model


def checkpoint_arrays(model: Qwen2ForCausalLM) -> dict[str, np.ndarray]:
    """What a push ships: every parameter by name, the tied head too."""
    arrays = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    return arrays


@torch.no_grad()
def reference_logprobs(
    model: Qwen2ForCausalLM, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> np.ndarray:
    """Log-probs of an answer's tokens by Hugging Face's float32 forward pass, among the ids that do not pad."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(ids).logits[0, :, :VOCABULARY].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    rows = logprobs[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()


class Loop:
    """An event loop in a thread, for synchronous tests over one lasting connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Runs a coroutine, bounded."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Instance(Protocol):
    """What the tests need of a started instance."""

    @property
    def address(self) -> str: ...
    @property
    def process_group(self) -> int: ...
    def ended(self) -> str | None: ...
    def log_tail(self) -> str: ...


@dataclass
class Startup:
    """How an instance was seen to come up."""

    first_answer_s: float = 0.0
    slowest_answer_s: float = 0.0
    phases: list[str] = field(default_factory=list)


async def wait_until_loaded(client: InstanceClient, instance: Instance) -> Startup:
    """Asks for the status until the engine is up."""
    seen = Startup()
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        assert asked - began < START_S, f"not loaded within {START_S} s; last phase: {seen.phases[-1:]}"
        assert instance.ended() is None, instance.log_tail()
        status, _ = await client.status(START_S)  # while libraries load, which may take one core for long
        now = time.monotonic()
        seen.slowest_answer_s = max(seen.slowest_answer_s, now - asked)
        seen.first_answer_s = seen.first_answer_s or now - began
        assert status.state is not InstanceState.FAILED, f"{status.message}\n{instance.log_tail()}"
        if status.state is not InstanceState.LOADING:
            return seen
        if status.phase not in seen.phases:
            seen.phases.append(status.phase)
        await asyncio.sleep(0.2)


@dataclass
class Rig:
    """The instance, and what the tests do with it."""

    loop: Loop
    instance: Instance
    client: InstanceClient
    stream: InstanceStream
    startup: Startup
    version: int = -1
    model: Qwen2ForCausalLM | None = None
    progress: dict[str, list[Progress]] = field(default_factory=lambda: defaultdict(list))  # by sample id
    _numbers: int = 0

    async def status(self) -> InstanceStatus:
        """What the instance is doing."""
        return (await self.client.status(ANSWER_S))[0]

    def sample_id(self) -> str:
        """A fresh one."""
        self._numbers += 1
        return f"t/{self._numbers}"

    def push(self, model: Qwen2ForCausalLM, *, in_flight: bool = False) -> UpdateReport:
        """Makes ``model`` the next version."""
        manifest, blob = pack(FENCE, self.version + 1, ARCHITECTURE, checkpoint_arrays(model))
        report = self.update(manifest, blob, in_flight=in_flight)
        assert report.accepted, report.reason
        self.version, self.model = manifest.version, model
        return report

    def update(
        self, manifest: Manifest, blob: bytes | bytearray, *, in_flight: bool = False, timeout_s: float = 60
    ) -> UpdateReport:
        """Offers a version whose blob lies in shared memory meanwhile."""
        return self.loop.run(self.offer(manifest, blob, in_flight=in_flight, timeout_s=timeout_s))

    async def offer(
        self, manifest: Manifest, blob: bytes | bytearray, *, in_flight: bool = False, timeout_s: float = 60
    ) -> UpdateReport:
        """`update` for a caller that is on the loop."""
        with BlobWriter(SHARED_MEMORY, FENCE, manifest.version, len(blob)) as writer:
            writer.write(0, bytes(blob))
            path = writer.seal()
        try:
            source = WeightSource(path=str(path))
            return await self.client.update(manifest, source, in_flight=in_flight, timeout_s=timeout_s)
        finally:
            path.unlink()

    async def assign(self, assignments: Sequence[Assignment]) -> None:
        """Hands out work."""
        for assignment in assignments:
            await self.stream.assign(assignment)

    async def collect(self, count: int) -> list[Generation]:
        """The next answers, in the order of their end."""
        found: list[Generation] = []
        async for event in self.stream.events():
            if isinstance(event, Progress):
                self.progress[event.sample_id].append(event)
            if isinstance(event, Generation):
                await self.stream.acknowledge(event.sample_id, event.attempt)
                found.append(event)
                if len(found) == count:
                    break
        return found

    def answer(self, assignments: Sequence[Assignment]) -> list[Generation]:
        """Answers in the order of the assignments."""

        async def work() -> list[Generation]:
            await self.assign(assignments)
            return await self.collect(len(assignments))

        found = {generation.sample_id: generation for generation in self.loop.run(work())}
        return [found[assignment.sample_id] for assignment in assignments]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's directory without weights, with a generation config that would bend the distribution."""
    path = tmp_path_factory.mktemp("model")
    make_model(0).config.save_pretrained(path)
    GenerationConfig(
        do_sample=True, temperature=0.2, top_k=3, top_p=0.5, eos_token_id=[5, 6]
    ).save_pretrained(path)
    return path


def make_launcher(model_dir: Path, run_dir: Path, ranks: int = 1) -> LocalLauncher:
    """A launcher of one real instance, a core for each of its ranks."""
    cores = sorted(os.sched_getaffinity(0))[:ranks]
    engine = EngineOptions(
        str(model_dir),
        max_model_len=512,
        max_num_seqs=8,
        tensor_parallel_size=ranks,
        device=f"cpu:{','.join(map(str, cores))}",
        kv_cache_gib=0.25,
        vocab_limit=VOCABULARY,
    )
    # The tests hand out more at once than an instance of a run would grant.
    spec = InstanceSpec("instance-0", engine, lookahead=256, fence=FENCE)
    return LocalLauncher([spec], run_dir, run_seed=7)


async def connect(loop: Loop, instance: Instance) -> Rig:
    """Waits until an instance is loaded and opens its stream."""
    client = InstanceClient(instance.address)
    startup = await wait_until_loaded(client, instance)
    hello = Hello(FENCE, heartbeat_interval_s=0.2, progress_interval_s=0.02)
    return Rig(loop, instance, client, await client.open(hello, ANSWER_S), startup)


@pytest.fixture(scope="session")
def rig(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The shared instance, serving version 0."""
    loop = Loop()
    instance = loop.run(make_launcher(model_dir, tmp_path_factory.mktemp("run")).start("instance-0"))
    try:
        found = loop.run(connect(loop, instance), START_S + 60)
        found.push(make_model(0))
        yield found
        loop.run(found.client.close())
    finally:
        loop.run(instance.stop())
        loop.close()
