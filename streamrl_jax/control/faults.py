"""What ends a run from the controller's side; each names who, what and the remedy."""

from __future__ import annotations

import traceback

from streamrl_jax.errors import UserError


class ControlError(UserError):
    """Generation cannot go on: an instance is past its restarts, none is left, or nothing arrives.

    Args:
        message: one paragraph that names the instance or the sample, and the bound.
        details: lines that follow it as they are (the end of a log).
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self._details = details

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self._details}" if self._details else super().__str__()


class InstanceLost(Exception):
    """An instance must be taken for dead; its work is handed out again and it is started anew."""


class RewardError(UserError):
    """The user's reward function raised, returned no number, or did not return in time.

    Args:
        message: one paragraph that names sample, prompt and answer.
        cause: what the function raised; its traceback follows the paragraph when the error is printed.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self._trace = "".join(traceback.format_exception(cause)).rstrip() if cause else ""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self._trace}" if self._trace else super().__str__()
