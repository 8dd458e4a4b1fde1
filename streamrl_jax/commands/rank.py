"""`streamrl rank collect`: observed lengths, from a checkpoint's answers or from what a run has recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from streamrl_jax.config import Config
from streamrl_jax.control.jobs import MOST_SAMPLES
from streamrl_jax.data import PromptSet
from streamrl_jax.data.sources import Split
from streamrl_jax.errors import UserError
from streamrl_jax.progress import Display
from streamrl_jax.ranker.collect import (
    Spread,
    check_place,
    collection_job,
    gathered,
    growing,
    spread_of,
    writing,
)
from streamrl_jax.ranker.lengths import ObservedLengths, lengths_of_run, write_lengths
from streamrl_jax.setup.inputs import Inputs
from streamrl_jax.setup.serving import UNSCORED, Served, serving
from streamrl_jax.types import Prompt, Sample, Sampling


@dataclass(frozen=True)
class Wanted:
    """What to collect.

    Attributes:
        split: Which prompts.
        prompts: How many; 0: all.
        n: Answers to each; 0: ``rollout.n``.
        seed: Of the sampling; None: ``run.seed``. The prompts do not depend on it.
    """

    split: Split = "train"
    prompts: int = 0
    n: int = 0
    seed: int | None = None


def collect(cfg: Config, out: Path, wanted: Wanted) -> Spread:
    """Answers prompts with a checkpoint through real instances, and writes how long the answers are.

    The answers are those of training: ``rollout.temperature``, ``data.max_response_length``. Rewards are not asked for.

    Args:
        cfg: ``model``, ``data``, ``rollout`` and ``gen`` are read.
        out: The file to write, `lengths.write_lengths`.
        wanted: What to collect.

    Returns:
        How the lengths are distributed.

    Raises:
        StopRequested: A signal ended it; what had come lies in ``OUT.partial``.
        UserError: Something given is wrong.
    """
    if wanted.split == "test" and not cfg.data.test:
        raise UserError("data.test is empty; give held-out prompts, or collect with --split train")
    check_place(out)
    with serving(cfg, "lengths", UNSCORED, partial(_check_count, cfg, wanted)) as served:
        return _collect(cfg, out, wanted, served)


def _check_count(cfg: Config, wanted: Wanted, inputs: Inputs) -> None:
    """Sees to it that there are as many prompts as are asked for, and not more than a job takes."""
    count = len(first_drawn(_prompts(wanted, inputs), wanted.prompts))
    if count * (n := wanted.n or cfg.rollout.n) > MOST_SAMPLES:
        raise UserError(
            f"--n {n}: {count} prompts have {count * n} answers then, and a job has {MOST_SAMPLES} at most; give "
            "fewer, or fewer --prompts"
        )


def _collect(cfg: Config, out: Path, wanted: Wanted, served: Served) -> Spread:
    n = wanted.n or cfg.rollout.n
    job = collection_job(*_work(cfg, wanted, served, n))
    begun = time.monotonic()
    served.controller.submit(job)
    rows: list[ObservedLengths] = []
    with growing(out, served.display.note) as take:
        for row in gathered(_shown(cfg, served, job.job_id, job.size), n):
            named = replace(row, prompt=served.inputs.tokenizer.decode(row.token_ids))
            rows.append(named)
            take(named)
    spread, seconds = spread_of(rows), time.monotonic() - begun
    served.display.done("collect")
    speed = {"seconds": f"{seconds:.1f}", "tokens/s": f"{spread.tokens / seconds:,.0f}", "file": str(out)}
    served.display.summary("lengths", spread.rows() | speed)
    return spread


def _work(cfg: Config, wanted: Wanted, served: Served, n: int) -> tuple[Sequence[Prompt], int, Sampling]:
    from streamrl_jax.train.rollouts import training_sampling

    sampling = training_sampling(cfg, served.stop_token_ids)
    if wanted.seed is not None:
        sampling = replace(sampling, seed=wanted.seed)
    return first_drawn(_prompts(wanted, served.inputs), wanted.prompts), n, sampling


def _prompts(wanted: Wanted, inputs: Inputs) -> PromptSet:
    prompts = inputs.train_prompts if wanted.split == "train" else inputs.test_prompts
    assert prompts is not None, "data.test is given"
    return prompts


def first_drawn(prompts: PromptSet, count: int) -> tuple[Prompt, ...]:
    """The prompts that a run's first iterations would draw, each once.

    Args:
        prompts: The set.
        count: How many; 0: all.

    Raises:
        UserError: There are not so many.
    """
    if count > len(prompts):
        raise UserError(
            f"--prompts {count}: {prompts.source} holds {len(prompts)} prompts; give as many at the most"
        )
    return tuple(prompts.prompts[prompts.order[place]] for place in range(count or len(prompts)))


def _shown(cfg: Config, served: Served, job_id: str, of: int) -> Iterator[Sample]:
    from streamrl_jax.train.rollouts import arriving

    bound = cfg.trainer.sample_timeout_s
    for count, sample in enumerate(arriving(served.controller, job_id, bound, served.stop), 1):
        served.display.phase("collect", "answers", count, of)
        yield sample


def collect_run(run_dir: Path, out: Path) -> Spread:
    """Writes how long the answers were that a run has consumed.

    Args:
        run_dir: The run directory; the run may go on meanwhile.
        out: The file to write.

    Returns:
        How the lengths are distributed.

    Raises:
        UserError: Something given is wrong.
    """
    check_place(out)
    rows = lengths_of_run(run_dir)
    with writing(out, "free some space, or give another --out"):
        write_lengths(out, rows)
    spread = spread_of(rows)
    with Display("lengths") as display:
        display.summary("lengths", spread.rows() | {"file": str(out)})
    return spread
