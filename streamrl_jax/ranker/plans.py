"""Servers, plans, and the one model by which plans are compared. Pure, NumPy only.

A *group* is a prompt with its n answers, of one predicted length. An instance works through its *line* of groups with
at most `batch` answers at once; as one ends the next begins (continuous batching). How long that takes::

    seconds = Σ over steps of base(answers active) + kv_token_s · Σ over tokens of their context + prefill

The second sum does not depend on the order: only what is on an instance counts. The first has a full part, in which
all slots are busy, and a tail, in which the answers that are left end one by one. In a line with the longest first,
the slots that hold no very long answer end about together, at a *level* λ: the rest's tokens over the rest's slots
(`_level`). So a long answer costs its steps in the tail at the low price of a small batch, not PTL(batch) · L as in
the paper's model, in which an instance runs full to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int, Int32

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.balance import assign_lpt
from streamrl_jax.ranker.cost import TokenLatency


@dataclass(frozen=True)
class Server:
    """What a plan knows of a generation instance."""

    name: str
    slots: int  # answers that it can run at once
    kv_tokens: int  # tokens of context that its cache holds
    cost: TokenLatency

    def __post_init__(self) -> None:
        if self.slots < 1 or self.kv_tokens < 1:
            raise ValueError(
                f"server {self.name}: slots = {self.slots}, kv_tokens = {self.kv_tokens}: both are at least 1"
            )


@dataclass(frozen=True, eq=False)
class Plan:
    """Which instance answers what, in which order, with how many at once.

    Invariant: every group has one instance, and the ranks of an instance's groups are 0, 1, 2, … once each.

    Attributes:
        instance: Of each group, an index into the servers.
        rank: Of each group, its place in its instance's line.
        batch: Of each server, answers at once; at least 1 and at most its slots.
        makespan_s: Predicted by the model of the planner that made it (`predicted_makespan`, but for the paper's).
        saves: Share of the end of plain longest first that it saves in the mean over lengths as they may turn out; 0
            where nobody has asked.
    """

    instance: Int32[np.ndarray, " groups"]
    rank: Int32[np.ndarray, " groups"]
    batch: Int32[np.ndarray, " servers"]
    makespan_s: float
    saves: float = 0.0


@dataclass(frozen=True, eq=False)
class Work:
    """Checked work of one stage.

    Attributes:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        prompts: Tokens of each group's prompt.
    """

    lengths: Float64[np.ndarray, " groups"]
    n: int
    prompts: Float64[np.ndarray, " groups"]

    def __getitem__(self, groups: Int[np.ndarray, " some"] | slice) -> Work:
        """The work of some groups, in the order given."""
        return Work(self.lengths[groups], self.n, self.prompts[groups])


def checked_work(
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
) -> Work:
    """Refuses what no plan can be made of.

    Args:
        lengths: Predicted tokens of an answer, of each group.
        n: Answers of each group.
        servers: At least one.
        prompt_tokens: Of each group; None: 0.

    Raises:
        UserError: A length is not above 0 and finite, a prompt's tokens are below 0, their numbers differ, n is below
            1, or there is no server.
    """
    values = np.asarray(lengths, np.float64).reshape(-1)
    prompts = np.zeros(values.size) if prompt_tokens is None else np.asarray(prompt_tokens, np.float64)
    if not servers:
        raise UserError("dispatch: there is no server to plan for; an instance has to have joined")
    if n < 1:
        raise UserError(f"dispatch: n = {n} answers of a prompt; at least 1 is needed")
    if (bad := ~((values > 0) & np.isfinite(values))).any():
        raise UserError(
            f"dispatch: lengths[{int(bad.argmax())}] = {values[bad.argmax()]}: a predicted length is a finite number "
            f"above 0; see to the predictor that gave it"
        )
    if prompts.shape != values.shape:
        raise UserError(
            f"dispatch: {prompts.size} prompt_tokens for {values.size} lengths; one for each is needed"
        )
    if (bad := ~((prompts >= 0) & np.isfinite(prompts))).any():
        raise UserError(f"dispatch: prompt_tokens[{int(bad.argmax())}] = {prompts[bad.argmax()]} is below 0")
    return Work(values, n, prompts)


def longest_first(lengths: Float[np.ndarray, " groups"]) -> Int[np.ndarray, " groups"]:
    """The groups by falling length; equals stay in their order."""
    return np.argsort(-lengths, kind="stable")


def line_up(
    instance: Int32[np.ndarray, " groups"], servers: int, order: Int[np.ndarray, " groups"]
) -> tuple[Int[np.ndarray, " groups"], Int[np.ndarray, " servers_and_one"]]:
    """Sorts groups into lines.

    Args:
        instance: Of each group.
        servers: How many.
        order: The groups in the order that each line keeps.

    Returns:
        The groups line after line, and where each server's line starts and the last one ends.
    """
    keys = instance[order]
    if servers < np.iinfo(np.int16).max:
        keys = keys.astype(np.int16)  # sorted by radix, ten times faster
    lined = order[np.argsort(keys, kind="stable")]
    bounds = np.zeros(servers + 1, np.int64)
    np.cumsum(np.bincount(instance, minlength=servers), out=bounds[1:])
    return lined, bounds


def lines_of(plan: Plan) -> list[Int[np.ndarray, " line"]]:
    """The groups of each server in the order of their ranks."""
    lined, bounds = line_up(plan.instance, plan.batch.size, np.argsort(plan.rank, kind="stable"))
    return [lined[start:end] for start, end in _spans(bounds)]


def caps_of(plan: Plan, servers: Sequence[Server], answers: int) -> dict[int, int]:
    """How many answers a server holds at once, by its index, where a plan has it run a smaller batch than its slots.

    Args:
        plan: Of some groups.
        servers: As the plan counts them.
        answers: Of a group.

    Returns:
        Without those that hold all they can: a batch is kept small for what was planned there, if anything was.
    """
    own = np.bincount(plan.instance, minlength=len(servers)) * answers
    held = np.minimum(plan.batch, own)
    return {
        index: int(cap)
        for index, (server, cap) in enumerate(zip(servers, held, strict=True))
        if 0 < cap < server.slots
    }


def plan_of(
    instance: Int32[np.ndarray, " groups"],
    order: Int[np.ndarray, " groups"],
    work: Work,
    servers: Sequence[Server],
    batches: Sequence[int] | None = None,
) -> Plan:
    """Makes a plan of a placement, and predicts it.

    Args:
        instance: Of each group.
        order: The groups in the order that each line keeps.
        work: Of the stage.
        servers: As `instance` counts them.
        batches: Bound on each server's batch besides slots and KV cache; None: none.

    Returns:
        The plan; its batches are as large as slots, KV cache (`line_batch`) and `batches` allow.
    """
    lined, bounds = line_up(instance, len(servers), order)
    ordered = work[lined]
    rank = np.empty(instance.size, np.int32)
    rank[lined] = np.arange(instance.size) - np.repeat(bounds[:-1], np.diff(bounds))
    batch = np.empty(len(servers), np.int32)
    ends = np.zeros(len(servers))
    for index, (server, (start, end)) in enumerate(zip(servers, _spans(bounds), strict=True)):
        line = ordered[slice(start, end)]
        batch[index] = line_batch(server, line)
        if batches is not None:
            batch[index] = max(1, min(batch[index], batches[index]))
        ends[index] = line_seconds(server.cost, int(batch[index]), line)
    return Plan(instance, rank, batch, float(ends.max(initial=0.0)))


def lpt_of(work: Work, servers: Sequence[Server]) -> Plan:
    """Longest processing time first: each group to the instance that would end it first if it ran full.

    Args:
        work: Of the stage.
        servers: At least one; they may differ.
    """
    order = longest_first(work.lengths)
    instance = np.empty(order.size, np.int32)
    if order.size:
        instance[order] = assign_lpt(work.lengths[order], full_token_s(work, servers))
    return plan_of(instance, order, work, servers)


def full_token_s(work: Work, servers: Sequence[Server]) -> Float64[np.ndarray, " servers"]:
    """Seconds that a token of this work takes each server while its slots are full, or as full as the work can make
    them.

    Args:
        work: At least one group.
        servers: At least one.
    """
    context = _met(work.lengths) + float(work.prompts.mean())
    share = max(1, work.lengths.size * work.n // len(servers))
    each: dict[tuple[int, int, TokenLatency], float] = {}
    for server in servers:
        key = (server.slots, server.kv_tokens, server.cost)
        if key not in each:
            batch = max(1, min(server.slots, share, int(server.kv_tokens // context)))
            each[key] = float(server.cost.ptl(batch, context)) / batch
    return np.array([each[server.slots, server.kv_tokens, server.cost] for server in servers])


def predicted_seconds(
    plan: Plan,
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
) -> Float64[np.ndarray, " servers"]:
    """When each server ends its line, by the model above.

    Args:
        plan: Of these groups and servers.
        lengths: Tokens of an answer, of each group.
        n: Answers of each group.
        servers: As the plan counts them.
        prompt_tokens: Of each group; None: 0.
    """
    work = checked_work(lengths, n, servers, prompt_tokens)
    return np.array(
        [
            line_seconds(server.cost, int(batch), work[line])
            for server, batch, line in zip(servers, plan.batch, lines_of(plan), strict=True)
        ]
    )


def predicted_makespan(
    plan: Plan,
    lengths: Sequence[float] | Float[np.ndarray, " groups"],
    n: int,
    servers: Sequence[Server],
    prompt_tokens: Sequence[int] | Int[np.ndarray, " groups"] | None = None,
) -> float:
    """When the last server ends (`predicted_seconds`)."""
    return float(predicted_seconds(plan, lengths, n, servers, prompt_tokens).max(initial=0.0))


def line_batch(server: Server, line: Work) -> int:
    """Answers that an instance runs at once: those that its slots, and its KV cache in the mean over the line, hold.

    Where long answers run together first they need more than the mean: the engine then puts some of them off and takes
    their contexts in again, which costs little beside decoding them. A batch small enough for the worst moment would
    hold the whole line back for it.

    Args:
        server: The instance.
        line: Its groups.

    Returns:
        At least 1 and at most its slots.
    """
    if not line.lengths.size:
        return server.slots
    context = float((line.lengths * (line.prompts + line.lengths / 2)).sum() / line.lengths.sum())
    return max(1, min(server.slots, int(server.kv_tokens // context)))


def line_seconds(cost: TokenLatency, batch: int, line: Work) -> float:
    """When an instance ends its line.

    Args:
        cost: Of its steps.
        batch: Answers at once.
        line: Its groups in order; the longest first, or any other.
    """
    if not line.lengths.size:
        return 0.0
    lengths, n = line.lengths, line.n
    reads = float((lengths * (line.prompts + lengths / 2)).sum()) * n
    prefill = float((cost.prefill_s(line.prompts) - cost.prefill_s(0)).sum())
    if _falls(lengths):
        full, mean, ends = _level(lengths, n, batch)
    else:
        full, mean, ends = _queue(lengths, n, batch)
    steps = ends - np.append(ends[1:], full) if ends.size else ends
    tail = float((cost.step_s(np.minimum(np.arange(1, ends.size + 1) * n, batch), 0) * steps).sum())
    return full * float(cost.step_s(mean, 0)) + tail + cost.kv_token_s * reads + prefill


def _level(
    lengths: Float[np.ndarray, " line"], n: int, batch: int
) -> tuple[float, float, Float[np.ndarray, " tail"]]:
    """The line with the longest first: steps in which the slots are full, the mean batch then, and the steps at which
    the groups end that go on beyond, falling."""
    head = min(lengths.size, (batch - 1) // n)
    total = float(lengths.sum())
    before = np.cumsum(lengths[:head]) - lengths[:head]
    slots = batch - n * np.arange(head)
    # A group is long if it does not end by the level of what is not longer.
    longer = lengths[:head] * slots > n * (total - before)
    long = head if longer.all() else int(longer.argmin())
    if long == lengths.size:
        return 0.0, 1.0, lengths
    rest, left = lengths.size - long, max(1, batch - n * long)
    level = n * max(float(lengths[long]), total - float(lengths[:long].sum())) / left
    # Answers are not cut up: one of the slots has so many of them.
    full = max(level, -(-rest * n // left) * float(lengths[-1]))
    return full, n * long + left * level / full, lengths[:long][lengths[:long] > full]


def _queue(
    lengths: Float[np.ndarray, " line"], n: int, batch: int
) -> tuple[float, float, Float[np.ndarray, " tail"]]:
    """As `_level` for a line in any order: a group begins when the tokens before it are done, less those that the
    running answers have still before them then."""
    residual = _met(lengths)
    before = np.cumsum(lengths) - lengths
    starts = np.maximum(n * before / batch - residual, 0.0)
    full = float(starts[-1])
    ends = np.sort(starts + lengths)[::-1]
    return full, float(batch), ends[ends > full]


def _falls(lengths: Float[np.ndarray, " line"]) -> bool:
    return bool((lengths[1:] <= lengths[:-1]).all())


def _met(lengths: Float[np.ndarray, " line"]) -> float:
    """Tokens that a running answer has so far, and that it has still to come, as one meets it at a random step."""
    return float((lengths**2).sum() / lengths.sum() / 2)


def _spans(bounds: Int[np.ndarray, " servers_and_one"]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(bounds.tolist())
