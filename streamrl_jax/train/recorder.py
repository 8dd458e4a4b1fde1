"""What a run keeps and shows of each iteration: the metrics, every consumed sample, the row on the screen."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from streamrl_jax.config import Config
from streamrl_jax.control.dispatched import Dispatched
from streamrl_jax.control.events import Activity, InstanceView
from streamrl_jax.control.protocol import RunController
from streamrl_jax.flops import mfu, peak_flops, throughput, update_flops
from streamrl_jax.metrics import MetricSink, Missing, Value, record
from streamrl_jax.progress import Display
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.trace import Trace
from streamrl_jax.train.agreement_gate import AgreementGate
from streamrl_jax.train.evaluator import Evaluation, EvaluationObserver
from streamrl_jax.train.models import Arch
from streamrl_jax.train.report import IterationResult
from streamrl_jax.train.rollouts import Rollouts, train_job
from streamrl_jax.train.weights import Weights
from streamrl_jax.types import Sample, expand_runs


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How far the consumed tokens lag behind (DESIGN rule 5).

    Args:
        samples: Of the iteration.
        version: The trainer's when it consumed them.

    Returns:
        Mean over tokens, and the maximum.
    """
    lags = version - np.concatenate([expand_runs(sample.generation.versions) for sample in samples])
    return {"training/staleness/mean": float(lags.mean()), "training/staleness/max": float(lags.max())}


def extras_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What the reward function told beside the score.

    Args:
        samples: Of the iteration.

    Returns:
        The mean of each figure, over the samples that have it; NaN or infinite where one of them is.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.reward_extras.items():
            found[name].append(value)
    return {f"reward/{name}/mean": sum(values) / len(values) for name, values in found.items()}


def generator_metrics(
    before: Mapping[str, InstanceView], after: Sequence[InstanceView], seconds: float
) -> dict[str, float]:
    """Idle share and speed of each instance over a step, and of all.

    Args:
        before: Views at its beginning, by name.
        after: Views at its end.
        seconds: Between the two.
    """
    found: dict[str, float] = {}
    idle: list[float] = []
    tokens = 0
    for view in after:
        earlier = before.get(view.name)
        share = (view.seconds[Activity.IDLE] - (earlier.seconds[Activity.IDLE] if earlier else 0.0)) / seconds
        made = view.tokens - (earlier.tokens if earlier else 0)
        idle.append(share)
        tokens += made
        found[f"gen/{view.name}/idle_ratio"] = share
        found[f"gen/{view.name}/tokens_per_s"] = made / seconds
        found[f"gen/{view.name}/version"] = float(view.version)
    if idle:
        found["rollouter/idle_ratio"] = sum(idle) / len(idle)
    return found | {"perf/gen_tokens_per_s": tokens / seconds}


def dispatch_metrics(jobs: Sequence[Dispatched], iteration: int) -> dict[str, Value | None]:
    """How an iteration's generation went, and how it was planned.

    Args:
        jobs: What became of the last jobs.
        iteration: Which one; empty where it is not among them.

    Returns:
        The actual time always; the rest where its answers were planned, or only predicted.
    """
    found = next((job for job in jobs if job.job_id == train_job(iteration)), None)
    if found is None:
        return {}
    metrics: dict[str, Value | None] = {"dispatch/actual_s": found.actual_s}
    if found.policy != "arrival":
        metrics["dispatch/in_lines"] = float(found.in_lines)
        metrics["dispatch/planned_s"] = found.planned_s or Missing("dispatch.cost is not given")
    if found.in_lines:
        metrics["dispatch/steals"] = float(found.steals)
        metrics["dispatch/as_planned"] = found.as_planned / found.samples
    return metrics


@dataclass(frozen=True)
class Hardware:
    """What the utilisation is measured against."""

    arch: Arch
    devices: int  # of the trainer
    generator_devices: int
    device_kind: str


class Records(EvaluationObserver, Protocol):
    """What the loop tells of an iteration."""

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        ...

    def sample(self, sample: Sample) -> None:
        """A sample was taken."""
        ...

    def end(self, iteration: int, result: IterationResult) -> None:
        """The iteration's update is done."""
        ...


class NoRecords:
    """`Records` of a trainer process that is not the first: what it would write, the first one writes."""

    def begin(self, iteration: int) -> None:
        """Nothing."""

    def sample(self, sample: Sample) -> None:
        """Nothing."""

    def end(self, iteration: int, result: IterationResult) -> None:
        """Nothing."""

    def evaluating(self, version: int) -> None:
        """Nothing."""

    def evaluation(self, result: Evaluation) -> None:
        """Nothing."""


class Recorder:
    """Collects an iteration and writes it down.

    Call order per iteration: ``begin``, ``sample`` for each, ``end``; ``evaluation`` whenever.

    Args:
        cfg: The run's configuration.
        sink: Takes the metric records.
        samples: Takes every consumed sample.
        trace: Takes it too, and knows how long each phase took.
        display: Shows how far the iteration is.
        controller: Asked for its pool and counters.
        rollouts: Knows how long the trainer waited.
        weights: Knows what publishing cost.
        gate: Knows what the probe measured.
        hardware: For the utilisation.
    """

    def __init__(
        self,
        cfg: Config,
        sink: MetricSink,
        samples: SampleLog,
        trace: Trace,
        display: Display,
        controller: RunController,
        rollouts: Rollouts,
        weights: Weights,
        gate: AgreementGate,
        hardware: Hardware,
    ) -> None:
        self._cfg = cfg
        self._sink = sink
        self._log = samples
        self._trace = trace
        self._display = display
        self._controller = controller
        self._rollouts = rollouts
        self._weights = weights
        self._gate = gate
        self._hardware = hardware

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._begun = time.monotonic()
        self._trace.take_seconds()  # what was done between iterations is not this one's
        self._samples: list[Sample] = []
        self._before = {view.name: view for view in self._controller.pool()}
        self._show(iteration)

    def sample(self, sample: Sample) -> None:
        """A sample was taken."""
        self._samples.append(sample)
        self._trace.sample(sample)
        self._show(sample.iteration)

    def end(self, iteration: int, result: IterationResult) -> None:
        """The iteration's update is done: its samples and metrics go to disk."""
        self._display.done("samples")
        self._log.write(iteration, self._samples, iteration)
        pool = self._controller.pool()  # before the clock, so that no share of the step is over 1
        seconds = time.monotonic() - self._begun
        phases = self._trace.take_seconds()
        metrics: dict[str, Value | None] = {
            **result.metrics,
            **staleness_metrics(self._samples, iteration),
            **extras_metrics(self._samples),
            **generator_metrics(self._before, pool, seconds),
            **self._weights.metrics(),
            **self._gate.metrics(),
            **self._rollouts.forecast_metrics(),
            **dispatch_metrics(self._controller.dispatched(), iteration),
            **{f"rollouter/{name}": float(count) for name, count in self._controller.counters().items()},
            **self._controller.usage(),
            **self._speed(
                result.lengths, seconds, seconds - self._rollouts.waited.total_s - phases.get("probe", 0.0)
            ),
            "training/global_step": float(iteration + 1),
            "training/version": float(iteration + 1),
            "training/samples": float(len(self._samples)),
            "training/replaced_prompts": float(self._rollouts.replaced(iteration)),
            **{f"timing_s/{name}": spent for name, spent in phases.items()},
            "timing_s/step": seconds,
            "timing_s/gen_wait": self._rollouts.waited.total_s,
            "timing_s/gen_wait_first": self._rollouts.waited.first_s,
            "trainer/idle_ratio": self._rollouts.waited.total_s / seconds,
        }
        self._sink.write(record(iteration + 1, time.time(), metrics))
        self._trace.flush()

    def evaluation(self, result: Evaluation) -> None:
        """An evaluation is done."""
        self._display.done("evaluation")
        self._sink.write(record(result.version, time.time(), dict(result.metrics())))

    def evaluating(self, version: int) -> None:
        """An evaluation begins."""
        self._display.phase("evaluation", f"evaluating version {version} on the held-out prompts")

    def _show(self, iteration: int) -> None:
        further = self._rollouts.replaced(iteration) * self._cfg.rollout.n
        self._display.phase(
            "samples",
            f"iteration {iteration + 1}: samples",
            len(self._samples),
            self._cfg.samples_per_iteration + further,
        )

    def _speed(self, trained: Sequence[int], seconds: float, busy: float) -> dict[str, Value | None]:
        """What the step came to.

        Args:
            trained: Tokens of each sample that the update worked on.
            seconds: Of the whole step.
            busy: Of them, those that the trainer spent on training.
        """
        lengths = [sample.length for sample in self._samples]
        hardware, cfg = self._hardware, self._cfg
        flops = update_flops(hardware.arch, trained, epochs=cfg.actor.ppo_epochs)
        peak = peak_flops(hardware.device_kind, cfg.model.compute_dtype)
        share = mfu(flops, busy, hardware.devices, peak)
        missing = Missing(f"no peak known for {hardware.device_kind} in {cfg.model.compute_dtype}")
        return {
            "perf/total_num_tokens": float(sum(lengths)),
            "perf/time_per_step": seconds,
            "perf/throughput": throughput(
                sum(lengths), seconds, hardware.devices + hardware.generator_devices
            ),
            "perf/mfu/actor": missing if share is None else share,
            "perf/max_memory_allocated_gb": _device_memory_gib(),
        }


def _device_memory_gib() -> float | None:
    """The highest use of any local device; None where the backend does not say (CPU)."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [entry["peak_bytes_in_use"] for entry in statistics if entry and "peak_bytes_in_use" in entry]
    return max(peaks) / 2**30 if peaks else None
