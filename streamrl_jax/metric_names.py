"""Every metric's name (verl's where it has one) and meaning. `docs/metrics.md` is generated from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

# `*` stands for a name that the run gives (an instance, a phase, a component of the reward).
METRICS: Final[Mapping[str, str]] = {
    "training/global_step": "Iterations completed.",
    "training/version": "Version of the weights that were published after this step.",
    "training/samples": "Samples consumed in this step, those of groups that were left out included.",
    "training/replaced_prompts": "Prompts that were asked in place of left-out groups (algorithm.filter_groups).",
    "training/tokens": "Tokens of their prompts and answers.",
    "training/micro_batches": "Micro-batches of the step.",
    "training/overlapped": "Share of the micro-batches whose gradient was begun before the last sample arrived.",
    "training/padding_share": "Share of the packed rows' tokens that is padding.",
    "training/compiled_shapes": "Shapes that a micro-batch may have; all are compiled before the first iteration.",
    "training/shapes_used": "Those of them that this step's micro-batches had.",
    "training/rank_imbalance": "Work of the most loaded data-parallel rank over the mean, summed over micro-batches.",
    "training/update_refused": "Updates of this step that were refused: reward, loss or gradient was not finite.",
    "training/update_empty": "Updates of this step that had nothing to train on: all was left out or masked.",
    "training/groups_left_out": "Groups that dynamic sampling left out, since their scores were all equal.",
    "training/groups_left_out_score": "Mean score of their answers: 1 where they were all right, 0 where all wrong.",
    "training/staleness/mean": "Versions that the consumed tokens lag behind the trainer, mean.",
    "training/staleness/max": "The same, maximum; never above trainer.max_staleness.",
    "training/rollout_tokens_compared": "Tokens that both sides scored at the same version.",
    "training/rollout_tokens_other_version": "Tokens of another version, which cannot be compared.",
    "training/rollout_probs_diff_mean": "|p_trainer - p_generator| of the same tokens and version, mean.",
    "training/rollout_probs_diff_max": "The same, maximum.",
    "training/rollout_logprobs_diff_mean": "|logp_trainer - logp_generator| of the same, mean.",
    "training/rollout_logprobs_diff_max": "The same, maximum.",
    "training/rollout_logprobs_diff_p50": "The same, median.",
    "training/rollout_logprobs_diff_p99": "The same, 99 % quantile.",
    "training/probe_*": "The same as training/rollout_*, on the probe that both sides score after a push.",
    "actor/pg_loss": "Policy loss, aggregated over the global batch as actor.loss_agg_mode says.",
    "actor/ppo_kl": "Behaviour to current policy, k1, token mean.",
    "actor/pg_clipfrac": "Share of tokens whose ratio the clip held.",
    "actor/pg_clipfrac_lower": "Share of tokens that the dual clip held.",
    "actor/entropy": "Entropy of the policy at the sampling temperature, nats, aggregated as actor.loss_agg_mode says.",
    "actor/kl_loss": "KL to the reference in the loss, before its weight, aggregated as actor.loss_agg_mode says.",
    "actor/router_aux_loss": "Load-balance loss of a mixture of experts, before its weight; 1 is even.",
    "actor/reward_kl_penalty": "KL to the reference that is in the reward, before its weight, token mean.",
    "actor/grad_norm": "Global norm of the gradient before clipping.",
    "actor/lr": "Learning rate of the step.",
    "rollout_corr/rho/*": "pi_start / pi_behaviour of the tokens (mean, max, min), before any correction.",
    "rollout_corr/rho_kl/*": "The same as -log: k1 from the behaviour policy to the trainer's (mean, max, min).",
    "rollout_corr/rollout_is/*": "The truncated importance weight of the tokens (mean, max, min).",
    "rollout_corr/rollout_rs_masked/*": "1 for a token that was rejected, else 0; the mean is their share.",
    "actor/*": "Token mean of a statistic that a loss of one's own returned.",
    "critic/vf_loss": "Clipped value loss, token mean.",
    "critic/vf_clipfrac": "Share of tokens whose value the clip held.",
    "critic/vf_explained_var": "1 - Var(return - value) / Var(return).",
    "critic/grad_norm": "Global norm of the gradient before clipping.",
    "critic/lr": "Learning rate of the step.",
    "critic/score/*": "Reward function's score per sample (mean, max, min).",
    "reward/*/mean": "A further figure that the reward function returned, over the samples that have it.",
    "critic/rewards/mean": "Sum of the token rewards per sample, KL included.",
    "critic/advantages/*": "Advantages over tokens, as trained on (mean, max, min).",
    "critic/returns/*": "Returns over tokens (mean, max, min).",
    "critic/values/*": "Values over tokens (mean, max, min).",
    "response_length/mean": "Tokens of an answer, the stop token included.",
    "response_length/max": "The same, maximum.",
    "response_length/min": "The same, minimum.",
    "response_length/clip_ratio": "Share of answers cut at data.max_response_length.",
    "prompt_length/mean": "Tokens of a prompt.",
    "val/accuracy": "Mean score on the held-out prompts.",
    "val/pass@*": "Chance that at least one of so many answers to a held-out prompt is right.",
    "val/response_length/mean": "Tokens of a held-out answer.",
    "timing_s/*": "Seconds that a phase took (step, gen_wait, publish, testing and so on).",
    "ranker/recall_20": "Of the fifth of the prompts with the longest answers, the share that was predicted as such.",
    "ranker/kendall_tau": "Kendall's tau-b of what was predicted before the iteration began and what was observed.",
    "ranker/log_error": "|log(predicted / observed)| of the prompts' mean lengths, mean.",
    "ranker/with_history": "Share of the iteration's prompts that had been answered before.",
    "ranker/unpredicted": "Prompts of the iteration that were handed over without a prediction.",
    "ranker/refresh_s": "Seconds of the refreshes that ended in the step, behind the training.",
    "dispatch/actual_s": "From the hand-out of the iteration's first sample to its last answer.",
    "dispatch/planned_s": "The same as predicted, before the first was handed out; null without dispatch.cost.",
    "dispatch/in_lines": "1 where a plan said which instance answers what; 0: by length, to the emptiest instance.",
    "dispatch/steals": "Prompts, or rests of them, that an instance took over from another line; absent without lines.",
    "dispatch/as_planned": "Share of the answers that ran on the instance that they were planned for.",
    "perf/total_num_tokens": "Tokens of prompts and answers in the step.",
    "perf/time_per_step": "Seconds of the step.",
    "perf/throughput": "Tokens per second and device, trainer and generator together.",
    "perf/gen_tokens_per_s": "Answer tokens per second, all instances.",
    "perf/mfu/actor": "The actor's useful FLOPs over the peak, outside waits and probes; missing without a known peak.",
    "perf/max_memory_allocated_gb": "Device memory at its highest, GiB.",
    "trainer/idle_ratio": "Share of the step that the trainer waited for samples (for a probe: timing_s/probe).",
    "rollouter/idle_ratio": "Share of the step that instances were up with nothing to do, mean.",
    "rollouter/*": "Counters of the controller since the start: redispatched, restarts and so on.",
    "control/rss_bytes": "Memory of the process that the controller is in (resident).",
    "control/cpu_share": "Processor time of that process in the step, as a share of one core's.",
    "control/latency_ms/median": "From a sample's reward, while the trainer waits for one, until its process has it.",
    "control/latency_ms/max": "The longest of them.",
    "gen/*/idle_ratio": "Idle share of one instance.",
    "gen/*/tokens_per_s": "Tokens per second of one instance.",
    "gen/*/version": "Version that one instance serves.",
    "weights/bytes": "Bytes of the version that the step used.",
    "sft/loss": "Cross-entropy of the answers, nats, token mean.",
    "sft/accuracy": "Greedy accuracy on the stop set.",
    "sft/grad_norm": "Global norm of the gradient before clipping.",
    "sft/lr": "Learning rate of the step.",
    "sft/tokens": "Tokens that were imitated in the step.",
    "sft/update_refused": "1 when the update was refused: loss or gradient was not finite.",
}


def undeclared(names: Iterable[str]) -> list[str]:
    """Names that the table has no line for.

    Args:
        names: Metric names.

    Returns:
        Those that match no entry, sorted.
    """
    return sorted(name for name in set(names) if not any(fnmatchcase(name, pattern) for pattern in METRICS))


def metrics_page() -> str:
    """The table as a page of documentation."""
    lines = [
        "# Metrics",
        "",
        "Generated from `streamrl_jax/metric_names.py` by `make docs`. Each step writes one line to "
        "`metrics.jsonl`:",
        "",
        '`{"step": 3, "time": 1.7e9, "metrics": {"actor/pg_loss": 0.1, "perf/mfu/actor": null}, "missing": '
        '{"perf/mfu/actor": "no peak known for cpu"}}`',
        "",
        "A value is a finite number, or `null` with the reason under `missing`. `*` stands for a name "
        "that the run gives.",
        "",
        "| metric | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in METRICS.items()),
    ]
    return "\n".join(lines) + "\n"
