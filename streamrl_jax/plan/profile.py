"""What `streamrl plan profile` measures: the grid, the load of each of its cells, and what the answers' times say.

A cell is a batch B at a context c. Its load is B answers of forced length to random prompts, at once: nothing is shared
in the prefix cache. A step's time comes from the decode time of one of them, by the engine's own clock: seconds from
its first token to its last over the steps between. No message and no poll is in it. (The engine's step counter, asked
from outside, tells steps as exactly, and the moment only as well as a reply travels.)

All B must run during that window, and prompts are taken in one after the other. So the *timed* answer is the last one
that is asked for, and the shortest by `lead` tokens: the others have begun when it begins, and end after it. That it
came back first is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.cost import Profile, StepPoint, TokenLatency
from streamrl_jax.types import FinishReason, Sample

LEAD: Final = 16
"""Tokens by which the others outlast the timed answer, at least: what they may be ahead when it begins."""

LEAD_PROMPT_TOKENS: Final = 2048
"""For each so many tokens of prompts they may be a step further ahead: engines take in as many a step or more."""

_CONTEXTS: Final = 4
_PROMPTS: Final = 4


@dataclass(frozen=True)
class Limits:
    """What the instances can hold."""

    slots: int
    max_model_len: int
    kv_tokens: int  # 0: not known


@dataclass(frozen=True, order=True)
class Cell:
    """A point of the grid."""

    batch: int
    context: int  # mean tokens of prompt and answer over the steps that are timed


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        cells: Of decode steps.
        prompts: Lengths of prompts that are taken in, tokens.
        steps: That each timed answer takes.
    """

    cells: tuple[Cell, ...]
    prompts: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Load:
    """The answers of one cell, the timed one last.

    Attributes:
        prompt: Tokens of each prompt.
        lengths: Tokens of each answer.
        lead: By which the others outlast it.
    """

    prompt: int
    lengths: tuple[int, ...]
    lead: int


def load_of(cell: Cell, steps: int, lead: int = 0) -> Load:
    """The load that measures a cell.

    Args:
        cell: Which.
        steps: To time.
        lead: Of the other answers; 0: what is enough as a rule.
    """
    lead = lead or LEAD + cell.batch * cell.context // LEAD_PROMPT_TOKENS
    timed = steps + 1
    return Load(cell.context - (steps + 1) // 2, (timed + lead,) * (cell.batch - 1) + (timed,), lead)


def longer_lead(load: Load, limits: Limits) -> int:
    """Twice the lead of a load, as far as sequences may be so long and the KV cache holds them."""
    longest = limits.max_model_len
    if limits.kv_tokens:
        longest = min(longest, limits.kv_tokens // len(load.lengths))
    return max(load.lead, min(2 * load.lead, longest - load.prompt - load.lengths[-1]))


def fault(cell: Cell, steps: int, limits: Limits) -> str:
    """Why a cell cannot be measured, with the remedy; empty: it can."""
    if cell.batch > limits.slots:  # before its load, which has a number for each of its answers
        return f"--batches {cell.batch}: an instance runs {limits.slots} at once (gen.max_num_seqs)"
    load = load_of(cell, steps)
    longest = load.prompt + max(load.lengths)
    if load.prompt < 1:
        return (
            f"--contexts {cell.context}: {steps} steps are timed, around that context, which leaves no prompt; give "
            f"{(steps + 1) // 2 + 1} or more, or fewer --steps"
        )
    if longest > limits.max_model_len:
        return (
            f"--contexts {cell.context} with batch {cell.batch} takes sequences of {longest} tokens: an instance has "
            f"room for {limits.max_model_len} (gen.max_model_len)"
        )
    if limits.kv_tokens and cell.batch * longest > limits.kv_tokens:
        return (
            f"--batches {cell.batch} with --contexts {cell.context} takes {cell.batch * longest:,} tokens of KV cache: "
            f"an instance holds {limits.kv_tokens:,} (gen.kv_cache_gib, gen.gpu_memory_utilization)"
        )
    return ""


def make_grid(limits: Limits, batches: Sequence[int], contexts: Sequence[int], steps: int) -> Grid:
    """The grid of a profile.

    Args:
        limits: Of the instances.
        batches: What was asked for; none: powers of two up to the slots, and the slots.
        contexts: What was asked for; none: `_CONTEXTS` of them, evenly in the logarithm. Of those not asked for, what
            does not fit is left out.
        steps: To time in each cell.

    Raises:
        UserError: A cell that was asked for cannot be measured, or fewer than two batches and two contexts are left.
    """
    chosen = tuple(sorted(set(batches))) or default_batches(limits.slots)
    largest = min(max(chosen), limits.slots)
    found = tuple(sorted(set(contexts))) or spread(2 * steps, _longest(largest, steps, limits), _CONTEXTS)
    cells = [Cell(batch, context) for batch in chosen for context in found]
    faults = {cell: said for cell in cells if (said := fault(cell, steps, limits))}
    kept = tuple(cell for cell in cells if cell not in faults)
    for cell, said in faults.items():
        batch_lost = cell.batch in batches and cell.batch not in {other.batch for other in kept}
        context_lost = cell.context in contexts and cell.context not in {other.context for other in kept}
        if batch_lost or context_lost or (batches and contexts):
            raise UserError(said)
    if len({cell.batch for cell in kept}) < 2 or len({cell.context for cell in kept}) < 2:
        said = next(
            iter(faults.values()), f"batches {list(chosen)} and contexts {list(found)} were asked for"
        )
        raise UserError(f"a profile takes two batches and two contexts at least: {said}")
    return Grid(kept, spread(16, limits.max_model_len - 1, _PROMPTS), steps)


def _longest(batch: int, steps: int, limits: Limits) -> int:
    """The longest context that a batch can be measured with; see `load_of`."""
    beside = steps + 1 - (steps + 1) // 2 + LEAD
    return int((limits.max_model_len - beside) / (1 + batch / LEAD_PROMPT_TOKENS))


def default_batches(slots: int) -> tuple[int, ...]:
    """Powers of two up to the slots, and the slots."""
    return tuple(sorted({*(1 << power for power in range(slots.bit_length())), slots}))


def spread(low: int, high: int, count: int) -> tuple[int, ...]:
    """Whole numbers from `low` to `high`, evenly in the logarithm; fewer where they fall together."""
    high = max(1, high)
    return tuple(sorted(set(np.geomspace(min(low, high), high, count).round().astype(int).tolist())))


def rounds(grid: Grid, repeats: int, seed: int) -> Iterator[Cell | int]:
    """All that is measured, in its order: each round has every cell and every prompt length once, in an order of its
    own. So a drift of the machine's speed does not look like an effect of batch or context.

    Args:
        grid: What.
        repeats: Rounds.
        seed: Of the order.
    """
    every: list[Cell | int] = [*grid.cells, *grid.prompts]
    generator = np.random.default_rng(seed)
    for _ in range(repeats):
        yield from (every[place] for place in generator.permutation(len(every)))


def timed_step(load: Load, samples: Sequence[Sample]) -> StepPoint | None:
    """What a cell's answers say.

    Args:
        load: What was asked for.
        samples: The answers, in the order in which they were asked for.

    Returns:
        Seconds of a step, and the mean tokens of all contexts over the steps that were timed; None where the timed
        answer did not end first, so that fewer than all ran at its end, or an answer was interrupted.
    """
    timed = samples[-1]
    whole = all(
        sample.generation.finish_reason is FinishReason.LENGTH and not sample.generation.attempt
        for sample in samples
    )
    if not whole or timed.arrived_s > min(sample.arrived_s for sample in samples):
        return None
    steps = load.lengths[-1] - 1
    seconds = timed.generation.timings.decode_s / steps
    if not seconds > 0:
        return None
    began = [sample.generation.timings.queued_s + sample.generation.timings.prefill_s for sample in samples]
    ahead = sum(min(max((began[-1] - other) / seconds, 0.0), load.lead) for other in began[:-1])
    return StepPoint(len(samples), len(samples) * (load.prompt + (steps + 1) / 2) + ahead, seconds)


def by_cell(measured: Mapping[Cell, Sequence[StepPoint]]) -> dict[Cell, tuple[StepPoint, ...]]:
    """Gives the repeats of each cell the same tokens of context, their median: they differ in how far others were
    ahead, by little, and make one point."""
    same = {
        cell: float(np.median([point.kv_tokens for point in points])) for cell, points in measured.items()
    }
    return {
        cell: tuple(StepPoint(point.batch, same[cell], point.seconds) for point in points)
        for cell, points in measured.items()
    }


def held_out_cells(cells: Iterable[Cell], share: float, seed: int) -> frozenset[Cell]:
    """Chooses cells that the fit does not see.

    Never one at the edge of the grid: beyond the outermost points the model would be judged by what it cannot know.

    Args:
        cells: All.
        share: Of all of them, to be held out; fewer where there are not so many inside.
        seed: Of the choice.
    """
    every = sorted(cells)
    inside = _inside(every)
    count = min(len(inside), round(share * len(every)))
    chosen = np.random.default_rng(seed).permutation(len(inside))[:count]
    return frozenset(inside[place] for place in chosen)


def _inside(cells: Sequence[Cell]) -> list[Cell]:
    batches, contexts = {cell.batch for cell in cells}, {cell.context for cell in cells}
    return [
        cell
        for cell in cells
        if min(batches) < cell.batch < max(batches) and min(contexts) < cell.context < max(contexts)
    ]


def some_held_out(grid: Grid, share: float, seed: int) -> frozenset[Cell]:
    """`held_out_cells` of a grid, at least one: the error of a profile is told on them.

    Args:
        grid: That is to be measured.
        share: Of all its cells.
        seed: Of the choice.

    Raises:
        UserError: There is none; says what would do.
    """
    if found := held_out_cells(grid.cells, share, seed):
        return found
    count = len(grid.cells)
    if _inside(grid.cells):
        raise UserError(
            f"--holdout {share:g} of {count} cells is none, and the error is told on cells that the fit does not see; "
            f"give {math.ceil(100 / count) / 100:g} or more"
        )
    batches, contexts = (
        ",".join(map(str, sorted(values)))
        for values in ({cell.batch for cell in grid.cells}, {cell.context for cell in grid.cells})
    )
    raise UserError(
        f"--batches {batches} with --contexts {contexts}: no cell is inside this grid that could be held out "
        f"(--holdout), and the error is told on those; give three batches and three contexts or more, that fit "
        f"together (slots: gen.max_num_seqs, tokens: gen.max_model_len)"
    )


def table(profile: Profile, cells: Mapping[Cell, Sequence[StepPoint]], held_out: frozenset[Cell]) -> str:
    """Measured and fitted milliseconds of each cell; measured: the quantile of the repeats that the fit took."""
    quantile = profile.conditions.quantile
    lines = ["batch  context  tokens of context   measured ms (lowest to highest)   fitted ms    error"]
    for cell in sorted(cells):
        seconds = np.array([point.seconds for point in cells[cell]])
        fitted = float(profile.cost.step_s(cell.batch, cells[cell][0].kv_tokens))
        middle = float(np.quantile(seconds, quantile))
        lines.append(
            f"{cell.batch:5d}  {cell.context:7d}  {cells[cell][0].kv_tokens:17,.0f}   {middle * 1e3:11.3f} "
            f"({seconds.min() * 1e3:.3f} to {seconds.max() * 1e3:.3f})".ljust(70)
            + f"{fitted * 1e3:9.3f}  {fitted / middle - 1:+7.1%}{'  held out' if cell in held_out else ''}"
        )
    return "\n".join([*lines, *_prefill_lines(profile)])


def _prefill_lines(profile: Profile) -> Iterator[str]:
    yield "prompt tokens   prefill measured ms   fitted ms    error"
    for tokens in sorted({point.tokens for point in profile.prefill_points}):
        seconds = [point.seconds for point in profile.prefill_points if point.tokens == tokens]
        middle = float(np.quantile(seconds, profile.conditions.quantile))
        fitted = float(profile.cost.prefill_s(tokens))
        yield f"{tokens:13d}   {middle * 1e3:19.3f}   {fitted * 1e3:9.3f}  {fitted / middle - 1:+7.1%}"


def worth(cost: TokenLatency, slots: int, context: float) -> dict[str, str]:
    """What the model says about batching: a step, and tokens per second, of 1 sequence and of all slots."""
    one, full = float(cost.ptl(1, context)), float(cost.ptl(slots, context))
    return {
        "step of 1": f"{one * 1e3:.2f} ms ({1 / one:,.0f} tokens/s)",
        f"step of {slots}": f"{full * 1e3:.2f} ms ({slots / full:,.0f} tokens/s), {full / one:.2f} times as long",
    }
