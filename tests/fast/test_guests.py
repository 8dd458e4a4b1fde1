"""Whose a name is when two processes dial in with it. The pool is scripted: what counts here is the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from streamrl_jax.control.guests import Guest, Guests, Word
from streamrl_jax.control.pool import Pool
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.join import Announcer, Myself
from streamrl_jax.gen.launch.fleet import Fleet
from streamrl_jax.gen.options import JoinSpec

OLD = Guest("node-a", "life-1", "10.0.0.1:5", "a")
ELSEWHERE = Guest("node-a", "life-2", "10.0.0.2:5", "b")
SAME_PLACE = Guest("node-a", "life-2", "10.0.0.1:5", "a")


class Script:
    """Stands for pool and fleet."""

    def __init__(self) -> None:
        self.connected: dict[str, bool] = {}
        self.dismissed: list[str] = []
        self.addresses: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.connected

    def guest(self, name: str, address: str, host: str) -> None:
        self.addresses.append(address)

    def add(self, name: str, *, founding: bool) -> None:
        self.connected[name] = True

    def dismiss(self, name: str, why: str) -> None:
        self.dismissed.append(why)
        del self.connected[name]

    def is_connected(self, name: str) -> bool:
        return self.connected.get(name, False)

    def gone(self) -> dict[str, str]:
        return {}


def guests(script: Script) -> Guests:
    return Guests(cast("Pool", script), cast("Fleet", script), beat_s=0.01)


async def told(visit: Any) -> Word:
    async with asyncio.timeout(10):
        return (await anext(visit))[0]


async def break_off(visit: Any) -> None:
    await cast("AsyncGenerator[Any, None]", visit).aclose()


def test_a_name_whose_announcement_broke_off_is_not_taken_from_one_that_works() -> None:
    async def scenario() -> None:
        script = Script()
        house = guests(script)
        first = house.attend(OLD)
        assert await told(first) is Word.STAY
        with pytest.raises(UserError, match="give this one another --name"):
            await told(house.attend(ELSEWHERE))
        await break_off(first)
        second = house.attend(ELSEWHERE)
        assert await told(second) is Word.WAIT
        assert script.dismissed == []
        script.connected["node-a"] = False  # its stream has broken too: it is gone
        while await told(second) is Word.WAIT:
            pass
        assert script.dismissed == ["it was started anew"]
        assert script.addresses == ["10.0.0.1:5", "10.0.0.2:5"]

    asyncio.run(scenario())


def test_one_that_was_started_anew_in_the_same_place_is_let_in_at_once() -> None:
    async def scenario() -> None:
        script = Script()
        house = guests(script)
        first = house.attend(OLD)
        assert await told(first) is Word.STAY
        await break_off(first)
        second = house.attend(SAME_PLACE)
        assert [await told(second), await told(second)] == [Word.WAIT, Word.STAY]

    asyncio.run(scenario())


def test_a_controller_whose_name_is_not_known_for_a_while_is_one_that_does_not_answer() -> None:
    join = JoinSpec(address="no-such-host.invalid:5", patience_s=0.5)
    with pytest.raises(
        UserError, match=r"no-such-host\.invalid:5 did not answer for 0\.5 s, and never did: see"
    ):
        asyncio.run(Announcer(join, Myself("a", "0.0.0.0:2", 1, 64), net.OPEN).run())
