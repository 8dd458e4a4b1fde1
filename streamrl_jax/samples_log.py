"""Every consumed sample, one Parquet file an iteration: exact enough to replay the run (DESIGN rule 7).

`samples/iteration_000012.parquet` holds the samples of iteration 12 in the order in which they were consumed.
Token ids, log-probs, versions and rewards come back bit for bit; the prompt's columns are kept as JSON.
Beside what is needed for a replay stand the texts and the staleness, for reading.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl_jax.errors import UserError
from streamrl_jax.files import naming, sync_directory
from streamrl_jax.types import (
    Fence,
    FinishReason,
    Generation,
    Prompt,
    Sample,
    Timings,
    TokenIds,
    VersionRun,
    expand_runs,
)

SUPERSEDED: Final = "superseded"

_FILE_NAME: Final = re.compile(r"iteration_(\d{6,})\.parquet")
_VERSION_RUNS: Final = pa.list_(pa.struct([("version", pa.int32()), ("length", pa.int32())]))
_SCHEMA: Final = pa.schema(
    [
        ("sample_id", pa.string()),
        ("iteration", pa.int32()),
        ("prompt_id", pa.string()),
        ("group_index", pa.int32()),
        ("attempt", pa.int32()),
        ("instance", pa.string()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("reward_extras", pa.string()),
        ("staleness_mean", pa.float64()),
        ("staleness_max", pa.int32()),
        ("prompt_text", pa.string()),
        ("answer_text", pa.string()),
        ("columns", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", _VERSION_RUNS),
        ("queued_s", pa.float64()),
        ("prefill_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("arrived_s", pa.float64()),
        ("rewarded_s", pa.float64()),
    ]
)


class SampleLog:
    """Writes the record of a run.

    Args:
        folder: The run's `samples/`.
        fence: The run and its incarnation; kept in each file.
        decode: Token ids to text, for the readable columns.
    """

    def __init__(self, folder: Path, fence: Fence, decode: Callable[[TokenIds], str]) -> None:
        self._folder = folder
        self._fence = fence
        self._decode = decode

    def write(self, iteration: int, samples: Sequence[Sample], trained_version: int) -> Path:
        """Records the samples of one iteration; the file is whole or not there.

        Args:
            iteration: Which.
            samples: In the order of their consumption.
            trained_version: The trainer's version when it consumed them, for the staleness.

        Returns:
            The file.
        """
        rows = [self._row(sample, trained_version) for sample in samples]
        fence = {"run_id": self._fence.run_id, "incarnation": str(self._fence.incarnation)}
        metadata = {**fence, "trained_version": str(trained_version)}
        table = pa.Table.from_pylist(rows, schema=_SCHEMA.with_metadata(metadata))
        path = iteration_file(self._folder, iteration)
        draft = path.with_name(f".{path.name}.tmp")
        with naming(path), draft.open("wb") as stream:
            pq.write_table(table, stream, compression="zstd")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
        sync_directory(self._folder)
        return path

    def _row(self, sample: Sample, trained_version: int) -> dict[str, Any]:
        answer = sample.generation
        staleness = trained_version - expand_runs(answer.versions)
        return {
            "sample_id": sample.sample_id,
            "iteration": sample.iteration,
            "prompt_id": sample.prompt.prompt_id,
            "group_index": sample.group_index,
            "attempt": answer.attempt,
            "instance": answer.instance,
            "finish_reason": answer.finish_reason.value,
            "reward": sample.reward,
            "reward_extras": json.dumps(dict(sample.reward_extras)),
            "staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
            "staleness_max": int(staleness.max()) if staleness.size else 0,
            "prompt_text": self._decode(sample.prompt.token_ids),
            "answer_text": self._decode(answer.token_ids),
            "columns": json.dumps(dict(sample.prompt.columns), default=_plain, ensure_ascii=False),
            "prompt_ids": sample.prompt.token_ids,
            "token_ids": answer.token_ids,
            "logprobs": answer.logprobs,
            "versions": [{"version": run.version, "length": run.length} for run in answer.versions],
            "queued_s": answer.timings.queued_s,
            "prefill_s": answer.timings.prefill_s,
            "decode_s": answer.timings.decode_s,
            "arrived_s": sample.arrived_s,
            "rewarded_s": sample.rewarded_s,
        }


def iteration_file(folder: Path, iteration: int) -> Path:
    """Where an iteration's samples are kept."""
    return folder / f"iteration_{iteration:06d}.parquet"


def recorded_iterations(folder: Path) -> list[int]:
    """Which iterations a run has recorded.

    Args:
        folder: The run's `samples/`.

    Returns:
        Their numbers, ascending.
    """
    matches = [_FILE_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def supersede(folder: Path, frontier: int, incarnation: int) -> list[int]:
    """Sets aside what an earlier life recorded beyond the checkpoint that a resume starts from.

    Those iterations are done again with newly sampled answers; the old files move to
    `superseded/<incarnation>/`, so that `samples/` holds one history.

    Args:
        folder: The run's `samples/`.
        frontier: The first iteration that is done again.
        incarnation: The new one.

    Returns:
        The iterations set aside.
    """
    later = [iteration for iteration in recorded_iterations(folder) if iteration >= frontier]
    if later:
        aside = folder / SUPERSEDED / str(incarnation)
        aside.mkdir(parents=True, exist_ok=True)
        for iteration in later:
            iteration_file(folder, iteration).replace(iteration_file(aside, iteration))
    return later


def read_samples(run_dir: Path, iteration: int) -> list[Sample]:
    """Reads back what an iteration consumed.

    Args:
        run_dir: The run directory.
        iteration: Which.

    Returns:
        The samples in the order of their consumption; ids, log-probs, versions and rewards bit for bit.

    Raises:
        UserError: The iteration is not recorded, or its file is damaged.
    """
    table = _read_table(run_dir, iteration)
    arrays = {name: _arrays(table, name) for name in ("prompt_ids", "token_ids", "logprobs")}
    rows = table.drop_columns(list(arrays)).to_pylist()
    return [
        _sample(row, arrays["prompt_ids"][index], arrays["token_ids"][index], arrays["logprobs"][index])
        for index, row in enumerate(rows)
    ]


def read_columns(run_dir: Path, iteration: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Reads some columns of what an iteration consumed, without the cost of the others.

    Args:
        run_dir: The run directory.
        iteration: Which.
        columns: Their names, as in the file.

    Returns:
        A row a sample in the order of their consumption; lists are Python's.

    Raises:
        UserError: As `read_samples`.
    """
    return _read_table(run_dir, iteration, columns).to_pylist()


def _read_table(run_dir: Path, iteration: int, columns: Sequence[str] | None = None) -> pa.Table:
    folder = run_dir / "samples"
    path = iteration_file(folder, iteration)
    if not path.is_file():
        known = recorded_iterations(folder) if folder.is_dir() else []
        span = f"{known[0]} to {known[-1]} are" if known else "none is"
        raise UserError(f"{path} does not exist: iteration {iteration} was not recorded ({span}).")
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet ({error}); it was damaged after the run."
        ) from error


def _arrays(table: pa.Table, name: str) -> list[np.ndarray]:
    """A column of lists as arrays that own their memory, without going through Python numbers."""
    column = table.column(name).combine_chunks()
    return [np.array(entry.values.to_numpy(zero_copy_only=False)) for entry in column]


def _sample(
    row: Mapping[str, Any], prompt_ids: TokenIds, token_ids: TokenIds, logprobs: np.ndarray
) -> Sample:
    return Sample(
        sample_id=row["sample_id"],
        iteration=row["iteration"],
        prompt=Prompt(row["prompt_id"], prompt_ids, json.loads(row["columns"])),
        group_index=row["group_index"],
        generation=Generation(
            sample_id=row["sample_id"],
            attempt=row["attempt"],
            token_ids=token_ids,
            logprobs=logprobs,
            versions=tuple(VersionRun(run["version"], run["length"]) for run in row["versions"]),
            finish_reason=FinishReason(row["finish_reason"]),
            instance=row["instance"],
            timings=Timings(row["queued_s"], row["prefill_s"], row["decode_s"]),
        ),
        reward=row["reward"],
        reward_extras=json.loads(row["reward_extras"]),
        arrived_s=row["arrived_s"],
        rewarded_s=row["rewarded_s"],
    )


def _plain(value: Any) -> Any:
    """What JSON lacks: arrays and NumPy numbers keep their values, the rest (dates, bytes) becomes text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
