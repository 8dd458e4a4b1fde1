"""The exactly-once account of samples (DESIGN rule 1). Pure: no sockets, no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from streamrl_jax.types import Fence

REMEMBERED: Final = 8192
"""Delivered samples whose repeats are told from answers that nobody asked for; about 1 MiB."""


class Stage(StrEnum):
    """Where a sample is on its way."""

    WAITING = "waiting"  # in the held queue
    DISPATCHED = "dispatched"  # an instance answers it
    FINISHED = "finished"  # the answer is here, its reward is computed
    REWARDED = "rewarded"  # ready for the trainer


class Verdict(StrEnum):
    """What the ledger says of a message about a sample."""

    ACCEPTED = "accepted"
    OTHER_FENCE = "other_fence_dropped"  # another run, or an earlier life of this one
    UNKNOWN = "unknown_dropped"  # never handed out, or of a job that is done
    STALE_ATTEMPT = "stale_attempts_dropped"  # the work was handed out again meanwhile
    OTHER_INSTANCE = "other_instance_dropped"  # not the one that holds this attempt
    DUPLICATE = "duplicates_dropped"  # already accepted


@dataclass(slots=True)
class _Entry:
    job_id: str
    stage: Stage = Stage.WAITING
    attempt: int = 0
    instance: str = ""


class Ledger:
    """Keeps rule 1: each sample id that is opened is delivered exactly once, whatever the messages' order.

    Call order: ``open`` a job; then, per sample::

        admit ─▶ dispatch ─▶ accept ─▶ rewarded ─▶ deliver       (each moves it one stage on)
                    ▲ │
                    └─┴─ requeue / requeue_instance              (attempt + 1; older answers are now stale)

    Only ``accept`` meets the outside world: it never raises, it drops what does not fit and counts it. The
    other moves are the controller's own; out of order they raise, since that is a fault of the program.

    Memory follows what is admitted and not delivered. Of the delivered samples the last `REMEMBERED` ids are kept,
    so that a repeat is counted as one; an older one is unknown, and dropped as well.

    Args:
        fence: the life of the run that this account belongs to.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._entries: dict[str, _Entry] = {}
        self._open: dict[str, int] = {}  # job -> samples not delivered yet
        self._unadmitted: dict[str, int] = {}  # job -> samples of these that have no entry yet
        self._held: dict[str, dict[str, None]] = {}  # instance -> dispatched ids, oldest first
        self._delivered: OrderedDict[str, int] = OrderedDict()  # id -> attempt, the oldest first
        self._counts: Counter[str] = Counter()

    def open(self, job_id: str, size: int) -> None:
        """Opens a job of ``size`` samples; one that is open already raises ``ValueError``."""
        if job_id in self._open or size < 1:
            raise ValueError(f"job {job_id} of {size} samples is open already, or empty")
        self._open[job_id] = self._unadmitted[job_id] = size
        self._counts["opened"] += size

    def admit(self, job_id: str, sample_id: str) -> None:
        """Names one sample of an open job, as it is about to be handed out; one that is known raises ``ValueError``."""
        if sample_id in self._entries or not self._unadmitted.get(job_id):
            raise ValueError(
                f"sample {sample_id} is open already, or one more than job {job_id} was opened with"
            )
        self._unadmitted[job_id] -= 1
        self._entries[sample_id] = _Entry(job_id)

    def dispatch(self, sample_id: str, instance: str) -> int:
        """Hands a waiting sample to an instance and returns the number of this attempt."""
        entry = self._at(sample_id, Stage.WAITING)
        entry.stage, entry.instance = Stage.DISPATCHED, instance
        self._held.setdefault(instance, {})[sample_id] = None
        self._counts["dispatched"] += 1
        self._counts["redispatched"] += entry.attempt > 0
        return entry.attempt

    def continued(self, tokens: int) -> None:
        """Counts a dispatch that goes on from so many tokens of an earlier attempt."""
        self._counts["continued"] += 1
        self._counts["tokens_kept"] += tokens

    def judge(self, fence: Fence, sample_id: str, attempt: int, instance: str) -> Verdict:
        """Says whether a message speaks of an attempt that runs now; changes and counts nothing."""
        if fence != self._fence:
            return Verdict.OTHER_FENCE
        entry = self._entries.get(sample_id)
        if entry is None:
            return self._judge_delivered(sample_id, attempt)
        if attempt > entry.attempt:
            return Verdict.UNKNOWN
        if attempt < entry.attempt:
            return Verdict.STALE_ATTEMPT
        if entry.stage is Stage.WAITING:
            return Verdict.UNKNOWN
        if entry.instance != instance:
            return Verdict.OTHER_INSTANCE
        return Verdict.ACCEPTED if entry.stage is Stage.DISPATCHED else Verdict.DUPLICATE

    def accept(self, fence: Fence, sample_id: str, attempt: int, instance: str) -> Verdict:
        """Takes a finished answer, once: only ``Verdict.ACCEPTED`` moves the sample on."""
        verdict = self.judge(fence, sample_id, attempt, instance)
        if verdict is Verdict.ACCEPTED:
            self._release(sample_id, Stage.FINISHED)
            self._counts["finished"] += 1
        else:
            self._counts[verdict.value] += 1
        return verdict

    def drop(self, verdict: Verdict) -> None:
        """Counts a message that was judged and left aside."""
        self._counts[verdict.value] += 1

    def requeue(self, sample_id: str) -> int:
        """Takes a dispatched sample back; returns the attempt that its next dispatch will carry."""
        self._at(sample_id, Stage.DISPATCHED)
        entry = self._release(sample_id, Stage.WAITING)
        entry.attempt += 1
        self._counts["taken_back"] += 1
        return entry.attempt

    def requeue_instance(self, instance: str) -> list[str]:
        """Takes back all that a lost instance held, oldest dispatch first."""
        lost = list(self._held.get(instance, ()))
        for sample_id in lost:
            self.requeue(sample_id)
        return lost

    def rewarded(self, sample_id: str) -> None:
        """Notes that the sample is complete and waits for the trainer."""
        self._at(sample_id, Stage.FINISHED).stage = Stage.REWARDED

    def deliver(self, sample_id: str) -> bool:
        """Notes that the trainer has the sample; returns whether that ended its job."""
        entry = self._at(sample_id, Stage.REWARDED)
        self._delivered[sample_id] = entry.attempt
        if len(self._delivered) > REMEMBERED:
            self._delivered.popitem(last=False)
        self._counts["delivered"] += 1
        return self._close_one(sample_id)

    def cancel(self, sample_id: str) -> bool:
        """Gives a waiting sample up (a probe whose instance left for good); returns whether its job ended."""
        self._at(sample_id, Stage.WAITING)
        self._counts["cancelled"] += 1
        return self._close_one(sample_id)

    def attempt(self, sample_id: str) -> int:
        """The attempt that runs, or that the next dispatch will carry."""
        return self._entries[sample_id].attempt

    def held(self, instance: str) -> list[str]:
        """Samples that the instance answers now, oldest dispatch first."""
        return list(self._held.get(instance, ()))

    def held_count(self, instance: str) -> int:
        """How many those are."""
        return len(self._held.get(instance, ()))

    def left(self, job_id: str) -> int:
        """Samples of the job that the trainer has not got yet; 0 for a job that is done."""
        return self._open.get(job_id, 0)

    def counts(self) -> Mapping[str, int]:
        """Totals since the start, by kind; those of dropped messages are named as in ``Verdict``."""
        names = ("opened", "dispatched", "finished", "taken_back", "redispatched", "continued", "tokens_kept",
                 "delivered", "cancelled")  # fmt: skip
        drops = (verdict.value for verdict in Verdict if verdict is not Verdict.ACCEPTED)
        return {name: self._counts[name] for name in (*names, *drops)}

    def stages(self) -> Mapping[Stage, int]:
        """How many samples of the open jobs are at each stage."""
        counted = Counter(entry.stage for entry in self._entries.values())
        counted[Stage.WAITING] += sum(self._unadmitted.values())
        return {stage: counted[stage] for stage in Stage}

    def check(self) -> None:
        """Compares the account's parts with each other; a difference raises ``AssertionError``.

        The totals add up at every moment::

            opened     = delivered + cancelled + open now
            dispatched = finished + taken_back + at an instance now
            finished   = delivered + waiting for a reward or for the trainer now
        """
        holders = {(entry.instance, sample_id) for sample_id, entry in self._entries.items()
                   if entry.stage is Stage.DISPATCHED}  # fmt: skip
        indexed = {(instance, sample_id) for instance, ids in self._held.items() for sample_id in ids}
        assert holders == indexed, f"instances hold {indexed ^ holders} otherwise than the samples say"
        undelivered = Counter(entry.job_id for entry in self._entries.values()) + Counter(self._unadmitted)
        assert undelivered == Counter(self._open), f"open jobs {self._open}, undelivered {undelivered}"
        totals, now = self._counts, self.stages()
        opened = totals["delivered"] + totals["cancelled"] + undelivered.total()
        assert totals["opened"] == opened, (
            f"{totals['opened']} samples were opened, {opened} are accounted for"
        )
        handed = totals["finished"] + totals["taken_back"] + now[Stage.DISPATCHED]
        assert totals["dispatched"] == handed, (
            f"{totals['dispatched']} dispatches, {handed} are accounted for"
        )
        taken = totals["delivered"] + now[Stage.FINISHED] + now[Stage.REWARDED]
        assert totals["finished"] == taken, f"{totals['finished']} answers, {taken} are accounted for"

    def _at(self, sample_id: str, stage: Stage) -> _Entry:
        entry = self._entries.get(sample_id)
        if entry is None or entry.stage is not stage:
            found = "not open" if entry is None else entry.stage.value
            raise RuntimeError(f"sample {sample_id} is {found}; this move is for one that is {stage.value}")
        return entry

    def _release(self, sample_id: str, stage: Stage) -> _Entry:
        entry = self._entries[sample_id]
        held = self._held[entry.instance]
        del held[sample_id]
        if not held:
            del self._held[entry.instance]
        entry.stage = stage
        return entry

    def _judge_delivered(self, sample_id: str, attempt: int) -> Verdict:
        delivered = self._delivered.get(sample_id)
        if delivered is None or attempt > delivered:
            return Verdict.UNKNOWN
        return Verdict.DUPLICATE if attempt == delivered else Verdict.STALE_ATTEMPT

    def _close_one(self, sample_id: str) -> bool:
        job_id = self._entries.pop(sample_id).job_id
        self._open[job_id] -= 1
        if self._open[job_id]:
            return False
        del self._open[job_id], self._unadmitted[job_id]
        return True
