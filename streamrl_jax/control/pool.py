"""All instances: hands out work as they have room, brings them versions, and notices when none is left."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from streamrl_jax.control.dispatching import Ready
from streamrl_jax.control.events import ControlEvent, EventKind, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.instance import Instance
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication, Shelf
from streamrl_jax.control.surroundings import Surroundings
from streamrl_jax.control.work import Work
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.types import Fence, UpdateReport

_LOOK_S = 0.2  # for somebody who dials in


@dataclass(eq=False)
class _Rollout:
    """A publication on its way to the instances that were there when it came."""

    version: int
    waiting: set[str]
    done: Future[list[UpdateReport]]
    reports: list[UpdateReport] = field(default_factory=list)


class Pool:
    """The instances of a run. Lives on the controller's loop.

    Call order: ``add`` each instance (also later, while the others work), ``drain`` those that are not needed any
    more, ``pump`` after anything that may give work to someone, ``publish`` for each version.

    Invariant: nothing waits for an instance that joins or leaves. A publication waits for those that can take it
    now, and at the start of the run for those that it begins with; one that joins gets the current version before
    its first sample.

    Args:
        fence: this life of the run.
        settings: bounds.
        launcher: starts instances, or knows where they are.
        access: token and TLS of the run.
        work: the open jobs.
        spawn: runs a coroutine on the loop; its exception ends the run.
        emit: takes events.
    """

    def __init__(
        self,
        fence: Fence,
        settings: ControlSettings,
        launcher: Launcher,
        access: net.Access,
        work: Work,
        spawn: Callable[..., object],
        emit: Callable[[ControlEvent], None],
    ) -> None:
        self._work = work
        self._spawn = spawn
        self._emit = emit
        self._instances: dict[str, Instance] = {}
        self._gone: dict[str, str] = {}
        self._lost_restarts = 0
        self._lost_drops = 0
        self._rollouts: list[_Rollout] = []
        self.shelf = Shelf()
        self._shared = Surroundings(
            fence, settings, launcher, access, work, self.shelf, self.pump, emit, self._settled
        )

    def add(self, name: str, *, founding: bool = True) -> None:
        """Starts an instance; it gets the current version and work as soon as it is up.

        Args:
            name: that the launcher knows.
            founding: the run begins with it, and is not ready before it. One that comes later may fail: it is
                reported gone, and the others go on.
        """
        if name in self._instances:
            raise ValueError(f"instance {name} is in the pool already")
        self._instances[name] = Instance(name, self._shared, founding=founding)
        self._gone.pop(name, None)
        if not founding:
            self._emit(ControlEvent(EventKind.ADDED, name))
        self._spawn(self._keep(self._instances[name]), name=f"instance {name}")

    def drain(self, *names: str, at_once: bool = False) -> None:
        """Lets instances go: they get nothing new, and leave when what they hold is answered.

        Asked again, it changes nothing, or makes the leaving one leave at once.

        Args:
            names: of the instances; all or none.
            at_once: what they hold is handed out to the others instead.

        Raises:
            UserError: no such instance, or nobody would be left.
        """
        leaving = [self._find(name) for name in names]
        if not any(other not in leaving for other in self._staying()):
            raise UserError(
                f"{' and '.join(names)} {'is the last instance' if len(names) == 1 else 'are the last instances'} of "
                "the run, which could not go on without; add another one first (streamrl pool add)"
            )
        for instance in leaving:
            self._let_go(instance, "it was drained at once" if at_once else "it was drained", at_once=at_once)

    def dismiss(self, name: str, why: str) -> None:
        """Takes an instance out at once, also the last one: it is known to be gone.

        Args:
            name: of an instance; nothing happens if it is not in the pool.
            why: what is reported.
        """
        if (instance := self._instances.get(name)) is not None:
            self._let_go(instance, why, at_once=True)

    def _let_go(self, instance: Instance, why: str, *, at_once: bool) -> None:
        instance.leave(why, at_once=at_once)
        self._work.queue.abandon(instance.name)
        self.pump()

    def holds(self, name: str) -> bool:
        """Whether an instance of this name is in the pool, in whatever state."""
        return name in self._instances

    def _staying(self) -> list[Instance]:
        return [instance for instance in self._instances.values() if not instance.tenure.leaving]

    def _find(self, name: str) -> Instance:
        if (instance := self._instances.get(name)) is not None:
            return instance
        near = difflib.get_close_matches(name, self._instances, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        left = f" It has left the pool: {self._gone[name]}." if name in self._gone else ""
        raise UserError(
            f"there is no instance {name!r} in the pool; {hint}It has {', '.join(self._instances) or 'none'}.{left}"
        )

    def pump(self, only: str = "") -> None:
        """Hands out what waits to whoever has room.

        Args:
            only: the instance whose room has changed, when that is all that has: the others were offered what waits
                before. With a thousand instances it must not cost a look at each whenever one of them says something.
        """
        chosen = self._instances.values()
        if only and not self._work.offer_all:
            chosen = [instance] if (instance := self._instances.get(only)) is not None else []
        self._work.offer_all = False
        rooms = [room for instance in chosen if (room := instance.room()) is not None and room.free]
        if not rooms:
            return
        for name, assignment in self._work.take(rooms):
            self._instances[name].assign(assignment)
        if self._work.offer_all:  # a plan has ended, and with it what held the others back
            self.pump()

    def publish(self, publication: Publication, done: Future[list[UpdateReport]]) -> None:
        """Makes a version the current one and brings it to every instance.

        Args:
            publication: the version.
            done: gets one report per instance that can take it now (and of those that the run begins with); one
                that is lost meanwhile, or drained, reports so. Whoever comes (back) later gets the version, or a newer
                one, before its first sample.
        """
        for version in self.shelf.put(publication):
            self._emit(ControlEvent(EventKind.RELEASED, version=version))
        waiting = {
            instance.name for instance in self._staying() if instance.loaded or instance.tenure.awaited
        }
        if waiting:
            self._rollouts.append(_Rollout(publication.version, waiting, done))
        else:
            done.set_result([])
        for instance in self._instances.values():
            instance.published()

    def views(self) -> tuple[InstanceView, ...]:
        """Each instance, in the order they were added."""
        return tuple(instance.view() for instance in self._instances.values())

    def gone(self) -> Mapping[str, str]:
        """Those that have left, and why."""
        return self._gone

    def __contains__(self, name: str) -> bool:
        return name in self._instances

    def is_loaded(self, name: str) -> bool:
        """Whether an instance is loaded and connected."""
        return name in self._instances and self._instances[name].loaded

    def is_connected(self, name: str) -> bool:
        """Whether the stream of an instance is open at this moment."""
        return name in self._instances and self._instances[name].connected

    def ready(self) -> tuple[Ready, ...]:
        """Those that can be given work, now or when they have the current version, in the order they were added."""
        views = (instance.view() for instance in self._staying() if instance.loaded)
        return tuple(Ready(view.name, view.slots, view.kv_tokens) for view in views)

    def loaded(self) -> int:
        """How many are loaded and connected, and stay."""
        return sum(instance.loaded for instance in self._staying())

    def wanted(self) -> int:
        """How many must be loaded for the run to begin: those that it begins with, as far as they stay, and whoever
        must dial in."""
        founding = sum(instance.tenure.founding for instance in self._staying())
        return max(founding, self._shared.settings.min_instances)

    def serving(self, version: int) -> list[str]:
        """Those that serve exactly this version."""
        return [i.name for i in self._instances.values() if i.serves and i.version == version]

    def counts(self) -> dict[str, int]:
        """Restarts, and messages of another life that the streams dropped."""
        instances = self._instances.values()
        return {
            "restarts": self._lost_restarts + sum(i.tenure.restarts for i in instances),
            "other_fence_dropped": self._lost_drops + sum(i.other_fence_dropped for i in instances),
        }

    def situation(self) -> str:
        """One sentence per instance, for errors."""
        lines = [
            f"{view.name} is {view.state} at version {view.version} with {view.held} samples, "
            f"{view.restarts} restarts"
            for view in self.views()
        ]
        lines += [f"{name} is gone: {why}" for name, why in self._gone.items()]
        oldest = self._work.queue.oldest_version()
        if oldest is not None:
            lines.append(f"{len(self._work.queue)} samples wait for version {oldest} or newer")
        return "; ".join(lines)

    def fail(self, error: BaseException) -> None:
        """Raises the error in whoever waits for an update."""
        for rollout in self._rollouts:
            rollout.done.set_exception(error)
        self._rollouts.clear()

    async def _keep(self, instance: Instance) -> None:
        why = await instance.run()
        del self._instances[instance.name]
        self._lost_restarts += instance.tenure.restarts
        self._lost_drops += instance.other_fence_dropped
        self._gone[instance.name] = why
        self._emit(ControlEvent(EventKind.GONE, instance.name, why))
        self._work.gone(instance.name)
        self._shared.launcher.forget(instance.name)
        if not self._instances:
            await self._others_dial_in()

    async def _others_dial_in(self) -> None:
        """Nobody is left: a run whose instances dial in waits for them as long as at its start."""
        settings = self._shared.settings
        end = time.monotonic() + (settings.start_timeout_s if settings.min_instances else 0.0)
        while not self._instances:
            if time.monotonic() >= end:
                raise ControlError("no instance is left: " + "; ".join(self._gone.values()))
            await asyncio.sleep(_LOOK_S)

    def _settled(self, report: UpdateReport) -> None:
        """An instance serves ``report.version``, or was lost: answers whatever waited for that or less."""
        for rollout in list(self._rollouts):
            if report.instance not in rollout.waiting:
                continue
            if report.accepted and report.version < rollout.version:
                continue
            rollout.waiting.discard(report.instance)
            rollout.reports.append(report)
            if not rollout.waiting:
                self._rollouts.remove(rollout)
                rollout.done.set_result(rollout.reports)
