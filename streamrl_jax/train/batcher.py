"""Packs answers into the few row shapes that the training step is compiled for. NumPy only.

Several prompt-and-answer sequences lie end to end in a row, told apart by `segment_ids`. A micro-batch
leaves as soon as it is well filled, while other answers are still being generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from streamrl_jax.train.answer import Answer
from streamrl_jax.train.packing import Packed, Packer
from streamrl_jax.train.shapes import BatchShape, Shape

A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class Rows(Generic[A]):
    """The arrays of a micro-batch, [rows, len] each; a JAX pytree (registered in `state.py`)."""

    tokens: A  # int32
    positions: A  # int32, within the segment, from 0
    segment_ids: A  # int32, from 1; 0 is padding
    response_mask: A  # bool: tokens that the policy wrote and is trained on
    behaviour_logprobs: A  # float32
    rewards: A  # float32, the score at the answer's last token, else 0
    advantages: A  # float32, the group's, at answer tokens


HostRows = Rows[np.ndarray]


def empty_rows(rows: int, length: int) -> HostRows:
    """Nothing but padding."""
    integers = dict.fromkeys(("tokens", "positions", "segment_ids"), np.int32)
    dtypes = integers | {"response_mask": np.bool_}
    return Rows(**{f.name: np.zeros((rows, length), dtypes.get(f.name, np.float32)) for f in fields(Rows)})


@dataclass(frozen=True, eq=False)
class Placement:
    """Where an answer lies: row and column of its prompt's first token."""

    answer: Answer
    row: int
    start: int

    @property
    def response(self) -> tuple[int, slice]:
        """Index of the answer's tokens in an array [rows, len]."""
        first = self.start + len(self.answer.prompt_ids)
        return self.row, slice(first, self.start + len(self.answer))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed rows, and which answer lies where."""

    rows: HostRows
    placements: tuple[Placement, ...]

    @property
    def used(self) -> int:
        """Tokens of prompts and answers."""
        return sum(len(p.answer) for p in self.placements)

    @property
    def capacity(self) -> int:
        """Tokens that are computed, padding included."""
        return self.rows.tokens.size


class MicroBatcher:
    """Hands out micro-batches of the answers that it is given; which lies where is `packing.Packer`'s choice.

    Call order: `add` for each answer, then `flush` for what is left.

    Invariant: each answer added is in exactly one micro-batch returned, whole.
    """

    def __init__(self, shape: BatchShape, *, pack: bool = True) -> None:
        """Starts empty.

        Args:
            shape: The compiled shapes.
            pack: Whether a row may hold several answers.
        """
        self._packer = Packer(shape, pack=pack)
        self._waiting: dict[int, Answer] = {}
        self._count = 0

    def add(self, answer: Answer) -> list[MicroBatch]:
        """Takes an answer.

        Returns:
            The micro-batches that leave now: mostly none, or one.

        Raises:
            ValueError: The answer is longer than the longest row.
        """
        self.put(answer)
        return [self._write(packed) for packed in self._packer.leaving()]

    def put(self, answer: Answer) -> None:
        """Takes an answer, and lets nothing leave before the next `add` or `flush`. Raises as `add`."""
        if len(answer) > self._packer.longest:
            raise ValueError(
                f"sample {answer.name}: {len(answer.prompt_ids)} prompt and {len(answer.response_ids)} "
                f"answer tokens do not fit a row of {self._packer.longest}"
            )
        self._packer.put(len(answer))
        self._waiting[self._count] = answer
        self._count += 1

    def flush(self) -> list[MicroBatch]:
        """Hands out what is held, in as many micro-batches as waste the least."""
        return [self._write(packed) for packed in self._packer.flush()]

    def _write(self, packed: Packed) -> MicroBatch:
        rows = [[self._waiting.pop(number) for number in row] for row in packed.rows]
        return _pack_rows(rows, packed.shape)


def pack_all(answers: Sequence[Answer], shape: BatchShape, *, pack: bool = True) -> list[MicroBatch]:
    """Packs answers that are all there: the choice is among all of them, whatever their order."""
    batcher = MicroBatcher(shape, pack=pack)
    for answer in answers:
        batcher.put(answer)
    return batcher.flush()


def _pack_rows(filled: Sequence[Sequence[Answer]], shape: Shape) -> MicroBatch:
    arrays = empty_rows(shape.rows, shape.row_len)
    placements: list[Placement] = []
    for row, answers in enumerate(filled):
        start = 0
        for segment, answer in enumerate(answers, start=1):
            placement = Placement(answer, row, start)
            _write(arrays, placement, segment)
            placements.append(placement)
            start += len(answer)
    return MicroBatch(arrays, tuple(placements))


def _write(arrays: HostRows, placement: Placement, segment: int) -> None:
    answer, response = placement.answer, placement.response
    whole = placement.row, slice(placement.start, placement.start + len(answer))
    arrays.tokens[whole] = np.concatenate([answer.prompt_ids, answer.response_ids])
    arrays.positions[whole] = np.arange(len(answer))
    arrays.segment_ids[whole] = segment
    arrays.response_mask[response] = answer.trained
    arrays.behaviour_logprobs[response] = answer.logprobs
    arrays.rewards[placement.row, response[1].stop - 1] = answer.reward
    arrays.advantages[response] = answer.advantage
