"""A prompt's own past lengths as a predictor, and the measured choice between it and the ranker. NumPy only.

The policy changes, so what was observed loses weight with every iteration. How far the history is to be trusted beside
the ranker is measured on predictions that were made before the answers were there, apart for prompts with few and with
many observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64, Int64

EDGES: Final = (1.5, 3.0, 6.0, 12.0, 24.0)
"""Between the classes of prompts: observations, after their decay."""

_PENDING_ITERATIONS: Final = 16
_EVICTED: Final = 0.1  # share of the prompts that makes room when the history is full


@dataclass(frozen=True, eq=False)
class Recalled:
    """What the history says of some prompts.

    Attributes:
        tokens: Expected tokens of an answer; that of an unknown prompt is the mean over all.
        weight: Observations behind it after their decay; 0: the prompt is unknown.
    """

    tokens: Float32[np.ndarray, " prompts"]
    weight: Float32[np.ndarray, " prompts"]


class LengthHistory:
    """Mean lengths of each prompt's answers, older ones with less weight.

    Invariant: of a prompt with answers of lengths L in iterations t it holds `weight = sum(decay^(now - t))` and
    `total = sum(decay^(now - t) * L)`, whatever happened in between. It takes 20 bytes a prompt beside its id and the
    entry of that in a dictionary (about 150 bytes together), and forgets those not seen for longest when it is full.

    Args:
        decay: What is left of an observation's weight after an iteration.
        prior: The mean over all prompts counts as so many observations of each (of the logarithms).
        capacity: Prompts that it holds at most.
    """

    def __init__(self, *, decay: float = 0.9, prior: float = 1.0, capacity: int = 1_000_000) -> None:
        if not 0.0 < decay <= 1.0 or not prior >= 0.0 or capacity < 1:
            raise ValueError(
                f"decay = {decay}, prior = {prior}, capacity = {capacity}: 0 < decay <= 1, 0 <= prior, 1 <= capacity"
            )
        self._decay = decay
        self._prior = prior
        self._capacity = capacity
        self._rows: dict[str, int] = {}
        self._sums = np.zeros((64, 2))  # weight and total, as of `seen`
        self._seen = np.zeros(64, np.int32)
        self._all = np.zeros(2)  # weight and total of all prompts, as of `_newest`
        self._newest = 0

    def __len__(self) -> int:
        return len(self._rows)

    def observe(self, prompt_id: str, lengths: Sequence[int], iteration: int) -> None:
        """Takes in answers.

        Args:
            prompt_id: Whose.
            lengths: Tokens of each; of one that was cut, the limit.
            iteration: When; may be older than what was taken in before.
        """
        row = self._rows.get(prompt_id)
        if row is None:
            row = self._new_row(prompt_id, iteration)
        seen = max(int(self._seen[row]), iteration)
        added = np.array([len(lengths), sum(lengths)], np.float64)
        fresh = added * self._decay ** (seen - iteration)
        self._sums[row] = self._sums[row] * self._decay ** (seen - int(self._seen[row])) + fresh
        self._seen[row] = seen
        newest = max(self._newest, iteration)
        self._all = self._all * self._decay ** (newest - self._newest) + added * self._decay ** (
            newest - iteration
        )
        self._newest = newest

    def recall(self, prompt_ids: Sequence[str], iteration: int) -> Recalled:
        """Predicts lengths from what was observed of the same prompts.

        The logarithm of a prompt's weighted mean, drawn towards that of all prompts as if that were `prior` more
        observations.

        Args:
            prompt_ids: The prompts.
            iteration: Now; older observations count less.
        """
        rows = np.array([self._rows.get(prompt_id, -1) for prompt_id in prompt_ids], np.int64)
        sums = self._sums[rows] * (rows >= 0)[:, None]
        age = np.maximum(iteration - self._seen[rows], 0)
        weight = sums[:, 0] * self._decay**age
        overall = np.log(max(self._all[1], 1.0) / self._all[0]) if self._all[0] else 0.0
        own = np.log(
            np.maximum(sums[:, 1], 1.0) / np.maximum(sums[:, 0], 1e-30),
            where=rows >= 0,
            out=np.zeros(len(rows)),
        )
        share = weight / np.maximum(weight + self._prior, 1e-30)
        tokens = np.exp(share * own + (1 - share) * overall)
        return Recalled(tokens.astype(np.float32), weight.astype(np.float32))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All that it holds, for a checkpoint: 20 bytes a prompt, and its id in UTF-8 with 8 bytes more."""
        used = list(self._rows.values())
        return {
            "sums": self._sums[used],
            "seen": self._seen[used],
            "all": np.append(self._all, self._newest),
            **_text_to_arrays(list(self._rows)),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the place of what it holds.

        Args:
            arrays: From `to_arrays`.

        Raises:
            ValueError: They do not belong together.
        """
        ids = _text_from_arrays(arrays)
        sums, seen, everything = (np.array(arrays[name]) for name in ("sums", "seen", "all"))
        if sums.shape != (len(ids), 2) or seen.shape != (len(ids),) or everything.shape != (3,):
            raise ValueError(
                f"a history of {len(ids)} prompts with sums {sums.shape} and iterations {seen.shape}"
            )
        self._rows = {prompt_id: row for row, prompt_id in enumerate(ids)}
        # One row to spare, so that a row to point at is there for prompts that are unknown.
        self._sums = np.append(sums, np.zeros((1, 2)), axis=0)
        self._seen = np.append(seen, 0).astype(np.int32)
        self._all, self._newest = everything[:2].astype(np.float64), int(everything[2])

    def _new_row(self, prompt_id: str, iteration: int) -> int:
        if len(self._rows) >= self._capacity:
            self._forget_oldest()
        row = len(self._rows)
        if row >= len(self._seen):
            room = max(64, 2 * row)
            self._sums, self._seen = np.resize(self._sums, (room, 2)), np.resize(self._seen, room)
        self._rows[prompt_id] = row
        self._sums[row], self._seen[row] = 0.0, iteration
        return row

    def _forget_oldest(self) -> None:
        ids = list(self._rows)
        seen = self._seen[: len(ids)]
        kept = np.sort(np.argsort(seen, kind="stable")[max(1, int(_EVICTED * len(ids))) :])
        self._sums, self._seen = self._sums[kept], seen[kept]
        self._rows = {ids[old]: new for new, old in enumerate(kept.tolist())}


class Choice:
    """How far the history is followed beside the ranker, by the observations a prompt has.

    The prediction is `log r + w (log h - log r)` of the ranker's r and the history's h. For each class of prompts w is
    the one of least squared error of the log length over what was learned, from 0 to 1: a history that adds nothing to
    the ranker gets 0, a ranker that adds nothing to the history leaves it 1, and where they err apart both are used.
    A few pseudo-observations stand for the rule "observations / (observations + 4)" until there are real ones.

    Invariant: over what was learned, the squared error of the choice is at most that of either predictor alone, class
    by class, but for what the pseudo-observations do.

    Args:
        forget: What is left of an earlier iteration's measurements.
        pseudo: Weight of the rule, in prompts.
    """

    def __init__(self, *, forget: float = 0.95, pseudo: float = 4.0) -> None:
        if not 0.0 < forget <= 1.0 or not pseudo >= 0.0:
            raise ValueError(f"forget = {forget}, pseudo = {pseudo}: 0 < forget <= 1 and 0 <= pseudo")
        self._forget = forget
        self._pseudo = pseudo
        # By class: prompts, and the sums of x^2, xy and y^2 with x = log h - log r and y = log(observed) - log r.
        self._sums = np.zeros((len(EDGES) + 1, 4))

    def learn(self, recalled: Recalled, ranker: np.ndarray, observed: np.ndarray) -> None:
        """Measures both on prompts whose answers have come.

        Args:
            recalled: What the history said before.
            ranker: What the ranker said before, tokens.
            observed: Mean tokens of each prompt's answers.
        """
        known = recalled.weight > 0
        x, y = (np.log(tokens[known]) - np.log(ranker[known]) for tokens in (recalled.tokens, observed))
        terms = np.stack([np.ones_like(x), x * x, x * y, y * y], axis=1).astype(np.float64)
        np.add.at(self._sums, _classes(recalled.weight[known]), terms)

    def age(self, iterations: int) -> None:
        """Lets so many iterations pass."""
        self._sums *= self._forget**iterations

    def combine(self, recalled: Recalled, ranker: np.ndarray) -> Float32[np.ndarray, " prompts"]:
        """Expected tokens from both; of prompts without a history the ranker's own.

        Args:
            recalled: What the history says.
            ranker: What the ranker says, tokens.
        """
        share = np.where(recalled.weight > 0, self.shares()[_classes(recalled.weight)], 0.0)
        base = np.log(ranker)
        return np.exp(base + share * (np.log(recalled.tokens) - base)).astype(np.float32)

    def shares(self) -> Float64[np.ndarray, " classes"]:
        """The weight w of the history in each class (`EDGES` lie between them)."""
        count, xx, xy, _ = self._sums.T
        spread = xx.sum() / max(count.sum(), 1e-30) if count.any() else 1.0
        typical = np.array([1.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 2 * EDGES[-1]])
        rule = typical / (typical + 4.0)
        extra = self._pseudo * max(spread, 1e-12)
        return np.clip((xy + extra * rule) / np.maximum(xx + extra, 1e-30), 0.0, 1.0)

    def errors(self) -> Float64[np.ndarray, "classes 3"]:
        """Prompts measured, and the root mean squared error of the log length of history and ranker, by class."""
        count, xx, xy, yy = self._sums.T
        shown = np.maximum(count, 1e-30)
        history = np.sqrt(np.maximum(yy - 2 * xy + xx, 0.0) / shown)
        return np.stack([count, history, np.sqrt(yy / shown)], axis=1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What `restore` takes."""
        return {"choice": self._sums.copy()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the place of what was learned.

        Raises:
            ValueError: It is of other classes.
        """
        sums = np.array(arrays["choice"], np.float64)
        if sums.shape != self._sums.shape:
            raise ValueError(f"a choice of shape {sums.shape} instead of {self._sums.shape}")
        self._sums = sums


class LengthPredictor:
    """History and ranker together, in the order of a run: `predict` an iteration, then `observe` its groups.

    Only what `predict` said before is measured when a group is observed; a group without a prediction is taken into
    the history alone. Predictions that nobody observed are dropped after 16 iterations.

    Args:
        history: Of the run's prompts.
        choice: Between it and the ranker.
    """

    def __init__(self, history: LengthHistory | None = None, choice: Choice | None = None) -> None:
        self.history = history if history is not None else LengthHistory()
        self.choice = choice if choice is not None else Choice()
        self._pending: dict[int, dict[str, tuple[float, float, float]]] = {}
        self._newest = 0

    def predict(
        self, prompt_ids: Sequence[str], ranker: Float32[np.ndarray, " prompts"] | None, iteration: int
    ) -> Float32[np.ndarray, " prompts"]:
        """Expected tokens of an answer to each prompt.

        Args:
            prompt_ids: The prompts of an iteration, or some of them.
            ranker: What the ranker expects, tokens; None: there is no ranker, the history is all.
            iteration: Its number.
        """
        recalled = self.history.recall(prompt_ids, iteration)
        self._advance(iteration)
        if ranker is None:
            return recalled.tokens
        said = zip(recalled.tokens.tolist(), recalled.weight.tolist(), ranker.tolist(), strict=True)
        self._pending.setdefault(iteration, {}).update(zip(prompt_ids, said, strict=True))
        return self.choice.combine(recalled, ranker)

    def observe(self, prompt_id: str, lengths: Sequence[int], iteration: int) -> None:
        """Takes in the answers of one group; call it once for a prompt and iteration, with all of them.

        Args:
            prompt_id: The prompt.
            lengths: Tokens of each answer.
            iteration: That `predict` was asked for.
        """
        said = self._pending.get(iteration, {}).pop(prompt_id, None)
        if said is not None:
            tokens, weight, ranker = (np.array([value], np.float32) for value in said)
            self.choice.learn(Recalled(tokens, weight), ranker, np.array([sum(lengths) / len(lengths)]))
        self.history.observe(prompt_id, lengths, iteration)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """History, choice, and what was predicted and not yet observed, for a checkpoint."""
        said = [
            (iteration, *values) for iteration, group in self._pending.items() for values in group.values()
        ]
        ids = [prompt_id for group in self._pending.values() for prompt_id in group]
        pending = {f"pending_{name}": array for name, array in _text_to_arrays(ids).items()}
        pending["pending_said"] = np.array(said, np.float64).reshape(len(said), 4)
        newest = {"newest": np.array(self._newest, np.int64)}
        return self.history.to_arrays() | self.choice.to_arrays() | pending | newest

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on where `to_arrays` was called.

        Raises:
            ValueError: The arrays do not belong together.
        """
        self.history.restore(arrays)
        self.choice.restore(arrays)
        self._newest = int(arrays["newest"])
        ids = _text_from_arrays({name: arrays[f"pending_{name}"] for name in ("text", "ends")})
        self._pending = {}
        for prompt_id, said in zip(ids, arrays["pending_said"].tolist(), strict=True):
            self._pending.setdefault(int(said[0]), {})[prompt_id] = (said[1], said[2], said[3])

    def _advance(self, iteration: int) -> None:
        if iteration > self._newest:
            self.choice.age(iteration - self._newest)
            self._newest = iteration
            oldest = iteration - _PENDING_ITERATIONS
            self._pending = {number: group for number, group in self._pending.items() if number > oldest}


def _classes(weight: np.ndarray) -> Int64[np.ndarray, " prompts"]:
    return np.searchsorted(EDGES, weight, side="right").astype(np.int64)


def _text_to_arrays(texts: Sequence[str]) -> dict[str, np.ndarray]:
    parts = [text.encode() for text in texts]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return {"text": np.frombuffer(b"".join(parts), np.uint8), "ends": ends}


def _text_from_arrays(arrays: Mapping[str, Any]) -> list[str]:
    text, ends = np.asarray(arrays["text"], np.uint8).tobytes(), np.asarray(arrays["ends"], np.int64)
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    if len(text) != (ends[-1] if len(ends) else 0) or (starts > ends).any():
        raise ValueError(f"{len(text)} bytes of ids do not end where {len(ends)} ids do")
    return [text[start:end].decode() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
