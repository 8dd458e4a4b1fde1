"""What the instances of a pool share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamrl_jax.control.events import ControlEvent
from streamrl_jax.control.settings import ControlSettings
from streamrl_jax.control.shelf import Shelf
from streamrl_jax.control.work import Work
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import Launcher
from streamrl_jax.types import Fence, Hello, UpdateReport


@dataclass(frozen=True)
class Surroundings:
    """What an instance shares with the others."""

    fence: Fence
    settings: ControlSettings
    launcher: Launcher
    access: net.Access
    work: Work
    shelf: Shelf
    pump: Callable[
        ..., None
    ]  # hands out work: `Pool.pump`, with the instance's name when only its room has changed
    emit: Callable[[ControlEvent], None]
    settled: Callable[[UpdateReport], None]  # an update of this instance ended, or will not come

    @property
    def hello(self) -> Hello:
        """What opens a stream."""
        settings = self.settings
        return Hello(self.fence, settings.heartbeat_interval_s, settings.progress_interval_s)
