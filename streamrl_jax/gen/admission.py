"""Which assignments an instance takes (DESIGN rules 4 and 5). Pure."""

from __future__ import annotations

from typing import Final

from streamrl_jax.gen.protocol import EngineLimits
from streamrl_jax.types import Assignment, RejectReason, Sampling

LOWEST_TEMPERATURE: Final = 0.01
"""vLLM raises a temperature between 0 and this to this one: answers would come from another distribution."""


def sampling_fault(sampling: Sampling) -> str:
    """Says what in a distribution keeps its log-probs from being those of the policy at its temperature.

    Training is an allow-list: temperature, length, stop ids and seed. Whatever else changes the density
    that tokens are drawn from, and the importance ratio would be biased.

    Args:
        sampling: the distribution.

    Returns:
        Each fault with its value and remedy; empty when there is none, or when it is for evaluation.
    """
    if sampling.evaluation:
        return ""
    faults: list[str] = []
    if sampling.temperature == 0.0:
        faults.append("temperature = 0 is greedy and has no density; set it above 0")
    elif sampling.temperature < LOWEST_TEMPERATURE:
        faults.append(f"temperature = {sampling.temperature} would be raised to {LOWEST_TEMPERATURE}")
    for name, off in (("top_p", 1.0), ("top_k", None), ("min_p", None), ("forced_length", None)):
        value = getattr(sampling, name)
        if value not in (None, off):
            faults.append(f"{name} = {value} changes the density; leave it off")
    if not faults:
        return ""
    return f"sampling.{'; sampling.'.join(faults)} (or mark the request as evaluation)"


def highest_id(assignment: Assignment) -> int:
    """The highest token id that an assignment hands the engine."""
    highest = int(assignment.prompt_ids.max())
    return max(highest, int(assignment.resumed.token_ids.max())) if assignment.resumed else highest


def refusal(
    assignment: Assignment, limits: EngineLimits, version: int, *, draining: bool
) -> tuple[RejectReason, str] | None:
    """Decides whether an instance takes an assignment.

    Args:
        assignment: well-formed, as the codec read it.
        limits: of the engine.
        version: that the engine serves; -1: none.
        draining: whether it accepts nothing new.

    Returns:
        None to take it, else the reason and a message that names field, value and remedy.
    """
    if draining:
        return RejectReason.DRAINING, "the instance is draining and takes nothing new; send it elsewhere"
    if fault := sampling_fault(assignment.sampling):
        return RejectReason.SAMPLING_NOT_ALLOWED, fault
    answer = assignment.sampling.max_new_tokens
    if (total := len(assignment.prompt_ids) + answer) > limits.max_model_len:
        return RejectReason.TOO_LONG, (
            f"a prompt of {len(assignment.prompt_ids)} tokens and sampling.max_new_tokens = {answer} make "
            f"{total}, over max_model_len = {limits.max_model_len}; shorten one or raise gen.max_model_len"
        )
    if limits.vocab_size and (highest := highest_id(assignment)) >= limits.vocab_size:
        return RejectReason.INVALID, (
            f"token id {highest} is not in the model's vocabulary of {limits.vocab_size}: prompts must be "
            "encoded with the model's own tokenizer"
        )
    if version < assignment.min_version:
        return RejectReason.WRONG_VERSION, (
            f"assign.min_version = {assignment.min_version}, the instance serves {version}; update it first"
        )
    return None
