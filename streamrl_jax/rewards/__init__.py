"""What an answer is worth: the functions that say so, and the built-in rules among them."""

from streamrl_jax.rewards.functions import RewardFn, RewardResult, adapt_reward, load_reward
from streamrl_jax.rewards.overlong import overlong_penalty

__all__ = ["RewardFn", "RewardResult", "adapt_reward", "load_reward", "overlong_penalty"]
