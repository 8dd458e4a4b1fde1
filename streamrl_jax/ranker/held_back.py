"""Which prompts a fit holds back, the same ones in every fit of a run whatever else is there, and which it has met."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jaxtyping import UInt64

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.lengths import ObservedLengths

Digests = UInt64[np.ndarray, " prompts"]

FEWEST_PROMPTS: Final = 16

_HASHES: Final = 2**64


def split(
    prompts: Sequence[ObservedLengths], share: float, seed: int, where: str = ""
) -> tuple[list[ObservedLengths], list[ObservedLengths]]:
    """Prompts to train on, and those that are held back.

    Invariant: a prompt is held back where a hash of the seed and its tokens is below `share` of all hashes. So whether
    it is does not depend on the other prompts, and a ranker that is trained on, from one window of answers after the
    other, is never measured on prompts that it was trained on before. Of few prompts it may be otherwise: 4 are held
    back at least, and 8 trained on at least, those with the lowest and the highest hashes.

    Args:
        prompts: Each once.
        share: Of all prompts that there could be, those held back.
        seed: Which.
        where: What the prompts are of, for an error: files, as a rule.

    Raises:
        UserError: There are too few prompts, or all answers are of one length.
    """
    told = f"{where}: " if where else ""
    if len(prompts) < FEWEST_PROMPTS:
        raise UserError(
            f"{told}there are lengths of {len(prompts)} prompts, a ranker needs {FEWEST_PROMPTS} or more; collect "
            "lengths of more prompts"
        )
    if len({length for row in prompts for length in row.lengths}) == 1:
        raise UserError(
            f"{told}all answers have {prompts[0].lengths[0]} tokens, so there is nothing to rank; where the limit cut "
            "them all, collect lengths under a higher one"
        )
    placed = sorted(
        ((_hash(row, seed), index) for index, row in enumerate(prompts)), key=lambda entry: entry[0]
    )
    below = sum(place < share * _HASHES for place, _ in placed)
    count = min(max(below, FEWEST_PROMPTS // 4), len(prompts) - FEWEST_PROMPTS // 2)
    ordered = [prompts[index] for _, index in placed]
    return ordered[count:], ordered[:count]


def digests(prompts: Iterable[ObservedLengths]) -> Digests:
    """What a ranker keeps of the prompts that it has met, to know them again: 8 bytes each, sorted, each once."""
    return np.unique(np.fromiter((_hash(row, "met") for row in prompts), np.uint64))


def _hash(row: ObservedLengths, seed: int | str) -> int:
    tokens = np.asarray(row.token_ids, np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(f"{seed}/".encode() + tokens, digest_size=8).digest(), "little")
