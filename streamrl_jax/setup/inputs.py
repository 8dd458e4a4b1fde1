"""What a run reads before it starts anything, so that a fault in it costs no start of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl_jax.config import Config
from streamrl_jax.data import PromptSet, load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.rewards import RewardFn, adapt_reward, load_reward
from streamrl_jax.setup.model_source import model_directory
from streamrl_jax.train.arch import Arch
from streamrl_jax.train.hf_directory import map_tensors_of, read_arch
from streamrl_jax.user_code import load_function

if TYPE_CHECKING:
    from streamrl_jax.train.advantage import GroupAdvantage
    from streamrl_jax.train.loss import PolicyLoss


@dataclass(frozen=True)
class Functions:
    """Functions of one's own, given from Python in place of the configuration's names."""

    reward: Callable[..., Any] | None = None
    loss: PolicyLoss | None = None
    advantage: GroupAdvantage | None = None


NO_FUNCTIONS = Functions()


@dataclass(frozen=True)
class Inputs:
    """Model, tokenizer, prompts and functions of a run.

    Attributes:
        model_dir: The policy's checkpoint.
        arch: Its architecture.
        critic_dir: The critic's; None: its body is the policy's.
        tokenizer: Of the policy.
        train_prompts: Training prompts.
        test_prompts: Held-out ones, or None.
        reward: The reward function.
        loss: A policy loss of one's own, or None.
        advantage: A group advantage of one's own, or None.
    """

    model_dir: Path
    arch: Arch
    critic_dir: Path | None
    tokenizer: Tokenizer
    train_prompts: PromptSet
    test_prompts: PromptSet | None
    reward: RewardFn
    loss: PolicyLoss | None
    advantage: GroupAdvantage | None


def read_inputs(cfg: Config, functions: Functions = NO_FUNCTIONS) -> Inputs:
    """Reads what the configuration names, and checks what can be checked without devices.

    Args:
        cfg: The run's configuration.
        functions: Those given from Python go before the configuration's.

    Returns:
        The inputs.

    Raises:
        UserError: Something is missing or wrong; names file and field.
    """
    model_dir = model_directory(cfg.model.path, "model.path")
    arch = _checked_arch(model_dir)
    if cfg.longest_sample > arch.max_positions:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length = {cfg.longest_sample} is more than the model was made "
            f"for: max_position_embeddings = {arch.max_positions} in {model_dir / 'config.json'}; lower one of them"
        )
    _check_mixture(cfg, arch)
    if functions.advantage and cfg.uses_critic:
        raise UserError(
            "advantage_fn is given, but algorithm.adv_estimator = 'gae': the critic gives the advantages, and the "
            "function would not be called; set adv_estimator to 'grpo'"
        )
    tokenizer = Tokenizer.load(model_dir)
    algorithm = cfg.algorithm
    return Inputs(
        model_dir=model_dir,
        arch=arch,
        critic_dir=_critic_directory(cfg, arch),
        tokenizer=tokenizer,
        train_prompts=load_prompts(cfg.data, tokenizer, "train", seed=cfg.run.seed),
        test_prompts=load_prompts(cfg.data, tokenizer, "test", seed=cfg.run.seed) if cfg.data.test else None,
        reward=adapt_reward(functions.reward) if functions.reward else load_reward(cfg.reward),
        loss=functions.loss or load_function(algorithm.loss_fn, "algorithm.loss_fn"),
        advantage=functions.advantage or load_function(algorithm.advantage_fn, "algorithm.advantage_fn"),
    )


def _check_mixture(cfg: Config, arch: Arch) -> None:
    """What concerns a mixture's experts, as far as it is known before the mesh (whose axis may be -1) is filled up."""
    if cfg.trainer.mesh.tensor > 0:
        arch.check_expert_shards(cfg.trainer.mesh.tensor)
    coefficient = cfg.actor.router_aux_loss_coef
    if coefficient and not arch.experts:
        raise UserError(
            f"actor.router_aux_loss_coef = {coefficient:g}, but {arch.architecture} has no experts whose load could be "
            f"balanced; set it to 0"
        )


def _checked_arch(directory: Path, *, critic: bool = False) -> Arch:
    arch = read_arch(directory, critic=critic)
    map_tensors_of(directory, arch)
    return arch


def _critic_directory(cfg: Config, arch: Arch) -> Path | None:
    if not cfg.uses_critic or not cfg.model.critic_path:
        return None
    directory = model_directory(cfg.model.critic_path, "model.critic_path")
    if not _checked_arch(directory, critic=True).same_body(arch):
        raise UserError(
            f"model.critic_path = {directory}: its architecture differs from the policy's; give a checkpoint of "
            "the same architecture, or leave it empty"
        )
    return directory
