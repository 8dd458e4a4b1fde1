"""Instances on the nodes of a Ray cluster: each is the very same process as elsewhere, under an actor's eye.

::

    controller ──▶ actor (one per instance, on a node with room) ──pipe──▶ guard ──▶ instance ──▶ EngineCore ──▶ workers

Ray only finds the room and starts the actor; samples and weights go over the run's own gRPC. The actor holds the pipe
of the guard: when it ends, for whatever reason (its node's raylet died, the driver is gone, Ray killed it), the guard
ends the instance with all of vLLM's processes, as it does for a launcher on one machine.

What the nodes must share: this package and vLLM (the same environment, or ``gen.python``), the model's directory and
the run directory, in which specification, token, certificates and logs lie. Where no file system is shared, instances
dial in (``streamrl gen --join``). Ray is an extra (``pip install streamrl_jax[ray]``), imported in functions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.guard import GRACE_S, REAP_S, TRACKERS_S
from streamrl_jax.gen.launch.local import (
    ANSWER_TIMEOUT_S,
    LocalInstance,
    LocalLauncher,
    instance_environment,
    log_tail,
)
from streamrl_jax.gen.launch.plan import RayPlan
from streamrl_jax.gen.options import InstanceSpec, engine_seed

_ACTOR_S: Final = 60.0
"""Bound on the start of an actor's process once there is room."""

_LOOK_S: Final = 0.2
_SLACK_S: Final = 5.0


@dataclass(frozen=True)
class Assigned:
    """What an actor is to do; travels to its node."""

    spec: InstanceSpec
    run_dir: str
    seed: int
    python: str
    module: str
    grace_s: float


@dataclass(frozen=True)
class Found:
    """Where an actor started its instance; travels back from its node."""

    address: str  # as other nodes reach it
    host: str  # of the node
    node_id: str  # Ray's


class Supervisor:
    """The actor: starts one instance on its node and holds on to it. Its methods run on Ray's event loop.

    Call order: ``start`` once; ``ended`` and ``stop`` afterwards.

    Args:
        assigned: the instance.
    """

    def __init__(self, assigned: Assigned) -> None:
        self._assigned = assigned
        self._instance: LocalInstance | None = None

    async def start(self) -> Found:
        """Starts the instance.

        Returns:
            Where it is.

        Raises:
            UserError: it did not come up, or this node does not see the run directory.
        """
        import ray

        assigned, host = self._assigned, ray.util.get_node_ip_address()
        if not Path(assigned.run_dir).is_dir():
            raise UserError(
                f"the node {host} does not see the run directory {assigned.run_dir}: put it on a file system that all "
                "nodes share (run.dir), or start instances there with streamrl gen --join"
            )
        gpus = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        cores = "cpu:" + ",".join(map(str, sorted(os.sched_getaffinity(0))))
        engine = replace(assigned.spec.engine, device=gpus or cores)
        launcher = LocalLauncher(
            [replace(assigned.spec, engine=engine)],
            Path(assigned.run_dir),
            run_seed=assigned.seed,
            python=assigned.python,
            module=assigned.module,
            grace_s=assigned.grace_s,
        )
        self._instance = await launcher.start(assigned.spec.name)
        bound, port = net.split_address(self._instance.address)
        address = f"{host if bound in ('0.0.0.0', '::') else bound}:{port}"
        return Found(address, host, ray.get_runtime_context().get_node_id())

    async def ended(self) -> str:
        """Returns when the instance has ended, and why."""
        while True:
            if self._instance is not None and (reason := self._instance.ended()) is not None:
                return reason
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Ends the instance with all its processes."""
        if self._instance is not None:
            await self._instance.stop()


class RayInstance:
    """A started instance on some node.

    Args:
        found: where it is.
        actor: its supervisor.
        group: its placement group.
        log: its log file.
        grace_s: what it gets to end in good order.
    """

    managed = True

    def __init__(self, found: Found, actor: Any, group: Any, log: Path, grace_s: float) -> None:
        self.address = found.address
        self.node_id = found.node_id
        self._actor = actor
        self._group = group
        self._log = log
        self._grace_s = grace_s
        self._end = actor.ended.remote()

    def ended(self) -> str | None:
        """Why its process, its actor or its node has ended; None while it lives."""
        import ray
        from ray.exceptions import RayError

        ready, _ = ray.wait([self._end], timeout=0)
        if not ready:
            return None
        try:
            return str(ray.get(ready[0]))
        except RayError as error:
            return f"its actor or its node is gone: {_first_line(error)}"

    def log_tail(self) -> str:
        """The last lines of its log, which lies in the run directory whatever became of its node."""
        return log_tail(self._log)

    async def stop(self) -> None:
        """Ends it and gives its room back."""
        await asyncio.to_thread(_end_actor, self._actor, self._group, self._grace_s)


class RayLauncher:
    """Starts instances as actors, each in a placement group of its own.

    The group has one bundle with all that the instance's tensor-parallel workers take: they are on one node, and the
    one actor that supervises them holds their GPUs.

    Args:
        specs: one an instance; the node chooses the devices.
        run_dir: on a file system that all nodes share.
        plan: ``gen.ray``.
        run_seed: ``run.seed``.
        python: interpreter of the generation environment on the nodes; empty: Ray's.
        module: what an instance's process runs (tests start a fake).
        grace_s: what an instance gets to end in good order.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        run_dir: Path,
        plan: RayPlan,
        *,
        run_seed: int = 0,
        python: str = "",
        module: str = "streamrl_jax.gen.instance",
        grace_s: float = GRACE_S,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._plan = plan
        self._run_seed = run_seed
        self._python = python
        self._module = module
        self._grace_s = grace_s
        self._starts: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._connecting = asyncio.Lock()

    @property
    def names(self) -> Sequence[str]:
        """The instances that can be started."""
        return tuple(self._specs)

    def admit(self, spec: InstanceSpec) -> None:
        """Learns of another instance, which can then be started."""
        self._specs[spec.name] = spec

    def forget(self, name: str) -> None:
        """The instance has left the run; its log stays."""
        self._specs.pop(name, None)
        self._hosts.pop(name, None)

    def host(self, name: str) -> str:
        """The node that an instance runs on; empty while that is open."""
        return self._hosts.get(name, "")

    async def start(self, name: str) -> RayInstance:
        """Finds room and starts one; returns as soon as it answers calls.

        Raises:
            UserError: there is no cluster, no room in time, or the instance did not come up.
        """
        async with self._connecting:
            await asyncio.to_thread(_connect, self._plan.address)
        number = self._starts.get(name, 0)
        self._starts[name] = number + 1
        spec = self._specs[name]
        # Each actor is a launcher's first start: what tells the lives apart is in the seed that it is given.
        incarnation = spec.fence.incarnation if spec.fence else 0
        seed = engine_seed(self._run_seed, name, incarnation, number)
        python, run_dir = self._python, str(self._run_dir.absolute())
        assigned = Assigned(spec, run_dir, seed, python, self._module, self._grace_s)
        starting = asyncio.ensure_future(asyncio.to_thread(_start_actor, assigned, self._plan))
        try:
            actor, group, found = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(UserError):
                actor, group, _ = await starting
                await asyncio.to_thread(_end_actor, actor, group, self._grace_s)
            raise
        self._hosts[name] = found.host
        log = self._run_dir / "logs" / f"{name}.log"
        return RayInstance(found, actor, group, log, self._grace_s)


def _connect(address: str) -> None:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "gen.launcher = 'ray', and Ray is not installed here: pip install 'streamrl_jax[ray]', on the cluster's "
            "version of Ray"
        ) from error
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster at gen.ray.address = {address!r}: {_first_line(error)}. Start one (ray start --head), or "
            "set gen.launcher = 'local'"
        ) from error


def _start_actor(assigned: Assigned, plan: RayPlan) -> tuple[Any, Any, Found]:
    """Actor, placement group and place of a started instance. Blocks; runs in a thread."""
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    size = assigned.spec.engine.tensor_parallel_size
    room = {"CPU": plan.cpus_per_worker * size, "GPU": plan.gpus_per_worker * size}
    group = placement_group([{kind: amount for kind, amount in room.items() if amount}], "STRICT_PACK")
    actor: Any = None
    try:
        if not group.wait(plan.placement_timeout_s):
            raise UserError(
                f"instance {assigned.spec.name} needs {room['CPU']:g} CPUs and {room['GPU']:g} GPUs on one node, and "
                f"no node of the Ray cluster had them free within {plan.placement_timeout_s:g} s "
                f"(gen.ray.placement_timeout_s); free now: {ray.available_resources()}"
            )
        supervisor = ray.remote(Supervisor).options(
            num_cpus=room["CPU"],
            num_gpus=room["GPU"],
            max_restarts=0,
            runtime_env={"env_vars": {"PYTHONPATH": instance_environment(os.environ).get("PYTHONPATH", "")}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        actor = supervisor.remote(assigned)
        found: Found = ray.get(actor.start.remote(), timeout=_ACTOR_S + ANSWER_TIMEOUT_S)
        _check_reachable(found)
        return actor, group, found
    except RayError as error:  # before UserError: Ray makes one class of both out of what an actor raised
        _end_actor(actor, group, assigned.grace_s)
        cause = getattr(error, "cause", None)
        why = str(cause) if isinstance(cause, UserError) else _first_line(error)
        raise UserError(f"instance {assigned.spec.name} did not start on the Ray cluster: {why}") from error
    except UserError:
        _end_actor(actor, group, assigned.grace_s)
        raise


def _check_reachable(found: Found) -> None:
    import ray

    if net.is_loopback(net.split_address(found.address)[0]) and found.host != ray.util.get_node_ip_address():
        raise UserError(
            f"an instance listens on the loopback address of the node {found.host}, where the controller cannot reach "
            "it; set gen.listen = '0.0.0.0'"
        )


def _end_actor(actor: Any, group: Any, grace_s: float) -> None:
    """Ends an instance, its actor and its reservation, each whatever became of the others."""
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    if actor is not None:
        with contextlib.suppress(RayError):
            ray.get(actor.stop.remote(), timeout=grace_s + TRACKERS_S + REAP_S + _SLACK_S)
        with contextlib.suppress(RayError):
            ray.kill(actor)
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
