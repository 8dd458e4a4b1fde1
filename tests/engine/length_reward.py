"""A reward that differs from answer to answer, whatever the model can: a share of the length."""

from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Generation, Prompt


def share_of_the_limit(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
    """Characters over 352, the limit of `configs/demo_long.toml`."""
    return RewardResult(len(text) / 352, {})
