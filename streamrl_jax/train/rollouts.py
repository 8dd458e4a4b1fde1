"""The loop's door to generation: which iteration may be generated when, and its samples as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from streamrl_jax.config import Config
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.jobs import Job
from streamrl_jax.data import PromptSet
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.trace import Trace
from streamrl_jax.types import Sample, Sampling


def newest_admitted(version: int, max_staleness: int, total: int) -> int:
    """The newest iteration that a published version admits (DESIGN rule 5).

    Iteration i is consumed when the trainer is at version i, so its tokens are at most ``i - version`` stale.

    Args:
        version: The newest published version.
        max_staleness: Versions that a token may lag behind.
        total: Iterations of the run.

    Returns:
        min(version + max_staleness, total - 1).
    """
    return min(version + max_staleness, total - 1)


def training_sampling(cfg: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """The distribution that training samples from: temperature, length, stop ids and seed, nothing else (rule 4)."""
    return Sampling(
        temperature=cfg.rollout.temperature,
        max_new_tokens=cfg.data.max_response_length,
        stop_token_ids=stop_token_ids,
        seed=cfg.run.seed,
    )


def arriving(controller: Controller, job_id: str, timeout_s: float, stop: StopSignal) -> Iterator[Sample]:
    """A job's samples in the order of their arrival, each once; a signal ends the wait.

    Args:
        controller: Has the job.
        job_id: Of the job.
        timeout_s: Bound on the wait for one sample.
        stop: Signals that may end the wait.

    Raises:
        StopRequested: A signal came.
    """
    source = controller.samples(job_id, timeout_s)
    while True:
        with stop.interruptible():
            sample = next(source, None)
        if sample is None:
            return
        yield sample


_SHOWN_WAIT_S = 1e-3  # shorter ones would only swell the timeline


@dataclass
class Waited:
    """How long the trainer waited for samples in an iteration, seconds."""

    first_s: float = 0.0  # for the first sample
    total_s: float = 0.0


class Rollouts:
    """Opens iterations by admission, and iterates over their samples.

    Invariant: nothing is ever generated that would be too stale when it is consumed, so nothing is dropped.

    Args:
        cfg: The run's configuration.
        controller: Where prompts go.
        prompts: The training prompts; iteration i's are a pure function of i.
        sampling: From `training_sampling`.
        trace: Shows when the trainer waited.
        stop: Signals that may end the wait.
        start: The first iteration to open.
    """

    def __init__(
        self,
        cfg: Config,
        controller: Controller,
        prompts: PromptSet,
        sampling: Sampling,
        trace: Trace,
        stop: StopSignal,
        start: int,
    ) -> None:
        self._cfg = cfg
        self._controller = controller
        self._prompts = prompts
        self._sampling = sampling
        self._trace = trace
        self._stop = stop
        self._next = start
        self.waited = Waited()

    def wait_ready(self) -> None:
        """Waits until all instances are loaded.

        Raises:
            StopRequested: A signal came.
            ControlError: Not within `gen.start_timeout_s`; says what each one does.
        """
        with self._stop.interruptible():
            self._controller.wait_ready(self._cfg.gen.start_timeout_s)

    def open(self, version: int) -> None:
        """Hands over every iteration that ``version`` admits and that is not open yet."""
        staleness = self._cfg.trainer.max_staleness
        newest = newest_admitted(version, staleness, self._cfg.trainer.total_training_steps)
        for iteration in range(self._next, newest + 1):
            job = Job(
                job_id=train_job(iteration),
                prompts=self._prompts.iteration(iteration),
                n=self._cfg.rollout.n,
                sampling=self._sampling,
                iteration=iteration,
                min_version=max(0, iteration - staleness),
                priority=iteration,
            )
            self._controller.submit(job)
        self._next = max(self._next, newest + 1)

    def samples(self, iteration: int) -> Iterator[Sample]:
        """Yields an iteration's samples in the order of their arrival, each once, and times the waiting."""
        self.waited = Waited()
        bound = self._cfg.trainer.sample_timeout_s
        begun = time.monotonic()
        for sample in arriving(self._controller, train_job(iteration), bound, self._stop):
            now = time.monotonic()
            waited = now - begun
            if waited > _SHOWN_WAIT_S:
                self._trace.span("gen_wait", begun, now)
            self.waited.first_s = self.waited.first_s or waited
            self.waited.total_s += waited
            yield sample
            begun = time.monotonic()

    @property
    def open_iterations(self) -> range:
        """Opened so far: up to the end of this range."""
        return range(self._next)


def train_job(iteration: int) -> str:
    """The job id of a training iteration."""
    return f"train/{iteration}"
