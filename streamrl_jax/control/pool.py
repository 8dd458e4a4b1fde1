"""All instances: hands out work as they have room, brings them versions, and notices when none is left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from streamrl_jax.control.events import ControlEvent, EventKind, InstanceView
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.instance import Instance, Surroundings
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Publication, Shelf
from streamrl_jax.control.work import Work
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.types import Fence, UpdateReport


@dataclass(eq=False)
class _Rollout:
    """A publication on its way to the instances that were there when it came."""

    version: int
    waiting: set[str]
    done: Future[list[UpdateReport]]
    reports: list[UpdateReport] = field(default_factory=list)


class Pool:
    """The instances of a run. Lives on the controller's loop.

    Call order: ``add`` each instance (also later, while the others work), ``pump`` after anything that may
    give work to someone, ``publish`` for each version.

    Args:
        fence: this life of the run.
        settings: bounds.
        launcher: starts instances, or knows where they are.
        token: shared secret of the run.
        work: the open jobs.
        spawn: runs a coroutine on the loop; its exception ends the run.
        emit: takes events.
    """

    def __init__(
        self,
        fence: Fence,
        settings: ControlSettings,
        launcher: Launcher,
        token: str,
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
            fence, settings, launcher, token, work, self.shelf, self.pump, emit, self._settled
        )

    def add(self, name: str) -> None:
        """Starts an instance; it gets the current version and work as soon as it is up."""
        if name in self._instances:
            raise ValueError(f"instance {name} is in the pool already")
        self._instances[name] = Instance(name, self._shared)
        self._spawn(self._keep(self._instances[name]), name=f"instance {name}")

    def pump(self) -> None:
        """Hands out what waits to whoever has room."""
        rooms = [room for instance in self._instances.values() if (room := instance.room()) is not None]
        for name, assignment in self._work.take(rooms):
            self._instances[name].assign(assignment)

    def publish(self, publication: Publication, done: Future[list[UpdateReport]]) -> None:
        """Makes a version the current one and brings it to every instance.

        Args:
            publication: the version.
            done: gets one report per instance; one that is lost meanwhile reports so, and gets the
                version (or a newer one) before its first sample.
        """
        for version in self.shelf.put(publication):
            self._emit(ControlEvent(EventKind.RELEASED, version=version))
        self._rollouts.append(_Rollout(publication.version, set(self._instances), done))
        for instance in self._instances.values():
            instance.published()

    def views(self) -> tuple[InstanceView, ...]:
        """Each instance, in the order they were added."""
        return tuple(instance.view() for instance in self._instances.values())

    def loaded(self) -> int:
        """How many are loaded and connected."""
        return sum(instance.loaded for instance in self._instances.values())

    def serving(self, version: int) -> list[str]:
        """Those that serve exactly this version."""
        return [i.name for i in self._instances.values() if i.loaded and i.version == version]

    def counts(self) -> dict[str, int]:
        """Restarts, and messages of another life that the streams dropped."""
        instances = self._instances.values()
        return {
            "restarts": self._lost_restarts + sum(instance.restarts for instance in instances),
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
        self._lost_restarts += instance.restarts
        self._lost_drops += instance.other_fence_dropped
        self._gone[instance.name] = why
        self._emit(ControlEvent(EventKind.GONE, instance.name, why))
        self._work.gone(instance.name)
        if not self._instances:
            raise ControlError("no instance is left: " + "; ".join(self._gone.values()))

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
