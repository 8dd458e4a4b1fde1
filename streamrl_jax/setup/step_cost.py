"""What a decode step costs an instance, by the configuration. Light: a dry run asks too."""

from __future__ import annotations

from pathlib import Path

from streamrl_jax.config import Config
from streamrl_jax.ranker.cost import TokenLatency
from streamrl_jax.ranker.hardware import named_cost


def step_cost(cfg: Config, config_json: Path) -> TokenLatency:
    """What a decode step costs an instance of the default pool, as ``dispatch.cost`` says.

    Args:
        cfg: The run's configuration.
        config_json: Of the policy's checkpoint, for its shape.

    Raises:
        UserError: It is neither a profile of what is served nor a GPU that is known.
    """
    return named_cost(cfg.dispatch.cost, config_json, value_bytes(cfg), cfg.gen.tensor_parallel_size)


def value_bytes(cfg: Config) -> int:
    """Of a weight, a key and an activation of an instance."""
    return 2 if cfg.gen.dtype == "bfloat16" else 4
