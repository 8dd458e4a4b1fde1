"""`streamrl pool list|add|drain RUN_DIR`: the instances of a run that goes on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.whereabouts import find_controller
from streamrl_jax.proto import pool_pb2 as pb
from streamrl_jax.proto import pool_pb2_grpc as rpc
from streamrl_jax.rundir import look
from streamrl_jax.setup.security import run_access

_CALL_S: Final = 10.0
"""Bound on one call: the controller answers at once."""

_LOOK_S: Final = 0.25

_REFUSALS: Final = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT})


def list_instances(run_dir: Path, *, as_json: bool = False) -> str:
    """What is printed about the instances of a run.

    Args:
        run_dir: The run directory.
        as_json: One JSON object in the place of a table.

    Returns:
        The text.

    Raises:
        UserError: No run goes on there.
    """
    with _admin(run_dir) as admin:
        reply = admin.list()
    return _as_json(reply) if as_json else _as_table(reply)


def add_instances(
    run_dir: Path, *, pool: str = "", count: int = 0, devices: Sequence[str] = (), endpoint: str = ""
) -> list[str]:
    """Adds instances to a run; returns before they are up.

    Args:
        run_dir: The run directory.
        pool: Of a pool; empty: the default one.
        count: How many; 0: one for each entry of ``devices``, else one.
        devices: As in `gen.devices`; empty: what is free.
        endpoint: ``host:port`` of an instance that was started elsewhere, in the place of all this.

    Returns:
        Their names.

    Raises:
        UserError: No run goes on there, or it refuses.
    """
    if endpoint and (pool or count or devices):
        raise UserError(
            "--endpoint names an instance that runs already; --pool, --count and --devices are for new ones"
        )
    with _admin(run_dir) as admin:
        return admin.add(pb.AddInstancesRequest(pool=pool, count=count, devices=devices, endpoint=endpoint))


def drain_instances(
    run_dir: Path, names: Sequence[str], *, at_once: bool = False, wait_s: float = 0.0
) -> list[str]:
    """Lets instances of a run go.

    Args:
        run_dir: The run directory.
        names: Of the instances; all or none.
        at_once: What they hold is handed out again.
        wait_s: So long this waits until they have left.

    Returns:
        Those that have not left yet.

    Raises:
        UserError: No run goes on there, or it refuses.
    """
    with _admin(run_dir) as admin:
        admin.drain(pb.DrainInstancesRequest(names=names, at_once=at_once))
        end = time.monotonic() + wait_s
        while True:
            there = {instance.name for instance in admin.list().instances}
            remaining = [name for name in names if name in there]
            if not remaining or time.monotonic() >= end:
                return remaining
            time.sleep(_LOOK_S)


class _Admin:
    """Calls to the admin service of one run."""

    def __init__(self, run_dir: Path, address: str, channel: grpc.Channel, access: net.Access) -> None:
        self._run_dir = run_dir
        self._address = address
        self._metadata = access.metadata
        self._stub = rpc.PoolAdminStub(channel)

    def list(self) -> pb.ListInstancesReply:
        """`ListInstances`."""
        return self._call(self._stub.ListInstances, pb.ListInstancesRequest())

    def add(self, request: pb.AddInstancesRequest) -> list[str]:
        """`AddInstances`."""
        reply: pb.AddInstancesReply = self._call(self._stub.AddInstances, request)
        return [*reply.names]

    def drain(self, request: pb.DrainInstancesRequest) -> None:
        """`DrainInstances`."""
        self._call(self._stub.DrainInstances, request)

    def _call(self, call: Any, request: Any) -> Any:
        try:
            return call(request, timeout=_CALL_S, metadata=self._metadata)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()  # type: ignore[attr-defined]
            if code in _REFUSALS:
                raise UserError(details or code.name) from error
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(f"the controller of {self._run_dir} refuses the token: {details}") from error
            raise UserError(
                f"the controller of {self._run_dir} at {self._address} does not answer ({code.name}: {details}). If "
                f"the run was killed, go on with streamrl train --resume {self._run_dir}"
            ) from error


@contextlib.contextmanager
def _admin(run_dir: Path) -> Iterator[_Admin]:
    home = look(run_dir)
    found = find_controller(run_dir)
    if found is None:
        raise UserError(
            f"run {run_dir} does not go on: it is over, or was stopped, or is just starting. Instances can be listed "
            "and changed while it runs"
        )
    access = net.Access.from_files(run_access(load_config([home.config]), home))
    with net.open_blocking_channel(found.address, access) as channel:
        yield _Admin(run_dir, found.address, channel, access)


def _as_json(reply: pb.ListInstancesReply) -> str:
    instances = [
        {
            "name": instance.name,
            "state": instance.state,
            "version": instance.version,
            "slots": instance.slots,
            "held": instance.held,
            "tokens_per_s": round(instance.tokens_per_s, 1),
            "restarts": instance.restarts,
            "device": instance.device,
            "host": instance.host,
            "address": instance.address,
            "joined": instance.joined,
        }
        for instance in reply.instances
    ]
    run = {"run_id": reply.fence.run_id, "incarnation": reply.fence.incarnation, "version": reply.version}
    return json.dumps(
        {**run, "instances": instances, "left": {left.name: left.why for left in reply.left}}, indent=1
    )


def _as_table(reply: pb.ListInstancesReply) -> str:
    header = ("name", "state", "version", "slots", "held", "tokens/s", "restarts", "device", "host")
    rows = [
        (
            instance.name,
            instance.state,
            str(instance.version) if instance.version >= 0 else "-",
            str(instance.slots or "-"),
            str(instance.held),
            f"{instance.tokens_per_s:,.0f}",
            str(instance.restarts),
            instance.device or "-",
            f"{instance.host} (dialled in)" if instance.joined else instance.host,
        )
        for instance in reply.instances
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in (header, *rows)]  # fmt: skip
    lines += [f"{left.name} has left: {left.why}" for left in reply.left]
    return "\n".join(lines)
