"""A reward that differs from answer to answer, whatever the model can, and that no policy can learn to raise."""

from hashlib import blake2b

from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import Generation, Prompt


def drawn(prompt: Prompt, text: str, generation: Generation) -> RewardResult:
    """From 0 to 1, by the sample's id: answers do not grow longer or shorter, however many iterations there are."""
    (byte,) = blake2b(generation.sample_id.encode(), digest_size=1).digest()
    return RewardResult(byte / 255, {})
