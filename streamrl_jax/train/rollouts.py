"""The loop's door to generation: which iteration may be generated when, and its samples as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.data import PromptSet
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.metrics import Value
from streamrl_jax.trace import Trace
from streamrl_jax.types import Prompt, Sample, Sampling

log = logging.getLogger(__name__)


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


def arriving(controller: RunController, job_id: str, timeout_s: float, stop: StopSignal) -> Iterator[Sample]:
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


_SHOWN_WAIT_S: Final = 1e-3  # shorter ones would only swell the timeline


@dataclass
class Waited:
    """How long the trainer waited for samples in an iteration, seconds."""

    first_s: float = 0.0  # for the first sample
    total_s: float = 0.0


@dataclass
class Replacements:
    """The further prompts of an iteration: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), from this side.

    Every group that is left out is answered with the next further prompt, so that the groups that are kept and those
    that are under way are ``batch`` together at any time. Which ones are asked then depends on what the answers scored
    alone, not on the order in which they came.
    """

    iteration: int
    further: Iterator[Prompt]  # a pure function of the iteration
    bound: int  # at most so many of them
    asked: int = 0
    unmet: int = 0  # groups without a replacement

    def take(self, groups: int) -> list[tuple[int, Prompt]]:
        """The next further prompts, each with its number from 0; fewer than ``groups`` where there are no more."""
        taken: list[tuple[int, Prompt]] = []
        for _ in range(groups):
            prompt = next(self.further, None) if self.asked < self.bound else None
            if prompt is None:
                self.unmet += 1
            else:
                taken.append((self.asked, prompt))
                self.asked += 1
        return taken


class Forecast(Protocol):
    """Predicts how long answers will be, off the loop's path (`ranker.online`).

    Call order per iteration: ``prepare`` long before, ``take`` when its job is handed over, ``observe`` for each of its
    samples, ``learn`` when it is consumed.
    """

    def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Begins to predict an iteration's prompts; returns at once."""
        ...

    def take(self, iteration: int) -> Sequence[float] | None:
        """Expected tokens of an answer to each of an iteration's prompts; None: nothing is known, or not in time."""
        ...

    def known(self, prompt: Prompt) -> float | None:
        """The same of a single prompt, from its own past answers; None: it has none. Does not wait."""
        ...

    def observe(self, sample: Sample) -> None:
        """A sample is consumed."""
        ...

    def learn(self, iteration: int, *, last: bool) -> None:
        """An iteration is trained on; begins to learn from its samples. ``last``: no other one follows."""
        ...

    def metrics(self) -> dict[str, Value]:
        """How well the newest iteration that was learned from had been predicted."""
        ...


class Rollouts:
    """Opens iterations by admission, and iterates over their samples.

    Call order: ``wait_ready`` once; per iteration ``open`` as soon as a version admits it; then ``samples``, and for
    each of them ``replace``.

    Invariant: nothing is ever generated that would be too stale when it is consumed, so nothing is dropped for its age.

    Args:
        cfg: The run's configuration.
        controller: Where prompts go.
        prompts: The training prompts; iteration i's are a pure function of i.
        sampling: From `training_sampling`.
        trace: Shows when the trainer waited.
        stop: Signals that may end the wait.
        start: The first iteration to open.
        forecast: Predicts lengths for `dispatch.policy`; None: prompts go in the order of their arrival, or another
            trainer process predicts.
    """

    def __init__(
        self,
        cfg: Config,
        controller: RunController,
        prompts: PromptSet,
        sampling: Sampling,
        trace: Trace,
        stop: StopSignal,
        start: int,
        forecast: Forecast | None = None,
    ) -> None:
        self._cfg = cfg
        self._controller = controller
        self._prompts = prompts
        self._sampling = sampling
        self._trace = trace
        self._stop = stop
        self._start = self._next = start
        self._forecast = forecast
        self._replacements = Replacements(-1, iter(()), 0)
        self.waited = Waited()

    def wait_ready(self) -> None:
        """Waits until all instances are loaded.

        Raises:
            StopRequested: A signal came.
            ControlError: Not within `gen.start_timeout_s`; says what each one does.
        """
        self._prepare(range(self._start, self._newest(self._start) + 1))
        with self._stop.interruptible():
            self._controller.wait_ready(self._cfg.gen.start_timeout_s)

    def open(self, version: int) -> None:
        """Hands over every iteration that ``version`` admits and that is not open yet."""
        self._learn(version)
        newest = self._newest(version)
        for iteration in range(self._next, newest + 1):
            prompts, predicted = self._prompts.iteration(iteration), self._predicted(iteration)
            self._controller.submit(self._job(train_job(iteration), iteration, prompts, predicted))
        self._next = max(self._next, newest + 1)
        self._prepare(range(self._next, self._newest(version + 1) + 1))

    def samples(self, iteration: int) -> Iterator[Sample]:
        """Yields an iteration's samples in the order of their arrival, each once, and times the waiting.

        Goes on with the samples that `replace` asks for meanwhile, until the last of them.
        """
        filtering = self._cfg.algorithm.filter_groups
        batch = self._cfg.data.train_batch_size
        self.waited = Waited()
        self._replacements = Replacements(
            iteration, self._prompts.further(iteration), (filtering.max_num_gen_batches - 1) * batch
        )
        bound = self._cfg.trainer.sample_timeout_s
        begun = time.monotonic()
        for sample in arriving(self._controller, train_job(iteration), bound, self._stop):
            now = time.monotonic()
            waited = now - begun
            if waited > _SHOWN_WAIT_S:
                self._trace.span("gen_wait", begun, now)
            self.waited.first_s = self.waited.first_s or waited
            self.waited.total_s += waited
            if self._forecast is not None:
                self._forecast.observe(sample)
            yield sample
            begun = time.monotonic()
        if self._replacements.unmet:
            log.warning(self._shortage(iteration))

    def replace(self, iteration: int, groups: int) -> None:
        """Asks for a further prompt in place of each group that was left out.

        The new ones are jobs of the same iteration, with its bounds on versions and its priority; they come out of
        the same `samples`. There are at most ``algorithm.filter_groups.max_num_gen_batches`` batches of prompts in an
        iteration, and no prompt comes twice; past that the iteration goes on with the groups that it has.

        Args:
            iteration: Whose samples are being taken.
            groups: So many were left out; 0: nothing is asked.
        """
        job_id = train_job(iteration)
        for number, prompt in self._replacements.take(groups):
            length = self._forecast.known(prompt) if self._forecast is not None else None
            predicted = None if length is None else [length]
            job = self._job(f"{job_id}+{number}", iteration, [prompt], predicted)
            self._controller.submit(job, into=job_id)

    def replaced(self, iteration: int) -> int:
        """Further prompts that the newest iteration has asked so far; 0 before its samples are taken."""
        return self._replacements.asked if self._replacements.iteration == iteration else 0

    def forecast_metrics(self) -> dict[str, Value]:
        """How well lengths were predicted of the newest iteration; empty where nothing predicts."""
        return {} if self._forecast is None else self._forecast.metrics()

    def _newest(self, version: int) -> int:
        trainer = self._cfg.trainer
        return newest_admitted(version, trainer.max_staleness, trainer.total_training_steps)

    def _prepare(self, iterations: range) -> None:
        if self._forecast is not None:
            for iteration in iterations:
                self._forecast.prepare(iteration, self._prompts.iteration(iteration))

    def _predicted(self, iteration: int) -> Sequence[float] | None:
        if self._forecast is None:
            return None
        with self._trace.phase("rank", iteration=iteration):
            return self._forecast.take(iteration)

    def _learn(self, version: int) -> None:
        """Only here is it certain that the iteration before ``version`` is in the next checkpoint."""
        if self._forecast is None or version == self._start:
            return
        with self._trace.phase("rank", iteration=version - 1):
            self._forecast.learn(version - 1, last=version == self._cfg.trainer.total_training_steps)

    def _job(
        self,
        job_id: str,
        iteration: int,
        prompts: Sequence[Prompt],
        predicted: Sequence[float] | None = None,
    ) -> Job:
        return Job(
            job_id=job_id,
            prompts=prompts,
            n=self._cfg.rollout.n,
            sampling=self._sampling,
            iteration=iteration,
            min_version=max(0, iteration - self._cfg.trainer.max_staleness),
            priority=iteration,
            predicted=predicted,
        )

    def _shortage(self, iteration: int) -> str:
        found, batch = self._replacements, self._cfg.data.train_batch_size
        why = (
            "algorithm.filter_groups.max_num_gen_batches = "
            f"{self._cfg.algorithm.filter_groups.max_num_gen_batches} allows no more prompts"
            if found.asked == found.bound
            else "the prompt set has no other prompts"
        )
        return (
            f"iteration {iteration}: {found.asked + found.unmet} of {found.asked + batch} groups were left out, since "
            f"their scores were all equal, and {found.unmet} of them were not replaced ({why}); it goes on with "
            f"{batch - found.unmet} of {batch} groups"
        )

    @property
    def open_iterations(self) -> range:
        """Opened so far: up to the end of this range."""
        return range(self._next)


def train_job(iteration: int) -> str:
    """The job id of a training iteration."""
    return f"train/{iteration}"
