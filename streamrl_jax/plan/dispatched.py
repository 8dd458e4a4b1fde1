"""A job in simulated time: arranged by the very function that the controller calls, and played by `generation`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from streamrl_jax.control.dispatching import DispatchSettings, Ready, arrange
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.lines import LinePlan
from streamrl_jax.plan.generation import Conditions, Outcome, Stage, run_plan, run_pulled
from streamrl_jax.ranker.dispatch import Plan, Server


def run_job(
    job: Job,
    lengths: Int[np.ndarray, "prompts n"],
    settings: DispatchSettings,
    servers: Sequence[Server],
    conditions: Conditions | None = None,
) -> Outcome:
    """Plays what the controller would make of a job in its first iteration.

    Args:
        job: With or without predictions.
        lengths: Tokens that each of its answers has.
        settings: The controller's.
        servers: The instances, at least one.
        conditions: None: the defaults.
    """
    ready = [Ready(one.name, one.slots, one.kv_tokens) for one in servers]
    arranged = arrange(job, settings, ready, ())
    if arranged.lines is None:
        order = "arrival" if arranged.order is None else "lpt"
        return run_pulled(_stage(job, lengths, 1), order, servers, conditions)
    stage = _stage(job, lengths, job.n // arranged.lines.answers)
    return run_plan(stage, _plan(arranged.lines), servers, conditions)


def _stage(job: Job, lengths: Int[np.ndarray, "prompts n"], units: int) -> Stage:
    """The work of a job, each prompt's answers in so many units."""
    prompts = np.asarray([len(prompt.token_ids) for prompt in job.prompts], np.int64)
    known = np.ones(len(prompts)) if job.predicted is None else np.asarray(job.predicted, np.float64)
    lengths = lengths.reshape(len(prompts) * units, -1).astype(np.int64)
    return Stage(lengths, np.repeat(prompts, units), np.repeat(known, units))


def _plan(lines: LinePlan) -> Plan:
    """A controller's lines as the plan that they were made of."""
    batch = [seat.batch for seat in lines.seats]
    instance, rank = (np.asarray(values, np.int32) for values in (lines.seat, lines.rank))
    return Plan(instance, rank, np.asarray(batch, np.int32), 0.0)
