"""What a run knows of its answers' lengths when it begins: anew, after a break, or as a fork."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from streamrl_jax.config_ranker import RankerSection
from streamrl_jax.errors import UserError
from streamrl_jax.ranker.knowledge import Knowledge, Predicted, grouped, read_knowledge
from streamrl_jax.ranker.lengths import ObservedLengths
from streamrl_jax.ranker.state import state_directory, state_faults
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.types import Prompt

if TYPE_CHECKING:
    from streamrl_jax.data.prompts import PromptSet
    from streamrl_jax.ranker.model import LengthRanker

log = logging.getLogger(__name__)

_RANKER_FILE: Final = "ranker.json"  # as `ranker.model` names it, which imports JAX


def check_given(section: RankerSection, prompts: Iterable[Prompt] = ()) -> None:
    """Refuses a ranker that cannot be one for a run, before anything is started.

    Args:
        section: ``[ranker]``.
        prompts: Of the run.

    Raises:
        UserError: ``ranker.path`` is no ranker, or does not know a token of the prompts.
    """
    if not section.path:
        return
    path = Path(section.path)
    if not (path / _RANKER_FILE).is_file():
        raise UserError(
            f"ranker.path = {section.path!r} has no {_RANKER_FILE}; give a directory that streamrl rank fit wrote, or "
            "leave it empty: a small ranker is then learned during the run"
        )
    largest = max((int(prompt.token_ids.max()) for prompt in prompts), default=0)
    if largest >= (known := read_arch(path, critic=True).vocab_size):
        raise UserError(
            f"ranker.path = {section.path!r}: vocab_size = {known} in {path / 'config.json'}, and the prompts have the "
            f"token {largest}; fit a ranker for the tokenizer of model.path"
        )


def begin(
    section: RankerSection,
    load: Callable[[Path], LengthRanker],
    prompts: PromptSet,
    resumed: tuple[Path, int] | None = None,
) -> tuple[Knowledge, dict[int, Predicted]]:
    """What a run knows of its answers' lengths when it begins.

    Args:
        section: ``[ranker]``.
        load: Reads a ranker: `LengthRanker.load`.
        prompts: Those that the run draws from; their ids are row numbers, and say nothing in another set.
        resumed: Run directory and step of the checkpoint that it goes on from, of this run or of the one that it is a
            fork of; None: anew.

    Returns:
        That, and what was predicted of the iterations in flight. Where the state of the checkpoint is missing or
        damaged it is made again from the recorded samples, with a warning. Where it is of another prompt set, or does
        not say of which, histories and predictions are left out, with a warning; newest answers and ranker are kept.

    Raises:
        UserError: ``ranker.path`` is no ranker.
    """
    if resumed is None:
        known = Knowledge(deque(maxlen=section.window), prompts=prompts.digest)
        return replace(known, ranker=_given(section, load)), {}
    run_dir, step = resumed
    wrong = state_faults(run_dir, step)
    if not wrong:
        try:
            restored = read_knowledge(state_directory(run_dir, step), section.window, section.path)
            own = None if restored.ranker is None else replace(load(restored.ranker), source=None)
        except UserError as error:
            wrong = [str(error)]
        else:
            known = replace(restored.known, ranker=own or _given(section, load), trained=own is not None)
            if known.prompts == prompts.digest:
                return known, dict(restored.said)
            log.warning(
                "%s: %s; the prompts' histories and what was predicted of them are left out",
                state_directory(run_dir, step),
                "data.train had other prompts" if known.prompts else "it does not say what prompts it is of",
            )
            return known.of_other_prompts(prompts.digest), {}
    known, told = _made_again(run_dir, step, section.window, prompts)
    log.warning(
        "%s: %s; what is known of the lengths of answers is made again from %s, and the ranker begins anew",
        state_directory(run_dir, step),
        "; ".join(wrong),
        told,
    )
    return replace(known, ranker=_given(section, load), due=True), {}


def _given(section: RankerSection, load: Callable[[Path], LengthRanker]) -> LengthRanker | None:
    return load(Path(section.path)) if section.path else None


def _made_again(run_dir: Path, step: int, window: int, prompts: PromptSet) -> tuple[Knowledge, str]:
    """Histories and newest answers of the newest iterations before ``step``, as many as fill the window.

    A recorded prompt that is not the one of its number any more, by its tokens, gets no history.
    """
    # A dry run checks a ranker too, and does without pyarrow.
    from streamrl_jax.samples_log import read_samples, recorded_iterations

    folder = run_dir / "samples"
    recorded = recorded_iterations(folder) if folder.is_dir() else []
    rows: dict[int, list[ObservedLengths]] = {}
    for iteration in sorted((number for number in recorded if number < step), reverse=True):
        try:
            rows[iteration] = grouped(read_samples(run_dir, iteration))
        except UserError as error:
            log.warning("%s", error)
        if sum(map(len, rows.values())) >= window:
            break
    known = Knowledge(deque(maxlen=window), prompts=prompts.digest)
    now = {prompt.prompt_id: prompt.token_ids for prompt in prompts.all()}
    others = 0
    for iteration in sorted(rows):
        same = [np.array_equal(now.get(row.prompt_id, ()), row.token_ids) for row in rows[iteration]]
        known.take_in(itertools.compress(rows[iteration], same), iteration)
        known.recent.extend(row for row, kept in zip(rows[iteration], same, strict=True) if not kept)
        others += same.count(False)
    if not rows:
        return known, "nothing, since no samples are recorded"
    told = f"the samples of iterations {min(rows)} to {max(rows)}"
    return (
        known,
        f"{told} (without {others} histories of prompts that data.train has not)" if others else told,
    )
