"""What an instance holds: asked for again it is no new work, and never acknowledged it is bounded all the same."""

from __future__ import annotations

import pytest

from streamrl_jax.gen import service
from streamrl_jax.gen.client import Drained
from streamrl_jax.types import Generation, Rejection
from tests.fakes import FakeEngine

from .test_gen_service import FENCE, answers, assignment, next_of, run, serving, stream_to


def test_what_a_draining_instance_holds_is_not_refused_when_it_is_asked_for_again() -> None:
    """After a break its controller repeats every assignment: one at work and one finished are no new work."""

    async def scenario() -> None:
        # At the third token, which is the first one of s1.
        engine = FakeEngine(slots=1, length=lambda each: 2 if each.sample_id == "s0" else 16, hang_at=3)
        async with serving(engine) as (_, address):
            async with stream_to(address) as (client, stream):
                for index in range(2):
                    await stream.assign(assignment(index))
                assert (await answers(stream, 1, acknowledge=False))[0].sample_id == "s0"
                await client.drain(FENCE)
            async with stream_to(address) as (_, stream):
                for index in range(3):
                    await stream.assign(assignment(index))
                told: set[tuple[str, str]] = set()
                async for event in stream.events():
                    if isinstance(event, Generation | Rejection):
                        told.add((type(event).__name__, event.sample_id))
                    if ("Rejection", "s2") in told:
                        engine.thaw()
                    if isinstance(event, Drained):
                        break
        assert told == {("Generation", "s0"), ("Generation", "s1"), ("Rejection", "s2")}
        assert [line for line in engine.log if line.startswith("start")] == ["start s0/0", "start s1/0"]

    run(scenario)


def test_what_nobody_acknowledges_is_bounded_over_any_number_of_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stream grants credit anew. What is held is still sent again when it is full, and not refused."""
    monkeypatch.setattr(service, "MOST_HELD", 2)
    most = 2 * (4 + 2)

    async def scenario() -> None:
        engine = FakeEngine(slots=4, tokens_per_s=5000)
        async with serving(engine, lookahead=2) as (_, address):
            given = [assignment(index) for index in range(most)]
            for first in range(0, most, 6):
                async with stream_to(address) as (_, stream):
                    for each in given[first : first + 6]:
                        await stream.assign(each)
                    await answers(stream, first + 6, acknowledge=False)
            async with stream_to(address) as (_, stream):
                await stream.assign(assignment(most))
                refused = await next_of(stream, Rejection)
                assert refused.sample_id == f"s{most}" and f"{most} are kept at most" in refused.message
                await stream.assign(given[0])
                while (await next_of(stream, Generation)).sample_id != "s0":
                    pass
                for each in given:
                    await stream.acknowledge(each.sample_id, 0)
                await stream.assign(assignment(most, attempt=1))
                while (await next_of(stream, Generation)).sample_id != f"s{most}":
                    pass

    run(scenario)
