"""Trains on a run's recorded samples again: nothing is generated, and the losses are those of the run (DESIGN rule 7).

For what a run leaves open: does another loss, learning rate or mesh learn better from the very same samples; and does a
machine compute what another one did.

    from streamrl_jax.config_io import load_config
    from streamrl_jax.train.replay import replay

    run = Path("runs/demo")
    for iteration, result in replay(load_config([run / "config.toml"], ["actor.optim.lr=1e-4"]), run, range(10)):
        print(iteration, result.metrics["actor/pg_loss"])
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl_jax.config import Config
from streamrl_jax.rundir import look
from streamrl_jax.samples_log import read_samples
from streamrl_jax.setup.inputs import NO_FUNCTIONS, Functions, read_inputs
from streamrl_jax.train.assemble import Restore, build_steps, build_trainer
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.report import IterationResult


def replay(
    cfg: Config, run_dir: Path, iterations: range, functions: Functions = NO_FUNCTIONS
) -> Iterator[tuple[int, IterationResult]]:
    """Trains on recorded iterations, in the order in which their samples were consumed.

    Args:
        cfg: The run's own for the same losses; another one for other losses from the same samples.
        run_dir: The run; it is only read.
        iterations: Which; a first one other than 0 starts from its checkpoint of that number.
        functions: Those that the run was given from Python.

    Yields:
        Each iteration with its result.

    Raises:
        UserError: An iteration or the checkpoint is not there, or does not fit the configuration.
    """
    first = iterations.start
    inputs = read_inputs(cfg, functions)
    with Checkpointer(look(run_dir).checkpoints, 1) as source:
        restore = Restore(source, first) if first else None
        trainer, _ = build_trainer(build_steps(cfg, inputs), inputs, restore)
    for iteration in iterations:
        trainer.begin_iteration(iteration)
        for sample in read_samples(run_dir, iteration):
            trainer.add(sample)
        yield iteration, trainer.end_iteration()
