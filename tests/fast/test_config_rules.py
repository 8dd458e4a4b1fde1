"""Combinations that make no sense are refused when the configuration is read, by name, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError
from streamrl_jax.setup.inputs import Functions, check_functions
from streamrl_jax.train.advantage import group_advantages
from streamrl_jax.train.loss import policy_gradient_loss

GRPO = {"adv_estimator": "grpo"}
MASKS = {"rollout_rs": "token"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"algorithm": GRPO, "rollout": {"n": 1}}, r"rollout\.n = 1: a group of one has no baseline"),
        ({"algorithm": {"adv_estimator": "rloo"}, "rollout": {"n": 1}}, "a group of one has no baseline"),
        (
            {"algorithm": GRPO, "critic": {"cliprange_value": 0.1}},
            r"critic\.cliprange_value is set, but .* no critic",
        ),
        ({"algorithm": GRPO, "critic": {"optim": {"lr": 1e-3}}}, r"critic\.optim is set, but .* no critic"),
        ({"algorithm": GRPO, "model": {"critic_path": "c"}}, r"model\.critic_path = 'c', but .* no critic"),
        ({"algorithm": GRPO | {"lam": 0.9}}, r"algorithm\.lam = 0\.9 is read by gae only"),
        (
            {"algorithm": GRPO | {"gamma": 0.9}},
            r"algorithm\.gamma = 0\.9 is read by gae and reinforce_plus_plus",
        ),
        (
            {"algorithm": {"norm_adv_by_std_in_grpo": False}},
            "norm_adv_by_std_in_grpo = False is read by grpo only",
        ),
        (
            {"algorithm": GRPO | {"norm_adv_by_std_in_grpo": False, "advantage_fn": "a.py:f"}},
            "is not read with algorithm.advantage_fn = 'a.py:f'",
        ),
        ({"actor": {"kl_loss_coef": 0.1}}, r"actor\.kl_loss_coef = 0\.1 without actor\.use_kl_loss = true"),
        ({"actor": {"kl_loss_type": "k2"}}, r"actor\.kl_loss_type = k2 without actor\.use_kl_loss = true"),
        ({"algorithm": {"kl_coef": 0.1}}, r"algorithm\.kl_coef = 0\.1 without algorithm\.use_kl_in_reward"),
        ({"algorithm": {"kl_penalty": "k3"}}, "algorithm.kl_penalty = k3 without"),
        ({"algorithm": GRPO | {"whiten_advantages": "batch"}}, "nothing would be whitened"),
        ({"algorithm": GRPO | {"use_kl_in_reward": True}}, r"put the KL in the loss with actor\.use_kl_loss"),
        ({"algorithm": {"advantage_fn": "a.py:f"}}, "the function would not be called"),
        ({"actor": {"loss_mode": "gspo", "clip_ratio_c": 5.0}}, r"actor\.clip_ratio_c = 5\.0 is not read"),
        (
            {"actor": {"loss_mode": "reinforce", "clip_ratio_low": 0.1}},
            r"actor\.clip_ratio_low = 0\.1 is not read",
        ),
        (
            {"actor": {"loss_mode": "gspo"}, "algorithm": {"loss_fn": "a.py:f"}},
            "only one of them can be the loss",
        ),
        ({"actor": {"loss_scale_factor": 9}}, r"actor\.loss_scale_factor = 9 is read with"),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, "would correct twice"),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs_threshold": 3.0}}},
            r"rollout_rs = 'none'; choose a level",
        ),
        (
            {"algorithm": {"rollout_correction": {"bypass_mode": False, "rollout_is_threshold": 3.0}}},
            r"rollout_is = 'none'; choose a level",
        ),
        ({"algorithm": {"filter_groups": {"max_num_gen_batches": 3}}}, "has no effect"),
        ({"algorithm": {"filter_groups": {"enable": True}}, "rollout": {"n": 1}}, "no group would be left"),
        ({"reward": {"overlong_buffer": {"len": 600}}}, r"overlong_buffer\.len = 600 is more than"),
        ({"reward": {"overlong_buffer": {"penalty_factor": 0.5}}}, r"len = 0 has no effect"),
        (
            {"actor": {"optim": {"min_lr_ratio": 0.1}}},
            r"actor\.optim\.min_lr_ratio = 0\.1 with .* 'constant'",
        ),
        (
            {"critic": {"warmup_steps": 100}},
            r"critic\.warmup_steps = 100 is not under .* the policy would never learn",
        ),
        ({"rollout": {"temperature": 0.005}}, r"greater than or equal to 0\.01"),
        ({"bridge": {"in_flight": True}}, "in sync mode nothing is in flight"),
        (
            {"trainer": {"max_staleness": 3}, "agreement": {"probe_prompts": 0}},
            r"max_staleness = 3: the consumed",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Config.model_validate(table)


@pytest.mark.parametrize(
    ("table", "functions", "says"),
    [
        (
            {},
            Functions(advantage=group_advantages),
            "'group_advantages' with algorithm.adv_estimator = 'gae'",
        ),
        (
            {"algorithm": {"adv_estimator": "reinforce_plus_plus"}},
            Functions(advantage=group_advantages),
            "the function would not be called",
        ),
        (
            {"actor": {"loss_mode": "gspo"}},
            Functions(loss=policy_gradient_loss),
            "'policy_gradient_loss': only one of them can be the loss",
        ),
    ],
)
def test_functions_given_from_python_are_held_to_the_same_rules(
    table: dict[str, Any], functions: Functions, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check_functions(Config.model_validate(table), functions)
    check_functions(Config.model_validate({"algorithm": GRPO}), functions)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"algorithm": GRPO | {"lam": 0.5}, "rollout": {"n": 1}})
    assert "group of one" in str(caught.value) and "algorithm.lam" in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        {"algorithm": GRPO | {"rollout_correction": {"bypass_mode": False, "rollout_is": "token"} | MASKS}},
        {"algorithm": {"rollout_correction": MASKS}, "actor": {"ppo_epochs": 2}},
        {"algorithm": {"filter_groups": {"enable": True}}},  # PPO, on groups that teach something
        {
            "actor": {"loss_mode": "cispo"},
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},
            "rollout": {"n": 1},
        },
    ],
)
def test_what_can_be_combined_loads_again_as_it_was_resolved(table: dict[str, Any]) -> None:
    cfg = Config.model_validate(table)
    assert Config.model_validate(cfg.model_dump()) == cfg


@pytest.mark.parametrize(
    ("table", "scores"),
    [
        ({}, False),
        ({"actor": {"ppo_epochs": 2}}, False),
        (
            {"algorithm": {"rollout_correction": {"bypass_mode": False}}},
            False,
        ),  # one update: it is the policy itself
        ({"algorithm": {"rollout_correction": {"bypass_mode": False}}, "actor": {"ppo_epochs": 2}}, True),
        ({"algorithm": {"rollout_correction": MASKS}, "actor": {"ppo_mini_batch_size": 8}}, True),
    ],
)
def test_when_the_starting_policy_needs_a_forward_pass_of_its_own(
    table: dict[str, Any], scores: bool
) -> None:
    assert Config.model_validate(table).scores_first == scores
