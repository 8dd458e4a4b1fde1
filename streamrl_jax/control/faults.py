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
        self.details = details

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.details}" if self.details else super().__str__()


class InstanceLost(Exception):
    """An instance must be taken for dead; its work is handed out again and it is started anew."""


class RewardError(UserError):
    """The user's reward function raised, returned no number, or did not return in time.

    Args:
        message: one paragraph that names sample, prompt and answer.
        cause: what the function raised; its traceback follows the paragraph when the error is printed.
        details: that traceback, where the exception itself is in another process.
    """

    def __init__(self, message: str, cause: BaseException | None = None, details: str = "") -> None:
        super().__init__(message)
        self.details = "".join(traceback.format_exception(cause)).rstrip() if cause else details

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.details}" if self.details else super().__str__()


class ControllerFault(Exception):
    """An exception in the controller's process that is no error of the user's; its traceback is in the text.

    Args:
        message: its class and text.
        details: its traceback there.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(f"{message}\n{details}" if details else message)
