"""What a process needs to know of its host: who shares its memory, and which port is free."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Names what `/dev/shm` this process sees: equal ids share it, across containers too.

    Returns:
        The kernel's boot id and the device number of the mount, which differs between mount namespaces.
    """
    return f"{_BOOT_ID.read_text().strip()}:{os.stat('/dev/shm').st_dev}"


def free_port() -> int:
    """A port of the loopback that nobody holds now, for a process that must be told its port before it starts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
