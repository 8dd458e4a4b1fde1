"""A group advantage of one's own: half the mean, half the best of the group is the baseline.

    streamrl demo configs/demo_grpo.toml --algorithm.advantage_fn examples/custom_advantage.py:beyond_the_best_half

It gets the rewards of the answers to one prompt, NumPy float64, and gives one number for each; it is not traced.
"""

import numpy as np


def beyond_the_best_half(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - (mean(r) + max(r)) / 2: only the group's best answers are pushed up."""
    return rewards - (rewards.mean() + rewards.max()) / 2
