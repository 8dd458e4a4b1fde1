"""`streamrl bench learning`: what the algorithms, and the corrections for staleness, do on the demo's task.

Every case of a seed starts from the same warm checkpoint and differs from `configs/demo_grpo.toml` by a layer and by
the overrides of its name. The instances are started once and serve all runs. A run that is there already is not
repeated, so that a table can be completed later.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl_jax.errors import UserError
from streamrl_jax.gen.host import free_port

CONFIGS: Final = Path("configs")
INSTANCES: Final = 2
_START_S: Final = 600.0
_END_S: Final = 30.0

ALGORITHMS: Final = ("ppo", "dapo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo")
CORRECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "ratio": (),  # the loss's own ratio against the behaviour policy, and its clip
    "none": ("algorithm.rollout_correction.bypass_mode=false",),
    "token": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    "sequence": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=sequence",
    ),
    "masked": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token",
    ),
}
STALENESS: Final = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """One run of each seed.

    Attributes:
        name: In the table and of the run's folder.
        layer: Of `configs/algorithms`; empty: none.
        overrides: `section.key=value`.
    """

    name: str
    layer: str = ""
    overrides: tuple[str, ...] = ()


def cases() -> dict[str, Case]:
    """All of them by name: GRPO, every algorithm, and GRPO by staleness and correction."""
    named = [Case("grpo"), *(Case(name, name) for name in ALGORITHMS)]
    for staleness in STALENESS:
        for correction, overrides in CORRECTIONS.items():
            stale = f"trainer.max_staleness={staleness}"
            named.append(Case(f"grpo-{staleness}-{correction}", "", (stale, *overrides)))
    return {case.name: case for case in named}


@dataclass(frozen=True)
class Curve:
    """What a run recorded.

    Attributes:
        accuracy: Iteration -> held-out accuracy.
        last: Metrics of the last iteration.
        highest: The largest value of each metric over the run.
        staleness: Mean over the run of the consumed tokens' staleness.
    """

    accuracy: Mapping[int, float]
    last: Mapping[str, float]
    highest: Mapping[str, float]
    staleness: float

    def first_at(self, bound: float) -> int | None:
        """The first evaluated iteration with so much accuracy."""
        return next((step for step, value in sorted(self.accuracy.items()) if value >= bound), None)


def read_curve(metrics: Path, iterations: int = 1) -> Curve:
    """Reads a run's `metrics.jsonl`.

    Raises:
        UserError: The run ended before so many iterations, or none was evaluated.
    """
    accuracy: dict[int, float] = {}
    highest: dict[str, float] = {}
    last: dict[str, float] = {}
    staleness: list[float] = []
    for line in metrics.read_text().splitlines():
        entry = json.loads(line)
        found = {name: value for name, value in entry["metrics"].items() if value is not None}
        if "val/accuracy" in found:
            accuracy[entry["step"]] = found["val/accuracy"]
        if "training/staleness/mean" in found:
            staleness.append(found["training/staleness/mean"])
            last = found
        for name, value in found.items():
            highest[name] = max(value, highest.get(name, value))
    if not accuracy or not staleness:
        raise UserError(
            f"{metrics} holds no finished iteration with an evaluation; remove the run to repeat it"
        )
    if len(staleness) < iterations:
        raise UserError(
            f"{metrics} holds {len(staleness)} of {iterations} iterations; remove the run to repeat it"
        )
    return Curve(accuracy, last, highest, sum(staleness) / len(staleness))


def table(curves: Mapping[tuple[str, int], Curve]) -> str:
    """The curves as Markdown, a row a run."""
    head = (
        "case",
        "seed",
        "before",
        "after",
        "iterations to 0.9",
        "KL to the start",
        "entropy",
        "clipped",
        "staleness mean / max",
        "rho max",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (name, seed), curve in curves.items():
        steps, last = sorted(curve.accuracy), curve.last
        reached = curve.first_at(0.9)
        cells = (
            name,
            str(seed),
            f"{curve.accuracy[steps[0]]:.3f}",
            f"{curve.accuracy[steps[-1]]:.3f}",
            "not reached" if reached is None else str(reached),
            f"{last.get('actor/kl_loss', float('nan')):.3f}",
            f"{last.get('actor/entropy', float('nan')):.3f}",
            f"{last.get('actor/pg_clipfrac', 0.0):.3f}",
            f"{curve.staleness:.2f} / {curve.highest['training/staleness/max']:.0f}",
            f"{curve.highest.get('rollout_corr/rho/max', float('nan')):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: ArgumentParser) -> None:
    """The program's options."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="models, runs and logs go there"
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default="11",
        metavar="N,N",
        help="of warm start and run (default: %(default)s)",
    )
    parser.add_argument(
        "--cases", default="", metavar="NAME,NAME", help=f"of {', '.join(cases())} (default: all)"
    )
    parser.add_argument(
        "--iterations", type=int, default=30, metavar="N", help="of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--test-freq", type=int, default=3, metavar="N", help="evaluate so often (default: %(default)s)"
    )


def run(arguments: Namespace) -> int:
    """Runs what is missing and prints the table."""
    known = cases()
    wanted = arguments.cases.split(",") if arguments.cases else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--cases {','.join(unknown)}: there are {', '.join(known)}")
    seeds = arguments.seeds
    out: Path = arguments.out
    common = (
        f"trainer.total_training_steps={arguments.iterations}",
        f"trainer.test_freq={arguments.test_freq}",
        "trainer.save_freq=0",
        "actor.use_kl_loss=true",  # measured, with no weight
        "actor.kl_loss_coef=0.0",
    )
    todo = [
        (known[name], seed)
        for seed in seeds
        for name in wanted
        if not (_home(out, name, seed) / "metrics.jsonl").exists()
    ]
    warm = {seed: _warm_start(out, seed) for _, seed in todo}
    if todo:
        with _instances(out, next(iter(warm.values()))) as endpoints:
            for case, seed in todo:
                _train(out, case, seed, warm[seed], endpoints, common)
    curves = {
        (name, seed): read_curve(_home(out, name, seed) / "metrics.jsonl", arguments.iterations)
        for name in wanted
        for seed in seeds
    }
    print(table(curves))
    return 0


def _home(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-{seed}"


def _warm_start(out: Path, seed: int) -> Path:
    warm = out / f"warm-{seed}"
    if not warm.exists():
        toy = out / f"toy-{seed}"
        _call(
            out, f"toy-{seed}", "-m", "streamrl_jax.tasks.toy_model", "--out", str(toy), "--seed", str(seed)
        )
        config = str(CONFIGS / "demo_grpo.toml")
        overrides = (f"model.path={toy}", f"run.seed={seed}")
        _call(out, f"warm-{seed}", "-m", "streamrl_jax", "sft", config, *overrides, "--out", str(warm))
    return warm


def _train(
    out: Path, case: Case, seed: int, warm: Path, endpoints: Sequence[str], common: Sequence[str]
) -> None:
    layers = [str(CONFIGS / "demo_grpo.toml")]
    if case.layer:
        layers.append(str(CONFIGS / "algorithms" / f"{case.layer}.toml"))
    where = (
        f"model.path={warm}",
        f"run.seed={seed}",
        "gen.instances=0",
        "gen.devices=[]",
        f"gen.endpoints={json.dumps(list(endpoints))}",
    )
    home = _home(out, case.name, seed)
    began = time.monotonic()
    _call(
        out,
        home.name,
        *("-m", "streamrl_jax", "train", *layers, *where, *common, *case.overrides),
        *("--run-dir", str(home)),
    )
    print(f"{home.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _call(out: Path, name: str, *arguments: str) -> None:
    """Runs a command of this project to its end; its output goes to a log."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    with log.open("w") as sink:
        done = subprocess.run(
            [sys.executable, *arguments], stdout=sink, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise UserError(f"{name} ended with {done.returncode}; see {log}: streamrl {' '.join(arguments[2:])}")


@contextlib.contextmanager
def _instances(out: Path, model: Path) -> Iterator[list[str]]:
    """Instances on this machine that outlive a run, each on a core of its own."""
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(INSTANCES)]
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for number, endpoint in enumerate(endpoints):
            sink = stack.enter_context((out / f"instance-{number}.log").open("wb"))
            command = [sys.executable, "-m", "streamrl_jax", "gen", str(CONFIGS / "demo_grpo.toml")]
            command += [f"model.path={model}", f'gen.devices=["cpu:{number}"]', "gen.instances=1"]
            process = subprocess.Popen(
                [*command, "--listen", endpoint], stdout=sink, stderr=subprocess.STDOUT
            )
            stack.callback(_end, process)
            started.append(process)
        _wait_listening(endpoints, started, out)
        yield endpoints


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_listening(endpoints: Sequence[str], started: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    end = time.monotonic() + _START_S
    for number, endpoint in enumerate(endpoints):
        host, port = endpoint.rsplit(":", 1)
        while True:
            if started[number].poll() is not None:
                raise UserError(f"instance {number} ended; see {out / f'instance-{number}.log'}")
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                break
            if time.monotonic() > end:
                raise UserError(f"instance {number} does not listen on {endpoint} after {_START_S:.0f} s")
            time.sleep(1.0)
