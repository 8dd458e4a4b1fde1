"""The open jobs: what waits, what runs, and what goes out to the trainer. Lives on the controller's loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from streamrl_jax.control.checks import check_beginning, check_length, check_versions
from streamrl_jax.control.dispatched import Accounts
from streamrl_jax.control.dispatching import (
    ARRIVAL,
    Arrangement,
    DispatchSettings,
    Ready,
    arrange,
    place_of,
    policy_of,
    waiting_of,
)
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job, Member, Roster, engine_priority, limits_of, members, sampling_of
from streamrl_jax.control.ledger import Ledger, Verdict
from streamrl_jax.control.lines import Lines
from streamrl_jax.control.outbox import Outbox
from streamrl_jax.control.partials import ending, extend, resumable, whole
from streamrl_jax.control.placing import Room, Waiting
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.errors import UserError
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Partial,
    Progress,
    Rejection,
    RejectReason,
    Sample,
    Sampling,
)

log = logging.getLogger(__name__)

_REFUSED_FOR_GOOD = frozenset(
    {RejectReason.TOO_LONG, RejectReason.SAMPLING_NOT_ALLOWED, RejectReason.INVALID}
)


@dataclass(frozen=True, eq=False, slots=True)
class _Open:
    """A sample that the trainer has not got yet."""

    job: Job
    member: Member

    @property
    def limits(self) -> Sampling:
        """How long its answer may be, and where it stops."""
        return limits_of(self.job, self.member)


class Work:
    """Moves every sample from its job to the trainer, and back into the queue when its instance is lost.

    Call order: ``open`` a job and, unless it is added to another, ``queue_up`` what ``planner`` makes of it (``submit``
    does all of it at once); ``take`` fills the instances; for each message of theirs ``finished``,
    ``progress`` or ``rejected``; ``lost`` when one dies; ``delivered`` when the trainer has taken a sample.

    Invariant: beginnings of answers (`control.partials`) are kept for open samples alone, no longer than was asked
    for, and none is whole; the next attempt is given exactly what is kept.

    Args:
        fence: this life of the run.
        rewards: computes rewards.
        queue: holds what is not handed out.
        max_attempts: bound on the attempts of one sample.
        intake: says which jobs may go on while finished samples wait for the trainer.
        spawn: runs a coroutine on the loop; its exception ends the run.
        dispatch: how jobs with predicted lengths are dispatched.
    """

    def __init__(
        self,
        fence: Fence,
        rewards: RewardWorkers,
        queue: HeldQueue,
        max_attempts: int,
        intake: Intake,
        spawn: Callable[..., object],
        dispatch: DispatchSettings = ARRIVAL,
    ) -> None:
        self.ledger = Ledger(fence)
        self.accounts = Accounts()
        self.queue = queue
        self.intake = intake
        self.offer_all = False
        """Something waits, or may leave now, that other instances have not been offered."""
        self._fence = fence
        self._rewards = rewards
        self._max_attempts = max_attempts
        self._spawn = spawn
        self._dispatch = dispatch
        self._open: dict[str, _Open] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._partials: dict[str, Partial] = {}
        self._noted: set[str] = set()

    def submit(self, job: Job, outbox: Outbox | None = None, ready: Sequence[Ready] = ()) -> Outbox:
        """Queues a job's samples; ``outbox`` is as for `open`, ``ready`` as for `planner`."""
        outbox = self.open(job, outbox)
        if outbox.job_id == job.job_id:
            self.queue_up(job, self.planner(job, ready)())
        return outbox

    def open(self, job: Job, outbox: Outbox | None = None) -> Outbox:
        """Takes a job on.

        Args:
            job: what to do.
            outbox: where its samples are to come out, beside what comes out there already; None: one of their own.
                What is added to another job is queued at once, and goes first among its iteration, since it is late
                already.

        Returns:
            Where they will come out.
        """
        self.ledger.open(job.job_id, job.size)
        if outbox is None:
            outbox = Outbox(job.job_id, job.size)
        else:
            outbox.grow(job.size)
        self._outboxes[job.job_id] = outbox
        if outbox.job_id != job.job_id:
            self.queue.add(outbox.job_id, self._draw(job), job.size)
            self.offer_all = True
        return outbox

    def plans(self, job: Job) -> bool:
        """Whether `planner` has more to do than nothing."""
        return policy_of(job, self._dispatch) != "arrival"

    def planner(self, job: Job, ready: Sequence[Ready]) -> Callable[[], Arrangement]:
        """What plans a job, in any thread: it is given what is known now.

        Args:
            job: what to do.
            ready: the instances that can be given work, which its samples are planned for.
        """
        return partial(arrange, job, self._dispatch, ready, self.accounts.recent(), self.accounts.spread())

    def queue_up(self, job: Job, arrangement: Arrangement) -> None:
        """Queues the samples of an open job as they were arranged."""
        if arrangement.note and arrangement.note not in self._noted:
            self._noted.add(arrangement.note)
            log.warning("%s", arrangement.note)
        if arrangement.lines is not None:
            roster = Roster(job)
            lines = Lines(arrangement.lines, lambda number: self._admit(job, roster.member(number)))
            order = (job.priority, job.iteration, place_of(arrangement.lines.tokens.max()))
            self.queue.line_up(job.job_id, order, job.min_version, lines)
        else:
            lines = None
            self.queue.add(job.job_id, self._draw(job, arrangement.order), job.size)
        if not job.probe:
            self.accounts.open(job, arrangement, lines)
        self.offer_all = True

    def take(self, rooms: Sequence[Room]) -> list[tuple[str, Assignment]]:
        """Hands out what the instances have room for, as far as the intake admits it.

        Args:
            rooms: the instances that can be given work; all of them while ``offer_all`` is set.

        Returns:
            (instance, assignment) pairs, to be sent in this order.
        """
        placed = self.queue.take(rooms, self.intake.admits)
        self.offer_all |= self.queue.uncapped
        self.queue.uncapped = False
        return [(one.instance, self._assignment(one.waiting.sample_id, one.instance)) for one in placed]

    def again(self, instance: str) -> list[Assignment]:
        """What an instance holds, with the same attempt numbers, to be sent once more over a new stream."""
        return [self._make(sample_id) for sample_id in self.ledger.held(instance)]

    def finished(self, fence: Fence, generation: Generation, instance: str) -> Verdict:
        """Takes an answer. Accepted once, its reward is computed and it goes to the trainer.

        Raises:
            InstanceLost: it is not as long as was asked for.
            ControlError: it holds tokens of too old a version.
        """
        if generation.finish_reason is FinishReason.ABORT:
            return self._take_back(fence, generation.sample_id, generation.attempt, instance, "was cut off")
        verdict = self.ledger.judge(fence, generation.sample_id, generation.attempt, instance)
        if verdict is Verdict.ACCEPTED:
            check_length(self._open[generation.sample_id].limits, generation)
        verdict = self.ledger.accept(fence, generation.sample_id, generation.attempt, instance)
        if verdict is Verdict.ACCEPTED:
            opened = self._open[generation.sample_id]
            check_versions(opened.job, generation, instance)
            self._partials.pop(generation.sample_id, None)
            self.accounts.answered(opened.job, opened.member, generation, time.monotonic())
            self._reward(generation)
        return verdict

    def progress(self, fence: Fence, progress: Progress, instance: str) -> Verdict:
        """Keeps the beginning of an answer; what is a whole answer already is taken as finished.

        Returns:
            `Verdict.DUPLICATE`, uncounted, for a repetition.

        Raises:
            InstanceLost: it is longer than was asked for.
            ControlError: it is whole, and holds tokens of too old a version.
        """
        verdict = self.ledger.judge(fence, progress.sample_id, progress.attempt, instance)
        before = self._partials.get(progress.sample_id)
        if verdict is not Verdict.ACCEPTED:
            self.ledger.drop(verdict)
        elif before is not None and progress.offset + len(progress.token_ids) <= len(before.token_ids):
            return Verdict.DUPLICATE  # it repeats what is known, which proves no work
        elif (known := extend(before, progress)) is not None:
            sampling = self._open[progress.sample_id].limits
            check_beginning(sampling, progress.sample_id, known)
            if (end := ending(known, sampling)) is not None:
                return self.finished(fence, whole(progress, *end, instance), instance)
            self._partials[progress.sample_id] = known
        return verdict

    def rejected(self, fence: Fence, rejection: Rejection, instance: str) -> Verdict:
        """Queues a refused sample again.

        Raises:
            UserError: no instance would ever take it.
        """
        if rejection.reason in _REFUSED_FOR_GOOD:
            raise UserError(
                f"instance {instance} refuses sample {rejection.sample_id or '(unnamed)'} "
                f"({rejection.reason}): {rejection.message}"
            )
        what = f"was refused ({rejection.reason}: {rejection.message})"
        return self._take_back(fence, rejection.sample_id, rejection.attempt, instance, what)

    def lost(self, instance: str) -> list[str]:
        """Queues what a lost instance held, before everything else; returns the ids."""
        self.queue.abandon(instance)
        lost = self.ledger.requeue_instance(instance)
        for sample_id in lost:
            self._push_again(sample_id, instance, f"was lost with instance {instance}")
        return lost

    def gone(self, instance: str) -> None:
        """Gives up what only this instance could have answered: it will not come back."""
        for waiting in self.queue.drop_pinned(instance):
            job_id = self._open.pop(waiting.sample_id).job.job_id
            self.accounts.cancelled(job_id, time.monotonic())
            self._partials.pop(waiting.sample_id, None)
            outbox = self._outboxes[job_id]
            if self.ledger.cancel(waiting.sample_id):
                del self._outboxes[job_id]
            outbox.cancel()

    def delivered(self, sample: Sample) -> bool:
        """Notes that the trainer has a sample; a job that is complete is forgotten.

        Returns:
            Whether samples may be handed out now that were held up before.
        """
        job_id = self._open.pop(sample.sample_id).job.job_id
        goes_on = self.intake.consumed(self._outboxes[job_id].job_id)
        self.offer_all |= goes_on
        if self.ledger.deliver(sample.sample_id):
            del self._outboxes[job_id]
        return goes_on

    def probes(self, instance: str, version: int) -> int:
        """Probes of ``version`` that the instance has still to answer."""
        held = sum(self._open[sample_id].job.probe for sample_id in self.ledger.held(instance))
        return held + self.queue.pinned(instance, version)

    def longest(self, instance: str) -> int | None:
        """Tokens that no answer to what the instance holds has more of; None: it holds nothing."""
        held = self.ledger.held(instance)
        return max((self._open[sample_id].job.sampling.max_new_tokens for sample_id in held), default=None)

    def sizes(self) -> dict[str, int]:
        """Entries held in memory, by kind; all 0 when every job is done."""
        return {
            "open": len(self._open),
            "waiting": len(self.queue),
            "jobs": len(self._outboxes),
            "partials": len(self._partials),
            "buffered": self.intake.buffered,
        }

    def _draw(self, job: Job, order: Iterable[int] | None = None) -> Iterator[Waiting]:
        """Opens a job's samples as the queue asks for them, the prompts in this order; None: as they are."""
        for asked in members(job, order):
            yield self._admit(job, asked)

    def _admit(self, job: Job, asked: Member) -> Waiting:
        self.ledger.admit(job.job_id, asked.sample_id)
        self._open[asked.sample_id] = _Open(job, asked)
        return self._waiting(job, asked)

    def _waiting(self, job: Job, asked: Member) -> Waiting:
        return waiting_of(job, asked, self._dispatch, late=self._late(job))

    def _late(self, job: Job) -> bool:
        return self._outboxes[job.job_id].job_id != job.job_id

    def _assignment(self, sample_id: str, instance: str) -> Assignment:
        self.ledger.dispatch(sample_id, instance)
        self.accounts.handed(self._open[sample_id].job.job_id, time.monotonic())
        assignment = self._make(sample_id)
        if assignment.resumed is not None:
            self.ledger.continued(len(assignment.resumed.token_ids))
        return assignment

    def _make(self, sample_id: str) -> Assignment:
        job, member = self._open[sample_id].job, self._open[sample_id].member
        attempt = self.ledger.attempt(sample_id)
        resumed = self._partials.get(sample_id)
        return Assignment(
            sample_id=sample_id,
            attempt=attempt,
            prompt_ids=job.prompts[member.position].token_ids,
            sampling=sampling_of(job, member, attempt if resumed else 0),
            priority=engine_priority(job, member.position, late=self._late(job)),
            min_version=job.min_version,
            resumed=resumed,
            probe=job.probe,
        )

    def _take_back(self, fence: Fence, sample_id: str, attempt: int, instance: str, why: str) -> Verdict:
        verdict = self.ledger.judge(fence, sample_id, attempt, instance)
        if verdict is Verdict.ACCEPTED:
            self.ledger.requeue(sample_id)
            self._push_again(sample_id, instance, why)
        else:
            self.ledger.drop(verdict)
        return verdict

    def _push_again(self, sample_id: str, instance: str, why: str) -> None:
        attempt = self.ledger.attempt(sample_id)
        if attempt >= self._max_attempts:
            raise ControlError(
                f"sample {sample_id} {why}, at its attempt number {attempt}, the last one allowed"
            )
        opened = self._open[sample_id]
        self.accounts.lost(opened.job, opened.member, attempt - 1, instance)
        if resumable(self._partials.get(sample_id), opened.job.min_version) is None:
            # Also so that the tokens of the next attempt are not appended to it.
            self._partials.pop(sample_id, None)
        self.queue.push(self._waiting(opened.job, opened.member), front=True)
        self.offer_all = True

    def _reward(self, generation: Generation) -> None:
        opened, arrived_s = self._open[generation.sample_id], time.monotonic()
        self.intake.arrived(self._outboxes[opened.job.job_id].job_id)
        if opened.job.probe:
            self._complete(generation, arrived_s, RewardResult(0.0))
        else:
            prompt = opened.job.prompts[opened.member.position]
            self._rewards.order(prompt, generation, partial(self._complete, generation, arrived_s))

    def _complete(
        self, generation: Generation, arrived_s: float, outcome: RewardResult | BaseException
    ) -> None:
        if isinstance(outcome, BaseException):
            self._spawn(_raise(outcome), name=f"reward {generation.sample_id}")
            return
        opened = self._open[generation.sample_id]
        job, prompt = opened.job, opened.job.prompts[opened.member.position]
        self.ledger.rewarded(generation.sample_id)
        sample = Sample(
            sample_id=generation.sample_id,
            iteration=job.iteration,
            prompt=prompt,
            group_index=opened.member.index,
            generation=generation,
            reward=outcome.score,
            reward_extras=outcome.extras,
            arrived_s=arrived_s,
            rewarded_s=time.monotonic(),
        )
        self._outboxes[job.job_id].put(sample)


async def _raise(error: BaseException) -> None:
    raise error
