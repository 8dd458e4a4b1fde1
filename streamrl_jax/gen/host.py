"""Which host a process runs on, as far as shared memory goes."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Names what `/dev/shm` this process sees: equal ids share it, across containers too.

    Returns:
        The kernel's boot id and the device number of the mount, which differs between mount namespaces.
    """
    return f"{_BOOT_ID.read_text().strip()}:{os.stat('/dev/shm').st_dev}"
