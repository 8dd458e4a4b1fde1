"""What the trainer needs of a prompt and its answer, whoever wrote it. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError
from streamrl_jax.rewards.overlong import overlong_penalty
from streamrl_jax.types import FinishReason, Generation, Logprobs, Prompt, Sample, TokenIds, expand_runs

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt with the answer to train on (or to score)."""

    name: str  # sample id
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: Logprobs  # behaviour log-probs; zeros where there is no behaviour (supervised)
    versions: TokenIds  # version of each token
    score: float = 0.0  # the reward function's
    reward: float = 0.0  # what is learned from: the score, shaped
    advantage: float = 0.0  # of all its tokens, where the group gives it
    prompt_id: str = ""
    instance: str = ""
    truncated: bool = False  # ended by the length limit
    trained: bool = True  # False: its tokens are in no loss and in no denominator

    def __post_init__(self) -> None:
        count = len(self.response_ids)
        if not count or not len(self.prompt_ids):
            raise ValueError(
                f"sample {self.name}: {len(self.prompt_ids)} prompt and {count} answer tokens; each needs one"
            )
        if len(self.logprobs) != count or len(self.versions) != count:
            raise ValueError(
                f"sample {self.name}: {count} answer tokens, {len(self.logprobs)} log-probs, "
                f"{len(self.versions)} versions"
            )

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def non_finite(self) -> str:
        """Which of its numbers is not finite; empty if all are. Such an answer cannot be trained on."""
        if not np.isfinite(self.logprobs).all():
            return f"a log-prob of instance {self.instance or 'unnamed'} is not finite"
        for what in ("reward", "advantage"):
            value = getattr(self, what)
            if not math.isfinite(value):
                return f"its {what} is {value}"
            if abs(value) > _LARGEST:
                return f"its {what} is {value}, beyond float32"
        return ""


def generated_answer(prompt: Prompt, generation: Generation) -> Answer:
    """What the trainer needs of a finished generation.

    Raises:
        ValueError: It was aborted, or its arrays do not fit each other.
    """
    if generation.finish_reason is FinishReason.ABORT:
        raise ValueError(f"sample {generation.sample_id} was aborted; an aborted answer is never trained on")
    return Answer(
        name=generation.sample_id,
        prompt_ids=prompt.token_ids,
        response_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=expand_runs(generation.versions),
        prompt_id=prompt.prompt_id,
        instance=generation.instance,
        truncated=generation.finish_reason is FinishReason.LENGTH,
    )


@dataclass(frozen=True)
class Shaping:
    """What an answer's length does to its reward, and to whether it is trained on (DAPO, arXiv 2503.14476).

    Attributes:
        limit: `data.max_response_length`.
        buffer_len: `reward.overlong_buffer.len`, section 3.4, eq. 13.
        penalty_factor: `reward.overlong_buffer.penalty_factor`.
        mask_truncated: `algorithm.mask_truncated_completions`, section 3.4, overlong filtering.
    """

    limit: int = 0
    buffer_len: int = 0
    penalty_factor: float = 1.0
    mask_truncated: bool = False

    @classmethod
    def of(cls, cfg: Config) -> Shaping:
        """What the configuration asks for."""
        buffer = cfg.reward.overlong_buffer
        masks = cfg.algorithm.mask_truncated_completions
        return cls(cfg.data.max_response_length, buffer.len, buffer.penalty_factor, masks)


def sampled_answer(sample: Sample, shaping: Shaping = Shaping()) -> Answer:
    """`generated_answer` of a rewarded sample, with the reward that is learned from."""
    answer = generated_answer(sample.prompt, sample.generation)
    penalty = overlong_penalty(
        len(answer.response_ids), shaping.limit, shaping.buffer_len, shaping.penalty_factor
    )
    return replace(
        answer,
        score=sample.reward,
        reward=sample.reward + penalty,
        trained=not (answer.truncated and shaping.mask_truncated),
    )


def check_vocabulary(answer: Answer, vocab_limit: int | None) -> None:
    """Refuses an answer that a policy of this tokenizer cannot have written: its instance is set up otherwise.

    Args:
        answer: As it was sampled.
        vocab_limit: From `Tokenizer.vocab_limit`.

    Raises:
        UserError: One of its ids pads the vocabulary; the trainer gives it probability 0.
    """
    if vocab_limit is not None and (highest := int(answer.response_ids.max())) >= vocab_limit:
        raise UserError(
            f"sample {answer.name} from {answer.instance}: token id {highest} is none of the tokenizer's "
            f"{vocab_limit}, and rollout.mask_padded_vocab = true keeps it from being sampled; start the instance "
            "with the run's configuration, or set it to false for both"
        )


def taught_answer(name: str, prompt_ids: TokenIds, answer_ids: TokenIds) -> Answer:
    """An example for supervised training: nobody sampled it, so it has no log-probs and no version."""
    nothing = np.zeros(len(answer_ids), np.float32)
    return Answer(
        name, prompt_ids, answer_ids, nothing, np.full(len(answer_ids), -1, np.int32), prompt_id=name
    )
