"""When a checkpoint is written, and what it says of the run beside the state."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from blake3 import blake3

from streamrl_jax.config import Config
from streamrl_jax.config_io import dump_config
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import BEST_METRIC, Frontier, Meta
from streamrl_jax.train.evaluator import Evaluator
from streamrl_jax.train.plan import Plan
from streamrl_jax.train.rollouts import Rollouts
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.types import Fence


class SavedForecast(Protocol):
    """What is known of answers' lengths, kept beside the checkpoints."""

    def save(self, step: int, keep: Collection[int]) -> None:
        """Begins to write what goes with the checkpoint of a step; ``keep``: the other checkpoints there are."""
        ...

    def wait(self) -> None:
        """Returns when that is on disk."""
        ...


class Keeper:
    """Writes checkpoints between iterations, where state, version and iteration belong together.

    The consumed frontier is one number, the first iteration that was not consumed: an iteration's prompts are a pure
    function of it, and what was in flight beyond it is generated anew (DESIGN rule 7).

    Args:
        cfg: The run's configuration.
        checkpointer: Writes, behind the training.
        trainer: Holds the state.
        evaluator: Has the newest held-out accuracy, by which the best checkpoint is kept.
        rollouts: Knows what was in flight.
        fence: This life of the run.
        start: Where it began. That state is written already, or can be made again.
        plan: Of several trainer processes, all of which write; None: there is one.
        forecast: Saved with each checkpoint; None: there is none, or another trainer process has it.
    """

    def __init__(
        self,
        cfg: Config,
        checkpointer: Checkpointer,
        trainer: Trainer,
        evaluator: Evaluator,
        rollouts: Rollouts,
        fence: Fence,
        start: int,
        plan: Plan | None = None,
        forecast: SavedForecast | None = None,
    ) -> None:
        self._cfg = cfg
        self._checkpointer = checkpointer
        self._trainer = trainer
        self._evaluator = evaluator
        self._rollouts = rollouts
        self._fence = fence
        self._plan = plan or Plan()
        self._forecast = forecast
        self._config_digest = blake3(dump_config(cfg).encode()).hexdigest()
        self._completed = start
        self._saved = start

    def completed(self, version: int) -> None:
        """The trainer holds the state of ``version``: so many iterations are consumed."""
        self._completed = version

    def due(self, version: int) -> bool:
        """Whether a checkpoint is to be written: every ``save_freq``, and the last."""
        freq, total = self._cfg.trainer.save_freq, self._cfg.trainer.total_training_steps
        return version == total or (freq > 0 and version % freq == 0)

    def save(self, version: int) -> None:
        """Begins to write a checkpoint of the trainer's present state."""
        newest = self._evaluator.results[-1] if self._evaluator.results else None
        known = newest is not None and newest.version == version and math.isfinite(newest.accuracy)
        metrics = {BEST_METRIC: newest.accuracy} if newest and known else None
        self._plan.whole("checkpoint", version)
        self._checkpointer.save(version, self._trainer.state, self._meta(version), metrics)
        if self._forecast is not None:
            self._forecast.save(version, self._checkpointer.steps())
        self._saved = version

    def save_now(self) -> int:
        """Writes the last whole state, if it is not written yet, and waits until it is on disk.

        Returns:
            Its version.
        """
        if self._saved != self._completed:
            self.save(self._completed)
        self._checkpointer.wait()
        if self._forecast is not None:
            self._forecast.wait()
        return self._completed

    def _meta(self, version: int) -> Meta:
        in_flight = tuple(iteration for iteration in self._rollouts.open_iterations if iteration >= version)
        return Meta(
            step=version,
            version=version,
            incarnation=self._fence.incarnation,
            frontier=Frontier(version, in_flight),
            config_digest=self._config_digest,
        )
