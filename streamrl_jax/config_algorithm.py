"""The sections that say what is learned: networks' updates, advantages, corrections, shaping.

``docs/algorithms.md`` explains the algorithms by these keys; which of them fit together is ``config_rules.py``'s.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from streamrl_jax.config_section import Section


class OptimSection(Section):
    """AdamW with linear warm-up."""

    lr: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""
    betas: list[float] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled; not applied to norms and biases."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final share of the peak rate, at the last step of the run."""

    @field_validator("betas")
    @classmethod
    def _betas_decay(cls, betas: list[float]) -> list[float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("each of the two must be from 0 to below 1: at 1 a moment would never move")
        return betas


class ActorSection(Section):
    """The policy's update."""

    ppo_mini_batch_size: int = Field(default=0, ge=0)
    """Prompts per optimizer step; 0: ``data.train_batch_size``, one step an iteration, which streams."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over an iteration's samples; more than one waits for the whole batch."""
    loss_mode: Literal["vanilla", "gspo", "cispo", "reinforce"] = "vanilla"
    """The policy loss. ``vanilla``: PPO's clipped surrogate; ``gspo``: the ratio of whole sequences; ``cispo``: a
    clipped weight on the log-prob; ``reinforce``: the plain policy gradient. docs/algorithms.md explains them."""
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=16)
    """Token budget of a micro-batch per data-parallel rank."""
    clip_ratio_low: float = Field(default=0.2, gt=0.0)
    """Lower clip of the ratio: 1 - this."""
    clip_ratio_high: float = Field(default=0.2, gt=0.0)
    """Upper clip of the ratio: 1 + this."""
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    """Dual clip: with a negative advantage the loss of a token is at most this times the advantage's size."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation over the tokens of the global (mini-)batch, never per micro-batch."""
    loss_scale_factor: int = Field(default=0, ge=0)
    """``seq-mean-token-sum-norm``: what a sequence's sum is divided by; 0: ``data.max_response_length``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Adds ``kl_loss_coef`` times the KL to the reference to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0.0)
    """Weight of that KL."""
    kl_loss_type: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Its estimator (Schulman's names). The gradient of ``k1`` averages to zero: it would hold nothing back. ``k3+``
    has the value of ``k3`` and the gradient of ``k2``, which is that of the KL."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the load-balance loss of a mixture of experts: each sequence's own, aggregated as the loss is."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Global norm."""
    optim: OptimSection = OptimSection()


class CriticSection(Section):
    """The value model's update; used with ``algorithm.adv_estimator = "gae"``."""

    cliprange_value: float = Field(default=0.5, gt=0.0)
    """Clip of the value around its old estimate."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Iterations in which only the critic learns."""
    optim: OptimSection = OptimSection(lr=1e-5)


class FilterGroupsSection(Section):
    """DAPO's dynamic sampling: a group of equal scores teaches nothing, and another prompt takes its place."""

    enable: bool = False
    """Leaves such groups out and asks for replacements until ``data.train_batch_size`` groups are there."""
    max_num_gen_batches: int = Field(default=10, ge=1)
    """Bound on the prompts of an iteration, in batches; past it the iteration trains on the groups that it has."""


class RolloutCorrectionSection(Section):
    """What is done about the gap between the policy that sampled and the one that is trained (verl's words).

    It has two causes: staleness, and the generator's arithmetic. Here rho = pi_start / pi_behaviour, where pi_start is
    the trainer's policy at the start of the iteration.
    """

    bypass_mode: bool = True
    """True: the ratio of the loss is taken against the behaviour policy. False: decoupled; it is taken against
    pi_start, the proximal policy, and ``rollout_is`` weights the token by rho."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Truncated importance weight min(rho, ``rollout_is_threshold``) of each token, or of the whole answer. Needs
    ``bypass_mode = false``: else the loss's own ratio already corrects."""
    rollout_is_threshold: float = Field(default=2.0, gt=0.0)
    """Where the weight is cut."""
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    """Masks tokens (or whole answers, by rho's product or geometric mean) whose rho lies outside the bounds; they leave
    the denominator too."""
    rollout_rs_threshold: float = Field(default=2.0, gt=1.0)
    """Upper bound."""
    rollout_rs_threshold_lower: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Lower bound; 0: one over the upper."""

    @property
    def rollout_rs_lower(self) -> float:
        """The lower bound that applies."""
        return self.rollout_rs_threshold_lower or 1.0 / self.rollout_rs_threshold


class AlgorithmSection(Section):
    """Advantages, the reward's KL, and what is left out or weighted."""

    adv_estimator: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        "gae"
    )
    """``gae``: PPO with a critic; ``grpo``: the group's mean as baseline; ``rloo``: the mean of the group's others;
    ``reinforce_plus_plus``: returns without a baseline, whitened; ``reinforce_plus_plus_baseline``: the score less the
    group's mean, whitened."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token; ``gae`` and ``reinforce_plus_plus``."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda."""
    whiten_advantages: Literal["running", "batch", "none"] = "running"
    """Not with ``grpo`` and ``rloo``. ``running``: statistics of earlier iterations, known beforehand, so that the
    stream does not stop (the first iteration waits for its batch); ``batch``: this iteration's own, waits for the last
    sample."""
    norm_adv_by_std_in_grpo: bool = True
    """Divides by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Subtracts ``kl_coef`` times the per-token KL to the reference from the reward."""
    kl_coef: float = Field(default=0.001, ge=0.0)
    """Weight of that KL."""
    kl_penalty: Literal["k1", "k2", "k3"] = "k1"
    """Its estimator."""
    mask_truncated_completions: bool = False
    """DAPO's overlong filtering: an answer that the length limit cut is not trained on, and counts in no denominator;
    its score still counts in the group's baseline."""
    filter_groups: FilterGroupsSection = FilterGroupsSection()
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    loss_fn: str = ""
    """A policy loss of one's own, as ``file.py:function``."""
    advantage_fn: str = ""
    """A group advantage of one's own, as ``file.py:function``, in place of that of an estimator with groups."""


class OverlongBufferSection(Section):
    """DAPO's soft punishment of answers that come near the length limit (arXiv 2503.14476, eq. 13)."""

    len: int = Field(default=0, ge=0)
    """Tokens before ``data.max_response_length`` in which the punishment grows from 0 to its full size; 0: off."""
    penalty_factor: float = Field(default=1.0, gt=0.0)
    """Its full size, taken from the score."""
