"""The exactly-once account of samples (DESIGN rule 1). Pure: no sockets, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from streamrl_jax.types import Fence


class Stage(StrEnum):
    """Where a sample is on its way."""

    WAITING = "waiting"  # in the held queue
    DISPATCHED = "dispatched"  # an instance answers it
    FINISHED = "finished"  # the answer is here, its reward is computed
    REWARDED = "rewarded"  # ready for the trainer
    DELIVERED = "delivered"  # the trainer has it


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

    Call order per sample::

        open ─▶ dispatch ─▶ accept ─▶ rewarded ─▶ deliver        (each moves it one stage on)
                   ▲ │
                   └─┴─ requeue / requeue_instance               (attempt + 1; older answers are now stale)

    Only ``accept`` meets the outside world: it never raises, it drops what does not fit and counts it. The
    other moves are the controller's own; out of order they raise, since that is a fault of the program. A
    job whose samples are all delivered is forgotten, so memory follows the open jobs.

    Args:
        fence: the life of the run that this account belongs to.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._entries: dict[str, _Entry] = {}
        self._open: dict[str, int] = {}  # job -> samples not delivered yet
        self._jobs: dict[str, list[str]] = {}
        self._held: dict[str, dict[str, None]] = {}  # instance -> dispatched ids, oldest first
        self._counts: Counter[str] = Counter()

    def open(self, job_id: str, sample_ids: Iterable[str]) -> None:
        """Opens a job's samples; an id or job that is open already raises ``ValueError``."""
        ids = list(sample_ids)
        known = [sample_id for sample_id in ids if sample_id in self._entries]
        if job_id in self._open or known or len(set(ids)) != len(ids):
            raise ValueError(f"job {job_id} is open already, or names a sample twice: {known[:3]}")
        self._entries.update((sample_id, _Entry(job_id)) for sample_id in ids)
        self._open[job_id] = len(ids)
        self._jobs[job_id] = ids
        self._counts["opened"] += len(ids)

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
        if entry is None or attempt > entry.attempt:
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
        entry.stage = Stage.DELIVERED
        self._counts["delivered"] += 1
        return self._close_one(entry.job_id)

    def cancel(self, sample_id: str) -> bool:
        """Gives a waiting sample up (a probe whose instance left for good); returns whether its job ended."""
        entry = self._at(sample_id, Stage.WAITING)
        entry.stage = Stage.DELIVERED
        self._counts["cancelled"] += 1
        return self._close_one(entry.job_id)

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
        undelivered = Counter(
            entry.job_id for entry in self._entries.values() if entry.stage is not Stage.DELIVERED
        )
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

    def _close_one(self, job_id: str) -> bool:
        self._open[job_id] -= 1
        if self._open[job_id]:
            return False
        del self._open[job_id]
        for sample_id in self._jobs.pop(job_id):
            del self._entries[sample_id]
        return True
