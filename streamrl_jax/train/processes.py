"""What several trainer processes do together outside of the training step: wait for each other, tell each other.

All of it is called by every process in the same order, on the thread that also starts the programs.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def barrier(what: str) -> None:
    """Returns when every process is here; at once where there is one.

    Args:
        what: Is named when another process waits for something else.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def told_by_the_first(value: Any) -> Any:
    """What the first process gives, in every process.

    Args:
        value: Anything that JSON can hold; only the first process's counts.
    """
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    held = np.zeros(size, np.uint8)
    held[: len(text)] = np.frombuffer(text, np.uint8)
    told = multihost_utils.broadcast_one_to_all(held)
    return json.loads(np.asarray(told, np.uint8).tobytes())
