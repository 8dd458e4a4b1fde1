"""`streamrl bench dispatch`: what knowing the answers' lengths is worth, on real instances.

The instances start once and serve a checkpoint; one controller hands the same recorded lengths out under each policy,
in rounds that draw prompts and lengths anew. What is compared is the makespan of a generation stage, in seconds and in
decode steps of the busiest instance. The cost model plays the very same rounds; its error is stated, and it then tells
of larger pools.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamrl_jax.bench.dispatch_draws import MEASURED, POLICIES, Material
from streamrl_jax.errors import UserError
from streamrl_jax.files import write_atomically

if TYPE_CHECKING:
    from streamrl_jax.bench.dispatch_model import Model
    from streamrl_jax.bench.dispatch_report import Compared, Found
    from streamrl_jax.bench.dispatch_rounds import Round, Size
    from streamrl_jax.config import Config

POOLS: Final = (8, 32, 128)
_SAMPLE_S: Final = 600.0  # bound on the wait for one sample


@dataclass(frozen=True)
class Result:
    """All that was found at one size.

    Attributes:
        prompts: Of a round.
        n: Answers to each.
        slots: Answers at once, of all instances.
        tokens: Of a round, the mean.
        load: Least and greatest load average of the machine at the beginning of a round.
        knows_seconds: Whether the model was told how long a step takes.
        measured: By policy.
        compared: By policy: the model beside it.
        pools: By instances and policy, from the model alone.
        rounds: What each policy did in each round, as it was measured.
    """

    prompts: int
    n: int
    slots: int
    tokens: float
    load: tuple[float, float]
    knows_seconds: bool
    measured: Mapping[str, Found]
    compared: Mapping[str, Compared]
    pools: Mapping[int, Mapping[str, Found]]
    rounds: Sequence[Mapping[str, Any]]


def add_options(parser: ArgumentParser) -> None:
    """Those of `streamrl bench dispatch`."""
    parser.add_argument(
        "--lengths", type=Path, required=True, metavar="FILE", help="recorded lengths (streamrl rank collect)"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="another sampling of the same prompts, for lpt-history"
    )
    parser.add_argument("--ranker", type=Path, metavar="DIR", help="a fitted ranker (streamrl rank fit)")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="a cost profile (streamrl plan profile)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[200], metavar="N",
        help="of each round; several: one table each, on the same instances; default: 200",
    )  # fmt: skip
    parser.add_argument("--n", type=int, default=2, metavar="K", help="answers to each prompt; default: 2")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="of all policies; default: 5")
    parser.add_argument(
        "--policies", type=lambda text: text.split(","), metavar="NAME,NAME",
        help=f"of {', '.join(POLICIES)}; default: {', '.join(MEASURED)}, those for which lengths are given",
    )  # fmt: skip
    parser.add_argument(
        "--pools", type=int, nargs="*", default=list(POOLS), metavar="N",
        help="instances of the pools that the cost model tells of; default: 8 32 128",
    )  # fmt: skip
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, metavar="S",
        help="no further round of a size after so long, from the second on; default: 1800",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the draws; default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")


def run(arguments: Namespace) -> int:
    """Measures and prints the tables.

    Raises:
        UserError: An option makes no sense, or a policy lacks what it wants to know.
    """
    from streamrl_jax.bench import dispatch_checks as checks
    from streamrl_jax.bench.dispatch_rounds import Size
    from streamrl_jax.config_io import load_config

    checks.check_options(arguments)
    cfg = _planning(load_config(arguments.files, arguments.overrides), arguments.cost)
    material = read_material(arguments)
    given = [source for source in ("history", "ranker") if getattr(arguments, source) is not None]
    names = chosen_policies(arguments.policies, given)
    sizes = [Size(count, arguments.n, arguments.rounds, arguments.seed) for count in arguments.prompts]
    for size in sizes:
        checks.check_enough(material, size.prompts, size.n)
    checks.check_answerable(cfg, material, arguments.lengths)
    if arguments.ranker is not None:
        checks.check_ranker(arguments.ranker, material)
    began = time.monotonic()
    results = []
    for result in _results(cfg, material, sizes, names, arguments):
        results.append(result)
        print(_text(result), end="\n\n", flush=True)
        if arguments.json is not None:  # after each size: what was measured is kept, whatever comes
            found = {
                "settings": {name: str(value) for name, value in vars(arguments).items()},
                "seconds": time.monotonic() - began,
                "cores": len(os.sched_getaffinity(0)),
                "results": [asdict(one) for one in results],
            }
            write_atomically(arguments.json, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def _planning(cfg: Config, cost: Path | None) -> Config:
    """The configuration of a controller that plans: each job names its policy, and all share the cost of a step."""
    from streamrl_jax.config_ranker import DispatchSection

    chosen = cfg.dispatch.cost if cost is None else str(cost)
    return cfg.model_copy(
        update={"dispatch": DispatchSection(policy="skewness", alpha=cfg.dispatch.alpha, cost=chosen)}
    )


def read_material(arguments: Namespace) -> Material:
    """Reads the lengths; what a ranker says of them is added by `with_ranker`.

    Raises:
        UserError: A file cannot be read, or lacks a prompt.
    """
    from streamrl_jax.ranker.lengths import merged, read_lengths
    from streamrl_jax.ranker.measure import history_of

    rows = merged(read_lengths(arguments.lengths))
    if arguments.history is None:
        return Material(rows, {})
    history = history_of(rows, read_lengths(arguments.history), f"--history {arguments.history}")
    return Material(rows, {"history": history.astype(np.float32)})


def with_ranker(material: Material, directory: Path | None) -> Material:
    """Adds a ranker's predictions. JAX must be set up by now: the instances' shares of the machine come first.

    Args:
        material: Its prompts are scored.
        directory: The ranker; None: nothing is added.
    """
    if directory is None:
        return material
    from streamrl_jax.ranker.model import LengthRanker

    said = LengthRanker.load(directory).lengths([row.token_ids for row in material.rows])
    return replace(material, predicted={**material.predicted, "ranker": said})


def chosen_policies(wanted: Sequence[str] | None, given: Collection[str]) -> list[str]:
    """The policies to measure, in the order of the table.

    Args:
        wanted: Names; None: all for which lengths are given.
        given: The sources of lengths: ``history``, ``ranker``.

    Raises:
        UserError: There is no such policy, or nobody says what it wants to know.
    """
    for name in wanted or ():
        if name not in POLICIES:
            raise UserError(f"--policies: there is no {name!r}; there are {', '.join(POLICIES)}")
        if not POLICIES[name].informed(given):
            raise UserError(f"--policies {name} needs --{POLICIES[name].knows}, which is not given")
    return [
        name
        for name, policy in POLICIES.items()
        if (name in MEASURED and policy.informed(given) if wanted is None else name in wanted)
    ]


def _results(
    cfg: Config, material: Material, sizes: Sequence[Size], names: Sequence[str], arguments: Namespace
) -> Iterator[Result]:
    """What was found at each size, as soon as it was measured; the instances serve all of them."""
    from streamrl_jax.bench.dispatch_model import Model
    from streamrl_jax.bench.dispatch_rounds import Asking, measure
    from streamrl_jax.control.dispatching import DispatchSettings
    from streamrl_jax.setup.serving import UNSCORED, serving
    from streamrl_jax.setup.step_cost import step_cost
    from streamrl_jax.train.evaluator import evaluation_sampling

    with serving(cfg, "dispatch", UNSCORED) as served:
        material = with_ranker(material, arguments.ranker)
        sampling = evaluation_sampling(cfg, served.stop_token_ids)
        asking = Asking(sampling, cfg.gen.heartbeat_interval_s, _SAMPLE_S, served.stop, arguments.limit_s)
        cost = step_cost(cfg, served.inputs.model_dir / "config.json")
        settings = DispatchSettings(cfg.dispatch.policy, cfg.dispatch.alpha, cost)
        model = Model.of(served.controller.pool(), settings, cfg.gen.lookahead)
        for size in sizes:
            served.display.phase("dispatch", f"{size.rounds} rounds of {size.prompts} prompts")
            rounds = measure(served.controller, material, size, names, asking)
            served.display.done("dispatch")
            yield summarise(material, size, names, rounds, model, arguments.pools)


def summarise(
    material: Material,
    size: Size,
    names: Sequence[str],
    rounds: Sequence[Round],
    model: Model,
    pools: Sequence[int],
) -> Result:
    """Figures of what was measured at one size, the model's beside them, and the model's of larger pools.

    Args:
        material: What the rounds were drawn from.
        size: Of the rounds.
        names: Of the policies.
        rounds: As measured.
        model: Of the instances.
        pools: Numbers of instances.
    """
    from streamrl_jax.bench.dispatch_report import compared, found
    from streamrl_jax.bench.dispatch_rounds import loads

    measured = [one.played for one in rounds]
    foretold = [model.round(material, one.work, names) for one in rounds]
    return Result(
        size.prompts,
        size.n,
        sum(server.slots for server in model.servers),
        sum(one.work.tokens for one in rounds) / len(rounds),
        loads(rounds),
        model.knows_seconds,
        found(measured),
        compared(measured, foretold, with_seconds=model.knows_seconds),
        {count: found(model.pool(material, size, names, count)) for count in pools},
        [{name: asdict(one) for name, one in each.played.items()} for each in rounds],
    )


def _text(result: Result) -> str:
    from streamrl_jax.bench import dispatch_report as report
    from streamrl_jax.bench.stream import table

    answers = result.prompts * result.n
    off = report.worst(result.compared)
    parts = [
        f"{len(result.rounds)} rounds of {result.prompts} prompts, {answers} answers, "
        f"{answers / result.slots:.1f} a slot, {result.tokens:,.0f} tokens a round; "
        f"load average {result.load[0]:.1f} to {result.load[1]:.1f}",
        table(report.MEASURED_HEADER, [one.cells(name) for name, one in result.measured.items()]),
        f"The cost model on the same rounds: in the mean over rounds at most {off.steps:.1%} off in steps (in a single "
        f"one {off.round:.1%}), {off.steps_ratio:.1%} in steps over {report.BASE}"
        + (
            f", {off.seconds_ratio:.1%} in seconds over {report.BASE}."
            if result.knows_seconds
            else "; without --cost it knows no seconds."
        ),
        table(report.FORETOLD_HEADER, [one.cells(name) for name, one in result.compared.items()]),
    ]
    if result.pools:
        lines = [
            report.pool_cells(name, count, one)
            for count, pool in result.pools.items()
            for name, one in pool.items()
        ]
        parts += [
            "Larger pools, from the cost model alone, the work in proportion:",
            table(report.POOLS_HEADER, lines),
        ]
    return "\n\n".join(parts)
