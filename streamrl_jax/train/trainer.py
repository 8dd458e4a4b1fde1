"""Drives one training iteration over the compiled programs; the loop's only door to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float

from streamrl_jax.train.advantage import GroupAdvantage, Whitening, group_advantages, whitening
from streamrl_jax.train.aggregate import AggregationMode, Size, denominator
from streamrl_jax.train.agreement import Comparison, compare
from streamrl_jax.train.answer import Answer, sampled_answer
from streamrl_jax.train.batcher import (
    MicroBatch,
    MicroBatcher,
    pack_all,
)
from streamrl_jax.train.groups import Groups, draw_mini_batches
from streamrl_jax.train.mesh import batch_shards, replicated
from streamrl_jax.train.models import Params
from streamrl_jax.train.moments import Moments, faded, merge
from streamrl_jax.train.objective import Prepared, Tally
from streamrl_jax.train.report import (
    answer_metrics,
    loss_metrics,
    overlap_metrics,
    packing_metrics,
    update_metrics,
)
from streamrl_jax.train.shapes import BatchShape, plan_rl_shape
from streamrl_jax.train.state import TrainState
from streamrl_jax.train.step import Steps, UpdateReport
from streamrl_jax.types import Sample

# How much of its weight a past iteration keeps in the running statistics, per iteration.
_WHITENING_MEMORY = 0.5


@dataclass(frozen=True)
class IterationResult:
    """What an iteration brought.

    Attributes:
        metrics: Under their logged names.
        agreement: Trainer beside generator, on the tokens seen before the first update.
        refused: Whether an update was refused because something was not finite.
    """

    metrics: dict[str, float]
    agreement: Comparison
    refused: bool


@dataclass(frozen=True, eq=False)
class _Batch:
    """A micro-batch on the devices."""

    micro: MicroBatch
    prepared: Prepared


class Trainer:
    """Trains on the samples of one iteration after the other.

    Call order: `warm_up` once (optional), then per iteration `begin_iteration`, `add` for each sample,
    `end_iteration`.

    With a single update per iteration and statistics for whitening that are known beforehand, each
    micro-batch's gradient is accumulated as soon as it is full, while the rest is still being generated.
    Otherwise the actor (with several updates, the critic too) waits for the last sample.

    Invariant (DESIGN rule 2): the same samples in any order and any micro-batch split give the same update
    and metrics.

    Attributes:
        state: Parameters and optimizers; replaced by `end_iteration`.
        reference: The frozen reference's parameters, or None.
    """

    def __init__(
        self,
        steps: Steps,
        state: TrainState,
        reference: Params | None = None,
        *,
        group_advantage: GroupAdvantage | None = None,
        shape: BatchShape | None = None,
        pack: bool = True,
    ) -> None:
        """Binds the programs to a state.

        Args:
            steps: The compiled programs.
            state: From `Steps.init_state` or a checkpoint; the trainer owns it from here on.
            reference: Needed where `cfg.uses_reference`.
            group_advantage: One's own advantage; None: GRPO's, by the configuration.
            shape: Row shapes; None: by the configuration.
            pack: Whether a row may hold several answers.
        """
        if steps.cfg.uses_reference != (reference is not None):
            raise ValueError(
                f"the configuration {'uses' if steps.cfg.uses_reference else 'does not use'} a reference, "
                f"and {'none is' if reference is None else 'one is'} given"
            )
        self.state = state
        self.reference = reference
        self.shape = shape or plan_rl_shape(steps.cfg, batch_shards(steps.mesh))
        self._steps = steps
        self._cfg = steps.cfg
        self._mode: AggregationMode = steps.cfg.actor.loss_agg_mode
        self._pack = pack
        by_std = partial(group_advantages, divide_by_std=steps.cfg.algorithm.norm_adv_by_std_in_grpo)
        self._group_advantage = group_advantage or by_std
        self._gradients = steps.zero_gradients()
        self.begin_iteration(0)

    def warm_up(self) -> None:
        """Compiles what an iteration needs, for all row shapes."""
        self.state = self._steps.warm_up(self.state, self.reference, self.shape)

    def begin_iteration(self, version: int) -> None:
        """Forgets the last iteration.

        Args:
            version: The trainer's version: the iterations it has completed.
        """
        self._version = version
        self._answers: list[Answer] = []
        self._groups = Groups(self._cfg.rollout.n, self._group_advantage)
        self._batcher = MicroBatcher(self.shape, self._mode, pack=self._pack)
        self._batches: list[_Batch] = []
        self._waiting: list[_Batch] = []
        self._tallies: list[Tally] = []
        self._scored: list[tuple[MicroBatch, Float[Array, "rows len"]]] = []
        self._reports: list[UpdateReport] = []
        self._accumulated_at: list[float] = []
        self._last_arrival = 0.0
        self._whitening = self._whitening_known()

    def add(self, sample: Sample) -> None:
        """Takes a sample, and works on the micro-batch that it fills."""
        self._last_arrival = max(self._last_arrival, sample.rewarded_s)
        for answer in self._with_advantage(sampled_answer(sample)):
            self._answers.append(answer)
            if self._steps.single_update:
                self._take(self._batcher.add(answer))

    @property
    def accumulated(self) -> int:
        """Micro-batches of this iteration whose actor gradient has been computed; each pass counts."""
        return len(self._accumulated_at)

    def end_iteration(self) -> IterationResult:
        """Works on what is left, updates the networks, and waits for the result.

        Raises:
            ValueError: There was no sample, or a group is incomplete.
        """
        if missing := self._groups.incomplete():
            raise ValueError(
                f"version {self._version}: groups of {self._cfg.rollout.n} lack answers: {missing}"
            )
        if not self._answers:
            raise ValueError(f"version {self._version}: no sample to train on")
        if self._steps.single_update:
            self._take(self._batcher.flush())
            self._settle_whitening()
            for batch in self._waiting:
                self._learn_actor(batch)
            self._apply(self._batches)
        else:
            self._several_updates()
        return self._finish()

    # ------------------------------------------------------------- one update

    def _with_advantage(self, answer: Answer) -> list[Answer]:
        return [answer] if self._cfg.uses_critic else self._groups.add(answer)

    def _take(self, full: Iterable[MicroBatch]) -> None:
        for micro in full:
            batch = self._prepare(micro)
            self._batches.append(batch)
            if self._whitening is None:
                self._waiting.append(batch)
            else:
                self._learn_actor(batch)

    def _prepare(self, micro: MicroBatch) -> _Batch:
        rows = self._steps.place(micro.rows)
        known = None if self.reference is None else self._steps.score(self.reference, rows)
        critic = self.state.critic
        actor_sum, critic_sum = self._gradients
        if critic is None or critic_sum is None or not self._steps.single_update:
            prepared, tally = self._steps.estimate(critic.params if critic else None, rows, known)
        else:
            critic_sum, prepared, tally = self._steps.learn_critic_on_arrival(
                critic.params, critic_sum, rows, known
            )
            self._gradients = actor_sum, critic_sum
        self._tallies.append(tally)
        return _Batch(micro, prepared)

    def _learn_actor(self, batch: _Batch) -> None:
        assert self._whitening is not None
        actor_sum, critic_sum = self._gradients
        actor_sum, tally, logprobs = self._steps.learn_actor(
            self.state.actor.params, actor_sum, batch.prepared, self._whitening
        )
        self._gradients = actor_sum, critic_sum
        self._tallies.append(tally)
        self._accumulated_at.append(time.monotonic())
        if not self._reports:  # no update yet: these are the log-probs of the trainer's version
            self._scored.append((batch.micro, logprobs))

    def _apply(self, batches: Sequence[_Batch]) -> None:
        size = _size(batches)
        self.state, self._gradients, report = self._steps.apply(
            self.state,
            self._gradients,
            actor_denominator=float(denominator(self._mode, size)),
            critic_denominator=float(size.tokens),
            learn_actor=self._version >= self._cfg.critic.warmup_steps or not self._cfg.uses_critic,
        )
        self._reports.append(report)

    # ------------------------------------------------------------- whitening

    def _whitening_known(self) -> Whitening | None:
        """The whitening that applies, if it is known before the batch."""
        kind = self._cfg.algorithm.whiten_advantages
        if not self._cfg.uses_critic or kind == "none":
            return Whitening()
        past = jax.device_get(self.state.advantages)
        return whitening(past) if kind == "running" and past.count > 0 else None

    def _settle_whitening(self) -> None:
        if self._whitening is None:
            self._whitening = whitening(self._statistics())

    def _statistics(self) -> Moments:
        """Of this iteration's advantages, before whitening."""
        raw = [tally.spreads.get("critic/advantages_raw") for tally in self._tallies]
        return merge(part for part in jax.device_get(raw) if part is not None)

    # -------------------------------------------------------- several updates

    def _several_updates(self) -> None:
        drawn = draw_mini_batches(
            self._answers, self._cfg.mini_batches, seed=self._cfg.run.seed, version=self._version
        )
        minis = [
            [self._prepare(micro) for micro in pack_all(answers, self.shape, self._mode, pack=self._pack)]
            for answers in drawn
        ]
        self._batches = [batch for mini in minis for batch in mini]
        self._settle_whitening()
        for _ in range(self._cfg.actor.ppo_epochs):
            for mini in minis:
                for batch in mini:
                    self._learn_critic(batch)
                    self._learn_actor(batch)
                self._apply(mini)

    def _learn_critic(self, batch: _Batch) -> None:
        actor_sum, critic_sum = self._gradients
        if self.state.critic is None or critic_sum is None:
            return
        critic_sum, tally = self._steps.learn_critic(self.state.critic.params, critic_sum, batch.prepared)
        self._gradients = actor_sum, critic_sum
        self._tallies.append(tally)

    # ----------------------------------------------------------------- result

    def _finish(self) -> IterationResult:
        tallies, scored, reports = jax.device_get(
            (self._tallies, [x for _, x in self._scored], self._reports)
        )
        size = _size(self._batches)
        epochs = self._cfg.actor.ppo_epochs
        metrics = loss_metrics(tallies, self._mode, Size(size.tokens * epochs, size.sequences * epochs))
        taken = (
            self._cfg.algorithm.kl_coef
            * metrics.get("actor/reward_kl_penalty", 0.0)
            * size.tokens
            / size.sequences
        )
        metrics |= answer_metrics(self._answers, taken)
        metrics |= update_metrics(reports) | packing_metrics([batch.micro for batch in self._batches])
        metrics |= overlap_metrics(self._accumulated_at, self._last_arrival)
        agreement = compare(list(zip((m for m, _ in self._scored), scored, strict=True)), self._version)
        refused = metrics["training/update_refused"] > 0
        if self._cfg.uses_critic and not refused:
            self._remember_statistics()
        return IterationResult(metrics | agreement.metrics(), agreement, refused)

    def _remember_statistics(self) -> None:
        past = jax.device_get(self.state.advantages)
        statistics = merge([faded(past, _WHITENING_MEMORY), self._statistics()])
        placed = jax.device_put(jax.tree.map(np.float32, statistics), replicated(self._steps.mesh))
        self.state = replace(self.state, advantages=placed)


def _size(batches: Sequence[_Batch]) -> Size:
    return sum((batch.micro.size for batch in batches), Size())
