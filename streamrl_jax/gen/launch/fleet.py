"""All that a run can get instances from: those it starts itself, endpoints, and those that dial in."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.launch.protocol import Launched, Launcher
from streamrl_jax.gen.launch.static import StaticLauncher
from streamrl_jax.gen.options import InstanceSpec, PoolTemplate

ENDPOINT: Final = "endpoint"
"""What the names of endpoints begin with, unless they are given other ones."""


class Maker(Launcher, Protocol):
    """A launcher that can start further instances."""

    def admit(self, spec: InstanceSpec) -> None:
        """Learns of an instance; `Launcher.start` can then start it."""
        ...

    def host(self, name: str) -> str:
        """Where an instance runs; empty while that is open."""
        ...


@dataclass(frozen=True)
class Place:
    """Where an instance runs, for a list."""

    host: str
    device: str = ""
    joined: bool = False  # it announced itself


class Fleet:
    """The launcher of a run, which can grow: hands each name to whoever knows it.

    Call order: as of `Launcher`; ``grow``, ``endpoint`` and ``guest`` give a name that can then be started, ``forget``
    when it has left. A name is not used for another instance again, but for one that dials in a second time.

    Args:
        make: makes the launcher of the run's own instances, from those that it begins with.
        pools: the pools, the default one first.
        endpoints: addresses by name.
        device: gives the devices of a further instance: ``(what the others have, workers) -> entry``.
        access: token and TLS of the run.
    """

    def __init__(
        self,
        make: Callable[[Sequence[InstanceSpec]], Maker],
        pools: Sequence[PoolTemplate],
        endpoints: Mapping[str, str],
        device: Callable[[Sequence[str], int], str],
        access: net.Access,
    ) -> None:
        for address in endpoints.values():
            net.check_call(address, access)
        specs = [pool.instance(index, entry) for pool in pools for index, entry in enumerate(pool.devices)]
        self._pools = {pool.name: pool for pool in pools}
        self._made = {spec.name: spec for spec in specs}
        self._numbers = {pool.name: len(pool.devices) for pool in pools} | {ENDPOINT: len(endpoints)}
        self._maker = make(specs)
        self._elsewhere = StaticLauncher(endpoints)
        self._guests: dict[str, str] = {}  # name -> host, as they say
        self._device = device
        self._access = access
        self._founding = (*self._made, *endpoints)

    @property
    def names(self) -> Sequence[str]:
        """The instances that the run begins with."""
        return self._founding

    async def start(self, name: str) -> Launched:
        """Starts one, by the launcher that knows it."""
        launcher: Launcher = self._maker if name in self._made else self._elsewhere
        return await launcher.start(name)

    def grow(self, pool: str = "", device: str = "") -> str:
        """A further instance of a pool.

        Args:
            pool: its name; empty: the default one.
            device: as in ``gen.devices``; empty: what is free.

        Returns:
            The new instance's name.

        Raises:
            UserError: no such pool, or nothing is free.
        """
        template = self._find(pool)
        taken = [spec.engine.device for spec in self._made.values()]
        entry = device or self._device(taken, template.spec.engine.tensor_parallel_size)
        number, _ = self._free(template.name)
        spec = template.instance(number, entry)
        self._numbers[template.name] = number + 1
        self._made[spec.name] = spec
        self._maker.admit(spec)
        return spec.name

    def endpoint(self, address: str) -> str:
        """An instance that was started elsewhere.

        Args:
            address: ``host:port``.

        Returns:
            The new instance's name.

        Raises:
            UserError: no address, in the pool already, or on another machine in plain text.
        """
        net.check_call(address, self._access)
        number, name = self._free(ENDPOINT)
        self._elsewhere.admit(name, address)
        self._numbers[ENDPOINT] = number + 1
        return name

    def guest(self, name: str, address: str, host: str) -> None:
        """An instance that dialled in.

        Args:
            name: that it chose; in use neither here nor for one of the run's own.
            address: where it answers.
            host: where it runs, as it says.

        Raises:
            UserError: the name is taken, or the address is none that may be called.
        """
        if name in self._made or name in self._elsewhere.names or name in self._pools:
            raise UserError(
                f"an instance called {name!r} is in the pool already; give this one another --name"
            )
        net.check_call(address, self._access)
        self._elsewhere.admit(name, address)
        self._guests[name] = host

    def forget(self, name: str) -> None:
        """An instance has left: its devices and its address are free again."""
        if self._made.pop(name, None) is not None:
            self._maker.forget(name)
        self._guests.pop(name, None)
        self._elsewhere.forget(name)

    def place(self, name: str) -> Place:
        """Where an instance runs."""
        if (spec := self._made.get(name)) is not None:
            return Place(self._maker.host(name), spec.engine.device)
        if name in self._guests:
            return Place(self._guests[name], joined=True)
        return Place(net.split_address(self._elsewhere.address(name))[0])

    def _free(self, prefix: str) -> tuple[int, str]:
        """The next number of a pool, and its name: one that dialled in may have chosen it already."""
        number = self._numbers[prefix]
        while f"{prefix}-{number}" in self._elsewhere.names:
            number += 1
        return number, f"{prefix}-{number}"

    def _find(self, pool: str) -> PoolTemplate:
        name = pool or next(iter(self._pools))
        if (template := self._pools.get(name)) is not None:
            return template
        near = difflib.get_close_matches(name, self._pools, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"there is no pool {name!r}; {hint}the pools are {', '.join(self._pools)}")
