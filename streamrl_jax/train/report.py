"""Turns the tallies of an iteration into named metrics: sums over all micro-batches, divided once.

On the host, in double precision. Names are verl's where it has one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl_jax.train.aggregate import Aggregation, Size
from streamrl_jax.train.agreement import Comparison
from streamrl_jax.train.answer import Answer
from streamrl_jax.train.batcher import MicroBatch
from streamrl_jax.train.moments import Moments, merge
from streamrl_jax.train.objective import Tally
from streamrl_jax.train.packing import rank_costs, row_cost
from streamrl_jax.train.refusal import Refusal
from streamrl_jax.train.shapes import BatchShape

# In these the means of several updates are reported; of anything else (rates) the last.
_AVERAGED = ("grad_norm",)
_COUNTED = ("training/update_refused", "training/update_empty")

# float32's, with room: returns are advantages plus values, so that equal ones differ by this share of the values.
_ROUNDING = 1e-6


# Spreads that other figures are made of, and that are not logged themselves.
_INNER = ("critic/advantages_raw", "critic/value_errors")


@dataclass(frozen=True)
class IterationResult:
    """What an iteration brought.

    Attributes:
        metrics: Under their logged names.
        agreement: Trainer beside generator, on the tokens seen before the first update.
        refusal: Why an update was refused; None if all were applied.
        lengths: Tokens of each sample that an update worked on; what was left out is none of them.
    """

    metrics: dict[str, float]
    agreement: Comparison
    refusal: Refusal | None = None
    lengths: tuple[int, ...] = ()


def loss_metrics(tallies: Sequence[Tally], aggregation: Aggregation) -> dict[str, float]:
    """Losses, entropy, KL, clip shares, and the spread of advantages, values, returns and importance ratios.

    Args:
        tallies: On the host, of every pass over every micro-batch.
        aggregation: Of the policy's loss.
    """
    metrics: defaultdict[str, float] = defaultdict(float)
    passes = sum((tally.size for tally in tallies), Size())
    denominator = float(aggregation.denominator(passes))
    for tally in tallies:
        for name, total in tally.weighted.items():
            metrics[name] += float(total) / denominator if denominator else 0.0
    metrics |= {name: float(mean.mean) for name, mean in _merged(t.means for t in tallies).items()}
    spreads = _merged(t.spreads for t in tallies)
    for name, spread in spreads.items():
        if name not in _INNER and float(spread.count):
            metrics[f"{name}/mean"] = float(spread.mean)
            metrics[f"{name}/max"] = float(spread.high)
            metrics[f"{name}/min"] = float(spread.low)
    if "critic/value_errors" in spreads and _differ(spreads["critic/returns"], spreads["critic/values"]):
        unexplained = spreads["critic/value_errors"].variance / spreads["critic/returns"].variance
        metrics["critic/vf_explained_var"] = 1.0 - unexplained
    return dict(metrics)


def _differ(returns: Moments, values: Moments) -> bool:
    """Whether the returns differ by more than rounding; else there is no variance to explain."""
    residue = _ROUNDING * max(abs(float(values.low)), abs(float(values.high)))
    return returns.variance > residue**2


def answer_metrics(answers: Sequence[Answer], reward_kl: float) -> dict[str, float]:
    """Scores and lengths.

    Args:
        answers: All of an iteration, each once, also those that are not trained on.
        reward_kl: What the KL took from the rewards of an answer, on average.
    """
    scores = np.array([answer.score for answer in answers])
    rewards = np.array([answer.reward for answer in answers])
    lengths = np.array([len(answer.response_ids) for answer in answers])
    return {
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "critic/rewards/mean": float(rewards.mean()) - reward_kl,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.mean([answer.truncated for answer in answers])),
        "prompt_length/mean": float(np.mean([len(answer.prompt_ids) for answer in answers])),
    }


def filter_metrics(left_out: Sequence[Answer], n: int, *, filters: bool) -> dict[str, float]:
    """How many groups dynamic sampling left out, and how many of them for being all right or all wrong.

    Args:
        left_out: Their answers.
        n: Answers per prompt.
        filters: Whether `algorithm.filter_groups` is on; else there is nothing to report.
    """
    if not filters:
        return {}
    return {
        "training/groups_left_out": len(left_out) / n,
        "training/groups_left_out_score": float(np.mean([answer.score for answer in left_out] or [0.0])),
    }


def update_metrics(reports: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Norms (their mean), rates (the last), and the numbers of refused and empty ones, of an iteration's updates."""
    metrics = {name: float(value) for name, value in reports[-1].items()}
    for name in metrics:
        total = math.fsum(float(report[name]) for report in reports)
        if name.endswith(_AVERAGED):
            metrics[name] = total / len(reports)
        elif name in _COUNTED:
            metrics[name] = total
    return metrics


def packing_metrics(batches: Sequence[MicroBatch], shape: BatchShape) -> dict[str, float]:
    """How many micro-batches there were, which share of their tokens was padding, and how level the ranks were.

    Args:
        batches: All of an iteration.
        shape: The compiled shapes, and over how many ranks their rows are split.

    Returns:
        The imbalance is the most loaded rank's work over the mean rank's, each summed over the micro-batches
        (ranks wait for each other in every one); work as `packing.row_cost` counts it.
    """
    used, capacity = sum(b.used for b in batches), sum(b.capacity for b in batches)
    ranks = [rank_costs(_row_costs(b), shape.shards) for b in batches]
    return {
        "training/micro_batches": float(len(batches)),
        "training/tokens": float(used),
        "training/padding_share": 1.0 - used / capacity,
        "training/compiled_shapes": float(len(shape.shapes)),
        "training/shapes_used": float(len({b.rows.tokens.shape for b in batches})),
        "training/rank_imbalance": math.fsum(map(max, ranks))
        * shape.shards
        / math.fsum(map(math.fsum, ranks)),
    }


def _row_costs(batch: MicroBatch) -> list[float]:
    lengths: list[list[int]] = [[] for _ in range(len(batch.rows.tokens))]
    for placement in batch.placements:
        lengths[placement.row].append(len(placement.answer))
    return [row_cost(row) for row in lengths]


def overlap_metrics(accumulated_at: Sequence[float], last_arrival: float) -> dict[str, float]:
    """How much of the training ran behind the generation (arXiv 2504.15930, figure 5b).

    Args:
        accumulated_at: When each micro-batch's gradient was begun; monotonic seconds of this machine.
        last_arrival: When the iteration's last sample was there, on the same clock.

    Returns:
        The share of the micro-batches that did not wait for the last sample.
    """
    early = sum(begun < last_arrival for begun in accumulated_at)
    return {"training/overlapped": early / len(accumulated_at)}


def _merged(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    collected: defaultdict[str, list[Moments]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            collected[name].append(value)
    return {name: merge(values) for name, values in collected.items()}
