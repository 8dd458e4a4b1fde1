"""Instances that were started elsewhere (`streamrl gen`) and are only connected to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl_jax.errors import UserError
from streamrl_jax.gen import net


@dataclass(frozen=True)
class StaticInstance:
    """An instance whose process belongs to somebody else."""

    address: str
    managed: bool = False

    def ended(self) -> str | None:
        """Cannot be seen from here; a broken stream or a lapsed lease tells."""
        return None

    def log_tail(self) -> str:
        """Lies on another host."""
        return ""

    async def stop(self) -> None:
        """Leaves it running: who started it ends it."""


class StaticLauncher:
    """Knows endpoints by name.

    Args:
        endpoints: ``host:port`` by instance name.

    Raises:
        UserError: an endpoint is no address, or is named twice.
    """

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._endpoints: dict[str, str] = {}
        for name, address in endpoints.items():
            self.admit(name, address)

    @property
    def names(self) -> Sequence[str]:
        """The endpoints' names."""
        return tuple(self._endpoints)

    def admit(self, name: str, address: str) -> None:
        """Learns of another endpoint, or of a new address of one.

        Raises:
            UserError: it is no address, or that of another one.
        """
        net.split_address(address)
        if any(known == address and other != name for other, known in self._endpoints.items()):
            raise UserError(
                f"gen.endpoints names {address} twice, or it is in the pool already; each instance has an endpoint of "
                "its own"
            )
        self._endpoints[name] = address

    def forget(self, name: str) -> None:
        """The endpoint is not needed any more."""
        self._endpoints.pop(name, None)

    def address(self, name: str) -> str:
        """Where an endpoint answers."""
        return self._endpoints[name]

    async def start(self, name: str) -> StaticInstance:
        """Gives the endpoint; whether anyone answers there shows at the first call."""
        return StaticInstance(self._endpoints[name])


def endpoint_names(endpoints: Sequence[str]) -> dict[str, str]:
    """Names endpoints ``endpoint-0``, ``endpoint-1``, … in their order."""
    return {f"endpoint-{index}": address for index, address in enumerate(endpoints)}
