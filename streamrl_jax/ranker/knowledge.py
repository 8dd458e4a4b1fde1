"""What a run knows of its answers' lengths, and its form on disk. NumPy only; the ranker is handed in and out.

A directory of `state.write_state` holds

    knowledge.json   format, which ranker, which prompts, predictions of the iterations in flight
    predictor.npz    the prompts' histories, and how far they are to be trusted beside the ranker
    lengths.jsonl    the newest answers, from which the ranker learns
    ranker/          the ranker, where the run has trained it
"""

from __future__ import annotations

import json
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float32

from streamrl_jax.errors import UserError
from streamrl_jax.metrics import Missing, Value
from streamrl_jax.ranker.history import LengthPredictor
from streamrl_jax.ranker.lengths import ObservedLengths, read_lengths, write_lengths
from streamrl_jax.ranker.metrics import kendall_tau, recall_at
from streamrl_jax.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from streamrl_jax.ranker.model import LengthRanker

FORMAT: Final = 1
TAIL: Final = 1.5
"""Answers are of about the same length while the 95th percentile is less than so many times the median: there is no
tail to be dispatched, and nothing is predicted or trained."""

_FEWEST_ANSWERS: Final = 16  # before the shape of the lengths is judged
_TAU_PROMPTS: Final = 1024  # Kendall's tau is quadratic; of more prompts it looks at so many
_RECORD, _ARRAYS, _LENGTHS, _RANKER = "knowledge.json", "predictor.npz", "lengths.jsonl", "ranker"


@dataclass(frozen=True, eq=False)
class Predicted:
    """What was said of an iteration before it began.

    Attributes:
        prompt_ids: Of its prompts, in their order.
        tokens: Expected tokens of an answer to each; None: nothing was said.
        with_history: Share of the prompts that had a history.
        why: Where nothing was said, the reason.
    """

    prompt_ids: tuple[str, ...]
    tokens: Float32[np.ndarray, " prompts"] | None
    with_history: float = 0.0
    why: str = ""


@dataclass(eq=False)
class Knowledge:
    """Histories, newest answers and ranker of a run.

    Attributes:
        predictor: The histories, and the choice between them and the ranker.
        recent: The newest answers, a row a group, oldest first; bounded.
        ranker: None: there is none yet.
        trained: Whether this run has trained it, so that it is found nowhere else.
        due: On disk: a refresh was due or begun, and not finished.
        prompts: Digest of the prompt set whose histories they are (`PromptSet.digest`); empty: it is not known.
    """

    recent: deque[ObservedLengths]
    predictor: LengthPredictor = field(default_factory=LengthPredictor)
    ranker: LengthRanker | None = None
    trained: bool = False
    due: bool = False
    prompts: str = ""

    def of_other_prompts(self, prompts: str) -> Knowledge:
        """What is left of it for another prompt set: all but what is known of single prompts by their numbers.

        Args:
            prompts: Digest of that set.
        """
        kept, predictor = self.predictor.to_arrays(), LengthPredictor()
        predictor.restore(predictor.to_arrays() | {name: kept[name] for name in ("choice", "newest")})
        return replace(self, predictor=predictor, prompts=prompts)

    def take_in(self, rows: Iterable[ObservedLengths], iteration: int) -> None:
        """Learns the answers of an iteration; each prompt once."""
        for row in rows:
            self.predictor.observe(row.prompt_id, row.lengths, iteration)
            self.recent.append(row)

    @property
    def has_tail(self) -> bool:
        """Whether the newest answers are long-tailed; true where too few are known."""
        found = [length for row in self.recent for length in row.lengths]
        if len(found) < _FEWEST_ANSWERS:
            return True
        median, high = np.quantile(found, [0.5, 0.95])
        return bool(high >= TAIL * median)


@dataclass(frozen=True, eq=False)
class Restored:
    """What `read_knowledge` found.

    Attributes:
        known: Without its ranker.
        said: What was predicted of the iterations in flight.
        ranker: Where the run's own ranker lies; None: it had trained none, or another ``ranker.path`` was given since.
    """

    known: Knowledge
    said: Mapping[int, Predicted]
    ranker: Path | None


def base_id(prompt_id: str) -> str:
    """A prompt's id in the set; where an iteration draws it a second time, it is called "17.1"."""
    return prompt_id.partition(".")[0]


def grouped(samples: Iterable[Sample]) -> list[ObservedLengths]:
    """The answers of an iteration, prompt by prompt; the same whatever the order in which they came."""
    found: dict[str, list[tuple[str, int, int, bool]]] = {}
    prompts: dict[str, Prompt] = {}
    for sample in samples:
        key, answer = base_id(sample.prompt.prompt_id), sample.generation
        prompts[key] = sample.prompt
        entry = len(answer.token_ids), answer.finish_reason is FinishReason.LENGTH
        found.setdefault(key, []).append((sample.prompt.prompt_id, sample.group_index, *entry))
    return [
        ObservedLengths(
            prompt_id=key,
            token_ids=prompts[key].token_ids,
            lengths=tuple(length for *_, length, _ in sorted(found[key])),
            cut=tuple(cut for *_, cut in sorted(found[key])),
        )
        for key in sorted(found)
    ]


def measures(said: Predicted | None, rows: Sequence[ObservedLengths]) -> dict[str, Value]:
    """How well an iteration was predicted, of what was said before it began.

    Args:
        said: That; None: the iteration began before anything could be said.
        rows: Its answers; prompts that nothing was said of (replacements) do not count.

    Returns:
        The metrics ``ranker/*``.
    """
    known = {row.prompt_id: row.mean for row in rows}
    ids = said.prompt_ids if said is not None else tuple(known)
    tokens = said.tokens if said is not None else None
    found: dict[str, Value] = {
        "ranker/unpredicted": float(len(ids)) if tokens is None else 0.0,
        "ranker/with_history": said.with_history if said is not None else 0.0,
    }
    names = ("ranker/recall_20", "ranker/kendall_tau", "ranker/log_error")
    if said is None or tokens is None:
        why = said.why if said is not None else "it began before anything could be said"
        return found | dict.fromkeys(names, Missing(why))
    places = [place for place, prompt_id in enumerate(ids) if base_id(prompt_id) in known]
    if not places:
        return found | dict.fromkeys(names, Missing("none of its prompts was answered"))
    observed = np.array([known[base_id(ids[place])] for place in places], np.float64)
    predicted = tokens[places].astype(np.float64)
    some = slice(None, None, -(-len(places) // _TAU_PROMPTS))
    return found | {
        "ranker/recall_20": recall_at(0.2, predicted, observed),
        "ranker/kendall_tau": kendall_tau(predicted[some], observed[some]),
        "ranker/log_error": float(np.abs(np.log(predicted / observed)).mean()),
    }


def write_knowledge(
    known: Knowledge,
    arrays: Mapping[str, np.ndarray],
    said: Mapping[int, Predicted],
    path: str,
    directory: Path,
) -> None:
    """Writes all that is known.

    Args:
        known: It; its predictor may be in use.
        arrays: Of its predictor.
        said: Predictions of the iterations that are not consumed yet.
        path: ``ranker.path`` of the run.
        directory: Empty.
    """
    record = {
        "format": FORMAT,
        "path": path,
        "trained": known.trained,
        "due": known.due,
        "prompts": known.prompts,
        "said": {str(iteration): _as_json(entry) for iteration, entry in sorted(said.items())},
    }
    (directory / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)
    if known.recent:
        write_lengths(directory / _LENGTHS, known.recent)
    if known.trained and known.ranker is not None:
        known.ranker.save(directory / _RANKER)


def read_knowledge(directory: Path, window: int, path: str) -> Restored:
    """Reads it back.

    Args:
        directory: From `write_knowledge`, whole.
        window: Rows of the newest answers that are kept.
        path: ``ranker.path`` of this run.

    Raises:
        UserError: A file is not what was written.
    """
    try:
        record: dict[str, Any] = json.loads((directory / _RECORD).read_bytes())
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} instead of {FORMAT}")
        # Earlier versions did not write the prompts' digest.
        known = Knowledge(deque(maxlen=window), due=record["due"], prompts=record.get("prompts", ""))
        with np.load(directory / _ARRAYS, allow_pickle=False) as arrays:
            known.predictor.restore(arrays)
        if (directory / _LENGTHS).exists():
            known.recent.extend(read_lengths(directory / _LENGTHS))
        said = {int(iteration): _from_json(entry) for iteration, entry in record["said"].items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{directory} cannot be read ({type(error).__name__}: {error})") from error
    kept = record["trained"] and record["path"] == path
    return Restored(known, said, directory / _RANKER if kept else None)


def _as_json(entry: Predicted) -> dict[str, Any]:
    tokens = None if entry.tokens is None else [float(value) for value in entry.tokens]
    return {"ids": entry.prompt_ids, "tokens": tokens, "with_history": entry.with_history, "why": entry.why}


def _from_json(entry: Mapping[str, Any]) -> Predicted:
    tokens = None if entry["tokens"] is None else np.array(entry["tokens"], np.float32)
    return Predicted(tuple(entry["ids"]), tokens, entry["with_history"], entry["why"])
