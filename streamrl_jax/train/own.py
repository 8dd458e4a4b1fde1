"""Functions of one's own at the trainer's edge: what they raise or return wrongly is said in words, not broadcast.

A loss that gives a single number, as a loss does elsewhere, would broadcast over the tokens and train on something that
nobody meant; so shapes and kinds are checked when the loss is traced, which costs no step anything.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from streamrl_jax.config import ActorSection
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.train.advantage import GroupAdvantage
from streamrl_jax.train.loss import PolicyInputs, PolicyLoss, TokenStatistics

_TAKEN: Final = ("pg_loss", "entropy", "kl_loss", "router_aux_loss", "reward_kl_penalty", "grad_norm", "lr")
"""Names under `actor/` that are the trainer's own."""


def checked_loss(function: PolicyLoss, name: str) -> PolicyLoss:
    """A policy loss that says what is wrong with it.

    Args:
        function: The loss.
        name: What the configuration calls it; empty: it was given from Python.

    Returns:
        The same loss. It raises UserError where `function` raises, or returns no float of each token and a mapping
        of statistics.
    """
    subject = _subject("algorithm.loss_fn", name, function)

    def loss(
        inputs: PolicyInputs, settings: ActorSection
    ) -> tuple[Float[Array, "rows len"], TokenStatistics]:
        returned: Any = _called(function, subject, "when JAX traced it", inputs, settings)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise UserError(
                f"{subject} returned {_kind(returned)}; it must return (loss of each token, statistics by name), and "
                "{} where there are none"
            )
        values, statistics = returned
        shape = inputs.logprobs.shape
        if not _is_array(values) or values.shape != shape or not jnp.issubdtype(values.dtype, jnp.floating):
            raise UserError(
                f"{subject} returned {_kind(values)} as the loss; it must be a float of each token, of the shape of "
                f"inputs.logprobs = {shape}: mask, mean and sum are the trainer's"
            )
        return jnp.asarray(values), {
            key: _statistic(key, value, shape, subject) for key, value in statistics.items()
        }

    return loss


def checked_advantage(function: GroupAdvantage, name: str) -> GroupAdvantage:
    """A group advantage that says what is wrong with it.

    Args:
        function: The advantage.
        name: What the configuration calls it; empty: it was given from Python.

    Returns:
        The same advantage. It raises UserError where `function` raises, or returns no number of each reward.
    """
    subject = _subject("algorithm.advantage_fn", name, function)

    def advantage(rewards: Float64[np.ndarray, " group"]) -> Float64[np.ndarray, " group"]:
        shape, shown = rewards.shape, rewards.tolist()
        returned: Any = _called(function, subject, f"for the rewards {shown}", rewards)
        try:
            values = np.asarray(returned)
        except ValueError:  # a ragged list
            values = np.empty(0, object)
        if values.shape != shape or values.dtype.kind not in "fiub":
            raise UserError(
                f"{subject} returned {_kind(returned)} for the rewards {shown}; it must return one real number for "
                "each of them, as an array or list"
            )
        return values.astype(np.float64)

    return advantage


def _subject(field: str, name: str, function: Callable[..., Any]) -> str:
    return (
        f"{field} = {name!r}" if name else f"the function {getattr(function, '__name__', function)} ({field})"
    )


def _called(function: Callable[..., Any], subject: str, when: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (UserError, StopRequested):  # a signal may come at any line
        raise
    except Exception as error:
        # JAX's messages explain themselves over many lines; the first says what happened.
        first = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"{subject} raised {type(error).__name__}: {first}{_place(error, function)} {when}; correct it"
        ) from error


def _place(error: Exception, function: Callable[..., Any]) -> str:
    """The innermost line of the function's own file."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1]})" if lines else ""


def _statistic(key: object, value: Any, shape: tuple[int, ...], subject: str) -> Float[Array, "rows len"]:
    if not isinstance(key, str) or key in _TAKEN:
        raise UserError(
            f"{subject} names a statistic {key!r}; a string is needed, and none of {', '.join(_TAKEN)}, which are the "
            "trainer's"
        )
    if not _is_array(value) or value.shape not in (shape, ()):
        raise UserError(
            f"{subject} returned {_kind(value)} as the statistic {key!r}; one number for each token is needed, of the "
            f"shape {shape}, or a single one"
        )
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _kind(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(part).__name__ for part in value)}"
    return repr(value)[:80] if isinstance(value, int | float | str | list | None) else type(value).__name__
