"""`streamrl rank fit` and `rank eval`: trains a length ranker on observed lengths, and measures it on held-out ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64
from rich.console import Console
from rich.table import Table

from streamrl_jax.control.dispatching import DispatchSettings
from streamrl_jax.control.jobs import Job
from streamrl_jax.plan.dispatched import run_job
from streamrl_jax.ranker.collect import writing
from streamrl_jax.ranker.cost import FLAT, TokenLatency, read_cost
from streamrl_jax.ranker.fit import FitOptions, fit_ranker
from streamrl_jax.ranker.held_back import digests
from streamrl_jax.ranker.lengths import ObservedLengths, read_lengths
from streamrl_jax.ranker.measure import SHARES, Line, Samplings, View, history_of, measure, pair_up
from streamrl_jax.ranker.metrics import Interval
from streamrl_jax.ranker.model import LengthRanker, refuse_used
from streamrl_jax.ranker.plans import Server
from streamrl_jax.types import Prompt, Sampling

SERVERS: Final = (2, 8, 32)
_VIEWS: Final[Mapping[View, str]] = {
    "answers": "single answers, as in the paper",
    "means": "means of a prompt's answers",
}
_WIDTH: Final = 170  # of the tables, in a log too
_ROUNDS: Final = 3  # timings of the scoring, of which the quickest counts


@dataclass(frozen=True)
class Against:
    """What a ranker is held against.

    Attributes:
        second: A file with a second, independent sampling of the same prompts: the ceiling.
        history: A file with earlier lengths of the same prompts.
        cost: A profile of what a decode step takes; None: every step takes as long.
        slots: Answers that a simulated instance runs at once; 0: as many as make 4 waves, 64 at most.
        seed: Of the bootstrap and of the random order.
    """

    second: Path | None = None
    history: Path | None = None
    cost: Path | None = None
    slots: int = 0
    seed: int = 0


def fit(lengths: Sequence[Path], out: Path, options: FitOptions, start: Path | None) -> LengthRanker:
    """Fits a ranker to files of lengths, and writes it.

    Args:
        lengths: Files of observed lengths; prompts that are in several are joined.
        out: The directory to make.
        options: How.
        start: A checkpoint to start from; None: from scratch.

    Raises:
        UserError: Something given is wrong; `out` is then as it was.
    """
    refuse_used(out)
    rows = [row for path in lengths for row in read_lengths(path)]
    where = ", ".join(map(str, lengths))
    ranker = fit_ranker(rows, options, start, report=lambda line: print(line, flush=True), where=where)
    with writing(out, "make room, or give another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        ranker.save(out)
    told = ranker.conditions
    print(
        f"{out}: fitted to {told['answers']} answers to {told['prompts'] + told['held_back']} prompts in "
        f"{told['seconds']} s; the order of {told['held_back']} held-back prompts' answers is right in "
        f"{told['concordance']:.1%} of the pairs that have one (step {told['best_step']})"
    )
    return ranker


def evaluate(directory: Path, lengths: Path, against: Against) -> None:
    """Measures a ranker on held-out prompts and prints the tables.

    Args:
        directory: The ranker.
        lengths: Observed lengths of prompts that it was not fitted to.
        against: What it is compared with.

    Raises:
        UserError: Something given is wrong.
    """
    ranker = LengthRanker.load(directory)
    second = None if against.second is None else read_lengths(against.second)
    samplings = pair_up(read_lengths(lengths), second, str(against.second))
    earlier: dict[str, Float64[np.ndarray, " prompts"]] = {}
    if against.history is not None:
        name = str(against.history)
        earlier["history"] = history_of(samplings.rows, read_lengths(against.history), name)
    cost = None if against.cost is None else read_cost(against.cost).cost
    # Every file has been read: what follows takes its time.
    predicted, seconds = _timed_lengths(ranker, samplings.rows, lengths)
    predictors = {"ranker": predicted.astype(np.float64), **earlier}
    predictors["prompt tokens"] = np.array([len(row.token_ids) for row in samplings.rows], np.float64)
    chance = np.random.default_rng(against.seed)
    predictors["random"] = chance.permutation(len(samplings.rows)).astype(np.float64)
    console = Console(width=max(Console().width, _WIDTH))
    console.print(_described(samplings), highlight=False, soft_wrap=True)
    if not len(ranker.met):
        console.print("note: this ranker does not record which prompts it was fitted to", style="yellow")
    if met := int(np.isin(digests(samplings.rows), ranker.met).sum()):
        console.print(
            f"note: {met} of these prompts are among those that the ranker was fitted to or chosen by; what follows "
            "flatters it",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    for view, title in _VIEWS.items():
        console.print(_recall_table(measure(samplings, predictors, view, seed=against.seed), title))
    console.print(
        f"ranker: {1e3 * seconds / len(predicted):.3f} ms a prompt on one CPU device, without compiling; prompts of "
        f"{np.mean([len(row.token_ids) for row in samplings.rows]):.0f} tokens",
        highlight=False,
        soft_wrap=True,
    )
    orders = {name: predictors[name] for name in ("ranker", "history") if name in predictors}
    console.print(_makespan_table(samplings, orders, against, cost))


def makespans(
    samplings: Samplings,
    predicted: Float64[np.ndarray, " prompts"] | None,
    servers: Sequence[Server],
    seed: int = 0,
) -> float:
    """The simulated seconds that the first sampling's answers take, dispatched as the controller would.

    Args:
        samplings: The work; its prompts come in a random order.
        predicted: Expected tokens of an answer, that skewness-aware dispatch plans with; None: nothing is known, and
            each answer goes to whichever instance has room.
        servers: The instances, of equal cost.
        seed: Of the random order.
    """
    order = np.random.default_rng(seed).permutation(len(samplings.rows))
    lengths = samplings.first[order].astype(np.int64)
    prompts = [
        Prompt(row.prompt_id, row.token_ids, {}) for row in (samplings.rows[at] for at in order.tolist())
    ]
    sampling = Sampling(temperature=1.0, max_new_tokens=int(lengths.max()), stop_token_ids=())
    expected = None if predicted is None else np.maximum(predicted[order], 1.0).tolist()
    job = Job("eval/0", prompts, lengths.shape[1], sampling, 0, 0, evaluation=True, predicted=expected)
    settings = DispatchSettings("skewness", cost=servers[0].cost)
    return run_job(job, lengths, settings, servers).makespan_s


def _timed_lengths(
    ranker: LengthRanker, rows: Sequence[ObservedLengths], path: Path
) -> tuple[Float32[np.ndarray, " prompts"], float]:
    token_ids = [row.token_ids for row in rows]
    names = [f"{path}: prompt {row.prompt_id!r}" for row in rows]
    lengths, seconds = ranker.lengths(token_ids, names), float("inf")  # the first call compiles
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        lengths = ranker.lengths(token_ids)
        seconds = min(seconds, time.perf_counter() - began)
    return lengths, seconds


def _described(samplings: Samplings) -> str:
    lengths, rows = samplings.first, samplings.rows
    cut = np.mean([part for row in rows for part in row.cut])
    median, tail = np.quantile(lengths, [0.5, 0.99])
    said = f"{len(rows)} prompts with {lengths.shape[1]} answers each"
    if samplings.second is not None:
        said += f" (and {samplings.second.shape[1]} of a second sampling)"
    return (
        f"{said}: mean {lengths.mean():.1f} tokens, median {median:.0f}, 99th percentile {tail:.0f}, longest "
        f"{lengths.max():.0f}; {cut:.1%} were cut at the limit"
    )


def _recall_table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=f"recall of the longest: {title}", title_justify="left")
    table.add_column("predictor")
    with_ceiling = any(line.of_ceiling for line in lines)
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right")
        if with_ceiling:
            table.add_column("of ceiling", justify="right")
    table.add_column("tau-b", justify="right")
    for line in lines:
        cells: list[str] = []
        for place, recall in enumerate(line.recall):
            cells.append(_interval(recall))
            if with_ceiling:
                cells.append(_interval(line.of_ceiling[place]) if line.of_ceiling else "")
        table.add_row(line.name, *cells, f"{line.tau:.3f}")
    table.caption = "in brackets: 95 % bootstrap intervals over prompts"
    return table


def _makespan_table(
    samplings: Samplings,
    orders: Mapping[str, Float64[np.ndarray, " prompts"]],
    against: Against,
    cost: TokenLatency | None,
) -> Table:
    unit = "decode steps" if cost is None else "seconds"
    table = Table(title=f"simulated makespan of the first sampling, {unit}", title_justify="left")
    for header in ("instances", "answers at once", "random", *orders, "oracle", "ranker over oracle"):
        table.add_column(header, justify="right")
    for count in SERVERS:
        slots = against.slots or min(64, max(1, samplings.first.size // (4 * count)))
        servers = [Server(str(index), slots, 10**9, cost or FLAT) for index in range(count)]
        random = makespans(samplings, None, servers, against.seed)
        found = [makespans(samplings, predicted, servers, against.seed) for predicted in orders.values()]
        oracle = makespans(samplings, samplings.first.mean(axis=1), servers, against.seed)
        cells = [f"{value:,.6g}" for value in (random, *found, oracle)]
        table.add_row(str(count), str(slots), *cells, f"{found[0] / oracle - 1:+.1%}")
    table.caption = (
        "as in a run; random: first come, first served; others: skewness; oracle: the prompts' true means"
    )
    return table


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.2f}-{interval.high:.2f})"
