"""An instance whose disk is full: for its log, for the file that says where it answers, for the weights it pulls.

The disk is a bound on the size of files (RLIMIT_FSIZE), which needs no rights and fails as a quota does.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.bridge.store import WeightStore
from streamrl_jax.control.events import EventKind
from streamrl_jax.control.faults import ControlError
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Manifest, WeightSource
from tests.fast.control_world import FENCE

from .harness import CHAOS, local, scene
from .proxies import LoopThread


@dataclass(frozen=True)
class Held:
    """What a store holds of a version."""

    manifest: Manifest
    path: Path


@contextmanager
def stored_version(folder: Path) -> Iterator[tuple[Manifest, WeightSource]]:
    """Version 0, 400 kB, in a store that instances pull from."""
    manifest, blob = pack(FENCE, 0, "Tiny", {"w": np.arange(100_000, dtype=np.float32)})
    path = folder / "blob.bin"
    path.write_bytes(blob)

    async def serve() -> tuple[net.grpc.aio.Server, str]:
        server = net.make_server(net.OPEN)
        rpc.add_WeightStoreServicer_to_server(
            WeightStore(lambda: FENCE, lambda: {0: Held(manifest, path)}), server
        )
        address = net.bind(server, "127.0.0.1:0", net.OPEN)
        await server.start()
        return server, address

    with LoopThread("store") as thread:
        server, address = thread.call(serve())
        try:
            yield manifest, WeightSource(address=address)
        finally:
            thread.call(server.stop(None))


def full(tmp_path: Path, largest_file: int) -> dict[str, dict[str, object]]:
    """Instance a's disk is full as long as ``tmp_path / "full"`` exists."""
    (tmp_path / "full").touch()
    return {"a": {"largest_file": largest_file, "full": str(tmp_path / "full")}}


def test_a_log_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    with scene(local(tmp_path, "ab", full(tmp_path, 100)), tmp_path) as found:
        found.take(found.submit(0, 40))
        counts = found.adds_up()
        assert counts["taken_back"] == counts["restarts"] == 0
        assert {sample.generation.instance for sample in found.samples} == {"a", "b"}
    assert "answers at" in (tmp_path / "logs/b.log").read_text()
    assert "answers at" not in (tmp_path / "logs/a.log").read_text()


def test_an_address_file_that_cannot_be_written_ends_the_start_with_its_name(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"a\.address could not be written .* Free some, or lift the quota"),
        scene(local(tmp_path, "ab", full(tmp_path, 10)), tmp_path),
    ):
        pass


def test_an_instance_that_finds_its_disk_full_at_a_restart_comes_back_when_there_is_room(
    tmp_path: Path,
) -> None:
    paces = full(tmp_path, 10)
    (tmp_path / "full").unlink()
    with scene(local(tmp_path, "ab", paces), tmp_path) as found:
        job_id = found.submit(0, 60)

        def kill() -> None:
            (tmp_path / "full").touch()
            found.signal("a", signal.SIGKILL)

        found.take(job_id, {30: kill})
        found.wait_for(
            lambda: any("a.address could not be" in e.text for _, e in found.seen(EventKind.LOST, "a"))
        )
        (tmp_path / "full").unlink()
        found.wait_for(lambda: len(found.seen(EventKind.READY, "a")) == 2)
        found.take(found.submit(1, 20))
        assert found.adds_up()["taken_back"] > 0
        assert found.samples[-1].generation.instance in "ab"


def test_weights_without_room_cost_the_instance_and_not_the_run(tmp_path: Path) -> None:
    settings = replace(CHAOS, transport="grpc")
    with (
        stored_version(tmp_path) as (manifest, source),
        scene(local(tmp_path, "ab", full(tmp_path, 4096)), tmp_path, settings, publish=False) as found,
    ):
        reports = {r.instance: r for r in found.controller.publish(manifest, source).result(120)}
        assert reports["b"].accepted and not reports["a"].accepted
        assert "no room for the weights, 400000 bytes needed" in reports["a"].reason
        assert "Enlarge /dev/shm" in reports["a"].reason
        found.take(found.submit(0, 20))
        (tmp_path / "full").unlink()
        found.wait_for(lambda: found.seen(EventKind.UPDATED, "a"))
        found.take(found.submit(1, 40))
        assert {sample.generation.instance for sample in found.samples} == {"a", "b"}
        found.adds_up()


def test_weights_that_never_find_room_end_the_run_with_the_remedy(tmp_path: Path) -> None:
    settings = replace(CHAOS, transport="grpc", max_restarts=1)
    with (
        stored_version(tmp_path) as (manifest, source),
        scene(local(tmp_path, "a", full(tmp_path, 4096)), tmp_path, settings, publish=False) as found,
        pytest.raises(ControlError, match=r"(?s)no room for the weights.*--resume"),
    ):
        found.controller.publish(manifest, source).result(120)
        next(found.controller.samples(found.submit(0, 1), 120))
