"""The frozen, validated run configuration.

One section a concern, verl's words where it has one. A docstring under a field is its documentation: ``docs/config.md``
is generated from here. Reading files, layering and overrides live in ``config_io.py``. Importing this module imports
neither JAX nor torch nor vLLM.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl_jax.config_algorithm import (
    ActorSection,
    AlgorithmSection,
    CriticSection,
    OptimSection,
    OverlongBufferSection,
)
from streamrl_jax.config_control import ControlSection
from streamrl_jax.config_distributed import DistributedSection
from streamrl_jax.config_generation import GenSection
from streamrl_jax.config_ranker import DispatchSection, RankerSection
from streamrl_jax.config_rules import GROUP_BASELINES, WHITENED, CombinationFaultsError, combination_faults
from streamrl_jax.config_section import Section
from streamrl_jax.config_security import SecuritySection


class RunSection(Section):
    """Where a run lives and how it is named."""

    name: str = "run"
    """Name of the run; the run directory is ``dir/name`` unless ``--run-dir`` is given."""
    dir: str = "runs"
    """Folder that holds run directories. A run directory that exists is refused, unless ``--resume``."""
    seed: int = Field(default=0, ge=0)
    """Seeds initialisation, the order of prompts and the sampling of answers."""


class ModelSection(Section):
    """The policy's checkpoint and how the trainer computes with it."""

    path: str = ""
    """A Hugging Face checkpoint directory, or a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``."""
    critic_path: str = ""
    """Checkpoint that the critic starts from; empty: the policy's. It may have a scalar head of its own
    (``...ForTokenClassification`` or ``...ForSequenceClassification`` with one label)."""
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
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature; the trainer's log-probs use the same. vLLM raises one below 0.01 to that, in silence."""
    top_p: float = 1.0
    """Only 1.0 in training: nucleus sampling renormalises, and the importance ratio would be wrong."""
    top_k: int = -1
    """Only -1 (off) in training."""
    min_p: float = 0.0
    """Only 0.0 in training."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Extra stop ids beside the EOS ids of the checkpoint's generation config."""
    mask_padded_vocab: bool = True
    """Ids that pad the checkpoint's vocabulary beyond the tokenizer's are never sampled, and the trainer leaves them
    out of its distribution too."""

    @model_validator(mode="after")
    def _density_untouched(self) -> RolloutSection:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"rollout.{name} = {getattr(self, name)} truncates the distribution, and the importance ratio of "
                    f"training would be biased; set it to {off} (evaluation may use eval.{name})"
                )
        return self


class RewardSection(Section):
    """The reward function."""

    function: str = "exact_match"
    """A built-in name, or ``file.py:function`` with TRL's ``(completions, **columns)`` or verl's
    ``compute_score(data_source, solution_str, ground_truth, extra_info)`` signature."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""
    timeout_s: float = Field(default=30.0, gt=0.0)
    """Bound on one call."""
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()


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
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Versions that a token may lag behind the trainer when it is consumed. 0: synchronous, with gradients accumulated
    while samples arrive; 1: the next iteration is generated while this one is trained on; above: so many iterations may
    be generated ahead."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """A reward, loss or gradient that is not finite refuses the iteration's update, and the samples that caused it are
    named. Then the run stops, or goes on with the weights as they were."""
    mesh: MeshSection = MeshSection()
    distributed: DistributedSection = DistributedSection()
    devices: str = ""
    """GPU ids of the trainer on this node (``"0,1,2,3"``); empty: all, or what the instances leave."""
    xla_memory_fraction: float = Field(default=0.9, gt=0.0, le=1.0)
    """Cap on JAX's preallocation of a GPU."""
    pack_row_length: int = Field(default=0, ge=0)
    """Tokens of a row of packed samples; 0: few row lengths, chosen from what the limits allow a sample."""
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
    logger: list[Literal["console", "tensorboard"]] = Field(default=["console"])
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
    control: ControlSection = ControlSection()
    dispatch: DispatchSection = DispatchSection()
    ranker: RankerSection = RankerSection()
    agreement: AgreementSection = AgreementSection()
    security: SecuritySection = SecuritySection()
    sft: SftSection = SftSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        if faults := list(combination_faults(self)):
            raise CombinationFaultsError(faults)
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
    def uses_groups(self) -> bool:
        """Whether an advantage needs the scores of the other answers to its prompt."""
        return self.algorithm.adv_estimator in GROUP_BASELINES

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the batch."""
        return self.algorithm.whiten_advantages != "none" and self.algorithm.adv_estimator in WHITENED

    @property
    def scores_first(self) -> bool:
        """Whether pi_start's log-probs need a forward pass of their own: they are read, and updates are several."""
        correction = self.algorithm.rollout_correction
        reads = not correction.bypass_mode or correction.rollout_rs != "none"
        return reads and not self.single_update

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
    def loss_scale(self) -> int:
        """What `seq-mean-token-sum-norm` divides a sequence's sum by, tokens."""
        return self.actor.loss_scale_factor or self.data.max_response_length

    @property
    def single_update(self) -> bool:
        """Whether an iteration takes one optimizer step, on all of its samples."""
        return self.mini_batches == 1 and self.actor.ppo_epochs == 1

    @property
    def streams(self) -> bool:
        """Whether gradients accumulate while samples still arrive (one optimizer step an iteration)."""
        return self.single_update and not (self.whitens and self.algorithm.whiten_advantages == "batch")
