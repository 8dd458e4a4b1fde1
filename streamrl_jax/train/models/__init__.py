"""The decoder as a pure function of a parameter tree, and what a checkpoint's configuration says about it."""

from streamrl_jax.train.arch import Arch, arch_from_hf
from streamrl_jax.train.models.decoder import Compute
from streamrl_jax.train.models.model import Model, Params

__all__ = ["Arch", "Compute", "Model", "Params", "arch_from_hf"]
