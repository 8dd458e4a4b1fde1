"""Files of observed lengths: what is written comes back, what is damaged is told by name, runs are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.ranker.lengths import (
    ObservedLengths,
    as_line,
    lengths_of_run,
    merged,
    read_lengths,
    write_lengths,
)
from streamrl_jax.samples_log import SampleLog, iteration_file
from streamrl_jax.types import Fence, FinishReason, Generation, Prompt, Sample, VersionRun

ROW = {"prompt_id": "3", "prompt": "1+2=", "token_ids": [4, 5], "lengths": [7, 9], "cut": [False, True]}


def row(prompt_id: str, tokens: Sequence[int], *lengths: int, cut: Sequence[bool] = ()) -> ObservedLengths:
    marks = tuple(cut) or (False,) * len(lengths)
    return ObservedLengths(prompt_id, np.array(tokens, np.int32), lengths, marks, f"text {prompt_id}")


def plain(found: ObservedLengths) -> tuple[object, ...]:
    assert found.token_ids.dtype == np.int32
    return found.prompt_id, found.token_ids.tolist(), found.lengths, found.cut, found.prompt


ROWS = st.builds(
    lambda name, tokens, answers: ObservedLengths(
        name, np.array(tokens, np.int32), tuple(n for n, _ in answers), tuple(c for _, c in answers), name
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.integers(0, 2**31 - 1), min_size=1),
    st.lists(st.tuples(st.integers(1, 2**31 - 1), st.booleans()), min_size=1),
)


@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_what_is_written_comes_back(
    rows: list[ObservedLengths], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "lengths.jsonl"
    write_lengths(path, rows)
    assert list(map(plain, read_lengths(path))) == list(map(plain, rows))


def test_files_may_be_joined_and_rows_of_one_prompt_merged(tmp_path: Path) -> None:
    first, second = [row("0", [4], 1), row("1", [5, 6], 2, 3)], [row("7", [5, 6], 9, cut=[True])]
    path = tmp_path / "joined.jsonl"
    path.write_text("".join(map(as_line, first)) + "\n" + "".join(map(as_line, second)))
    rows = read_lengths(path)
    assert len(rows) == 3
    joined = [("0", [4], (1,), (False,), "text 0"), ("1", [5, 6], (2, 3, 9), (False, False, True), "text 1")]
    assert list(map(plain, merged(rows))) == joined
    assert merged(rows)[1].mean == pytest.approx(14 / 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lengths": [7]}, "1 lengths, but 2 in `cut`"),
        ({"lengths": []}, r"'lengths' is \[\]; a list of whole numbers from 1 on is needed, at least one"),
        ({"lengths": [0, 9]}, r"'lengths' is \[0, 9\]"),
        ({"lengths": [7.5, 9]}, "'lengths'"),
        ({"lengths": [True, 9]}, "'lengths'"),
        ({"lengths": [2**31, 9]}, "'lengths'"),
        ({"cut": [0, 1]}, r"'cut' is \[0, 1\]; a list of true or false for each length"),
        ({"token_ids": None}, "'token_ids' is None; a list of token ids is needed"),
        ({"token_ids": [-1]}, "'token_ids'"),
        ({"prompt_id": 3}, "'prompt_id' is 3; a text is needed"),
        ({"prompt": 3}, "'prompt' is 3"),
    ],
)
def test_a_faulty_row_is_told_by_file_line_and_field(
    change: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(json.dumps(fields) for fields in (ROW, ROW | change)))
    with pytest.raises(UserError, match=rf"lengths.jsonl, line 2: .*{told}"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no row"),
        (b"\n\n", "holds no row"),
        (b"[1]", "line 1: a JSON object is needed, found list"),
        (as_line(row("0", [4], 1)).encode()[:-20], "line 1: no valid JSON .* cut short"),
        (b'{"prompt": "\xff"}', "line 1: no valid JSON"),
        (b"[" * 100_000, "line 1: no valid JSON"),
    ],
)
def test_a_damaged_file_is_told_by_name(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"lengths.jsonl.*{told}"):
        read_lengths(path)


def test_a_missing_file_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.jsonl: the file of lengths cannot be read \(No such file"):
        read_lengths(tmp_path / "none.jsonl")


def test_a_row_without_answers_cannot_be_made() -> None:
    for lengths, cut in (((), ()), ((1, 2), (False,)), ((0,), (False,))):
        with pytest.raises(ValueError, match="prompt 3"):
            ObservedLengths("3", np.zeros(1, np.int32), lengths, cut)


def sample(prompt_id: str, token: int, length: int, index: int, reason: FinishReason) -> Sample:
    answer = Generation(
        sample_id=f"train/0/{prompt_id}/{index}",
        attempt=0,
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=(VersionRun(0, length),),
        finish_reason=reason,
        instance="instance-0",
    )
    prompt = Prompt(prompt_id, np.array([token], np.int32), {"prompt": "p"})
    return Sample(answer.sample_id, 0, prompt, index, answer, 0.0)


def test_a_run_gives_the_lengths_of_what_it_consumed(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    log = SampleLog(folder, Fence("run", 0), lambda ids: f"tokens {ids.tolist()}")
    stop, limit = FinishReason.STOP, FinishReason.LENGTH
    # A prompt that is drawn twice in an iteration has a suffix, and its answers may come first.
    log.write(0, [sample("5.1", 9, 4, 0, stop), sample("5", 9, 6, 0, limit), sample("2", 8, 1, 0, stop)], 0)
    log.write(1, [sample("5", 9, 3, 1, stop)], 1)
    assert list(map(plain, lengths_of_run(tmp_path))) == [
        ("5", [9], (4, 6, 3), (False, True, False), "tokens [9]"),
        ("2", [8], (1,), (False,), "tokens [8]"),
    ]
    damaged = iteration_file(folder, 1)
    damaged.write_bytes(damaged.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"iteration_000001.parquet cannot be read"):
        lengths_of_run(tmp_path)


def test_a_directory_without_samples_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no recorded samples \(looked for .*samples/iteration_000000"):
        lengths_of_run(tmp_path)
