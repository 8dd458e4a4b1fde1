"""From a job's predicted lengths and the instances that are there to the way in which its samples wait. Pure.

The plans themselves are made by `ranker.dispatch`; here is what the controller makes of them. A plan that would change
nothing costs nothing: then the samples wait in the queue that all instances share, in the order of their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from streamrl_jax.config_ranker import Policy
from streamrl_jax.control.jobs import Job, Member
from streamrl_jax.control.lines import LinePlan, Seat
from streamrl_jax.control.placing import Waiting
from streamrl_jax.ranker.cost import FLAT, TokenLatency
from streamrl_jax.ranker.dispatch import Plan, Server, plan_answers, plan_lpt, plan_paper
from streamrl_jax.ranker.plans import caps_of
from streamrl_jax.ranker.risk import KNOWN, USUAL, Spread

GAIN: Final = 0.1
GAIN_KNOWN: Final = 0.01
"""A plan of lines is followed if it ends so much sooner than the shared queue, by the model that made both: the first
where lengths are predicted, and then in the mean over lengths as they may turn out as well, since a queue that all
share makes up for wrong predictions and a line only by stealing; the second where they are known."""

_ALIKE: Final = 0.9
"""Share of the largest KV cache that the smallest has where instances count as equal: what an engine finds free differs
a little from start to start."""

_UNBOUNDED: Final = 1 << 50
"""KV tokens of an instance that does not say."""

_UNEQUAL: Final = (
    "dispatch.policy = paper knows equal instances alone; these differ in their slots or KV caches, so that samples "
    "wait in the order of their lengths, as with lpt"
)
_STEPS: Final = 256  # into which a token is cut, to sort by whole numbers
_LATE: Final = 1 << 62  # places before the longest answer

Lengths = Float64[np.ndarray, " prompts"]


@dataclass(frozen=True)
class DispatchSettings:
    """How jobs with predicted lengths are dispatched."""

    policy: Policy = "arrival"
    alpha: float = 0.2  # share of the prompts that the policy "paper" takes for long
    cost: TokenLatency = FLAT  # of a decode step


ARRIVAL: Final = DispatchSettings()
"""Nothing is planned."""


@dataclass(frozen=True, slots=True)
class Ready:
    """An instance that can be given work."""

    name: str
    slots: int
    kv_tokens: int  # 0: not known


@dataclass(frozen=True, eq=False)
class Arrangement:
    """How the samples of a job wait."""

    policy: Policy
    order: Int64[np.ndarray, " prompts"] | None = None
    """In the queue that all instances share, the prompts in this order; None: as they are."""
    lines: LinePlan | None = None
    """In lines, instead of that queue."""
    planned_s: float = 0.0
    """From the first hand-out to the last answer, as predicted; 0: nothing was, or the cost of a step is not known."""
    note: str = ""
    """Why the policy is not followed, where that is worth a word."""


def arrange(
    job: Job,
    settings: DispatchSettings,
    ready: Sequence[Ready],
    recent: Sequence[float] | Lengths,
    spread: Spread = USUAL,
) -> Arrangement:
    """Decides how a job's samples wait.

    Args:
        job: with or without predictions.
        settings: the controller's.
        ready: the instances that can be given work, in an order that lasts.
        recent: lengths of answers in the last iterations; empty: none yet.
        spread: how lengths turn out, measured against predictions. Those that are forced to be as predicted are known.

    Returns:
        In the order of arrival without predictions, with the policy ``arrival``, or where all lengths are equal; by
        length with the policy ``lpt``, for fewer than two instances, where lines would not end sooner, and with the
        policy ``paper`` for instances that differ; else in lines.
    """
    policy = policy_of(job, settings)
    if policy == "arrival" or job.predicted is None:
        return Arrangement("arrival")
    lengths = np.asarray(job.predicted, np.float64)
    places = -np.floor(lengths * _STEPS).astype(np.int64)
    order = None if places.min() == places.max() else np.argsort(places, kind="stable")
    shared = Arrangement(policy, order)
    if not ready:
        return shared
    known = _known(job)
    made = _Planner(job, lengths, settings, ready, KNOWN if known else spread)
    balanced = made.balanced()
    shared = replace(shared, planned_s=made.seconds(balanced))
    if policy == "lpt" or len(ready) < 2 or order is None:
        return shared
    if policy == "paper" and not made.alike():
        return replace(shared, note=_UNEQUAL)
    if policy == "paper":
        return made.in_lines(policy, made.paper(recent if len(recent) else lengths), job.n)
    plan, answers = made.skewness()
    if not pays(plan, balanced, known=known):
        return shared
    return made.in_lines(policy, plan, answers)


def pays(plan: Plan, balanced: Plan, *, known: bool) -> bool:
    """Whether a plan by `plan_skewness` is worth to be followed.

    Args:
        plan: its answers wait in lines.
        balanced: what the shared queue comes to.
        known: whether the lengths are forced to be as predicted.
    """
    gain = GAIN_KNOWN if known else GAIN
    return plan.makespan_s <= (1 - gain) * balanced.makespan_s and (known or plan.saves >= gain)


def policy_of(job: Job, settings: DispatchSettings) -> Policy:
    """How a job is dispatched: in the order of arrival where nothing is predicted, or nothing is to be chosen."""
    if job.predicted is None or job.probe or job.pinned:
        return "arrival"
    return job.policy or settings.policy


def place_of(tokens: float) -> int:
    """Where a predicted length stands in the queue: a negative number, the lower the longer."""
    return -int(tokens * _STEPS)


def waiting_of(job: Job, asked: Member, settings: DispatchSettings, *, late: bool) -> Waiting:
    """A sample as the queue sorts it.

    Args:
        job: of the sample.
        asked: the sample.
        settings: the controller's.
        late: whether it is added to a job whose samples were asked for before: where lengths count it goes first among
            its iteration, which waits for it.

    Returns:
        In the order of its job's priority, iteration, predicted length if that counts, and place in the job.
    """
    place = asked.position
    if late and settings.policy != "arrival":
        place -= _LATE
    elif job.predicted is not None and policy_of(job, settings) != "arrival":
        place = place_of(job.predicted[asked.position])
    order = (job.priority, job.iteration, place, asked.position, asked.index)
    capped = not (job.probe or job.pinned or (job.evaluation and job.predicted is None))
    return Waiting(asked.sample_id, asked.group, job.min_version, order, job.pinned, capped)


def _known(job: Job) -> bool:
    """Whether the lengths are forced to be what was predicted."""
    return (
        job.forced is not None
        and job.predicted is not None
        and np.array_equal(np.repeat(np.asarray(job.predicted, np.float64), job.n), np.asarray(job.forced))
    )


@dataclass(frozen=True, eq=False)
class _Planner:
    """Plans for one job over the instances that are there."""

    job: Job
    lengths: Lengths
    settings: DispatchSettings
    ready: Sequence[Ready]
    spread: Spread
    prompts: Int64[np.ndarray, " prompts"] = field(init=False)
    servers: tuple[Server, ...] = field(init=False)

    def __post_init__(self) -> None:
        cost = self.settings.cost
        servers = tuple(Server(one.name, one.slots, one.kv_tokens or _UNBOUNDED, cost) for one in self.ready)
        prompts = np.fromiter(
            (len(prompt.token_ids) for prompt in self.job.prompts), np.int64, len(self.lengths)
        )
        object.__setattr__(self, "servers", servers)
        object.__setattr__(self, "prompts", prompts)

    def balanced(self) -> Plan:
        """What the shared queue comes to."""
        return plan_lpt(self.lengths, self.job.n, self.servers, self.prompts)

    def alike(self) -> bool:
        """Whether the instances are equal, but for some of the KV cache."""
        caches = [one.kv_tokens for one in self.servers]
        return len({one.slots for one in self.servers}) == 1 and min(caches) >= _ALIKE * max(caches)

    def paper(self, recent: Sequence[float] | Lengths) -> Plan:
        """The paper's, for instances that are `alike`: all are taken for as large as the smallest."""
        slots, kv_tokens = (
            min(getattr(one, name) for one in self.servers) for name in ("slots", "kv_tokens")
        )
        equal = [replace(one, slots=slots, kv_tokens=kv_tokens) for one in self.servers]
        return plan_paper(self.lengths, self.job.n, equal, recent, self.settings.alpha)

    def skewness(self) -> tuple[Plan, int]:
        """The better one, and how many answers to a prompt it keeps together: all, or each for itself."""
        limit = float(self.job.sampling.max_new_tokens)
        return plan_answers(self.lengths, self.job.n, self.servers, self.prompts, self.spread, limit)

    def in_lines(self, policy: Policy, plan: Plan, answers: int) -> Arrangement:
        """Lines as the plan says."""
        units = self.job.n // answers
        tokens = np.repeat(self.lengths, units)
        context = float((self.lengths / 2 + self.prompts).mean())
        cost = self.settings.cost
        seats = tuple(
            Seat(one.name, int(batch), float(cost.ptl(int(batch), context)), float(cost.ptl(1, context)))
            for one, batch in zip(self.servers, plan.batch, strict=True)
        )
        caps = {seats[index].name: cap for index, cap in caps_of(plan, self.servers, answers).items()}
        lines = LinePlan(seats, plan.instance, plan.rank, tokens, answers, caps)
        return Arrangement(policy, lines=lines, planned_s=self.seconds(plan))

    def seconds(self, plan: Plan) -> float:
        """What the plan predicts, if a step's cost is known."""
        return 0.0 if self.settings.cost == FLAT else plan.makespan_s
