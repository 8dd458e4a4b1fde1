"""What an answer is worth: the functions that say so, and the built-in rules among them."""

from streamrl_jax.rewards.functions import RewardFn, RewardResult, adapt_reward, load_reward

__all__ = ["RewardFn", "RewardResult", "adapt_reward", "load_reward"]
