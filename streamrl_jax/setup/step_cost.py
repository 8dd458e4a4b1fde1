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
        UserError: It is neither a profile nor a GPU that is known.
    """
    value_bytes = 2 if cfg.gen.dtype == "bfloat16" else 4
    parallel = cfg.gen.tensor_parallel_size
    return named_cost(cfg.dispatch.cost, config_json, value_bytes, parallel)
