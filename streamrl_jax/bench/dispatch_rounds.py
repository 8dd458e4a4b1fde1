"""Rounds of `streamrl bench dispatch` on real instances: each policy answers the same draw, through one controller."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from streamrl_jax.bench.dispatch_draws import POLICIES, Draw, Material, Order, Policy, draw, order, turns
from streamrl_jax.control.events import InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.protocol import RunController
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.ranker.lengths import ObservedLengths
from streamrl_jax.train.rollouts import arriving
from streamrl_jax.types import Prompt, Sampling

log = logging.getLogger(__name__)

FEWEST_ROUNDS: Final = 2
"""Without a second one there is no interval."""

_QUIET_HEARTBEATS: Final = 3
"""An instance that tells the same so often has told all: two may lie on either side of the last step."""
_SETTLE_S: Final = 30.0


@dataclass(frozen=True)
class Asking:
    """How the instances are asked.

    Attributes:
        sampling: Of every answer, but for its length.
        heartbeat_s: Between two of an instance's.
        timeout_s: Bound on the wait for one sample.
        stop: Signals that may end the wait.
        limit_s: After so long at one size no further round begins; there are two at least.
    """

    sampling: Sampling
    heartbeat_s: float
    timeout_s: float
    stop: StopSignal
    limit_s: float = math.inf


@dataclass(frozen=True)
class Played:
    """One policy in one round.

    Attributes:
        seconds: From the submission to the arrival of the last sample.
        steps: Decode steps of each instance.
        answers: That each instance gave.
    """

    seconds: float
    steps: Mapping[str, int]
    answers: Mapping[str, int]

    @property
    def longest(self) -> int:
        """Decode steps of the instance that made the most: the makespan, but for how fast a step is."""
        return max(self.steps.values())

    @property
    def total(self) -> int:
        """Decode steps of all instances."""
        return sum(self.steps.values())


@dataclass(frozen=True, eq=False)
class Round:
    """One draw, answered under each policy.

    Attributes:
        work: The draw.
        played: By the policy's name.
        load: The machine's load average at its beginning.
    """

    work: Draw
    played: Mapping[str, Played]
    load: float


@dataclass(frozen=True)
class Size:
    """How much a round holds.

    Attributes:
        prompts: Of each round.
        n: Answers to each.
        rounds: How many.
        seed: Of all draws.
    """

    prompts: int
    n: int
    rounds: int
    seed: int

    def draw(self, material: Material, number: int) -> Draw:
        """The work of a round."""
        return draw(material, self.prompts, self.n, (self.seed, self.prompts, number))


def measure(
    controller: RunController, material: Material, size: Size, names: Sequence[str], asking: Asking
) -> list[Round]:
    """Plays all rounds. One more comes first, under one policy, and is left out.

    Args:
        controller: Its instances are ready and serve version 0.
        material: Where the work comes from.
        size: Of the rounds.
        names: Of `POLICIES`; the material has what they want to know.
        asking: How the instances are asked.
    """
    warm = size.draw(material, size.rounds)
    play(controller, f"bench/{size.prompts}/warm", POLICIES[names[0]], warm, material, asking)
    found, began = [], time.monotonic()
    for number, turn in enumerate(turns(names, size.rounds, size.seed)):
        if len(found) >= FEWEST_ROUNDS and time.monotonic() - began > asking.limit_s:
            log.warning("%d of %d rounds within %g s", number, size.rounds, asking.limit_s)
            break
        work, load = size.draw(material, number), os.getloadavg()[0]
        played = {
            name: play(
                controller, f"bench/{size.prompts}/{number}/{name}", POLICIES[name], work, material, asking
            )
            for name in turn
        }
        found.append(Round(work, {name: played[name] for name in names}, load))
    return found


def play(
    controller: RunController, job_id: str, policy: Policy, work: Draw, material: Material, asking: Asking
) -> Played:
    """Has a draw answered under one policy.

    Raises:
        ControlError: An instance was lost meanwhile, so that its steps are not those of this work.
    """
    met = order(policy, work, material)
    before = settled(controller, asking.heartbeat_s)
    began = time.monotonic()
    controller.submit(job_of(job_id, policy, met, material, asking.sampling))
    answers = dict.fromkeys(before, 0)
    last = began
    for sample in arriving(controller, job_id, asking.timeout_s, asking.stop):
        answers[sample.generation.instance] += 1
        last = time.monotonic()
    after = settled(controller, asking.heartbeat_s)
    for name, view in after.items():
        if view.restarts != before[name].restarts:
            raise ControlError(f"instance {name} was lost during {job_id}: its steps cannot be counted")
    steps = {name: view.steps_total - before[name].steps_total for name, view in after.items()}
    return Played(last - began, steps, answers)


def prompts_of(rows: Sequence[ObservedLengths]) -> list[Prompt]:
    """Recorded prompts as a job asks them."""
    return [Prompt(row.prompt_id, row.token_ids, {}) for row in rows]


def job_of(job_id: str, policy: Policy, met: Order, material: Material, sampling: Sampling) -> Job:
    """A round's work as a job: every answer has its recorded length, whatever the policy."""
    rows = [material.rows[row] for row in met.rows]
    return Job(
        job_id,
        prompts_of(rows),
        met.lengths.shape[1],
        replace(sampling, max_new_tokens=max(int(met.lengths.max()), sampling.max_new_tokens)),
        iteration=0,
        min_version=0,
        evaluation=True,
        predicted=None if met.predicted is None else met.predicted.tolist(),
        forced=met.lengths.ravel().tolist(),
        policy=policy.dispatch,
    )


def settled(controller: RunController, heartbeat_s: float) -> dict[str, InstanceView]:
    """Waits until every instance is idle and has told all its steps.

    Returns:
        How each stands, by name.

    Raises:
        ControlError: One goes on for `_SETTLE_S`.
    """
    end = time.monotonic() + _SETTLE_S
    seen: list[dict[str, InstanceView]] = []
    while True:
        views = {view.name: view for view in controller.pool()}
        told = {name: view.steps_total for name, view in views.items()}
        busy = [name for name, view in views.items() if view.held or view.running or view.waiting]
        if seen and told != {name: view.steps_total for name, view in seen[-1].items()}:
            seen.clear()
        seen = [] if busy else [*seen, views]
        if len(seen) > _QUIET_HEARTBEATS:
            return views
        if time.monotonic() > end:
            raise ControlError(f"the instances did not come to rest within {_SETTLE_S:g} s: {busy or told}")
        time.sleep(heartbeat_s)


def loads(rounds: Sequence[Round]) -> tuple[float, float]:
    """Least and greatest load average at the beginning of a round."""
    values = np.asarray([one.load for one in rounds])
    return float(values.min()), float(values.max())
