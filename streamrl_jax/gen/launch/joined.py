"""Several launchers as one: local processes beside endpoints that were started elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl_jax.gen.launch.protocol import Launched, Launcher


class JoinedLauncher:
    """Hands each name to the launcher that knows it.

    Args:
        launchers: their names differ.
    """

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._by_name = {name: launcher for launcher in launchers for name in launcher.names}

    @property
    def names(self) -> Sequence[str]:
        """All of them."""
        return tuple(self._by_name)

    async def start(self, name: str) -> Launched:
        """Starts one, by the launcher that knows it."""
        return await self._by_name[name].start(name)

    def forget(self, name: str) -> None:
        """Tells the launcher that knows it."""
        self._by_name[name].forget(name)
