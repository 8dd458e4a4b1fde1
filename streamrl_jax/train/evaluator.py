"""Evaluation on held-out prompts, through the instances that also generate for training."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.train.rollouts import arriving
from streamrl_jax.types import Prompt, Sample, Sampling

log = logging.getLogger(__name__)

EVALUATION_PRIORITY = -(2**30)
"""Before training: the loop waits for it."""

_NAMED: Final = 5  # samples that a message names


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        version: Of the weights.
        accuracy: Mean score; NaN where a score was not finite and the run goes on all the same.
        pass_at_k: Chance that the best of k answers scores 1, for each k up to eval.n that is a power of two.
        length: Mean tokens of an answer.
        count: Answers.
        seconds: It took.
    """

    version: int
    accuracy: float
    pass_at_k: dict[int, float]
    length: float
    count: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Under their logged names."""
        found = {
            "val/accuracy": self.accuracy,
            "val/response_length/mean": self.length,
            "timing_s/testing": self.seconds,
        }
        return found | {f"val/pass@{k}": value for k, value in self.pass_at_k.items()}


def evaluation_sampling(cfg: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How held-out prompts are answered: greedy by default; nucleus and top-k are free here (rule 4)."""
    return Sampling(
        temperature=cfg.eval.temperature,
        max_new_tokens=cfg.data.max_response_length,
        stop_token_ids=stop_token_ids,
        seed=cfg.run.seed,
        evaluation=True,
        top_p=cfg.eval.top_p if cfg.eval.top_p < 1.0 else None,
        top_k=cfg.eval.top_k if cfg.eval.top_k > 0 else None,
    )


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).

    Args:
        answers: n, answers to a prompt.
        correct: c, those that are right.
        k: At most n.

    Returns:
        The chance that one of k drawn without replacement is right.
    """
    return 1.0 - math.comb(answers - correct, k) / math.comb(answers, k)


def summarise(version: int, samples: Sequence[Sample], n: int, seconds: float) -> Evaluation:
    """Turns the samples of an evaluation into its result.

    Args:
        version: Of the weights.
        samples: All of them.
        n: Answers per prompt.
        seconds: It took.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt.prompt_id].append(sample.reward)
    powers = [2**i for i in range(n.bit_length()) if 2**i <= n] if n > 1 else []
    passes = {
        k: sum(pass_at_k(len(g), sum(r >= 1.0 for r in g), k) for g in groups.values()) / len(groups)
        for k in powers
    }
    lengths = [len(sample.generation.token_ids) for sample in samples]
    scores = [sample.reward for sample in samples]
    mean = sum(scores) / len(scores) if all(map(math.isfinite, scores)) else math.nan
    return Evaluation(version, mean, passes, sum(lengths) / len(lengths), len(samples), seconds)


class EvaluationObserver(Protocol):
    """Follows evaluations; the recorder of a run does."""

    def evaluating(self, version: int) -> None:
        """An evaluation begins."""
        ...

    def evaluation(self, result: Evaluation) -> None:
        """An evaluation is done."""
        ...


class Evaluator:
    """Evaluates versions; keeps every result.

    Args:
        cfg: The run's configuration.
        controller: Runs the jobs.
        prompts: Held-out ones; empty: nothing is ever due.
        sampling: From `evaluation_sampling`.
        observer: Told when an evaluation begins and what it found.
        stop: Signals that may end the wait for answers.
        evaluated: Whether the version that the run starts from was evaluated before.
    """

    def __init__(
        self,
        cfg: Config,
        controller: RunController,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        observer: EvaluationObserver,
        stop: StopSignal,
        evaluated: bool = False,
    ) -> None:
        self._cfg = cfg
        self._controller = controller
        self._prompts = tuple(prompts[: cfg.eval.max_prompts or None])
        self._sampling = sampling
        self._observer = observer
        self._stop = stop
        self._evaluated = evaluated
        self.results: list[Evaluation] = []

    def due(self, version: int) -> bool:
        """Whether a version is to be evaluated: every ``test_freq``, and the last."""
        freq, total = self._cfg.trainer.test_freq, self._cfg.trainer.total_training_steps
        return bool(self._prompts) and freq > 0 and (version % freq == 0 or version == total)

    def due_at_start(self, version: int) -> bool:
        """Whether the version that the run starts from is to be evaluated.

        Version 0 is, if `val_before_train` and evaluations are on at all; a later one where a signal ended the run
        before its evaluation.
        """
        trainer = self._cfg.trainer
        wanted = self.due(version) if version else trainer.val_before_train and trainer.test_freq > 0
        return wanted and not self._evaluated

    def evaluate(self, version: int) -> Evaluation | None:
        """Answers all held-out prompts with a published version, and waits for them.

        Returns:
            The result; None without held-out prompts.

        Raises:
            StopRequested: A signal came; nothing is kept.
            UserError: A score is not finite, and ``trainer.on_non_finite`` does not say to go on.
        """
        if not self._prompts:
            return None
        self._observer.evaluating(version)
        begun = time.monotonic()
        job = Job(
            job_id=f"eval/{version}",
            prompts=self._prompts,
            n=self._cfg.eval.n,
            sampling=self._sampling,
            iteration=version,
            min_version=version,
            priority=EVALUATION_PRIORITY,
            evaluation=True,
        )
        self._controller.submit(job)
        bound = self._cfg.trainer.sample_timeout_s
        samples = list(arriving(self._controller, job.job_id, bound, self._stop))
        self._check_scores(version, samples)
        result = summarise(version, samples, self._cfg.eval.n, time.monotonic() - begun)
        self.results.append(result)
        self._observer.evaluation(result)
        return result

    def _check_scores(self, version: int, samples: Sequence[Sample]) -> None:
        faulty = [f"{s.sample_id} ({s.reward})" for s in samples if not math.isfinite(s.reward)]
        if not faulty:
            return
        shown = ", ".join(faulty[:_NAMED]) + (", …" if len(faulty) > _NAMED else "")
        text = (
            f"the evaluation of version {version} has no accuracy: {len(faulty)} of {len(samples)} scores are not "
            f"finite: {shown}. Mend the reward function"
        )
        if self._cfg.trainer.on_non_finite == "stop":
            raise UserError(f"{text}, or set trainer.on_non_finite = 'skip' to go on without")
        log.warning(text)
