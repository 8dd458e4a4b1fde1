"""Do trainer and generator give the same log-probs for the same tokens and version (DESIGN rule 4)? NumPy only.

Only tokens of the trainer's own version are compared: where the trainer has moved on, a difference is
learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float

from streamrl_jax.config import AgreementSection
from streamrl_jax.train.batcher import MicroBatch


@dataclass(frozen=True)
class Disagreement:
    """The token whose log-probs lie furthest apart."""

    sample: str
    instance: str
    index: int  # in the answer
    token: int
    version: int
    behaviour_logprob: float
    trainer_logprob: float

    def __str__(self) -> str:
        return (
            f"token {self.token} at position {self.index} of answer {self.sample} (version {self.version}, "
            f"instance {self.instance or 'unnamed'}): generator {self.behaviour_logprob:.6f}, trainer "
            f"{self.trainer_logprob:.6f}"
        )


@dataclass(frozen=True, eq=False)
class Comparison:
    """Log-probs of both sides for the compared tokens of a step, side by side.

    Attributes:
        behaviour: The generator's.
        trainer: The trainer's.
        other_version: Tokens left out because another version produced them.
        worst: The token furthest apart; None if there is none.
    """

    behaviour: Float[np.ndarray, " tokens"]
    trainer: Float[np.ndarray, " tokens"]
    other_version: int = 0
    worst: Disagreement | None = None

    @property
    def logprob_diffs(self) -> Float[np.ndarray, " tokens"]:
        """|trainer - behaviour| of the log-probs; what is not a number counts as infinite."""
        return np.nan_to_num(np.abs(self.trainer - self.behaviour), nan=np.inf, posinf=np.inf)

    @property
    def prob_diffs(self) -> Float[np.ndarray, " tokens"]:
        """|trainer - behaviour| of the probabilities."""
        return np.nan_to_num(np.abs(np.exp(self.trainer) - np.exp(self.behaviour)), nan=np.inf, posinf=np.inf)

    def quantile(self, q: float) -> float | None:
        """The log-prob difference that a share q of the tokens does not exceed; None without tokens."""
        if not len(self.trainer):
            return None
        return float(np.quantile(self.logprob_diffs, q, method="inverted_cdf"))

    def metrics(self) -> dict[str, float]:
        """Means, maxima and quantiles under verl's names, and how many tokens they rest on."""
        counts = {
            "training/rollout_tokens_compared": float(len(self.trainer)),
            "training/rollout_tokens_other_version": float(self.other_version),
        }
        if not len(self.trainer):
            return counts
        logs, probs = self.logprob_diffs, self.prob_diffs
        return counts | {
            "training/rollout_probs_diff_mean": float(probs.mean()),
            "training/rollout_probs_diff_max": float(probs.max()),
            "training/rollout_logprobs_diff_mean": float(logs.mean()),
            "training/rollout_logprobs_diff_max": float(logs.max()),
            "training/rollout_logprobs_diff_p50": float(np.quantile(logs, 0.5, method="inverted_cdf")),
            "training/rollout_logprobs_diff_p99": float(np.quantile(logs, 0.99, method="inverted_cdf")),
        }


def compare(scored: Sequence[tuple[MicroBatch, Float[np.ndarray, "rows len"]]], version: int) -> Comparison:
    """Sets the trainer's log-probs beside the generator's.

    Args:
        scored: Micro-batches with the log-probs that the policy of `version` gives their tokens.
        version: The trainer's.

    Returns:
        The comparison, over the tokens of that version.
    """
    behaviour, trainer, other = [np.zeros(0)], [np.zeros(0)], 0
    worst: Disagreement | None = None
    largest = -1.0
    for micro, logprobs in scored:
        for placement in micro.placements:
            answer = placement.answer
            same = answer.versions == version
            other += int((~same).sum())
            if not same.any():
                continue
            mine, theirs = logprobs[placement.response], answer.logprobs
            behaviour.append(theirs[same])
            trainer.append(mine[same])
            gaps = np.where(same, np.nan_to_num(np.abs(mine - theirs), nan=np.inf, posinf=np.inf), -1.0)
            index = int(gaps.argmax())
            if gaps[index] > largest:
                largest = float(gaps[index])
                worst = Disagreement(
                    answer.name,
                    answer.instance,
                    index,
                    int(answer.response_ids[index]),
                    version,
                    float(theirs[index]),
                    float(mine[index]),
                )
    return Comparison(
        np.concatenate(behaviour, dtype=np.float64), np.concatenate(trainer, dtype=np.float64), other, worst
    )


class Verdict(StrEnum):
    """What the agreement of the last steps calls for."""

    AGREES = "agrees"
    WATCH = "watch"  # over the bound, for fewer steps in a row than the window
    WARN = "warn"
    STOP = "stop"


def judge(history: Sequence[float], settings: AgreementSection) -> Verdict:
    """Applies the policy of DESIGN rule 4, on a quantile over several steps.

    Args:
        history: `Comparison.quantile(settings.quantile)` of each step so far, the newest last; steps without
            a compared token are left out.
        settings: Bound, window, policy.

    Returns:
        `AGREES` if the newest is within the bound; the policy's verdict if the last `window` are all over it.
    """

    def over(value: float) -> bool:
        return not value <= settings.max_logprob_diff

    if not history or not over(history[-1]):
        return Verdict.AGREES
    recent = history[-settings.window :]
    if len(recent) < settings.window or not all(over(value) for value in recent):
        return Verdict.WATCH
    return Verdict.STOP if settings.policy == "stop" else Verdict.WARN


def explain(comparison: Comparison, settings: AgreementSection) -> str:
    """One paragraph for the user: what differs by how much, where, and what to look at."""
    reached = comparison.quantile(settings.quantile)
    measured = math.nan if reached is None else reached
    return (
        f"trainer and generator disagree: the {settings.quantile:g} quantile of the log-prob difference over "
        f"{len(comparison.trainer)} tokens is {measured:.6f}, over agreement.max_logprob_diff = "
        f"{settings.max_logprob_diff:g}; furthest apart is {comparison.worst}. Compare gen.dtype with "
        "model.compute_dtype (bfloat16 on one side needs a wider bound), the sampling temperature, and the "
        "instance's version; agreement.policy = 'warn' lets the run go on."
    )
