"""Holds a run to the log-probability contract (DESIGN rule 4): each step is measured, and judged by the policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from streamrl_jax.config import Config
from streamrl_jax.control.protocol import RunController
from streamrl_jax.errors import UserError
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.train.agreement import Comparison, Verdict, compare, explain, judge
from streamrl_jax.train.answer import generated_answer
from streamrl_jax.train.batcher import pack_all
from streamrl_jax.train.report import IterationResult
from streamrl_jax.train.rollouts import arriving
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.train.weights import WeightDoor
from streamrl_jax.types import Prompt, Sampling

log = logging.getLogger(__name__)


def probe_sampling(cfg: Config, sampling: Sampling) -> Sampling:
    """Training's distribution, cut short."""
    tokens = min(cfg.agreement.probe_tokens, sampling.max_new_tokens)
    return replace(sampling, max_new_tokens=tokens)


class AgreementGate:
    """Measures, remembers, and stops or warns.

    In sync mode the consumed samples are of the trainer's own version, and they are what is compared. Where the trainer
    may have moved on, each version is also compared on a small probe: after its push every instance answers the same
    few prompts, and the trainer scores them before its next update, while it still holds that version.

    Call order per iteration: ``probe`` before the update, ``check`` after it.

    Args:
        cfg: The run's configuration.
        controller: Runs the probes.
        weights: Says when a version is served.
        prompts: What the probe asks.
        sampling: From `probe_sampling`.
        stop: Signals that may end the wait for a probe.
    """

    def __init__(
        self,
        cfg: Config,
        controller: RunController,
        weights: WeightDoor,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        stop: StopSignal,
    ) -> None:
        self._cfg = cfg
        self._controller = controller
        self._weights = weights
        self._prompts = tuple(prompts[: cfg.agreement.probe_prompts])
        self._sampling = sampling
        self._stop = stop
        self._history: list[float] = []
        self._probed: Comparison | None = None

    def probe(self, trainer: Trainer, version: int) -> None:
        """Compares the instances with the trainer's present parameters, in async mode; waits for the answers.

        Args:
            trainer: Holds the parameters of ``version``.
            version: The newest published one.

        Raises:
            StopRequested: A signal came.
        """
        self._probed = None
        if self._cfg.trainer.max_staleness == 0 or not self._prompts:
            return
        bound = self._cfg.trainer.sample_timeout_s
        with self._stop.interruptible():
            self._weights.served(bound)
        jobs = self._controller.probe(version, self._prompts, self._sampling)
        samples = [sample for job in jobs for sample in arriving(self._controller, job, bound, self._stop)]
        answers = [generated_answer(sample.prompt, sample.generation) for sample in samples]
        micros = pack_all(answers, trainer.shape)
        self._probed = compare([(micro, trainer.logprobs(micro)) for micro in micros], version)

    def check(self, iteration: int, result: IterationResult) -> None:
        """Judges the iteration; what was probed counts where there is a probe.

        An iteration whose update was refused (`trainer.on_non_finite`) is not judged: its log-probs may be no numbers.

        Raises:
            UserError: The policy says stop, or an update was refused and the configuration says stop.
        """
        if result.refusal is not None:
            text = f"iteration {iteration}: the update was refused: {result.refusal}"
            if self._cfg.trainer.on_non_finite == "stop":
                raise UserError(
                    f"{text}. The iteration's samples are in samples/, the weights are as before that update. Look at "
                    "the reward function and at a loss of your own, or lower actor.optim.lr; --resume goes on from the "
                    "last checkpoint, and trainer.on_non_finite = 'skip' passes over such iterations"
                )
            log.warning("%s; it is passed over, with the weights as before it", text)
            return
        if empty := result.metrics.get("training/update_empty"):
            log.warning(
                "iteration %d: nothing to train on in %d update%s: every answer was left out or masked; there the "
                "policy stays as it was",
                iteration,
                empty,
                "s" if empty > 1 else "",
            )
        compared = self._probed or result.agreement
        reached = compared.quantile(self._cfg.agreement.quantile)
        if reached is None:
            return
        self._history.append(reached)
        verdict = judge(self._history, self._cfg.agreement)
        if verdict is Verdict.AGREES:
            return
        text = f"iteration {iteration}: {explain(compared, self._cfg.agreement)}"
        if verdict is Verdict.STOP:
            raise UserError(text)
        log.warning(text)

    def metrics(self) -> dict[str, float]:
        """What the probe measured in this iteration."""
        if self._probed is None:
            return {}
        return {
            name.replace("training/rollout_", "training/probe_"): value
            for name, value in self._probed.metrics().items()
        }
