"""One generation instance from the controller's side: its process, its stream, its weights, its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from streamrl_jax.control.events import Activity, ControlEvent, EventKind, InstanceView
from streamrl_jax.control.faults import InstanceLost
from streamrl_jax.control.lease import Lease
from streamrl_jax.control.ledger import Verdict
from streamrl_jax.control.link import Link
from streamrl_jax.control.meter import ActivityClock, TokenRate
from streamrl_jax.control.placing import Room
from streamrl_jax.control.startup import check_process, launch, until_loaded
from streamrl_jax.control.surroundings import Surroundings
from streamrl_jax.control.tasks import to_the_end, until_one_ends
from streamrl_jax.control.tenure import Fate, Tenure
from streamrl_jax.control.updates import load_current
from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import Granted, InstanceClient, StreamEvent
from streamrl_jax.gen.launch import Launched
from streamrl_jax.types import (
    NO_VERSION,
    Assignment,
    Generation,
    InstanceInfo,
    InstanceState,
    InstanceStatus,
    Progress,
    Rejection,
    RejectReason,
    UpdateReport,
)

_TICK_S = 0.5  # between two judgements of one that runs
_LATE_S = 1.0  # a tick later than this, or than a quarter of the lease: this process itself was stopped


class Instance:
    """Keeps one instance alive and fed.

    Call order: ``run`` as a task, until it leaves the pool; the rest at any time. One life::

        start ─▶ wait until loaded ─▶ open the stream ─▶ push the current version ─▶ serve ─▶ lost
          ▲                                                                                     │
          └──────────── its samples are queued again, its process group is ended ◀──────────────┘

    ``leave`` ends the last life: nothing new is handed out, what it holds is answered first.

    Invariant: it has a room (and so gets samples) only while it is connected and serves a version that was
    checked against the manifest in this very life, and only samples that this version may answer.

    Args:
        name: unique in the pool.
        shared: what all instances share.
        founding: the run began with it.
    """

    def __init__(self, name: str, shared: Surroundings, *, founding: bool) -> None:
        self.name = name
        self.tenure = Tenure(founding=founding, max_restarts=shared.settings.max_restarts)
        self.version = NO_VERSION
        self.loaded = False  # LOADED and connected
        self._shared = shared
        self._settings = shared.settings
        self._address = ""
        self._checked = False  # what it serves was held against the manifest, in this life
        self._info: InstanceInfo | None = None
        self._link: Link | None = None
        self._lease = Lease(self._settings.lease, time.monotonic())
        self._status = InstanceStatus(InstanceState.LOADING, NO_VERSION)
        self._updating = False
        self._published = asyncio.Event()
        self._changed = asyncio.Event()
        self._clock = ActivityClock(time.monotonic())
        self._rate = TokenRate()
        self._other_fence_dropped = 0

    # ---------------------------------------------------------------- what others ask and tell

    def room(self) -> Room | None:
        """What it can take now; None: nothing at all."""
        if self._link is None or self._info is None or not self._link.connected or not self._checked:
            return None
        if self._status.state is InstanceState.DRAINING or self.tenure.leaving:
            return None
        capacity = self._info.slots + self._info.lookahead
        held = max(self._shared.work.ledger.held_count(self.name), capacity - self._link.credit)
        return Room(self.name, self.version, capacity, held, pinned_only=self._updating)

    def assign(self, assignment: Assignment) -> None:
        """Hands out a sample that was placed here."""
        assert self._link is not None, "it had a room"
        now = time.monotonic()
        if self._clock.activity is not Activity.BUSY:  # until now; it may be given several samples at once
            self._lease.worked(now)
        self._link.assign(assignment)
        self._note(now)

    def published(self) -> None:
        """A newer version is on the shelf."""
        self._published.set()

    @property
    def connected(self) -> bool:
        """Whether its stream is open."""
        return self._link is not None and self._link.connected

    @property
    def serves(self) -> bool:
        """Whether it may be given work of its version."""
        return self.loaded and self._checked and not self.tenure.leaving

    def leave(self, why: str, *, at_once: bool) -> None:
        """Gives it nothing more; it leaves the pool with its last answer.

        Args:
            why: what the pool reports when it has left.
            at_once: hands out again what it holds, instead of waiting for it.
        """
        self.tenure.leave(why, at_once=at_once)
        self._changed.set()
        self._shared.settled(UpdateReport(self.name, False, NO_VERSION, f"not needed any more: {why}"))

    def view(self) -> InstanceView:
        """How it stands."""
        now = time.monotonic()
        return InstanceView(
            name=self.name,
            address=self._address,
            state=InstanceState.DRAINING if self.tenure.leaving else self._status.state,
            version=self.version,
            held=self._shared.work.ledger.held_count(self.name),
            running=self._status.running,
            waiting=self._status.waiting,
            tokens_per_s=self._rate.per_s(now),
            tokens=self._rate.total,
            restarts=self.tenure.restarts,
            seconds=self._clock.seconds(now),
            slots=self._info.slots if self._info else 0,
            kv_tokens=self._info.kv_tokens if self._info else 0,
            steps_total=self._status.steps_total,
        )

    @property
    def other_fence_dropped(self) -> int:
        """Messages of another life that came from it."""
        return self._other_fence_dropped + (self._link.other_fence_dropped if self._link else 0)

    # ---------------------------------------------------------------- life

    async def run(self) -> str:
        """Lives, dies and is started anew, until it leaves.

        Returns:
            Why it left the pool.

        Raises:
            ControlError: it died once too often, and the run began with it.
            Exception: whatever ends the run.
        """
        await until_one_ends(self._lives(), self._until_left())
        return self.tenure.farewell

    async def _lives(self) -> None:
        while True:
            launched, reason = await self._one_life()
            if not self._allow_another(launched, reason):
                return

    async def _until_left(self) -> None:
        """Returns when it was told to leave and holds nothing any more; the lease bounds what it still answers."""
        await self.tenure.told_to_leave()
        while self._shared.work.ledger.held_count(self.name):
            if self.tenure.at_once:
                self._hand_back(self.tenure.farewell)
                return
            self._changed.clear()
            await self._changed.wait()

    async def _one_life(self) -> tuple[Launched | None, str]:
        launched: Launched | None = None
        try:
            launched = await launch(self.name, self._shared.launcher, self.tenure)
            self.tenure.managed = launched.managed
            await self._live(launched)
        except InstanceLost as lost:
            self._take_back(str(lost))  # before its process is ended, which may take a while
            return launched, str(lost)
        except UserError as error:
            if not self.tenure.on_trial:
                raise
            self.tenure.misfit = True
            self._take_back(str(error))
            return launched, str(error)
        finally:
            if launched is not None:
                await to_the_end(launched.stop())
        raise AssertionError("a life ends with its loss")

    async def _live(self, launched: Launched) -> None:
        self._address = launched.address
        client = InstanceClient(launched.address, self._shared.access)
        try:
            await until_loaded(
                self.name,
                client,
                launched,
                self._settings.start_timeout_s,
                lambda phase, waited: self._emit(EventKind.PHASE, phase, seconds=waited),
                min(1.0, self._settings.heartbeat_interval_s),
                self._settings.lease_s,
            )
            link = Link(
                self.name,
                client,
                self._shared.hello,
                self._receive,
                lambda: self._shared.work.again(self.name),
                lambda: self.version,
                lambda why: self._emit(EventKind.RECONNECTED, why),
                self._settings.lease_s,
            )
            self._info = await link.open()
            self._link, self.version = link, self._info.version
            self._lease = Lease(self._settings.lease, time.monotonic())
            self.loaded = self.tenure.loaded = True
            self._emit(EventKind.READY, self._info.engine)
            self._published.set()
            await until_one_ends(link.run(), self._keep_updated(client), self._watch(launched))
        finally:
            if self._link is not None:
                await self._link.close()
                self._other_fence_dropped = self.other_fence_dropped
            self._link, self.version, self.loaded, self._checked = None, NO_VERSION, False, False
            self._status = InstanceStatus(InstanceState.LOADING, NO_VERSION)
            self._note(time.monotonic())
            await client.close()

    def _take_back(self, reason: str) -> None:
        """Hands the samples of a lost instance to the others."""
        self._emit(EventKind.LOST, reason)
        self._hand_back(reason)
        self._shared.settled(
            UpdateReport(self.name, False, NO_VERSION, f"lost: {reason}; it gets the version when it is back")
        )

    def _hand_back(self, reason: str) -> None:
        if lost := self._shared.work.lost(self.name):
            self._emit(EventKind.REDISPATCH, reason, count=len(lost))
        self._changed.set()
        self._shared.pump()

    def _allow_another(self, launched: Launched | None, reason: str) -> bool:
        """Whether it is started anew; otherwise it leaves, for the reason that `run` returns.

        Raises:
            ControlError: the run ends with it.
        """
        tenure = self.tenure
        why = f"instance {self.name} ({self._address}) was lost after {tenure.restarts} restarts: {reason}"
        match tenure.fate(why):
            case Fate.AGAIN:
                self._emit(EventKind.RESTART, reason, count=tenure.restarts)
                return True
            case Fate.LEAVES:
                return False
            case Fate.ENDS_RUN:
                raise tenure.once_too_often(why, launched.log_tail() if launched else "")

    # ---------------------------------------------------------------- serving

    def _receive(self, event: StreamEvent) -> None:
        work, fence, now = self._shared.work, self._shared.fence, time.monotonic()
        match event:
            case InstanceStatus():
                self._status = event
                self._lease.observe(event, now)
                self._rate.add(event.tokens_since_last, now)
                if not self._checked:  # from then on what it was given counts, whatever it says
                    self.version = max(self.version, event.version)
            case Generation():
                self._weigh(work.finished(fence, self._named(event), self.name), now)
                if self._link is not None:
                    self._link.acknowledge(event.sample_id, event.attempt)
            case Progress():
                self._weigh(work.progress(fence, event, self.name), now)
            case Rejection(reason=RejectReason.ENGINE_FAILED):
                raise InstanceLost(f"its engine failed: {event.message}")
            case Rejection():
                self._lease.useless(now)
                self._believe(event.reason)
                work.rejected(fence, event, self.name)
            case Granted():
                pass
            case _:
                return
        self._note(now)
        self._changed.set()
        self._shared.pump(self.name)

    def _weigh(self, verdict: Verdict, now: float) -> None:
        """Only what moved a sample on is a sign that its engine works."""
        if verdict is Verdict.ACCEPTED:
            self._lease.heard(now)
        else:
            self._lease.useless(now)

    def _most_tokens(self) -> int | None:
        """More than it can make before an answer arrives: what was taken back from it may still run there too."""
        longest = self._shared.work.longest(self.name)
        if longest is None or self._info is None:
            return None
        return 2 * (self._info.slots + self._info.lookahead) * longest

    def _named(self, generation: Generation) -> Generation:
        """It may call itself otherwise (`streamrl gen --name`); metrics and messages use the pool's name."""
        return generation if generation.instance == self.name else replace(generation, instance=self.name)

    def _believe(self, reason: RejectReason) -> None:
        """Corrects what was thought of it, so that it is not asked the same again at once."""
        if reason is RejectReason.DRAINING:
            self._status = replace(self._status, state=InstanceState.DRAINING)
        elif reason is RejectReason.WRONG_VERSION:
            self.version = NO_VERSION
            self._published.set()

    async def _watch(self, launched: Launched) -> None:
        due = time.monotonic() + _TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now - due > min(_LATE_S, self._settings.lease_s / 4):
                self._lease.forgive(now - due, now)
            due = now + min(_TICK_S, self._settings.lease_s / 4)
            check_process(launched)
            held = self._shared.work.ledger.held_count(self.name)
            if reason := self._lease.verdict(now, held, self._most_tokens):
                raise InstanceLost(reason)

    async def _keep_updated(self, client: InstanceClient) -> None:
        """Loads the newest version whenever it serves an older one."""
        while True:
            await self._published.wait()
            self._published.clear()
            while not self.tenure.leaving and self._lacks_current():
                await self._update(client)
            self._shared.settled(UpdateReport(self.name, True, self.version))

    def _lacks_current(self) -> bool:
        """Whether the newest version must be pushed: also the one that it says it has, which is not checked yet."""
        current = self._shared.shelf.version
        return current > self.version or (current != NO_VERSION and not self._checked)

    async def _update(self, client: InstanceClient) -> None:
        shared = self._shared
        self._updating = not self._settings.in_flight
        try:
            while shared.work.probes(self.name, self.version):
                self._changed.clear()
                await self._changed.wait()
            assert self._info is not None, "it is connected"
            self._note(time.monotonic())
            report, publication = await load_current(
                self.name,
                client,
                self._info,
                shared.shelf,
                self._settings,
                lambda version: self._emit(EventKind.RELEASED, version=version),
            )
        finally:
            self._updating = False
            self._note(time.monotonic())
        self.version = publication.version
        self._checked = self.tenure.served = True
        seconds = time.monotonic() - publication.published_s
        self._emit(EventKind.UPDATED, version=report.version, seconds=seconds)
        shared.settled(report)
        shared.pump()

    # ---------------------------------------------------------------- accounts

    def _note(self, now: float) -> None:
        """Books the time up to now."""
        held = self._shared.work.ledger.held_count(self.name)
        if not self.loaded:
            activity = Activity.DOWN
        elif held:
            activity = Activity.BUSY
        else:
            activity = Activity.UPDATING if self._updating else Activity.IDLE
        self._clock.switch(activity, now)

    def _emit(self, kind: EventKind, text: str = "", *, version: int = NO_VERSION, count: int = 0,
              seconds: float = 0.0) -> None:  # fmt: skip
        self._shared.emit(ControlEvent(kind, self.name, text, version, count, seconds))
