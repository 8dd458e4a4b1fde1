"""What a configuration learns by, in words: printed before a run starts, so that a layer that was forgotten shows."""

from __future__ import annotations

from typing import Final

from streamrl_jax.config import Config

_ADVANTAGES: Final = {
    "rloo": "the score less the mean of the group's others",
    "reinforce_plus_plus_baseline": "the score less the group's mean",
}
_EACH: Final = {"token": "each token", "sequence": "each answer (the product over its tokens)"}
_THOSE: Final = {
    "token": "tokens whose rho is",
    "sequence": "answers whose rho (the product over the tokens) is",
    "geometric": "answers whose rho (the geometric mean over the tokens) is",
}


def algorithm_text(config: Config) -> str:
    """Names advantage, loss, corrections, KL, reward, and what is left out.

    Args:
        config: The configuration.

    Returns:
        A line a part, in the order in which a step is made of them.
    """
    lines = {
        "reward": _reward(config),
        "left out": _left_out(config),
        "advantage": _advantage(config),
        "loss": f"{_loss(config)}; {_aggregation(config)}",
        "ratio": _ratio(config),
        "correction": _correction(config),
        "KL": _kl(config),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _reward(config: Config) -> str:
    buffer = config.reward.overlong_buffer
    if not buffer.len:
        return config.reward.function
    return (
        f"{config.reward.function}, less up to {buffer.penalty_factor:g} over the last {buffer.len:,} of "
        f"{config.data.max_response_length:,} tokens"
    )


def _left_out(config: Config) -> str:
    algorithm = config.algorithm
    parts = (
        ["groups of equal scores (others are asked in their place)"] if algorithm.filter_groups.enable else []
    )
    parts += ["answers that the length limit cut"] if algorithm.mask_truncated_completions else []
    return ", ".join(parts) or "nothing"


def _advantage(config: Config) -> str:
    algorithm, group = config.algorithm, f"{config.rollout.n} answers a prompt"
    if algorithm.advantage_fn:
        return f"{algorithm.advantage_fn}, of {group}{_whitened(config)}"
    match algorithm.adv_estimator:
        case "gae":
            text = f"gae: from a critic, gamma {algorithm.gamma:g}, lambda {algorithm.lam:g}"
        case "grpo":
            over = (
                "over its standard deviation"
                if algorithm.norm_adv_by_std_in_grpo
                else "not divided (Dr. GRPO)"
            )
            text = f"grpo: the score less the group's mean, {over}, of {group}"
        case "reinforce_plus_plus":
            text = f"reinforce_plus_plus: the return, gamma {algorithm.gamma:g}, without a baseline"
        case other:
            text = f"{other}: {_ADVANTAGES[other]}, of {group}"
    return text + _whitened(config)


def _whitened(config: Config) -> str:
    if not config.whitens:
        return ""
    by = {"running": "earlier iterations' statistics", "batch": "this iteration's statistics"}
    return f"; whitened by {by[config.algorithm.whiten_advantages]}"


def _loss(config: Config) -> str:
    actor = config.actor
    if config.algorithm.loss_fn:
        return config.algorithm.loss_fn
    bounds = f"[{1 - actor.clip_ratio_low:g}, {1 + actor.clip_ratio_high:g}]"
    return {
        "vanilla": f"vanilla: each token's ratio clipped to {bounds}, dual clip at {actor.clip_ratio_c:g}",
        "gspo": f"gspo: the answer's ratio (geometric mean) clipped to {bounds}",
        "cispo": f"cispo: log-probs weighted by the ratio clipped to {bounds}",
        "reinforce": "reinforce: log-probs weighted by the advantage, no ratio",
    }[actor.loss_mode]


def _aggregation(config: Config) -> str:
    mode = config.actor.loss_agg_mode
    if mode != "seq-mean-token-sum-norm":
        return mode
    return f"{mode}, over {config.loss_scale:,} tokens"


def _ratio(config: Config) -> str:
    if config.algorithm.rollout_correction.bypass_mode:
        against = "against the policy that sampled (bypass_mode = true)"
    else:
        against = "against the policy at the iteration's start (decoupled, bypass_mode = false)"
    return against + ("; one more forward pass an iteration" if config.scores_first else "")


def _correction(config: Config) -> str:
    correction = config.algorithm.rollout_correction
    parts: list[str] = []
    if correction.rollout_is != "none":
        parts.append(
            f"weight min(rho, {correction.rollout_is_threshold:g}) of {_EACH[correction.rollout_is]}"
        )
    if correction.rollout_rs != "none":
        upper = correction.rollout_rs_threshold
        lower = correction.rollout_rs_lower
        parts.append(f"leaves out {_THOSE[correction.rollout_rs]} outside [{lower:g}, {upper:g}]")
    return "; ".join(parts) or "none"


def _kl(config: Config) -> str:
    actor, algorithm = config.actor, config.algorithm
    parts = [f"{actor.kl_loss_coef:g} × {actor.kl_loss_type} in the loss"] if actor.use_kl_loss else []
    parts += (
        [f"{algorithm.kl_coef:g} × {algorithm.kl_penalty} in the reward"]
        if algorithm.use_kl_in_reward
        else []
    )
    return " and ".join(parts) or "none"
