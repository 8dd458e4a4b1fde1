"""What a run reads before it starts anything, so that a fault in it costs no start of an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl_jax.config import Config
from streamrl_jax.config_rules import combination_faults
from streamrl_jax.data import PromptSet, load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.ranker.restore import check_given
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
        reward_given: Whether it was given from Python, and may be a closure that no other process can load.
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
    reward_given: bool = False


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
    check_experts(cfg, arch)
    check_functions(cfg, functions)
    tokenizer = Tokenizer.load(model_dir)
    train_prompts = load_prompts(cfg.data, tokenizer, "train", seed=cfg.run.seed)
    check_given(cfg.ranker, train_prompts.all())
    return Inputs(
        model_dir=model_dir,
        arch=arch,
        critic_dir=_critic_directory(cfg, arch),
        tokenizer=tokenizer,
        train_prompts=train_prompts,
        test_prompts=load_prompts(cfg.data, tokenizer, "test", seed=cfg.run.seed) if cfg.data.test else None,
        reward=adapt_reward(functions.reward) if functions.reward else load_reward(cfg.reward),
        loss=load_loss(cfg, functions.loss),
        advantage=load_advantage(cfg, functions.advantage),
        reward_given=functions.reward is not None,
    )


def check_functions(cfg: Config, functions: Functions) -> None:
    """Holds functions that are given from Python to the rules for those that the configuration names.

    Raises:
        UserError: One would not be called, or a setting would not be read beside it.
    """
    given = {"loss_fn": functions.loss, "advantage_fn": functions.advantage}
    named = {key: getattr(one, "__name__", repr(one)) for key, one in given.items() if one is not None}
    algorithm = cfg.algorithm.model_copy(update=named)
    if faults := list(combination_faults(cfg.model_copy(update={"algorithm": algorithm}))):
        raise UserError("; ".join(faults))


def load_loss(cfg: Config, given: PolicyLoss | None = None) -> PolicyLoss | None:
    """The policy loss of one's own: the given one, else that of `algorithm.loss_fn`; None if there is neither.

    Raises:
        UserError: It cannot be loaded, or does not take (inputs, settings).
    """
    return _taking(given, cfg.algorithm.loss_fn, "algorithm.loss_fn", ("inputs", "settings"))


def load_advantage(cfg: Config, given: GroupAdvantage | None = None) -> GroupAdvantage | None:
    """The group advantage of one's own: the given one, else that of `algorithm.advantage_fn`; None: neither.

    Raises:
        UserError: It cannot be loaded, or does not take (rewards).
    """
    return _taking(given, cfg.algorithm.advantage_fn, "algorithm.advantage_fn", ("rewards",))


def _taking(
    given: Callable[..., Any] | None, name: str, field: str, arguments: tuple[str, ...]
) -> Callable[..., Any] | None:
    function = given or load_function(name, field)
    if function is None:
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it shows none: the call will tell
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        subject = f"the function given for {field}" if given else f"{field} = {name!r}"
        raise UserError(
            f"{subject} takes {signature}; it must take ({', '.join(arguments)}), by position"
        ) from error
    return function


def check_experts(cfg: Config, arch: Arch) -> None:
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
    check_body(directory, _checked_arch(directory, critic=True), arch)
    return directory


def check_body(directory: Path, critic: Arch, policy: Arch) -> None:
    """Sees to it that the critic's decoder is built as the policy's.

    Raises:
        UserError: It is not.
    """
    if not critic.same_body(policy):
        raise UserError(
            f"model.critic_path = {directory}: its architecture differs from the policy's; give a checkpoint of "
            "the same architecture, or leave it empty"
        )
