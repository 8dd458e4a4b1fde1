"""The frozen, validated run configuration.

One section a concern, verl's words where it has one. A docstring under a field is its documentation: ``docs/config.md``
is generated from here. Reading files, layering and overrides live in ``config_io.py``. Importing this module imports
neither JAX nor torch nor vLLM.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Field(ge=0.0, le=1.0)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    """Where a run lives and how it is named."""

    name: str = "run"
    """Name of the run; the run directory is ``dir/name`` unless ``--run-dir`` is given."""
    dir: str = "runs"
    """Folder that holds run directories. A run directory that exists is refused, unless ``--resume``."""
    seed: int = 0
    """Seeds initialisation, the order of prompts and the sampling of answers."""


class ModelSection(Section):
    """The policy's checkpoint and how the trainer computes with it."""

    path: str = ""
    """A Hugging Face checkpoint directory, or a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``."""
    critic_path: str = ""
    """Checkpoint that the critic's body starts from; empty: the policy's."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward and backward pass; parameters stay float32 masters."""
    remat: Literal["none", "full", "dots"] = "full"
    """What each layer recomputes in the backward pass."""
    attention_block: int = Field(default=512, ge=16)
    """Queries per block of attention, tokens; longer rows run block by block, so that memory grows linearly."""
    logprob_chunk: int = Field(default=1024, ge=16)
    """Tokens per block of the output head; bounds the memory of the logits."""


class DataSection(Section):
    """Prompts: where they come from and how long they may be."""

    train: str = ""
    """Training prompts: a ``.jsonl`` or ``.parquet`` file, or ``task:NAME`` for a built-in task."""
    test: str = ""
    """Held-out prompts, in the same forms; empty: no evaluation."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a built-in task."""
    prompt_key: str = "prompt"
    """Field that holds the prompt: a string, or a list of chat messages."""
    apply_chat_template: bool = False
    """Renders the prompt through the checkpoint's chat template."""
    system_prompt: str = ""
    """System message put before each prompt when the chat template is applied."""
    train_batch_size: int = Field(default=32, ge=1)
    """Prompts per iteration; samples per iteration are this times ``rollout.n``."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens."""
    max_response_length: int = Field(default=512, ge=1)
    """Tokens of a whole answer."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt over the limit stops the run, or is dropped and counted; it is never cut."""
    shuffle: bool = True
    """Redraws the order at each epoch, from ``run.seed``."""


class RolloutSection(Section):
    """The distribution that answers are sampled from. What would bend the density is refused (rule 4)."""

    n: int = Field(default=8, ge=1)
    """Answers per prompt."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature; the trainer's log-probs use the same."""
    top_p: float = 1.0
    """Only 1.0 in training: nucleus sampling renormalises, and the importance ratio would be wrong."""
    top_k: int = -1
    """Only -1 (off) in training."""
    min_p: float = 0.0
    """Only 0.0 in training."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Extra stop ids beside the EOS ids of the checkpoint's generation config."""

    @model_validator(mode="after")
    def _density_untouched(self) -> RolloutSection:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"rollout.{name} = {getattr(self, name)} truncates the distribution, and the importance ratio of "
                    f"training would be biased; set it to {off} (evaluation may use eval.{name})"
                )
        return self


class GenSection(Section):
    """The stream generation service: instances and their engines."""

    instances: int = Field(default=1, ge=0)
    """Local instances that the run starts; 0 with ``endpoints`` only."""
    endpoints: list[str] = Field(default_factory=list)
    """``host:port`` of instances that were started elsewhere with ``streamrl gen``."""
    python: str = ""
    """Interpreter of the generation environment; empty: the trainer's own."""
    devices: list[str] = Field(default_factory=list)
    """One entry an instance: GPU ids (``"4,5"``), or CPU cores (``"cpu:0"``, ``"cpu:0-3"``); empty: automatic."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU workers) per instance."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The engine's dtype, in which weights are shipped."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences an instance runs at once."""
    lookahead: int = Field(default=8, ge=0)
    """Assignments an instance holds beyond its slots."""
    max_model_len: int = Field(default=0, ge=0)
    """Tokens of prompt and answer; 0: the two limits of ``data``."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """KV cache on a CPU machine, GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine takes."""
    enforce_eager: bool = True
    """No graph capture: quicker to start, slower to decode on GPUs."""
    enable_prefix_caching: bool = True
    """Shares the prompt's KV between the answers of a group; reset with every update."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Bound on an instance's start."""
    heartbeat_interval_s: float = Field(default=1.0, gt=0.0)
    """How often an instance reports."""
    lease_s: float = Field(default=20.0, gt=0.0)
    """An instance silent for so long, or without progress while it generates, is taken for dead and restarted."""
    progress_interval_s: float = Field(default=0.0, ge=0.0)
    """Partial answers are sent so often; 0: only finished ones."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts per instance before the run stops with its name."""
    listen: str = "127.0.0.1"
    """Address that instances bind; anything but loopback needs ``security.insecure`` and a token."""


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
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=16)
    """Token budget of a micro-batch per data-parallel rank."""
    clip_ratio_low: float = Field(default=0.2, gt=0.0)
    """Lower clip of the ratio: 1 - this."""
    clip_ratio_high: float = Field(default=0.2, gt=0.0)
    """Upper clip of the ratio: 1 + this."""
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    """Dual clip: with a negative advantage the loss of a token is at most this times the advantage's size."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """Aggregation over the tokens of the global (mini-)batch, never per micro-batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Adds ``kl_loss_coef`` times the KL to the reference to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0.0)
    """Weight of that KL."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator (Schulman's names). The gradient of ``k1`` averages to zero: it would hold nothing back."""
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


class AlgorithmSection(Section):
    """Advantages and the reward's KL."""

    adv_estimator: Literal["gae", "grpo"] = "gae"
    """``gae``: PPO with a critic; ``grpo``: the group's mean as baseline."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda."""
    whiten_advantages: Literal["running", "batch", "none"] = "running"
    """GAE only. ``running``: statistics of earlier iterations, known beforehand, so that the stream does not stop
    (the first iteration waits for its batch); ``batch``: this iteration's own, waits for the last sample."""
    norm_adv_by_std_in_grpo: bool = True
    """Divides by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Subtracts ``kl_coef`` times the per-token KL to the reference from the reward."""
    kl_coef: float = Field(default=0.001, ge=0.0)
    """Weight of that KL."""
    kl_penalty: Literal["k1", "k2", "k3"] = "k1"
    """Its estimator."""
    loss_fn: str = ""
    """A policy loss of one's own, as ``file.py:function``."""
    advantage_fn: str = ""
    """A group advantage of one's own, as ``file.py:function``; with ``grpo``."""


class RewardSection(Section):
    """The reward function."""

    function: str = "exact_match"
    """A built-in name, or ``file.py:function`` with TRL's ``(completions, **columns)`` or verl's
    ``compute_score(data_source, solution_str, ground_truth, extra_info)`` signature."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""
    timeout_s: float = Field(default=30.0, gt=0.0)
    """Bound on one call."""


class MeshSection(Section):
    """The trainer's device mesh; one axis may be -1 and takes what is left."""

    data: int = 1
    """Replicas of the parameters; rows of a batch are split over it."""
    fsdp: int = -1
    """Parameters, gradients and moments are split over it, rows too."""
    tensor: int = 1
    """Heads, feed-forward and vocabulary are split over it."""


class TrainerSection(Section):
    """The loop: steps, mode, mesh, checkpoints, records."""

    total_training_steps: int = Field(default=100, ge=1)
    """Iterations."""
    max_staleness: int = Field(default=0, ge=0, le=1)
    """Versions that a token may lag behind the trainer when it is consumed. 0: synchronous, with gradients accumulated
    while samples arrive; 1: the next iteration is generated while this one is trained on."""
    mesh: MeshSection = MeshSection()
    devices: str = ""
    """GPU ids of the trainer on this node (``"0,1,2,3"``); empty: all, or what the instances leave."""
    xla_memory_fraction: float = Field(default=0.9, gt=0.0, le=1.0)
    """Cap on JAX's preallocation of a GPU."""
    pack_row_length: int = Field(default=0, ge=0)
    """Tokens of a row of packed samples; 0: the longest sample that the limits allow, rounded up to 64."""
    sample_timeout_s: float = Field(default=600.0, gt=0.0)
    """The loop stops with an error when no sample arrives for so long."""
    save_freq: int = Field(default=10, ge=0)
    """Checkpoint every so many iterations; 0: only the last."""
    max_ckpt_to_keep: int = Field(default=3, ge=1)
    """The newest so many, and the best."""
    test_freq: int = Field(default=10, ge=0)
    """Evaluates every so many iterations on ``data.test``; 0: never."""
    val_before_train: bool = True
    """Evaluates version 0 too."""
    logger: list[Literal["console", "tensorboard"]] = ["console"]
    """``metrics.jsonl`` is always written."""
    compilation_cache: str = "auto"
    """Directory of JAX's compilation cache; ``auto``: in the user's cache; ``off``."""


class BridgeSection(Section):
    """How weights reach the instances."""

    transport: Literal["auto", "shm", "grpc"] = "auto"
    """``auto``: shared memory where the instance shares the host, else gRPC."""
    listen: str = "127.0.0.1:0"
    """Address of the trainer's weight store, for instances on other hosts."""
    advertise: str = ""
    """``host`` that other hosts reach the store by; empty: the listen address."""
    in_flight: bool = False
    """Updates with answers in flight (their KV is recomputed); else what runs finishes first. Async only."""
    update_timeout_s: float = Field(default=300.0, gt=0.0)
    """Bound on one update of one instance."""


class AgreementSection(Section):
    """Trainer and generator must give the same log-probs for the same tokens and version (rule 4)."""

    max_logprob_diff: float = Field(default=0.01, gt=0.0)
    """Bound on the chosen quantile of the absolute log-prob difference."""
    quantile: float = Field(default=0.99, gt=0.0, le=1.0)
    """Which quantile over a step's tokens is held against the bound; 1.0: the maximum."""
    window: int = Field(default=1, ge=1)
    """Steps in a row over the bound before the policy applies."""
    policy: Literal["warn", "stop"] = "stop"
    """What then happens."""
    probe_prompts: int = Field(default=4, ge=0)
    """Async: prompts per instance that are answered after each push and scored by both sides at that version."""
    probe_tokens: int = Field(default=16, ge=1)
    """Tokens of a probe's answer."""


class SecuritySection(Section):
    """Who may talk to whom."""

    insecure: bool = False
    """Permits plain text beyond loopback. A token is still needed."""
    token_file: str = ""
    """Shared secret of a run and its instances; empty: made per run."""


class SftSection(Section):
    """The supervised warm start (``streamrl sft``)."""

    steps: int = Field(default=400, ge=1)
    """Optimizer steps at most."""
    batch_size: int = Field(default=128, ge=1)
    """Examples per step."""
    optim: OptimSection = OptimSection(lr=3e-3, lr_warmup_steps=30, lr_scheduler="cosine")
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Global norm."""
    data: str = ""
    """Examples with ``prompt`` and ``answer``: a file, or ``task:NAME``."""
    answer_key: str = "answer"
    """Field of the answer to imitate."""
    stop_accuracy: float = Field(default=1.0, gt=0.0, le=1.0)
    """Stops when the greedy accuracy on the task's stop set reaches this (1.0 never stops early)."""
    stop_check_every: int = Field(default=50, ge=1)
    """Steps between two checks."""


class EvalSection(Section):
    """Evaluation on held-out prompts."""

    n: int = Field(default=1, ge=1)
    """Answers per prompt; pass@k needs more than one."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; free in evaluation."""
    top_k: int = -1
    """-1: off."""
    max_prompts: int = Field(default=0, ge=0)
    """0: all."""


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    gen: GenSection = GenSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    bridge: BridgeSection = BridgeSection()
    agreement: AgreementSection = AgreementSection()
    security: SecuritySection = SecuritySection()
    sft: SftSection = SftSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        mini = self.actor.ppo_mini_batch_size
        if mini and self.data.train_batch_size % mini:
            raise ValueError(
                f"actor.ppo_mini_batch_size = {mini} does not divide data.train_batch_size = "
                f"{self.data.train_batch_size} (both count prompts)"
            )
        if self.algorithm.adv_estimator == "grpo" and self.rollout.n < 2:
            raise ValueError(
                f"algorithm.adv_estimator = 'grpo' with rollout.n = {self.rollout.n}: a group of one has no baseline; "
                "set rollout.n to 2 or more"
            )
        if self.algorithm.adv_estimator == "grpo" and self.algorithm.use_kl_in_reward:
            raise ValueError(
                "algorithm.use_kl_in_reward = true with algorithm.adv_estimator = 'grpo': a group's "
                "advantage comes from its scores alone; put the KL in the loss with actor.use_kl_loss"
            )
        if self.algorithm.advantage_fn and self.uses_critic:
            raise ValueError(
                f"algorithm.advantage_fn = {self.algorithm.advantage_fn!r} with algorithm.adv_estimator = 'gae': the "
                "critic gives the advantages, and the function would not be called; set adv_estimator to 'grpo'"
            )
        if self.bridge.in_flight and self.trainer.max_staleness == 0:
            raise ValueError(
                "bridge.in_flight = true needs trainer.max_staleness = 1: in sync mode nothing is in flight"
            )
        if self.trainer.max_staleness and not self.agreement.probe_prompts:
            raise ValueError(
                "agreement.probe_prompts = 0 with trainer.max_staleness = 1: the consumed tokens are of an older "
                "version than the trainer's, and agreement would not be measured; ask for 1 or more"
            )
        if not self.gen.instances and not self.gen.endpoints:
            raise ValueError("gen.instances = 0 and gen.endpoints is empty: nothing would generate")
        if self.gen.max_model_len and self.gen.max_model_len < self.longest_sample:
            raise ValueError(
                f"gen.max_model_len = {self.gen.max_model_len} is under data.max_prompt_length + "
                f"data.max_response_length = {self.longest_sample}"
            )
        return self

    @property
    def longest_sample(self) -> int:
        """Tokens of prompt and answer that the limits allow."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def samples_per_iteration(self) -> int:
        """Prompts times answers per prompt."""
        return self.data.train_batch_size * self.rollout.n

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether the frozen reference is held in memory."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per pass over an iteration."""
        mini = self.actor.ppo_mini_batch_size
        return self.data.train_batch_size // mini if mini else 1

    @property
    def streams(self) -> bool:
        """Whether gradients accumulate while samples still arrive (one optimizer step an iteration)."""
        return (
            self.mini_batches == 1
            and self.actor.ppo_epochs == 1
            and not (self.uses_critic and self.algorithm.whiten_advantages == "batch")
        )
