"""An answer for tests of rewards, which look at its text and seldom at anything else."""

from __future__ import annotations

from typing import Final

import numpy as np

from streamrl_jax.types import FinishReason, Generation, VersionRun

ANSWERED: Final = Generation(
    "0/7/0",
    0,
    np.array([5, 6], np.int32),
    np.zeros(2, np.float32),
    (VersionRun(0, 2),),
    FinishReason.STOP,
    "instance-0",
)
