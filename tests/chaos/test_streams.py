"""Streams that are cut, half open, slow, repeated and reordered, between a controller and living instances."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl_jax.control.events import EventKind
from streamrl_jax.gen.launch import StaticLauncher

from .harness import CHAOS, LEASE_S, MEASURED, TICK_S, endpoints, scene
from .proxies import LoopThread, Wire, repeating


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread("proxies") as thread:
        yield thread


def test_a_cut_that_is_mended_within_the_lease_loses_nothing(tmp_path: Path, loop: LoopThread) -> None:
    with endpoints(tmp_path, "ab") as addresses:
        wires = {name: Wire(loop, address).open() for name, address in addresses.items()}
        launcher = StaticLauncher({name: wire.address for name, wire in wires.items()})
        with scene(launcher, tmp_path) as found:
            job_id = found.submit(0, 60)

            cuts: list[int] = []

            def cut() -> None:
                found.wait_for(lambda: len(found.seen(EventKind.RECONNECTED)) == 2 * len(cuts))
                cuts.append(0)
                for wire in wires.values():
                    wire.cut()
                time.sleep(LEASE_S / 4)
                for wire in wires.values():
                    wire.mend()

            found.take(job_id, {20: cut, 100: cut})
            counts = found.adds_up()
            assert counts["taken_back"] == counts["restarts"] == 0
            found.wait_for(lambda: len(found.seen(EventKind.RECONNECTED)) == 4)
            assert {sample.generation.attempt for sample in found.samples} == {0}


@pytest.mark.parametrize("fault", ["cut", "half_open"])
def test_a_break_past_the_lease_costs_the_instance_its_work_until_it_is_mended(
    tmp_path: Path, loop: LoopThread, fault: str
) -> None:
    """A wire that takes everything and brings nothing (its far end lost power) is as dead as one that was cut."""
    with endpoints(tmp_path, "ab", tokens_per_s=100.0) as addresses:
        wire = Wire(loop, addresses["a"]).open()
        launcher = StaticLauncher({"a": wire.address, "b": addresses["b"]})
        with scene(launcher, tmp_path, MEASURED) as found:
            job_id = found.submit(0, 40)
            found.wait_for(lambda: all(view.held == 6 for view in found.controller.pool()))
            broken = time.monotonic()
            getattr(wire, fault)()
            seconds, why = found.noticed_after("a", broken)
            assert LEASE_S - 1.1 < seconds < LEASE_S + TICK_S + found.slack_s, why
            wire.mend()
            found.take(job_id)
            found.wait_for(lambda: len(found.seen(EventKind.READY, "a")) >= 2)
            assert found.adds_up()["taken_back"] > 0


def test_a_slow_wire_delays_and_breaks_nothing(tmp_path: Path, loop: LoopThread) -> None:
    with endpoints(tmp_path, "a") as addresses:
        wire = Wire(loop, addresses["a"]).open()
        with scene(StaticLauncher({"a": wire.address}), tmp_path) as found:
            wire.delay(0.1)
            found.take(found.submit(0, 10))
            wire.mend()
            wire.throttle(20_000)
            found.take(found.submit(1, 10))
            assert found.adds_up()["taken_back"] == 0


@pytest.mark.parametrize(
    "faults", [{"duplicate": True}, {"reorder": True}, {"duplicate": True, "reorder": True}], ids="+".join
)
def test_repeated_and_reordered_answers_are_taken_once(
    tmp_path: Path, loop: LoopThread, faults: dict[str, bool]
) -> None:
    # An answer that is held back to be swapped goes out, once, with a heartbeat where no other answer comes before it:
    # these are rare, so that two answers meet however slow the machine is.
    seldom = replace(CHAOS, heartbeat_interval_s=5.0)
    with (
        endpoints(tmp_path, "a") as addresses,
        repeating(loop, addresses["a"], **faults) as address,
        scene(StaticLauncher({"a": address}), tmp_path, seldom) as found,
    ):
        found.take(found.submit(0, 25))
        counts = found.adds_up()
        repeated = 0 if "duplicate" not in faults else 40 if "reorder" in faults else 90
        found.wait_for(lambda: found.controller.counters()["duplicates_dropped"] >= repeated)
        assert counts["taken_back"] == 0
