"""What the trainer needs of a prompt and its answer, whoever wrote it. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamrl_jax.types import FinishReason, Generation, Logprobs, Prompt, Sample, TokenIds, expand_runs


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt with the answer to train on (or to score)."""

    name: str  # sample id
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: Logprobs  # behaviour log-probs; zeros where there is no behaviour (supervised)
    versions: TokenIds  # version of each token
    reward: float = 0.0
    advantage: float = 0.0  # of all its tokens, where the group gives it
    prompt_id: str = ""
    instance: str = ""
    truncated: bool = False  # ended by the length limit

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
        if not (
            np.isfinite(self.logprobs).all() and math.isfinite(self.reward) and math.isfinite(self.advantage)
        ):
            raise ValueError(
                f"sample {self.name} from {self.instance or 'no instance'}: reward {self.reward}, advantage "
                f"{self.advantage}, lowest log-prob {self.logprobs.min()}; all must be finite"
            )

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def generated_answer(
    prompt: Prompt, generation: Generation, reward: float = 0.0, advantage: float = 0.0
) -> Answer:
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
        reward=reward,
        advantage=advantage,
        prompt_id=prompt.prompt_id,
        instance=generation.instance,
        truncated=generation.finish_reason is FinishReason.LENGTH,
    )


def sampled_answer(sample: Sample, advantage: float = 0.0) -> Answer:
    """`generated_answer` of a rewarded sample."""
    return generated_answer(sample.prompt, sample.generation, sample.reward, advantage)


def taught_answer(name: str, prompt_ids: TokenIds, answer_ids: TokenIds) -> Answer:
    """An example for supervised training: nobody sampled it, so it has no log-probs and no version."""
    nothing = np.zeros(len(answer_ids), np.float32)
    return Answer(
        name, prompt_ids, answer_ids, nothing, np.full(len(answer_ids), -1, np.int32), prompt_id=name
    )
