"""A loss or an advantage of one's own that is wrong says so: what it returned, what is needed, where it raised."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl_jax.config import ActorSection
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.train.loss import PolicyInputs, clipped_policy_loss
from streamrl_jax.train.own import checked_advantage, checked_loss

ROWS, LEN = 2, 3


def traced(function: Any) -> Any:
    """Calls the loss as the trainer does: under a trace."""
    loss = checked_loss(function, "own.py:f")

    def run(logprobs: jax.Array) -> Any:
        ones = jnp.ones_like(logprobs)
        inputs = PolicyInputs(logprobs, logprobs, logprobs, ones, ones > 0, jnp.ones(logprobs.shape, int))
        return loss(inputs, ActorSection())

    return jax.eval_shape(run, jax.ShapeDtypeStruct((ROWS, LEN), jnp.float32))


def branches(inputs: PolicyInputs, settings: ActorSection) -> Any:
    return (inputs.logprobs, {}) if inputs.advantages[0, 0] > 0 else None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda i, s: (jnp.mean(i.logprobs), {}), r"float32 of shape \(\) as the loss.*= \(2, 3\)"),
        (lambda i, s: (i.logprobs[:, :-1], {}), r"float32 of shape \(2, 2\) as the loss"),
        (lambda i, s: (i.logprobs.astype(int), {}), r"int32 of shape \(2, 3\) as the loss"),
        (lambda i, s: (i.mask, {}), r"bool of shape \(2, 3\) as the loss"),
        (lambda i, s: (1.0, {}), "1.0 as the loss"),
        (
            lambda i, s: i.logprobs,
            r"float32 of shape \(2, 3\); it must return \(loss of each token, statistics",
        ),
        (lambda i, s: None, "None; it must"),
        (lambda i, s: (i.logprobs, None), "a tuple of 2: .*, NoneType; it must .* {} where there are none"),
        (
            lambda i, s: (i.logprobs, {"pg_loss": i.logprobs}),
            "a statistic 'pg_loss'.*which are the trainer's",
        ),
        (lambda i, s: (i.logprobs, {3: i.logprobs}), "a statistic 3; a string is needed"),
        (lambda i, s: (i.logprobs, {"m": i.logprobs[0]}), r"shape \(3,\) as the statistic 'm'"),
        (
            lambda i, s: i.rewards,
            r"AttributeError: .*'rewards' \(.*test_own.py, line \d+\) when JAX traced it",
        ),
        (lambda i, s: s.beta, "AttributeError: .*'beta'"),
        (branches, r"TracerBoolConversionError: .* \(.*test_own.py, line \d+\)"),
    ],
)
def test_a_wrong_loss_is_refused_in_one_paragraph(function: Any, message: str) -> None:
    with pytest.raises(
        UserError, match=f"^algorithm.loss_fn = 'own.py:f' (returned|raised|names) .*{message}"
    ) as caught:
        traced(function)
    assert "\n" not in str(caught.value)


def test_a_right_loss_passes_as_it_is() -> None:
    loss, statistics = traced(clipped_policy_loss)
    assert loss.shape == (ROWS, LEN) and set(statistics) == {"ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"}
    _, statistics = traced(lambda i, s: (i.logprobs.astype(jnp.bfloat16), {"m": jnp.mean(i.logprobs)}))
    assert statistics["m"].shape == (ROWS, LEN)


def test_a_loss_given_from_python_goes_by_its_own_name() -> None:
    def my_loss(inputs: PolicyInputs, settings: ActorSection) -> Any:
        raise ValueError("no")

    with pytest.raises(UserError, match=r"^the function my_loss \(algorithm.loss_fn\) raised ValueError: no"):
        checked_loss(my_loss, "")({}, {})  # pyright: ignore[reportArgumentType]


def test_a_signal_that_comes_while_it_runs_is_no_fault_of_it() -> None:
    def signalled(rewards: np.ndarray) -> np.ndarray:
        raise StopRequested("SIGUSR1")

    with pytest.raises(StopRequested):
        checked_advantage(signalled, "own.py:a")(np.zeros(2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r: r[:-1], r"float64 of shape \(2,\)"),
        (lambda r: r[:, None], r"float64 of shape \(3, 1\)"),
        (lambda r: 1.0, "1.0"),
        (lambda r: None, "None"),
        (lambda r: ["x"] * 3, r"\['x', 'x', 'x'\]"),
        (lambda r: [[1.0], [1.0, 2.0], []], r"\[\[1.0\]"),
        (lambda r: r * 1j, r"complex128 of shape \(3,\)"),
    ],
)
def test_a_wrong_advantage_is_refused(function: Any, message: str) -> None:
    said = rf"^algorithm.advantage_fn = 'own.py:a' returned {message}.* for the rewards \[0.0, 0.5, 1.0\]; it must"
    with pytest.raises(UserError, match=said):
        checked_advantage(function, "own.py:a")(np.array([0.0, 0.5, 1.0]))


def test_an_advantage_that_raises_is_placed() -> None:
    def bad(rewards: np.ndarray) -> np.ndarray:
        return rewards - {}["mean"]

    with pytest.raises(
        UserError, match=r"raised KeyError: 'mean' \(.*test_own.py, line \d+\) for the rewards"
    ):
        checked_advantage(bad, "own.py:a")(np.zeros(2))


@pytest.mark.parametrize(
    "function", [lambda r: [1.0, 2.0], lambda r: np.array([1, 2]), lambda r: jnp.array([1.0, 2.0])]
)
def test_lists_whole_numbers_and_jax_arrays_are_numbers(function: Any) -> None:
    found = checked_advantage(function, "own.py:a")(np.zeros(2))
    assert found.dtype == np.float64 and re.sub(r"\s", "", str(found)) == "[1.2.]"
