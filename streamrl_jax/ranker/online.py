"""What a run predicts of its answers' lengths, learned while it goes, off the path of its training.

::

    trainer's thread          prepare(i+1)  take(i+1)      observe(sample) …  learn(i)        save(step)
                                   │            ▲                               │                │
    thread "ranker-score"     history + ranker ─┘ waits max_wait_s at most      │                │
                                   ▲      ▲                                     ▼                ▼
    thread "ranker-learn"          │      └──────────────────────────── history, choice     RUN_DIR/ranker/step_N/
                                   │                                            │ newest answers
    thread "ranker-refresh"    swapped in ◀── trained on, every refresh_every ◀─┘

There is one refresh at a time. One that takes longer than refresh_every iterations lets the next one wait: that is due,
and begins with the first iteration that is learned after the other one's end, from the answers that are newest then.

JAX computes on one CPU device of this host, never on the trainer's GPUs. Without GPUs that is one of the trainer's own
devices; steps are small, so that neither waits long for the other. The threads run at a low priority; those of XLA,
which do most of a step's work, have the process's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from streamrl_jax.config_ranker import RankerSection
from streamrl_jax.errors import UserError
from streamrl_jax.metrics import Value
from streamrl_jax.ranker.background import Background, check_all, result_of
from streamrl_jax.ranker.fit import FitOptions, LossNotFiniteError, fit_ranker, refresh_rate
from streamrl_jax.ranker.held_back import FEWEST_PROMPTS
from streamrl_jax.ranker.knowledge import (
    Knowledge,
    Predicted,
    base_id,
    grouped,
    measures,
    write_knowledge,
)
from streamrl_jax.ranker.lengths import ObservedLengths, merged
from streamrl_jax.ranker.model import LengthRanker
from streamrl_jax.ranker.state import state_directory, write_state
from streamrl_jax.types import Prompt, Sample, TokenIds

log = logging.getLogger(__name__)

_LONGEST_READ: Final = 4096  # tokens of a prompt, its last ones, that a ranker learned during the run reads
_AT_ONCE: Final = 256  # prompts that are scored between two looks at whether it is still wanted
_LISTS: Final = ((64, 48), (FEWEST_PROMPTS, 12))
"""From so many prompts on, a step has so many; few shapes to compile."""
_CHECK_EVERY: Final = 10  # steps between two looks, at which a refresh also sees that it is to end
_LOOK_S: Final = 0.01
_CLOSE_S: Final = 30.0
_SAVE_S: Final = 120.0


class _EndedEarlyError(Exception):
    """A refresh that is not needed any more."""


@dataclass(eq=False)
class _Asked:
    """An iteration that is to be predicted."""

    iteration: int
    prompts: Sequence[Prompt]
    before: Sequence[Future[Any]]  # all that was to be learned, and trained, when it was prepared
    wanted: threading.Event = field(default_factory=threading.Event)  # the trainer waits
    missed: threading.Event = field(default_factory=threading.Event)  # it has gone on without

    def silent(self, why: str, with_history: float = 0.0) -> Predicted:
        """Nothing is said of it."""
        return Predicted(tuple(prompt.prompt_id for prompt in self.prompts), None, with_history, why)


class OnlineForecast:
    """Keeps `train.rollouts.Forecast` and `train.keeper.SavedForecast`; one a run, in its first trainer process.

    Invariants: no call waits for a thread, but for ``take`` (``max_wait_s``), ``wait`` (for what was saved) and
    ``close`` (for the tasks that run). At most one refresh is begun and not done, and nothing but predictions waits for
    it: neither what is learned nor what is saved. An iteration is predicted from all that was learned before it was
    prepared, unless the trainer comes for it sooner: then from what is there. So a resumed run predicts what it would
    have predicted without a break, but where that break fell into a refresh from older answers. An exception in a
    thread is raised by the next call, of several the first.

    Args:
        section: ``[ranker]``.
        known: What it begins with; from `restore.begin`.
        said: What was predicted of iterations in flight, from there too.
        run_dir: Of the run; the state lies in it.
        longest: Tokens that an answer may have.
        vocab_size: Of the policy.
        seed: Of the run.
    """

    def __init__(
        self,
        section: RankerSection,
        known: Knowledge,
        said: dict[int, Predicted],
        run_dir: Path,
        *,
        longest: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._section = section
        self._known = known
        self._said = said
        self._run_dir = run_dir
        self._longest = longest
        self._options = FitOptions(
            vocab_size=vocab_size, steps=section.refresh_steps, check_every=_CHECK_EVERY, seed=seed
        )
        self._lock = threading.Lock()  # over the predictor and the ranker's name; held shortly
        self._asked: dict[int, tuple[_Asked, Future[Predicted]]] = {}
        self._samples: list[Sample] = []
        self._now = 0  # the newest iteration that has begun
        self._metrics: dict[str, Value] = {}
        self._seconds: list[float] = []  # of refreshes, since they were last told
        self._ended = threading.Event()
        self._tail = known.has_tail
        self._unfinished = 0  # refreshes that are begun and not done
        self._due = known.due and section.refresh_every > 0  # one is to begin when there is none at work
        self._saved: Future[Path] | None = None
        self._scorer = Background("ranker-score", _CLOSE_S)
        self._learner = Background("ranker-learn", _CLOSE_S)
        self._refresher = Background("ranker-refresh", _CLOSE_S)
        self._learned: Future[Sequence[ObservedLengths]] | None = None
        self._refreshed: Future[None] | None = None
        self._begin_to_learn([], 0, last=False)

    # ---------------------------------------------------------------- before an iteration

    def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Begins to predict an iteration's prompts; returns at once.

        What a run before a resume said of the iteration stays, unless it said it of other prompts.
        """
        ids = tuple(prompt.prompt_id for prompt in prompts)
        if (said := self._said.get(iteration)) is not None and said.prompt_ids != ids:
            log.warning("iteration %d has other prompts than were predicted; it is predicted anew", iteration)
            del self._said[iteration]
        if iteration in self._said or iteration in self._asked:
            return
        asked = _Asked(iteration, prompts, self._begun())
        self._asked[iteration] = asked, self._scorer.do(lambda: self._predict(asked))

    def take(self, iteration: int) -> list[float] | None:
        """What `prepare` was asked for.

        Args:
            iteration: Which.

        Returns:
            Expected tokens of an answer to each prompt, from 1 to the longest that is allowed; None: nothing is known
            yet, the answers are of about the same length, or it was not in time.

        Raises:
            Exception: A thread failed.
        """
        self._check()
        self._now = iteration
        if iteration not in self._said:
            asked, result = self._asked.pop(iteration)
            asked.wanted.set()
            try:
                self._said[iteration] = result_of(result, self._section.max_wait_s, self._threads)
            except TimeoutError:
                asked.missed.set()
                self._said[iteration] = asked.silent(
                    f"not within ranker.max_wait_s = {self._section.max_wait_s:g}"
                )
        tokens = self._said[iteration].tokens
        return None if tokens is None else tokens.tolist()

    def known(self, prompt: Prompt) -> float | None:
        """Expected tokens of an answer to a single prompt, from its own past answers; None: it has none."""
        self._check()
        if not self._tail:
            return None
        with self._lock:
            recalled = self._known.predictor.history.recall([base_id(prompt.prompt_id)], self._now)
        return float(recalled.tokens[0].clip(1, self._longest)) if recalled.weight[0] > 0 else None

    # ---------------------------------------------------------------- after it

    def observe(self, sample: Sample) -> None:
        """A sample is consumed; it is kept until its iteration is."""
        self._samples.append(sample)

    def learn(self, iteration: int, *, last: bool) -> None:
        """Measures what was predicted of an iteration, and begins to learn from its samples.

        Args:
            iteration: All its samples were given to `observe`, and it is trained on.
            last: No other one follows, so that no refresh is begun.
        """
        self._check()
        rows, self._samples = grouped(self._samples), []
        self._metrics = measures(self._said.pop(iteration, None), rows)
        seconds, self._seconds = self._seconds, []
        if seconds:
            self._metrics["ranker/refresh_s"] = sum(seconds)
        every = self._section.refresh_every
        self._due |= not last and every > 0 and (iteration + 1) % every == 0
        self._begin_to_learn(rows, iteration, last=last)

    def metrics(self) -> dict[str, Value]:
        """How well the iteration last given to `learn` had been predicted; empty before there is one."""
        return self._metrics

    # ---------------------------------------------------------------- with a checkpoint, and at the end

    def save(self, step: int, keep: Collection[int]) -> None:
        """Begins to write what is known, when everything given to `learn` is learned.

        A refresh that is at work then is not waited for: a resumed run begins it again.

        Args:
            step: Of the checkpoint that it goes with.
            keep: Steps of the other checkpoints; the states of those that are gone are removed.
        """
        said = {iteration: entry for iteration, entry in self._said.items() if iteration >= step}
        due = self._due
        self._saved = self._learner.do(lambda: self._write(step, said, keep, due))

    def wait(self) -> None:
        """Returns when what was saved is on disk; at the end of a run.

        A refresh that is under way is given up; a resumed run begins it again.

        Raises:
            TimeoutError: It takes too long.
            Exception: A thread failed.
        """
        self._ended.set()
        self._check()
        if self._saved is None:
            return
        try:
            result_of(self._saved, _SAVE_S, self._threads)
        except TimeoutError as error:
            where = state_directory(self._run_dir, 0).parent
            raise TimeoutError(f"the state in {where} was not written within {_SAVE_S:g} s") from error

    def close(self) -> None:
        """Ends the threads; what `wait` has not waited for may be lost.

        Waits for the task that each thread is at, so long as `Background` does. A refresh ends when it next looks; what
        XLA compiles meanwhile cannot be interrupted, and the process ends after it.
        """
        self._ended.set()
        for thread in self._threads:
            thread.close()

    @property
    def _threads(self) -> tuple[Background, ...]:
        return self._scorer, self._refresher, self._learner

    def _check(self) -> None:
        check_all(self._threads)

    def _begun(self) -> tuple[Future[Any], ...]:
        """What is to be learned and trained so far."""
        return tuple(begun for begun in (self._learned, self._refreshed) if begun is not None)

    def _begin_to_learn(self, rows: Sequence[ObservedLengths], iteration: int, *, last: bool) -> None:
        refresh = self._due and not last and (self._refreshed is None or self._refreshed.done())
        self._learned = learned = self._learner.do(lambda: self._learn(rows, iteration, refresh))
        if refresh:
            self._due = False
            self._refreshed = self._refresher.do(lambda: self._refresh(learned))

    # ---------------------------------------------------------------- in the thread that scores

    def _predict(self, asked: _Asked) -> Predicted:
        while not (_all_done(asked.before) or asked.wanted.is_set() or self._scorer.stopping.is_set()):
            asked.wanted.wait(_LOOK_S)
        ids = [base_id(prompt.prompt_id) for prompt in asked.prompts]
        with self._lock:
            ranker, tail = self._known.ranker, self._tail
            weight = self._known.predictor.history.recall(ids, asked.iteration).weight
        share = float((weight > 0).mean())
        if not tail:
            return asked.silent("the answers are of about the same length", share)
        try:
            scored = None if ranker is None else self._scored(ranker, asked)
        except _EndedEarlyError:
            return asked.silent("not in time", share)
        with self._lock:
            tail = self._tail  # of the very answers that it is predicted from: more may have come since
            tokens = self._known.predictor.predict(ids, scored, asked.iteration).clip(1, self._longest)
        if not tail:
            return asked.silent("the answers are of about the same length", share)
        # As with a calibration that is flat, of a ranker whose scores have told nothing; histories count beside it.
        if tokens.max() <= tokens.min():
            return asked.silent("nothing is known yet that tells one prompt from another", share)
        return Predicted(tuple(prompt.prompt_id for prompt in asked.prompts), tokens, share)

    def _scored(self, ranker: LengthRanker, asked: _Asked) -> Float32[np.ndarray, " prompts"]:
        read = [self._read(ranker, prompt.token_ids) for prompt in asked.prompts]
        found: list[np.ndarray] = []
        for start in range(0, len(read), _AT_ONCE):
            if asked.missed.is_set() or self._scorer.stopping.is_set():
                raise _EndedEarlyError
            found.append(ranker.lengths(read[start : start + _AT_ONCE]))
        return np.concatenate(found)

    def _read(self, ranker: LengthRanker | None, token_ids: TokenIds) -> TokenIds:
        """What a ranker reads of a prompt: the end, where it is longer than it can read."""
        limit = _LONGEST_READ
        if ranker is not None and self._section.path:
            limit = ranker.model.arch.max_positions
        return token_ids[-limit:]

    # ---------------------------------------------------------------- in the threads that learn and refresh

    def _learn(
        self, rows: Sequence[ObservedLengths], iteration: int, refresh: bool
    ) -> Sequence[ObservedLengths]:
        """Takes in an iteration; what a refresh is to learn from, where one is due."""
        known = self._known
        with self._lock:  # at once, so that nobody predicts from answers whose lengths are not judged yet
            known.take_in(rows, iteration)
            self._tail = tail = known.has_tail
            self._unfinished += refresh
        return list(known.recent) if refresh and tail else []

    def _refresh(self, learned: Future[Sequence[ObservedLengths]]) -> None:
        """Trains the ranker on; the new one takes the place of the old one when it is done.

        A fit whose loss is no number is given up, with a warning: predictions steer, and a run can do without a newer
        ranker.
        """
        answers = learned.result()
        if self._ended.is_set():
            return  # it stays due
        begun, before = time.monotonic(), self._known.ranker
        rows = merged(replace(row, token_ids=self._read(before, row.token_ids)) for row in answers)
        found = None
        if len(rows) >= FEWEST_PROMPTS:
            size = next(size for least, size in _LISTS if len(rows) >= least)
            rate = self._options.learning_rate if before is None else refresh_rate(before.model.arch)
            options = replace(self._options, list_size=size, learning_rate=rate)
            try:
                found = fit_ranker(rows, options, before, report=self._look)
            except _EndedEarlyError:
                return  # it stays due
            except LossNotFiniteError as error:
                log.warning(
                    "the ranker was to be trained on with the answers to %d prompts, but at step %d the loss was %s: "
                    "%s; the next refresh tries again",
                    len(rows),
                    error.step,
                    error.loss,
                    "it stays as it was" if before is not None else "there is none yet",
                )
            self._seconds.append(time.monotonic() - begun)
        with self._lock:
            self._unfinished -= 1
            if found is not None:
                self._known.ranker, self._known.trained = replace(found, source=None), True

    def _look(self, line: str) -> None:
        log.debug("refresh: %s", line)
        if self._ended.is_set():
            raise _EndedEarlyError

    def _write(self, step: int, said: dict[int, Predicted], keep: Collection[int], due: bool) -> Path:
        def fill(directory: Path) -> None:
            with self._lock:
                known = replace(self._known, due=due or self._unfinished > 0)
                arrays = known.predictor.to_arrays()
            write_knowledge(known, arrays, said, self._section.path, directory)

        try:
            return write_state(self._run_dir, step, fill, keep)
        except OSError as error:
            raise UserError(
                f"{state_directory(self._run_dir, step)}: what the run knows of its answers' lengths cannot be written "
                f"({error}); free some space, or remove what is in the way, then go on with --resume"
            ) from error


def _all_done(begun: Sequence[Future[Any]]) -> bool:
    return all(one.done() for one in begun)
