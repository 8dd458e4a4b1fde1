"""How large a run's models are, told before anything is loaded."""

from __future__ import annotations

from typing import Final

from streamrl_jax.bridge.names import parameters
from streamrl_jax.config import Config
from streamrl_jax.flops import matmul_parameters
from streamrl_jax.train.arch import Arch

# float32 each: the master, its accumulated gradient, Adam's two moments.
_TRAINED_BYTES: Final = 16
_HELD_BYTES: Final = 4


def model_size(arch: Arch, config: Config) -> str:
    """Parameters of the policy, and what the trainer holds of all models.

    Args:
        arch: The policy's.
        config: Says whether there is a critic and a reference.

    Returns:
        Two lines. The state is without activations, logits and what is being converted for a push; it is split over
        the mesh's fsdp and tensor axes, and copied over data.
    """
    count = parameters(arch)
    held = {"policy": _TRAINED_BYTES}
    held |= {"critic": _TRAINED_BYTES} if config.uses_critic else {}
    held |= {"reference": _HELD_BYTES} if config.uses_reference else {}
    return (
        f"model\n{arch.architecture}: {count:,} parameters, {matmul_parameters(arch):,} in the products of a token\n"
        f"training state of {', '.join(held)}: {count * sum(held.values()) / 2**30:.3g} GiB, split over fsdp and tensor"
    )
