"""Which settings fit together: rules over the whole configuration, as sentences about what breaks them.

A setting that the chosen algorithm would not read is refused, not ignored: whoever wrote it believes that it acts. It
counts as set where it differs from its default, so that a resolved configuration loads again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from streamrl_jax.config_generation import pool_faults
from streamrl_jax.config_ranker import dispatch_faults
from streamrl_jax.config_section import Section

if TYPE_CHECKING:
    from streamrl_jax.config import Config

GROUP_BASELINES: Final = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators whose advantage is a score against those of the other answers to the same prompt."""

WHITENED: Final = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are whitened over the batch, as ``algorithm.whiten_advantages`` says."""

DISCOUNTED: Final = ("gae", "reinforce_plus_plus")
"""Estimators that add up rewards over the tokens of an answer."""


class CombinationFaultsError(ValueError):
    """Settings that do not fit together.

    Attributes:
        faults: One sentence each.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        """Takes the sentences; as a text they are one."""
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


ESTIMATOR_KEYS: Final = (
    "model.critic_path",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.whiten_advantages",
    "algorithm.norm_adv_by_std_in_grpo",
)
"""What belongs to an estimator of advantages, beside the section ``critic``."""


def combination_faults(cfg: Config) -> Iterator[str]:
    """Yields one sentence for each combination that makes no sense, with the remedy."""
    yield from _update_faults(cfg)
    yield from _advantage_faults(cfg)
    yield from _loss_faults(cfg)
    yield from _kl_faults(cfg)
    yield from _correction_faults(cfg)
    yield from _filter_faults(cfg)
    yield from _generation_faults(cfg)
    yield from dispatch_faults(cfg.dispatch, cfg.ranker)


def _changed(section: Section, *names: str) -> list[str]:
    """The fields, of these or of all, that differ from their defaults."""
    fields = type(section).model_fields
    return [
        name
        for name in names or fields
        if getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def _update_faults(cfg: Config) -> Iterator[str]:
    for name, optim in (("actor", cfg.actor.optim), ("critic", cfg.critic.optim), ("sft", cfg.sft.optim)):
        if optim.min_lr_ratio and optim.lr_scheduler == "constant":
            yield (
                f"{name}.optim.min_lr_ratio = {optim.min_lr_ratio} with {name}.optim.lr_scheduler = 'constant': the "
                "rate never falls to it; choose 'cosine' or 'linear', or remove it"
            )
    warmup, iterations = cfg.critic.warmup_steps, cfg.trainer.total_training_steps
    if cfg.uses_critic and warmup >= iterations:
        yield (
            f"critic.warmup_steps = {warmup} is not under trainer.total_training_steps = {iterations}: the policy "
            "would never learn; lower the one or raise the other"
        )
    mini = cfg.actor.ppo_mini_batch_size
    if mini and cfg.data.train_batch_size % mini:
        yield (
            f"actor.ppo_mini_batch_size = {mini} does not divide data.train_batch_size = "
            f"{cfg.data.train_batch_size} (both count prompts)"
        )


def _advantage_faults(cfg: Config) -> Iterator[str]:
    algorithm, estimator = cfg.algorithm, cfg.algorithm.adv_estimator
    said = f"algorithm.adv_estimator = '{estimator}'"
    if estimator in GROUP_BASELINES and cfg.rollout.n < 2:
        yield (
            f"{said} with rollout.n = {cfg.rollout.n}: a group of one has no baseline; set rollout.n to 2 or more"
        )
    if estimator in GROUP_BASELINES and algorithm.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward = true with {said}: a group's advantage comes from its scores alone; put the "
            "KL in the loss with actor.use_kl_loss"
        )
    if algorithm.advantage_fn and estimator not in GROUP_BASELINES:
        yield (
            f"algorithm.advantage_fn = {algorithm.advantage_fn!r} with {said}: its advantages do not come from the "
            "group, and the function would not be called; set adv_estimator to 'grpo'"
        )
    if algorithm.advantage_fn and not algorithm.norm_adv_by_std_in_grpo:
        yield (
            "algorithm.norm_adv_by_std_in_grpo = False is not read with algorithm.advantage_fn = "
            f"{algorithm.advantage_fn!r}, which gives the advantage itself; remove one"
        )
    if not cfg.uses_critic:
        for name in _changed(cfg.critic):
            yield f"critic.{name} is set, but {said} trains no critic; remove it, or set adv_estimator to 'gae'"
        if cfg.model.critic_path:
            yield (
                f"model.critic_path = {cfg.model.critic_path!r}, but {said} trains no critic; remove it, or set "
                "adv_estimator to 'gae'"
            )
    read_by = {"gamma": DISCOUNTED, "lam": ("gae",), "norm_adv_by_std_in_grpo": ("grpo",)}
    for name in _changed(algorithm, *read_by):
        if estimator not in read_by[name]:
            yield (
                f"algorithm.{name} = {getattr(algorithm, name)} is read by {' and '.join(read_by[name])} only, not "
                f"with {said}; remove it"
            )
    if algorithm.whiten_advantages == "batch" and estimator not in WHITENED:
        yield (
            f"algorithm.whiten_advantages = 'batch' with {said}: the group already is the baseline, and nothing would "
            "be whitened; remove it, or use 'reinforce_plus_plus_baseline'"
        )


def _loss_faults(cfg: Config) -> Iterator[str]:
    actor, mode = cfg.actor, cfg.actor.loss_mode
    if actor.loss_scale_factor and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"actor.loss_scale_factor = {actor.loss_scale_factor} is read with actor.loss_agg_mode = "
            f"'seq-mean-token-sum-norm' only, not with '{actor.loss_agg_mode}'; set the one or remove the other"
        )
    if cfg.algorithm.loss_fn:
        if mode != "vanilla":
            yield (
                f"actor.loss_mode = '{mode}' with algorithm.loss_fn = {cfg.algorithm.loss_fn!r}: only one of them can "
                "be the loss; remove one"
            )
        return
    unread = {"gspo": ["clip_ratio_c"], "cispo": ["clip_ratio_c"]}
    unread["reinforce"] = ["clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
    for name in _changed(actor, *unread[mode]) if mode in unread else ():
        yield f"actor.{name} = {getattr(actor, name)} is not read with actor.loss_mode = '{mode}'; remove it"


def _kl_faults(cfg: Config) -> Iterator[str]:
    for at, section, switch, names in (
        ("actor", cfg.actor, "use_kl_loss", ("kl_loss_coef", "kl_loss_type")),
        ("algorithm", cfg.algorithm, "use_kl_in_reward", ("kl_coef", "kl_penalty")),
    ):
        for name in () if getattr(section, switch) else _changed(section, *names):
            yield (
                f"{at}.{name} = {getattr(section, name)} without {at}.{switch} = true has no effect; set it, or remove "
                "this"
            )


def _correction_faults(cfg: Config) -> Iterator[str]:
    correction = cfg.algorithm.rollout_correction
    at = "algorithm.rollout_correction"
    if correction.rollout_is != "none" and correction.bypass_mode:
        yield (
            f"{at}.rollout_is = '{correction.rollout_is}' with bypass_mode = true would correct twice: the ratio of "
            "the loss is already taken against the behaviour policy; set bypass_mode to false"
        )
    for switch, names in (
        ("rollout_is", ["rollout_is_threshold"]),
        ("rollout_rs", ["rollout_rs_threshold", "rollout_rs_threshold_lower"]),
    ):
        if getattr(correction, switch) == "none":
            for name in _changed(correction, *names):
                yield f"{at}.{name} is set, but {at}.{switch} = 'none'; choose a level, or remove it"


def _filter_faults(cfg: Config) -> Iterator[str]:
    groups, buffer = cfg.algorithm.filter_groups, cfg.reward.overlong_buffer
    if groups.enable and cfg.rollout.n < 2:
        yield (
            f"algorithm.filter_groups.enable = true with rollout.n = {cfg.rollout.n}: the scores of a group of one "
            "never differ, and no group would be left; set rollout.n to 2 or more"
        )
    if not groups.enable and _changed(groups, "max_num_gen_batches"):
        yield (
            f"algorithm.filter_groups.max_num_gen_batches = {groups.max_num_gen_batches} without "
            "algorithm.filter_groups.enable = true has no effect; set it, or remove this"
        )
    if buffer.len > cfg.data.max_response_length:
        yield (
            f"reward.overlong_buffer.len = {buffer.len} is more than data.max_response_length = "
            f"{cfg.data.max_response_length}; it counts the last tokens before that limit"
        )
    if not buffer.len and _changed(buffer, "penalty_factor"):
        yield (
            f"reward.overlong_buffer.penalty_factor = {buffer.penalty_factor} with reward.overlong_buffer.len = 0 has "
            "no effect; set len, or remove it"
        )


def _generation_faults(cfg: Config) -> Iterator[str]:
    if cfg.bridge.in_flight and cfg.trainer.max_staleness == 0:
        yield "bridge.in_flight = true needs trainer.max_staleness of 1 or more: in sync mode nothing is in flight"
    if cfg.trainer.max_staleness and not cfg.agreement.probe_prompts:
        yield (
            f"agreement.probe_prompts = 0 with trainer.max_staleness = {cfg.trainer.max_staleness}: the consumed "
            "tokens are of an older version than the trainer's, and agreement would not be measured; ask for 1 or more"
        )
    yield from pool_faults(cfg.gen)
    if cfg.gen.max_model_len and cfg.gen.max_model_len < cfg.longest_sample:
        yield (
            f"gen.max_model_len = {cfg.gen.max_model_len} is under data.max_prompt_length + "
            f"data.max_response_length = {cfg.longest_sample}"
        )
