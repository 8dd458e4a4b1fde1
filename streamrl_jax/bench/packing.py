"""`streamrl bench packing`: how much padding the packer leaves on a file of lengths, beside two simpler ways.

The lengths run through the very classes that the trainer uses; nothing is trained on, so no device is needed.
"""

from __future__ import annotations

import csv
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from streamrl_jax.errors import UserError
from streamrl_jax.train.packing import Packed, Packer, rank_costs, row_cost
from streamrl_jax.train.shapes import BatchShape, Shape, plan_shape

# A row's tokens attend to the whole row, masked or not: it costs rows x len x (1 + len / 6 width) tokens of the
# linear layers (24 width^2 beside 4 len width operations a token); here for a width of 1,536.
_LEVEL_ROW: Final = 6 * 1536

ORDERS: Final = ("arrival", "random", "sorted", "file", "together")


@dataclass(frozen=True)
class Request:
    """Tokens of a prompt and of its answer."""

    context: int
    generated: int

    @property
    def total(self) -> int:
        """Tokens of the sample."""
        return self.context + self.generated


@dataclass(frozen=True)
class Setting:
    """What is packed: samples of an iteration in an order, a token budget for each of the ranks."""

    samples: int
    budget: int
    ranks: int
    order: str


@dataclass(frozen=True)
class Outcome:
    """A packing of some iterations.

    Attributes:
        used: Tokens of samples.
        micro_batches: (shape, work of each rank) of each.
        seconds: What the packing took.
    """

    used: int
    micro_batches: tuple[tuple[Shape, tuple[float, ...]], ...]
    seconds: float

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is none of a sample's."""
        return 1 - self.used / sum(shape.tokens for shape, _ in self.micro_batches)

    @property
    def computed(self) -> float:
        """Work of a kernel that masks and does not skip, in tokens of the linear layers."""
        return sum(shape.tokens * (1 + shape.row_len / _LEVEL_ROW) for shape, _ in self.micro_batches)

    @property
    def imbalance(self) -> float:
        """The most loaded rank's work over the mean rank's, summed over the micro-batches."""
        means = [sum(work) / len(work) for _, work in self.micro_batches]
        return sum(max(work) for _, work in self.micro_batches) / sum(means)


def read_lengths(path: Path) -> list[Request]:
    """Reads a CSV file with the columns context_tokens and generated_tokens.

    Raises:
        UserError: It cannot be read, lacks a column, or has a value that is no positive whole number.
    """
    requests: list[Request] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                context, generated = (row.get(name) for name in ("context_tokens", "generated_tokens"))
                if not (context and context.isdecimal() and generated and generated.isdecimal()):
                    raise UserError(
                        f"{path}, line {line}: context_tokens is {context!r} and generated_tokens {generated!r}; "
                        "each must be a whole number, under a first line that names the columns"
                    )
                requests.append(Request(int(context), int(generated)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not requests:
        raise UserError(f"{path} holds no lengths")
    return requests


def arranged(requests: Sequence[Request], order: str, seed: int) -> list[int]:
    """The samples' tokens in an order.

    Args:
        requests: Of one iteration.
        order: "arrival": as they finish if all begin at once, the shortest answer first; "random"; "sorted": the
            shortest sample first, the hardest for who packs a stream; "file": as they are; "together": all are there
            before packing begins, the longest first.
        seed: Of the random order.
    """
    if order == "arrival":
        requests = sorted(requests, key=lambda request: request.generated)
    lengths = [request.total for request in requests]
    if order == "sorted":
        lengths.sort()
    elif order == "together":
        lengths.sort(reverse=True)
    elif order == "random":
        lengths = [lengths[at] for at in np.random.default_rng(seed).permutation(len(lengths))]
    return lengths


def here(shape: BatchShape, lengths: Sequence[int]) -> list[Packed]:
    """Streams the samples through `Packer`."""
    packer = Packer(shape)
    packed = [one for length in lengths for one in packer.add(length)]
    return packed + packer.flush()


def here_together(shape: BatchShape, lengths: Sequence[int]) -> list[Packed]:
    """As `batcher.pack_all`: `Packer` chooses among all of them."""
    packer = Packer(shape)
    for length in lengths:
        packer.put(length)
    return packer.flush()


def two_shapes(shape: BatchShape, lengths: Sequence[int]) -> list[Packed]:
    """Best fit into the rows of one micro-batch, which leaves when a sample fits none of them.

    Args:
        shape: Two shapes, of one row length: the full one, and a smaller one for what is left.
        lengths: Tokens of each sample.
    """
    packed: list[Packed] = []
    rows: list[list[int]] = []
    room: list[int] = []

    def leave() -> None:
        smallest = min((each for each in shape.shapes if each.rows >= len(rows)), key=lambda each: each.rows)
        filled = [tuple(row) for row in rows] + [()] * (smallest.rows - len(rows))
        packed.append(Packed(smallest, tuple(filled)))
        rows.clear()
        room.clear()

    for number, length in enumerate(lengths):
        fitting = [row for row, left in enumerate(room) if left >= length]
        if not fitting and len(rows) == shape.full.rows:
            leave()
        if not fitting:
            rows.append([])
            room.append(shape.row_len)
        row = min(fitting, key=lambda row: room[row], default=len(rows) - 1)
        rows[row].append(number)
        room[row] -= length
    leave()
    return packed


def one_a_row(shape: BatchShape, lengths: Sequence[int]) -> list[Packed]:
    """A sample a row, padded to the longest that there may be."""
    full = shape.full
    numbers = [(number,) for number in range(len(lengths))]
    return [
        Packed(full, tuple(numbers[at : at + full.rows]) + ((),) * max(0, at + full.rows - len(numbers)))
        for at in range(0, len(numbers), full.rows)
    ]


def plain_shapes(longest: int, budget: int, ranks: int) -> BatchShape:
    """Rows for the longest sample: as many as the budget allows, and a quarter of that."""
    row_len = min(-(-longest // 64) * 64, budget)
    rows = budget // row_len
    counts = sorted({rows, -(-rows // 4)}, reverse=True)
    return BatchShape(tuple(Shape(count * ranks, row_len) for count in counts), ranks)


def measure(
    way: Callable[[BatchShape, Sequence[int]], list[Packed]],
    shape: BatchShape,
    iterations: Sequence[Sequence[int]],
) -> Outcome:
    """Packs iteration after iteration."""
    made: list[tuple[Shape, tuple[float, ...]]] = []
    seconds = 0.0
    for lengths in iterations:
        begun = time.perf_counter()
        packed = way(shape, lengths)
        seconds += time.perf_counter() - begun
        for one in packed:
            costs = [row_cost([lengths[number] for number in row]) for row in one.rows]
            made.append((one.shape, tuple(rank_costs(costs, shape.shards))))
    return Outcome(sum(map(sum, iterations)), tuple(made), seconds)


def compare(requests: Sequence[Request], longest: int, setting: Setting) -> list[str]:
    """A line of the table: the packer beside the two other ways, on all whole iterations of the file."""
    size = setting.samples
    parts = [requests[at : at + size] for at in range(0, len(requests) - size + 1, size)]
    iterations = [arranged(part, setting.order, seed) for seed, part in enumerate(parts)]
    shape = plan_shape(longest=longest, samples=size, budget_per_shard=setting.budget, shards=setting.ranks)
    plain = plain_shapes(longest, setting.budget, setting.ranks)
    ours_way = here_together if setting.order == "together" else here
    ours, two, one = (
        measure(way, shapes, iterations)
        for way, shapes in ((ours_way, shape), (two_shapes, plain), (one_a_row, plain))
    )
    used = len({each for each, _ in ours.micro_batches})
    batches = " / ".join(f"{len(each.micro_batches) / len(iterations):.0f}" for each in (ours, two, one))
    return [
        f"{size:,}",
        f"{setting.budget:,}",
        str(setting.ranks),
        setting.order,
        " / ".join(f"{each.padding:.1%}" for each in (ours, two, one)),
        batches,
        f"1 / {two.computed / ours.computed:.2f} / {one.computed / ours.computed:.2f}",
        f"{used} of {len(shape.shapes)}",
        f"{ours.imbalance:.3f} / {two.imbalance:.3f}",
        f"{sum(map(len, iterations)) / ours.seconds:,.0f}",
    ]


HEADER: Final = (
    "samples an iteration",
    "budget a rank",
    "ranks",
    "order",
    "padding: here / two shapes / one a row",
    "micro-batches an iteration",
    "work, attention included",
    "shapes used",
    "rank imbalance: here / two shapes",
    "samples/s packed",
)


def table(lines: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    rows = [HEADER, ["---"] * len(HEADER), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def add_options(parser: ArgumentParser) -> None:
    """Those of `streamrl bench packing`."""
    parser.add_argument("lengths", type=Path, help="CSV with context_tokens and generated_tokens")
    for name, values in {"samples-per-iteration": [512], "budget": [16384], "ranks": [1]}.items():
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=values, metavar="N", help=f"default: {values[0]}"
        )
    parser.add_argument(
        "--order", nargs="+", choices=ORDERS, default=list(ORDERS), help="default: all of them"
    )


def run(arguments: Namespace) -> int:
    """Prints the table.

    Raises:
        UserError: The file cannot be used, or a number is not positive.
    """
    everything = read_lengths(arguments.lengths)
    sizes, budgets, ranks = arguments.samples_per_iteration, arguments.budget, arguments.ranks
    if min([*sizes, *budgets, *ranks]) < 1:
        raise UserError("--samples-per-iteration, --budget and --ranks must be positive")
    lines: list[list[str]] = []
    for budget in budgets:
        fitting = budget // 64 * 64  # rows are multiples of 64
        kept = [request for request in everything if 0 < request.total <= fitting]
        if len(kept) < max(sizes):
            raise UserError(
                f"{arguments.lengths} has {len(kept):,} samples of at most {fitting:,} tokens, fewer than an "
                f"iteration of {max(sizes):,}; lower --samples-per-iteration or raise --budget"
            )
        if len(kept) < len(everything):
            print(
                f"budget {budget:,}: {len(everything) - len(kept):,} of {len(everything):,} samples are left out"
            )
        longest = max(request.total for request in kept)
        for size, rank_count, order in product(sizes, ranks, arguments.order):
            lines.append(compare(kept, longest, Setting(size, budget, rank_count, order)))
    print(table(lines))
    return 0
