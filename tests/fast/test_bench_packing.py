"""`streamrl bench packing`: the ways it compares, the table, and files that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl_jax.bench.packing import (
    HEADER,
    Request,
    arranged,
    here,
    here_together,
    measure,
    one_a_row,
    plain_shapes,
    read_lengths,
    two_shapes,
)
from streamrl_jax.cli import main
from streamrl_jax.errors import UserError
from streamrl_jax.train.shapes import BatchShape, Shape

LENGTHS = Path(__file__).parents[1] / "data" / "conversation_lengths.csv"


def test_every_way_packs_each_sample_once() -> None:
    lengths = [30, 64, 1, 1, 50, 14, 33, 31, 64, 2]
    shape = plain_shapes(longest=64, budget=128, ranks=2)
    assert shape == BatchShape((Shape(4, 64), Shape(2, 64)), 2)
    for way in (here, here_together, two_shapes, one_a_row):
        packed = way(shape, lengths)
        assert sorted(n for one in packed for row in one.rows for n in row) == list(range(len(lengths)))
        for one in packed:
            assert len(one.rows) == one.shape.rows
            assert all(sum(lengths[n] for n in row) <= 64 for row in one.rows)


def test_what_is_measured_of_a_packing() -> None:
    shape = BatchShape((Shape(2, 64),), 2)
    outcome = measure(one_a_row, shape, [[64, 32, 16]])
    assert outcome.padding == pytest.approx(1 - 112 / 256)
    assert outcome.computed == pytest.approx(256 * (1 + 64 / 9216))
    work = [n + n * n / 18432 for n in (64, 32, 16)]
    assert outcome.imbalance == pytest.approx((work[0] + work[2]) / (sum(work) / 2))


def test_the_orders() -> None:
    requests = [Request(9, 3), Request(1, 2), Request(5, 1)]
    assert arranged(requests, "file", 0) == [12, 3, 6]
    assert arranged(requests, "arrival", 0) == [6, 3, 12]
    assert arranged(requests, "sorted", 0) == [3, 6, 12]
    assert arranged(requests, "together", 0) == [12, 6, 3]
    assert sorted(arranged(requests, "random", 0)) == [3, 6, 12]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples-per-iteration", "64", "--budget", "4096", "8192", "--order", "arrival", "sorted"]
    assert main(["bench", "packing", str(LENGTHS), *options]) == 0
    *notes, header, _, one, two, three, four = capsys.readouterr().out.splitlines()
    assert header == f"| {' | '.join(HEADER)} |"
    assert notes == ["budget 4,096: 17 of 200 samples are left out"]
    assert [line.split(" | ")[:4] for line in (one, two, three, four)] == [
        ["| 64", budget, "1", order] for budget in ("4,096", "8,192") for order in ("arrival", "sorted")
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("context_tokens,generated_tokens\n", "holds no lengths"),
        (
            "context_tokens,generated_tokens\n12,-3\n",
            "line 2: context_tokens is '12' and generated_tokens '-3'",
        ),
        ("prompt,answer\n12,3\n", "line 2: context_tokens is None"),
    ],
)
def test_a_file_that_holds_no_lengths_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_lengths(path)


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "packing", str(tmp_path / "none.csv")]) == 2
    assert "none.csv cannot be read" in capsys.readouterr().err
    assert main(["bench", "packing", str(LENGTHS), "--budget", "0"]) == 2
    assert main(["bench", "packing", str(LENGTHS), "--samples-per-iteration", "500"]) == 2
    assert "fewer than an iteration of 500" in capsys.readouterr().err
