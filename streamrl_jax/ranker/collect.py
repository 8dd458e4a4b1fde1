"""Collects observed lengths from instances: answers as in training, of which the lengths alone are kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from streamrl_jax.control.jobs import Job
from streamrl_jax.errors import UserError
from streamrl_jax.files import check_replaceable, write_atomically
from streamrl_jax.ranker.lengths import ObservedLengths, as_line, write_lengths
from streamrl_jax.types import FinishReason, Prompt, Sample, Sampling

JOB_ID: Final = "lengths/0"
_PARTIAL: Final = ".partial"


def collection_job(prompts: Sequence[Prompt], n: int, sampling: Sampling) -> Job:
    """The job that asks for all answers of a collection.

    Args:
        prompts: Each once.
        n: Answers to each.
        sampling: That of training; another seed makes it an independent collection.
    """
    return Job(JOB_ID, prompts, n, sampling, iteration=0, min_version=0)


def gathered(samples: Iterable[Sample], n: int) -> Iterator[ObservedLengths]:
    """Joins answers to rows.

    Args:
        samples: Of a `collection_job`, in any order; nothing but their lengths is kept.
        n: Answers to each prompt.

    Yields:
        A prompt's row when its last answer has come; its lengths are in the order of the group, whatever the order of
        arrival. Its text is empty.
    """
    open_groups: defaultdict[str, dict[int, tuple[int, bool]]] = defaultdict(dict)
    for sample in samples:
        answer, prompt = sample.generation, sample.prompt
        group = open_groups[prompt.prompt_id]
        cut = answer.finish_reason is FinishReason.LENGTH
        group[sample.group_index] = (len(answer.token_ids), cut)
        if len(group) == n:
            lengths, cuts = zip(*(group[index] for index in range(n)), strict=True)
            yield ObservedLengths(prompt.prompt_id, prompt.token_ids, lengths, cuts)
            del open_groups[prompt.prompt_id]


def check_place(path: Path) -> None:
    """Says now, and not after the collection, that its file cannot be written.

    Raises:
        UserError: It exists already, or its folder cannot be made.
    """
    with writing(path, "give another --out"):
        if path.exists():
            raise UserError(f"{path} exists already; give another --out, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(path, "--out")


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Makes a system's error of a file that is written one for the user.

    Args:
        path: The file.
        remedy: What would do.

    Raises:
        UserError: The body raised an `OSError`; names the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def partial_file(path: Path) -> Path:
    """Where the rows of a collection lie that is not complete."""
    return path.with_name(path.name + _PARTIAL)


@contextmanager
def growing(
    path: Path, say: Callable[[str], None] = lambda text: None
) -> Iterator[Callable[[ObservedLengths], None]]:
    """Writes rows as they come beside the file that they are meant for, and puts that one in their place at the end.

    Invariant: the file is there only when the body has ended well. What a broken collection has got stays in
    ``NAME.partial``, which the first row of the next one replaces.

    Args:
        path: The file; its rows are sorted by the prompts' ids, numbers by their size.
        say: Is told of what is left where the body does not end well.

    Yields:
        Takes a row.

    Raises:
        UserError: A file cannot be written; names it.
    """
    rows: list[ObservedLengths] = []
    partial = partial_file(path)

    def take(row: ObservedLengths) -> None:
        line = as_line(row).encode()
        with writing(partial, "free some space, or give another --out"):
            if not rows:
                write_atomically(partial, line)
            else:
                with partial.open("ab", buffering=0) as stream:
                    whole = stream.tell()
                    try:
                        stream.write(line)
                    except OSError:
                        stream.truncate(whole)  # a full disk takes half a row
                        raise
        rows.append(row)

    try:
        yield take
    except BaseException:
        if rows:
            say(
                f"{partial}: the {len(rows):,} prompts whose answers were complete, in the order in which they were; "
                f"it leans to prompts with short answers and is no set to fit a ranker to"
            )
        raise
    with writing(path, f"all rows are in {partial}: free some space, and rename it"):
        write_lengths(path, sorted(rows, key=lambda row: (len(row.prompt_id), row.prompt_id)))
    if rows:
        partial.unlink()


@dataclass(frozen=True)
class Spread:
    """How lengths are distributed.

    Attributes:
        prompts: How many.
        answers: To all of them.
        tokens: In all answers.
        quantiles: Tokens of an answer by share: 0.5, 0.9, 0.99.
        longest: Tokens of the longest answer.
        cut: Share of the answers that the limit ended.
        between: Share of the variance that the prompt determines, the rest being chance: 1 less the mean variance
            within a prompt over the variance of all answers. NaN where no prompt has two answers, or all are equal.
    """

    prompts: int
    answers: int
    tokens: int
    quantiles: dict[float, float]
    longest: int
    cut: float
    between: float

    def rows(self) -> dict[str, str]:
        """For a table."""
        p50, p90, p99 = (self.quantiles[share] for share in (0.5, 0.9, 0.99))
        return {
            "prompts": f"{self.prompts:,}",
            "answers": f"{self.answers:,}",
            "P50, P90, P99": f"{p50:.0f}, {p90:.0f}, {p99:.0f} tokens",
            "longest": f"{self.longest:,} tokens",
            "cut": f"{self.cut:.2%}",
            "variance between prompts": f"{self.between:.0%}",
        }


def spread_of(rows: Sequence[ObservedLengths]) -> Spread:
    """Describes observed lengths.

    Args:
        rows: At least one.
    """
    lengths = [np.asarray(row.lengths, np.float64) for row in rows]
    together = np.concatenate(lengths)
    cut = np.concatenate([np.asarray(row.cut) for row in rows])
    return Spread(
        prompts=len(rows),
        answers=len(together),
        tokens=int(together.sum()),
        quantiles={share: float(np.quantile(together, share)) for share in (0.5, 0.9, 0.99)},
        longest=int(together.max()),
        cut=float(cut.mean()),
        between=_between(lengths, together),
    )


def _between(lengths: Sequence[Float64[np.ndarray, " n"]], together: Float64[np.ndarray, " all"]) -> float:
    """Share of the variance between prompts; each prompt's variance counts by its degrees of freedom."""
    freedom = len(together) - len(lengths)
    whole = float(together.var())
    if not freedom or not whole:
        return float("nan")
    within = sum(float(((one - one.mean()) ** 2).sum()) for one in lengths) / freedom
    return 1.0 - within / whole
