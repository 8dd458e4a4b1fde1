"""`streamrl eval`: accuracy and pass@k of a checkpoint on held-out prompts, through real instances."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.devices import look_around, split_devices, trainer_environment
from streamrl_jax.setup.generation import GenerationSide, open_generation
from streamrl_jax.setup.inputs import Inputs, read_inputs
from streamrl_jax.setup.jax_setup import prepare_jax
from streamrl_jax.types import Fence

if TYPE_CHECKING:
    from streamrl_jax.train.evaluator import Evaluation


def run(cfg: Config, checkpoint: Path | None = None) -> Evaluation:
    """Evaluates a checkpoint on ``data.test``.

    Args:
        cfg: ``data``, ``eval``, ``gen`` and ``reward`` are read.
        checkpoint: What is evaluated; None: ``model.path``.

    Returns:
        The result.

    Raises:
        StopRequested: A signal ended it.
        UserError: Something given is wrong.
    """
    if checkpoint is not None:
        cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(checkpoint)})})
    if not cfg.data.test:
        raise UserError(
            "data.test is empty, and there is nothing to evaluate on; give a file, or 'task:NAME'"
        )
    split = split_devices(cfg, look_around(dict(os.environ)))
    inputs = read_inputs(cfg)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal().listening())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-eval-")))
        (folder / "logs").mkdir()
        home = RunDir(folder, Fence(f"eval-{uuid.uuid4().hex[:8]}", 0))
        display = stack.enter_context(Display("evaluation"))
        generation = stack.enter_context(open_generation(cfg, home, inputs, split, display))
        prepare_jax(cfg, trainer_environment(cfg, split))
        return _evaluate(cfg, home, inputs, generation, display, stop)


def _evaluate(
    cfg: Config,
    home: RunDir,
    inputs: Inputs,
    generation: GenerationSide,
    display: Display,
    stop: StopSignal,
) -> Evaluation:
    from streamrl_jax.train.assemble import build_mesh, open_bridge
    from streamrl_jax.train.evaluator import Evaluator, evaluation_sampling
    from streamrl_jax.train.hf import load_params
    from streamrl_jax.train.models import Model

    assert inputs.test_prompts is not None
    controller = generation.controller
    model = Model(inputs.arch, build_mesh(cfg))
    with open_bridge(cfg, home, model.arch, generation) as weights:
        weights.publish(load_params(inputs.model_dir, model), version=0)
        with stop.interruptible():
            controller.wait_ready(cfg.gen.start_timeout_s)
        stop_ids = (*inputs.tokenizer.eos_ids, *cfg.rollout.stop_token_ids)
        sampling = evaluation_sampling(cfg, stop_ids)
        prompts = inputs.test_prompts.all()
        evaluator = Evaluator(cfg, controller, prompts, sampling, _Observer(display), stop)
        result = evaluator.evaluate(0)
        assert result is not None
        return result


class _Observer:
    """Shows an evaluation.

    Args:
        display: Open.
    """

    def __init__(self, display: Display) -> None:
        self._display = display

    def evaluating(self, version: int) -> None:
        """It begins."""
        self._display.phase("evaluation", "answering the held-out prompts")

    def evaluation(self, result: Evaluation) -> None:
        """It is done."""
        self._display.done("evaluation")
        rows = {"accuracy": f"{result.accuracy:.4f}", "answers": str(result.count)}
        rows |= {f"pass@{k}": f"{value:.4f}" for k, value in result.pass_at_k.items()}
        rows |= {"length": f"{result.length:.1f} tokens", "seconds": f"{result.seconds:.1f}"}
        self._display.summary("evaluation", rows)
