"""Drives one training iteration over the compiled programs; the loop's only door to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import jax
import numpy as np
from jaxtyping import Array, Float

from streamrl_jax.train.advantage import GroupAdvantage, Whitening, level, whitening
from streamrl_jax.train.advantage import group_advantage as default_group_advantage
from streamrl_jax.train.aggregate import Aggregation
from streamrl_jax.train.agreement import compare
from streamrl_jax.train.answer import Answer, Shaping, check_vocabulary, sampled_answer
from streamrl_jax.train.batcher import MicroBatch, MicroBatcher, pack_all
from streamrl_jax.train.groups import Groups, draw_mini_batches
from streamrl_jax.train.mesh import batch_shards
from streamrl_jax.train.models import Params
from streamrl_jax.train.moments import Moments, faded, merge
from streamrl_jax.train.objective import Prepared, Tally
from streamrl_jax.train.plan import Plan
from streamrl_jax.train.refusal import Refusal, find_culprits
from streamrl_jax.train.report import (
    IterationResult,
    answer_metrics,
    filter_metrics,
    loss_metrics,
    overlap_metrics,
    packing_metrics,
    update_metrics,
)
from streamrl_jax.train.shapes import BatchShape, plan_rl_shape
from streamrl_jax.train.state import TrainState, place_whole
from streamrl_jax.train.step import Accumulators, Steps, UpdateReport
from streamrl_jax.types import Sample

# How much of its weight a past iteration keeps in the running statistics, per iteration.
_WHITENING_MEMORY = 0.5


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
        mesh: That all of it lies on.
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
        plan: Plan | None = None,
    ) -> None:
        """Binds the programs to a state.

        Args:
            steps: The compiled programs.
            state: From `Steps.init_state` or a checkpoint; the trainer owns it from here on.
            reference: Needed where `cfg.uses_reference`.
            group_advantage: One's own advantage; None: that of `algorithm.adv_estimator`.
            shape: Row shapes; None: by the configuration.
            pack: Whether a row may hold several answers.
            plan: Of several trainer processes; None: there is one.
        """
        if steps.cfg.uses_reference != (reference is not None):
            raise ValueError(
                f"the configuration {'uses' if steps.cfg.uses_reference else 'does not use'} a reference, "
                f"and {'none is' if reference is None else 'one is'} given"
            )
        self.state = state
        self.reference = reference
        self.shape = shape or plan_rl_shape(steps.cfg, batch_shards(steps.mesh))
        self.mesh = steps.mesh
        self._steps = steps
        self._cfg = steps.cfg
        self._pack = pack
        self._plan = plan or Plan()
        self._shaping = Shaping.of(steps.cfg)
        self._group_advantage = None
        if steps.cfg.uses_groups:
            self._group_advantage = group_advantage or default_group_advantage(steps.cfg.algorithm)
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
        self._left_out: list[Answer] = []
        self._faults: list[tuple[Answer, str]] = []
        self._groups = Groups(self._cfg.rollout.n, self._group_advantage)
        self._batcher = MicroBatcher(self.shape, pack=self._pack)
        self._batches: list[_Batch] = []
        self._waiting: list[_Batch] = []
        self._tallies: list[Tally] = []
        self._scored: list[tuple[MicroBatch, Float[Array, "rows len"]]] = []
        self._reports: list[UpdateReport] = []
        self._accumulated_at: list[float] = []
        self._last_arrival = 0.0
        self._whitening = self._whitening_known()

    def add(self, sample: Sample) -> int:
        """Takes a sample, and works on the micro-batch that it fills.

        Returns:
            The groups that this sample completed and that are left out because their scores do not differ
            (`algorithm.filter_groups`): 0 or 1. Another prompt may take their place.

        Raises:
            UserError: Its instance samples ids that this run masks.
        """
        self._last_arrival = max(self._last_arrival, sample.rewarded_s)
        answer = sampled_answer(sample, self._shaping)
        check_vocabulary(answer, self._steps.vocab_limit)
        if self._faulty(answer):
            return 0
        complete = self._groups.add(answer) if self._waits_for_groups else [answer]
        if complete and self._filters and level(np.array([answer.score for answer in complete])):
            self._left_out.extend(complete)
            return 1
        for answer in complete:
            if self._faulty(answer):
                continue
            self._answers.append(answer)
            if self._cfg.single_update:
                self._take(self._batcher.add(answer))
        return 0

    def logprobs(self, micro: MicroBatch) -> Float[np.ndarray, "rows len"]:
        """Of the present policy, for the probe of the agreement."""
        self._plan.rows("score", micro)
        return self._steps.score_to_host(self.state.actor.params, self._steps.place(micro.rows))

    @property
    def accumulated(self) -> int:
        """Micro-batches of this iteration whose actor gradient has been computed; each pass counts."""
        return len(self._accumulated_at)

    def end_iteration(self) -> IterationResult:
        """Works on what is left, updates the networks, and waits for the result.

        Where a sample's reward, log-probs or advantage are not finite, or every group was left out, nothing is
        updated. A loss or gradient that is not finite refuses its update alone.

        Raises:
            ValueError: There was no sample, or a group is incomplete.
        """
        if self._faults:
            return self._refuse_all()
        if missing := self._groups.incomplete():
            raise ValueError(
                f"version {self._version}: groups of {self._cfg.rollout.n} lack answers: {missing}"
            )
        if not self._answers:
            return self._nothing_to_train_on()
        if self._cfg.single_update:
            self._take(self._batcher.flush())
            self._settle_whitening()
            for batch in self._waiting:
                self._learn_actor(batch)
            self._apply()
        else:
            self._several_updates()
        return self._finish()

    # -------------------------------------------------------------- admission

    @property
    def _filters(self) -> bool:
        return self._cfg.algorithm.filter_groups.enable

    @property
    def _waits_for_groups(self) -> bool:
        return self._cfg.uses_groups or self._filters

    def _faulty(self, answer: Answer) -> bool:
        if fault := answer.non_finite:
            self._faults.append((answer, fault))
        return bool(fault)

    def _refuse_all(self) -> IterationResult:
        """The whole iteration is refused for the sake of some samples; what was accumulated is dropped."""
        self._gradients = self._steps.zero_gradients()
        faults = sorted((answer.name, fault) for answer, fault in self._faults)  # whatever came first
        refusal = Refusal("sample {}: {}".format(*faults[0]), tuple(name for name, _ in faults))
        return IterationResult(self._bare_metrics(refused=1.0), compare([], self._version), refusal)

    def _nothing_to_train_on(self) -> IterationResult:
        if not self._left_out:
            raise ValueError(f"version {self._version}: no sample to train on")
        return IterationResult(self._bare_metrics(refused=0.0), compare([], self._version))

    def _bare_metrics(self, *, refused: float) -> dict[str, float]:
        answers = [*self._answers, *self._left_out]
        counts = {"training/update_refused": refused, "training/update_empty": 1.0 - refused}
        scores = answer_metrics(answers, 0.0) if answers else {}
        return scores | counts | filter_metrics(self._left_out, self._cfg.rollout.n, filters=self._filters)

    # ------------------------------------------------------------- one update

    def _take(self, full: Iterable[MicroBatch]) -> None:
        for micro in full:
            self._gradients, batch, tally = self._prepare(micro, self._gradients)
            self._tallies.append(tally)
            self._batches.append(batch)
            if self._whitening is None:
                self._waiting.append(batch)
            else:
                self._learn_actor(batch)

    def _prepare(self, micro: MicroBatch, gradients: Accumulators) -> tuple[Accumulators, _Batch, Tally]:
        """Scores, values and advantages of a micro-batch; with a single update the critic learns on the way."""
        rows = self._steps.place(micro.rows)
        actor, critic = self.state.actor.params, self.state.critic
        actor_sum, critic_sum = gradients
        known = start = None
        if self.reference is not None:
            self._plan.rows("score", micro)
            known = self._steps.score(self.reference, rows)
        if critic is None or critic_sum is None or not self._cfg.single_update:
            if self._cfg.scores_first:
                self._plan.rows("score", micro)
                start = self._steps.score(actor, rows)
            self._plan.rows("estimate", micro)
            prepared, tally = self._steps.estimate(critic.params if critic else None, rows, known, start)
        else:
            self._plan.rows("critic", micro)
            critic_sum, prepared, tally = self._steps.learn_critic_on_arrival(
                critic.params, critic_sum, rows, known
            )
        return (actor_sum, critic_sum), _Batch(micro, prepared), tally

    def _learn_actor(self, batch: _Batch) -> None:
        assert self._whitening is not None
        actor_sum, critic_sum = self._gradients
        self._plan.rows("actor", batch.micro)
        actor_sum, tally, logprobs = self._steps.learn_actor(
            self.state.actor.params, actor_sum, batch.prepared, self._whitening
        )
        self._gradients = actor_sum, critic_sum
        self._tallies.append(tally)
        self._accumulated_at.append(time.monotonic())
        if not self._reports:  # no update yet: these are the log-probs of the trainer's version
            self._scored.append((batch.micro, logprobs))

    def _apply(self) -> None:
        warming_up = self._cfg.uses_critic and self._version < self._cfg.critic.warmup_steps
        self._plan.whole("apply", self._version)
        self.state, self._gradients, report = self._steps.apply(
            self.state, self._gradients, learn_actor=not warming_up
        )
        self._reports.append(report)

    # ------------------------------------------------------------- whitening

    def _whitening_known(self) -> Whitening | None:
        """The whitening that applies, if it is known before the batch."""
        if not self._cfg.whitens:
            return Whitening()
        if self._cfg.algorithm.whiten_advantages != "running":
            return None
        known = whitening(jax.device_get(self.state.advantages))
        # Earlier advantages without a spread (there are none, or no answer earned anything yet) tell nothing of these:
        # by them the first success of a run would whiten to 0.
        return known if known.scale else None

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
        minis = [self._prepare_all(answers) for answers in drawn]
        self._batches = [batch for mini in minis for batch in mini]
        self._settle_whitening()
        for _ in range(self._cfg.actor.ppo_epochs):
            for mini in minis:
                for batch in mini:
                    self._learn_critic(batch)
                    self._learn_actor(batch)
                self._apply()

    def _prepare_all(self, answers: Sequence[Answer]) -> list[_Batch]:
        batches: list[_Batch] = []
        for micro in pack_all(answers, self.shape, pack=self._pack):
            self._gradients, batch, tally = self._prepare(micro, self._gradients)
            self._tallies.append(tally)
            batches.append(batch)
        return batches

    def _learn_critic(self, batch: _Batch) -> None:
        actor_sum, critic_sum = self._gradients
        if self.state.critic is None or critic_sum is None:
            return
        self._plan.rows("critic", batch.micro)
        critic_sum, tally = self._steps.learn_critic(self.state.critic.params, critic_sum, batch.prepared)
        self._gradients = actor_sum, critic_sum
        self._tallies.append(tally)

    # ----------------------------------------------------------------- result

    def _finish(self) -> IterationResult:
        tallies, scored, reports = jax.device_get(
            (self._tallies, [x for _, x in self._scored], self._reports)
        )
        metrics = loss_metrics(tallies, Aggregation.of(self._cfg))
        kl = self._cfg.algorithm.kl_coef * metrics.get("actor/reward_kl_penalty", 0.0)
        lengths = [len(answer.response_ids) for answer in self._answers if answer.trained]
        metrics |= answer_metrics([*self._answers, *self._left_out], kl * float(np.mean(lengths or [0])))
        metrics |= filter_metrics(self._left_out, self._cfg.rollout.n, filters=self._filters)
        metrics |= update_metrics(reports)
        metrics |= packing_metrics([batch.micro for batch in self._batches], self.shape)
        metrics |= overlap_metrics(self._accumulated_at, self._last_arrival)
        agreement = compare(list(zip((m for m, _ in self._scored), scored, strict=True)), self._version)
        refusal = None
        if metrics["training/update_refused"]:
            culprits = find_culprits(sorted(self._answers, key=attrgetter("name")), self._spoils)
            refusal = Refusal("loss or gradient is not finite", culprits)
        elif self._cfg.whitens:
            self._remember_statistics()
        worked_on = tuple(len(answer) for answer in self._answers)
        return IterationResult(metrics | agreement.metrics(), agreement, refusal, worked_on)

    def _spoils(self, answers: Sequence[Answer]) -> bool:
        """Whether the loss or gradient of some answers, computed anew, is not finite."""
        gradients = self._steps.zero_gradients()
        for micro in pack_all(answers, self.shape, pack=self._pack):
            gradients, batch, _ = self._prepare(micro, gradients)
            actor_sum, critic_sum = gradients
            if not self._cfg.single_update and self.state.critic is not None and critic_sum is not None:
                self._plan.rows("critic", micro)
                critic_sum, _ = self._steps.learn_critic(self.state.critic.params, critic_sum, batch.prepared)
            self._plan.rows("actor", micro)
            actor_sum, _, _ = self._steps.learn_actor(
                self.state.actor.params, actor_sum, batch.prepared, self._whitening or Whitening()
            )
            gradients = actor_sum, critic_sum
        self._plan.whole("finite", self._version)
        return not self._steps.finite(gradients)

    def _remember_statistics(self) -> None:
        new = self._statistics()
        # Where all rewards are equal, the advantages' spread is that of a small KL, or of the critic's errors: by it
        # the next iteration's first success would become huge.
        if not new.count or level(np.array([answer.reward for answer in self._answers])):
            return
        past = jax.device_get(self.state.advantages)
        statistics = merge([faded(past, _WHITENING_MEMORY), new])
        placed = place_whole(jax.tree.map(np.float32, statistics), self._steps.mesh)
        self.state = replace(self.state, advantages=placed)
