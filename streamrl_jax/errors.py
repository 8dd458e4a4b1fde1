"""The error a user is meant to read: one paragraph, no traceback."""

from __future__ import annotations

from typing import Final

USER_ERROR_EXIT_CODE: Final = 2
STOPPED_EXIT_CODE: Final = 75  # EX_TEMPFAIL: a signal ended a run; the same command with --resume goes on


class UserError(Exception):
    """Input or surroundings are wrong in a way that the user can put right.

    Raised at the edges (files, configuration, ports, checkpoints). The command line prints `str(error)`
    without a traceback and exits with `USER_ERROR_EXIT_CODE`; everything else that reaches the top is a
    fault of the program and keeps its traceback.

    Args:
        message: One paragraph that names the file, the field, the value found and the remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
