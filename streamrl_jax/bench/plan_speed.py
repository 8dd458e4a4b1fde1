"""`streamrl bench plan`: all dispatch policies side by side on the same lengths, by the cost model of a named GPU.

What each plan takes to make, and what the stage then takes: as the planner predicts it, and played in simulated time,
where answers turn out otherwise than predicted. Nothing is run on a device.
"""

from __future__ import annotations

import itertools
import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from streamrl_jax.bench.stream import table
from streamrl_jax.control.dispatching import pays
from streamrl_jax.errors import UserError
from streamrl_jax.plan.generation import Conditions, Outcome, Stage, run_plan, run_pulled
from streamrl_jax.ranker.dispatch import Plan, Server, plan_arrival, plan_lpt, plan_paper, plan_skewness
from streamrl_jax.ranker.hardware import GPUS, ModelShape, kv_capacity, roofline
from streamrl_jax.ranker.lengths import read_lengths
from streamrl_jax.ranker.risk import Spread

QWEN_7B: Final = ModelShape(
    vocab_size=152_064, embed=3_584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp=18_944
)
"""Qwen2.5-7B."""

_PROMPT: Final = 200
"""Tokens of a drawn prompt."""

_PLAYED: Final = 150_000
"""Answers of all repeats together up to which the stage is played."""

_MANY: Final = math.inf
_MOST: Final = 100_000_000  # answers that memory holds
_FAR: Final = 10.0
"""Of a spread: e to the 10th is a factor of 22,000."""

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "prompts": (1, 1e7),
    "answers": (1, 1e6),
    "instances": (1, 1e5),
    "slots": (1, 1e6),
    "stretch": (1e-6, 1e6),
    "median": (1, 1e9),
    "limit": (1, 1e9),
    "sigma": (0, _FAR),
    "chance": (0, _FAR),
    "error": (0, _FAR),
    "repeats": (1, 1e6),
    "seed": (0, _MANY),
}
"""Of the options: the lowest and the highest value."""

PLANS: Final = ("arrival", "lpt", "paper", "skewness")
PLAYED: Final = ("arrival, pulled", "lpt, pulled", *PLANS, "in a run")


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        gpu: A name of `GPUS`.
        instances: How many.
        error: Standard deviation of log(prediction / mean length of a prompt); 0: the means are known.
    """

    gpu: str
    instances: int
    error: float


@dataclass(frozen=True)
class Drawn:
    """One repeat's work, and how single answers turn out, measured against their predictions."""

    stage: Stage
    spread: Spread


def add_options(parser: ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--prompts", type=int, default=512, help="of a stage (default: 512)")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt (default: 8)")
    parser.add_argument("--instances", type=int, nargs="+", default=[16], metavar="N", help="default: 16")
    parser.add_argument("--gpu", nargs="+", default=["H800"], choices=sorted(GPUS), help="default: H800")
    parser.add_argument(
        "--slots", type=int, default=256, help="answers at once on an instance (default: 256)"
    )
    parser.add_argument(
        "--lengths", type=Path, help="a file of `streamrl rank collect`, in place of drawn lengths"
    )
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="factor on the lengths of that file (default: 1)"
    )
    parser.add_argument("--median", type=float, default=2_000, help="tokens of drawn answers (default: 2000)")
    parser.add_argument("--limit", type=float, default=20_000, help="longest answer (default: 20000)")
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="spread of the prompts' log lengths (default: 1.0)"
    )
    parser.add_argument(
        "--chance", type=float, default=0.3, help="spread of one prompt's log lengths (default: 0.3)"
    )
    parser.add_argument(
        "--error",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="SIGMA",
        help="error of the predictions' logs; 0: oracle",
    )
    parser.add_argument("--repeats", type=int, default=3, help="draws of a stage (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def run(arguments: Namespace) -> int:
    """Prints the tables."""
    check_ranges(arguments)
    rows = _rows_of(arguments.lengths, arguments.stretch) if arguments.lengths else None
    cases = [
        Case(*values) for values in itertools.product(arguments.gpu, arguments.instances, arguments.error)
    ]
    plays = arguments.prompts * arguments.answers * arguments.repeats <= _PLAYED
    speed: list[list[str]] = []
    played: list[list[str]] = []
    for case in cases:
        servers = servers_of(case.gpu, case.instances, arguments.slots)
        draws = [drawn(arguments, case.error, repeat, rows) for repeat in range(arguments.repeats)]
        label = [case.gpu, str(case.instances), f"{case.error:g}" if case.error else "oracle"]
        made = [{name: timed(name, one, servers, arguments.limit) for name in PLANS} for one in draws]
        speed += [[*label, name, *_planned([one[name] for one in made])] for name in PLANS]
        if plays:
            outcomes = [
                play(one, {name: plan for name, (plan, _) in plans.items()}, servers)
                for one, plans in zip(draws, made, strict=True)
            ]
            played.append([*label, *shares(outcomes)])
    print(
        table(
            ("GPU", "instances", "error", "policy", "planned in (processor time)", "predicted makespan"),
            speed,
        )
    )
    if plays:
        print()
        print(table(("GPU", "instances", "error", "arrival, pulled", *PLAYED[1:]), played))
    return 0


def check_ranges(arguments: Namespace) -> None:
    """Looks at every number before anything is drawn.

    Raises:
        UserError: One is outside its range; names it.
    """
    for name, (low, high) in _RANGES.items():
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if not low <= value <= high:
                needed = f"{low:g} or more" if high == _MANY else f"a number from {low:g} to {high:g}"
                raise UserError(f"--{name} {value}: give {needed}")
    if (count := arguments.prompts * arguments.answers) > _MOST:
        raise UserError(f"--prompts times --answers is {count}: give fewer, {_MOST:,} at most")


def servers_of(gpu: str, count: int, slots: int) -> list[Server]:
    """Instances of one GPU each that serve Qwen2.5-7B in bfloat16."""
    cost, kv_tokens = roofline(QWEN_7B, GPUS[gpu]), kv_capacity(QWEN_7B, GPUS[gpu])
    return [Server(f"{gpu}-{index}", slots, kv_tokens, cost) for index in range(count)]


def drawn(arguments: Namespace, error: float, repeat: int, rows: Sequence[np.ndarray] | None) -> Drawn:
    """The work of one repeat.

    Args:
        arguments: The command's.
        error: Of the predictions' logs.
        repeat: Its number.
        rows: The observed lengths of each prompt; None: they are drawn.
    """
    rng = np.random.default_rng((arguments.seed, repeat))
    prompts, answers = arguments.prompts, arguments.answers
    if rows is None:
        means = arguments.median * np.exp(arguments.sigma * rng.standard_normal(prompts))
        chance = np.exp(arguments.chance * rng.standard_normal((prompts, answers)) - arguments.chance**2 / 2)
        lengths = np.clip(means[:, None] * chance, 1, arguments.limit)
        spread = Spread(float(np.hypot(arguments.chance, error)))
    else:
        picked = [rows[index] for index in rng.integers(len(rows), size=prompts)]
        lengths = np.clip([rng.choice(row, answers) for row in picked], 1, arguments.limit)
        means = np.array([row.mean() for row in picked])
        seen = np.concatenate(
            [np.log(row / row.mean()) for row in rows]
        )  # as earlier iterations would have shown
        spread = Spread.of(seen + error * rng.standard_normal(seen.size) - error**2 / 2)
    lengths = lengths.astype(np.int64)
    exact = np.clip(means, 1, arguments.limit)
    wrong = np.exp(error * rng.standard_normal(prompts) - error**2 / 2)
    predicted = np.clip(exact * wrong, 1, arguments.limit)
    stage = Stage(lengths, np.full(prompts, _PROMPT, np.int64), predicted)
    return Drawn(stage, spread)


def timed(name: str, one: Drawn, servers: Sequence[Server], limit: float) -> tuple[Plan, float]:
    """A policy's plan, and the processor seconds that it took: other work on the machine does not count."""
    stage = one.stage
    given = (stage.predicted, stage.lengths.shape[1], servers)
    makers: Mapping[str, Callable[[], Plan]] = {
        "arrival": lambda: plan_arrival(*given, stage.prompts),
        "lpt": lambda: plan_lpt(*given, stage.prompts),
        "paper": lambda: plan_paper(*given, stage.predicted),
        "skewness": lambda: plan_skewness(*given, stage.prompts, one.spread, limit),
    }
    started = time.process_time()
    plan = makers[name]()
    return plan, time.process_time() - started


def play(one: Drawn, plans: Mapping[str, Plan], servers: Sequence[Server]) -> dict[str, Outcome]:
    """The stage under each policy, in simulated time; lines with the longest first are re-balanced.

    The last one, "in a run", is what ``dispatch.policy = "skewness"`` comes to: the plan where it pays, else one queue,
    the longest first.
    """
    stage = one.stage
    outcomes = {
        "arrival, pulled": run_pulled(stage, "arrival", servers),
        "lpt, pulled": run_pulled(stage, "lpt", servers),
    }
    for name, plan in plans.items():
        outcomes[name] = run_plan(stage, plan, servers, Conditions(stealing=name != "arrival"))
    follows = pays(plans["skewness"], plans["lpt"], known=not one.spread.deviation)
    outcomes["in a run"] = outcomes["skewness" if follows else "lpt, pulled"]
    return outcomes


def shares(outcomes: Sequence[Mapping[str, Outcome]]) -> list[str]:
    """The first way's mean makespan, and what the others take of it: mean and range over the repeats."""
    first = [one[PLAYED[0]].makespan_s for one in outcomes]
    cells = [f"{np.mean(first):,.1f} s"]
    for name in PLAYED[1:]:
        share = [one[name].makespan_s / base for one, base in zip(outcomes, first, strict=True)]
        cells.append(f"{np.mean(share):.3f} ({min(share):.2f} to {max(share):.2f})")
    return cells


def _planned(made: Sequence[tuple[Plan, float]]) -> list[str]:
    seconds = [took for _, took in made]
    makespans = [plan.makespan_s for plan, _ in made]
    return [f"{np.median(seconds):.3f} s", f"{np.mean(makespans):,.1f} s"]


def _rows_of(path: Path, stretch: float) -> list[np.ndarray]:
    return [stretch * np.asarray(row.lengths, np.float64) for row in read_lengths(path)]
