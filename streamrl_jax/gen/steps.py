"""Counts what the engine samples, from vLLM's own statistics of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats


class StepCounter:
    """Tokens that were sampled, and the steps that they were sampled in.

    Of one engine there is one record a step, made after the step's answers were handed on:
    `Scheduler.update_from_output` makes one message of a step for our only client, and
    `AsyncLLM._run_output_handler` one record of each message (vLLM 0.32). A step that took in a part of a prompt and
    sampled nothing has no statistics of an iteration, and an aborted answer's end is an output of 0 tokens: neither
    counts. Nor does a step whose only tokens are of answers that were aborted meanwhile: nobody gets them.
    """

    def __init__(self) -> None:
        self.tokens_total = 0
        self.steps_total = 0

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that vLLM calls for its stat logger."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counter = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: IterationStats | None,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if iteration_stats is not None:
                    counter.add(iteration_stats.num_generation_tokens)

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)

    def add(self, tokens: int) -> None:
        """A step has sampled so many tokens."""
        self.tokens_total += tokens
        self.steps_total += tokens > 0
