"""`streamrl eval`: accuracy and pass@k of a checkpoint on held-out prompts, through real instances."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_jax.config import Config
from streamrl_jax.errors import UserError
from streamrl_jax.progress import Display
from streamrl_jax.setup.serving import Served, serving

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
    with serving(cfg, "evaluation") as served:
        return _evaluate(cfg, served)


def _evaluate(cfg: Config, served: Served) -> Evaluation:
    from streamrl_jax.train.evaluator import Evaluator, evaluation_sampling

    held_out = served.inputs.test_prompts
    assert held_out is not None
    sampling = evaluation_sampling(cfg, served.stop_token_ids)
    observer = _Observer(served.display)
    evaluator = Evaluator(cfg, served.controller, held_out.all(), sampling, observer, served.stop)
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
