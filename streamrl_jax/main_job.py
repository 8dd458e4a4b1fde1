"""The main job: starts instances, builds the trainer while they load, runs the loop, and ends everything.

The order matters. What can be refused is refused before a process is started; the instances come first, since they
take longest; JAX's devices are touched after that, with the environment that they need.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl_jax.commands.starts import Fork, parse_fork
from streamrl_jax.config import Config
from streamrl_jax.config_hints import hints
from streamrl_jax.config_io import dump_config, load_config
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.metrics import JsonlSink, MetricSink, Sinks, TensorBoardSink
from streamrl_jax.progress import ConsoleSink, Display
from streamrl_jax.provenance import write_provenance
from streamrl_jax.rundir import RunDir, create, look, reopen
from streamrl_jax.samples_log import supersede
from streamrl_jax.setup.devices import DeviceSplit, look_around, split_devices, trainer_environment
from streamrl_jax.setup.distributed import Member, failures_told, membership, met, own_share, spawned, tell
from streamrl_jax.setup.generation import open_generation
from streamrl_jax.setup.inputs import NO_FUNCTIONS, Functions, Inputs, read_inputs
from streamrl_jax.setup.jax_setup import prepare_jax
from streamrl_jax.trace import Trace

if TYPE_CHECKING:
    from streamrl_jax.train.advantage import GroupAdvantage
    from streamrl_jax.train.assemble import Restore
    from streamrl_jax.train.checkpoint import Checkpointer
    from streamrl_jax.train.evaluator import Evaluation
    from streamrl_jax.train.loop import Parts
    from streamrl_jax.train.loss import PolicyLoss


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        run_dir: Its directory.
        version: Of the last weights; equals the iterations completed.
        evaluations: On the held-out prompts, in order.
        stopped_by: The signal that ended it early; empty: it is complete.
    """

    run_dir: Path
    version: int
    evaluations: tuple[Evaluation, ...]
    stopped_by: str = ""


def run(
    config: Config | str | Path | Sequence[str | Path],
    *overrides: str,
    reward_fn: Callable[..., Any] | None = None,
    loss_fn: PolicyLoss | None = None,
    advantage_fn: GroupAdvantage | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> RunResult:
    """Runs the main job from Python; the entry `streamrl_jax.run`.

    Args:
        config: A configuration, or the TOML files that it is layered from.
        *overrides: ``section.key=value``, as on the command line.
        reward_fn: A reward with TRL's ``(completions, **columns)`` or verl's ``compute_score`` signature.
        loss_fn: A policy loss (see `streamrl_jax.train.loss.PolicyLoss`).
        advantage_fn: A group advantage (see `streamrl_jax.train.advantage.GroupAdvantage`).
        run_dir: Where the run lives; None: ``run.dir/run.name``.
        resume: Whether to go on with the run that lives there.

    Returns:
        How it ended.

    Raises:
        UserError: Something given is wrong; names it and the remedy.
    """
    if isinstance(config, Config):
        if overrides:
            raise UserError("overrides are for configuration files; a Config is given as it is to be")
        resolved = config
    else:
        files = [config] if isinstance(config, str | Path) else list(config)
        resolved = load_config([Path(file) for file in files], overrides)
    functions = Functions(reward_fn, loss_fn, advantage_fn)
    return train(resolved, Path(run_dir) if run_dir else None, resume=resume, functions=functions)


def train(
    cfg: Config,
    run_dir: Path | None = None,
    *,
    resume: bool = False,
    fork: Fork | None = None,
    functions: Functions = NO_FUNCTIONS,
) -> RunResult:
    """Runs, resumes or forks a run.

    Args:
        cfg: The resolved configuration.
        run_dir: Where the run lives; None: ``run.dir/run.name``.
        resume: Goes on from the newest whole checkpoint of ``run_dir``; if there is none, from the beginning, which
            of a fork is where it forked.
        fork: The checkpoint of another run to start from.
        functions: Functions of one's own.

    Returns:
        How it ended.

    Raises:
        UserError: Something given is wrong, or the run cannot go on; names it and the remedy.
    """
    member = membership(cfg)
    _check_spawned(cfg, functions)
    if not member.leads:
        from streamrl_jax.follower_job import follow

        return follow(cfg, member, functions)
    path = run_dir or Path(cfg.run.dir) / cfg.run.name
    split = split_devices(cfg, look_around(dict(os.environ)))
    inputs = read_inputs(cfg, functions)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal().listening())
        if fork is not None:
            fork = _pinned(fork, cfg)
        written = dump_config(cfg)
        opened = reopen(path, written) if resume else create(path, written, str(fork) if fork else "")
        home = stack.enter_context(opened)
        return _lead(cfg, home, inputs, member, split, stop, stack, resume=resume)


def _lead(
    cfg: Config,
    home: RunDir,
    inputs: Inputs,
    member: Member,
    split: DeviceSplit,
    stop: StopSignal,
    stack: contextlib.ExitStack,
    *,
    resume: bool,
) -> RunResult:
    """A run as its first trainer process, mostly the only one, has it; see the module for the order."""
    own = own_share(split.trainer, 0, cfg.trainer.distributed)
    display = stack.enter_context(Display(cfg.run.name, cfg.trainer.total_training_steps))
    display.note(f"run directory: {home.path}")
    for hint in hints(cfg):
        display.note(f"note: {hint}")
    stack.enter_context(spawned(cfg, home, member, split.trainer))
    generation = stack.enter_context(open_generation(cfg, home, inputs, split, display, member.count))
    if member.count > 1:
        stack.enter_context(failures_told(generation.controller))
        stack.enter_context(stop.relayed(generation.controller.stop))
        display.phase("meet", f"waiting for {member.count - 1} other trainer processes")
    prepare_jax(cfg, trainer_environment(cfg, replace(split, trainer=own)))
    stack.enter_context(met(cfg, member, own))
    display.done("meet")
    from streamrl_jax.train.assemble import Edges, Leading, assembled
    from streamrl_jax.train.checkpoint import Checkpointer
    from streamrl_jax.train.checkpoint_meta import BEST_METRIC

    keep = cfg.trainer.max_ckpt_to_keep
    checkpointer = stack.enter_context(Checkpointer(home.checkpoints, keep, BEST_METRIC))
    restore = _restore_point(home, checkpointer, resume, stack)
    tell(home, cfg, restore)
    sink = stack.enter_context(_sinks(cfg, home, display, _last_step(restore) if resume else None))
    _write_down(cfg, home, inputs)
    trace = stack.enter_context(Trace(home.trace))
    leading = Leading(generation, sink)
    edges = Edges(generation.controller, checkpointer, display, trace, stop, leading)
    try:
        parts, start = stack.enter_context(assembled(cfg, home, inputs, edges, restore))
    except StopRequested as request:  # nothing is trained yet that a checkpoint could keep
        return RunResult(home.path, restore.step if restore else 0, (), str(request))
    return run_loop(parts, start, home, display)


def _check_spawned(cfg: Config, functions: Functions) -> None:
    if cfg.trainer.distributed.spawn and (functions.loss or functions.advantage):
        raise UserError(
            "trainer.distributed.spawn starts the other trainer processes from the configuration, which does not hold "
            "a loss or an advantage given from Python; name it there (algorithm.loss_fn, algorithm.advantage_fn), or "
            "call streamrl_jax.run in each process"
        )


def _pinned(fork: Fork, cfg: Config) -> Fork:
    """The fork with its directory and step as they are now: a resume may have to find them again."""
    from streamrl_jax.train.checkpoint import Checkpointer

    with Checkpointer(look(fork.run_dir).checkpoints, 1) as source:
        pinned = Fork(fork.run_dir.absolute(), source.read_meta(fork.step).step)
    if pinned.step is not None and pinned.step >= cfg.trainer.total_training_steps:
        raise UserError(
            f"the fork starts at step {pinned.step} of {pinned.run_dir}, and trainer.total_training_steps = "
            f"{cfg.trainer.total_training_steps}: nothing would be trained; raise it, or fork from an earlier step"
        )
    return pinned


def _last_step(restore: Restore | None) -> int:
    """The step that a resumed run's records are kept up to; without a checkpoint of its own it begins anew."""
    return -1 if restore is None or restore.forked else restore.step


def run_loop(parts: Parts, start: int, home: RunDir, display: Display) -> RunResult:
    """Trains to the end, or until a signal asks for it, and writes the last checkpoint."""
    from streamrl_jax.train import loop

    ending = ""
    try:
        loop.train(parts, start)
    except StopRequested as request:
        ending = str(request)
        display.note(f"{ending}: writing a checkpoint, then ending")
    display.phase("checkpoint", "writing the last checkpoint")
    version = parts.keeper.save_now()
    display.done("checkpoint")
    return RunResult(home.path, version, tuple(parts.evaluator.results), ending)


def _restore_point(
    home: RunDir, checkpointer: Checkpointer, resume: bool, stack: contextlib.ExitStack
) -> Restore | None:
    """The checkpoint to start from; what the run recorded beyond it is set aside, since it is done again."""
    from streamrl_jax.train.assemble import Restore
    from streamrl_jax.train.checkpoint import Checkpointer

    if resume:
        step = checkpointer.latest()
        checkpointer.set_aside(step or 0)
        supersede(home.samples, step or 0, home.fence.incarnation)
        if step is not None:
            return Restore(checkpointer, step)
    if not home.forked_from:
        return None
    fork = parse_fork(home.forked_from)
    assert fork.step is not None  # it was pinned
    source = stack.enter_context(Checkpointer(look(fork.run_dir).checkpoints, 1))
    return Restore(source, fork.step, forked=True)


@contextlib.contextmanager
def _sinks(cfg: Config, home: RunDir, display: Display, restored: int | None) -> Iterator[MetricSink]:
    sinks: list[MetricSink] = [JsonlSink(home.metrics, restored)]
    if "console" in cfg.trainer.logger:
        sinks.append(ConsoleSink(display))
    if "tensorboard" in cfg.trainer.logger:
        sinks.append(TensorBoardSink(home.path / "tensorboard", restored))
    together = Sinks(sinks)
    try:
        yield together
    finally:
        together.close()


def _write_down(cfg: Config, home: RunDir, inputs: Inputs) -> None:
    """The resolved configuration of this life, and its provenance."""
    import jax

    write_provenance(home, cfg, [str(device) for device in jax.devices()], inputs.model_dir)
