"""Fits a ranker to observed lengths.

Each step draws a list of prompts and, for each of them, a few of its observed lengths; the loss sees one length a
prompt at a time, so that the scores learn the chances and not a mean. Prompts held back decide when to stop and
calibrate the scores. Equal rows, options and start give an equal ranker on one machine.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32, Int

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.ranker.calibrate import calibrate
from streamrl_jax.ranker.held_back import digests, split
from streamrl_jax.ranker.lengths import ObservedLengths, merged
from streamrl_jax.ranker.loss import LOSSES, LossName
from streamrl_jax.ranker.metrics import concordance
from streamrl_jax.ranker.model import (
    RANKER_FILE,
    LengthRanker,
    Size,
    bucket,
    check_prompts,
    last_scores,
    pack,
    ranker_model,
    read_met,
    score_prompts,
    scratch_arch,
)
from streamrl_jax.train.arch import Arch
from streamrl_jax.train.hf import load_critic
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.mesh import put
from streamrl_jax.train.models import Model, Params
from streamrl_jax.train.optim import decayed

LARGEST_VOCABULARY: Final = 2**22
"""Of a ranker from scratch: above any tokenizer's; a damaged token id would ask for as many rows of an embedding."""


class LossNotFiniteError(UserError):
    """The loss of a fit has become NaN or infinite.

    Args:
        step: At which it was seen.
        loss: It.
        rate: Highest learning rate of the fit.
    """

    def __init__(self, step: int, loss: float, rate: float) -> None:
        super().__init__(f"step {step}: the loss is {loss}; lower the learning rate (now {rate:g})")
        self.step = step
        self.loss = loss


Report = Callable[[str], None]


@dataclass(frozen=True)
class FitOptions:
    """How a ranker is fitted.

    Attributes:
        loss: A name of `loss.LOSSES`.
        size: Of a ranker from scratch; not used where one starts from a checkpoint.
        vocab_size: Of a ranker from scratch; 0: as large as the prompts ask for.
        steps: At most so many.
        list_size: Prompts of a step.
        draws: Observed lengths of each prompt that a step looks at, one at a time.
        learning_rate: Highest rate of AdamW; it rises over the first twentieth and falls along a cosine.
        weight_decay: Of matrices.
        average: What is kept of the running mean of the parameters at each step; the ranker is that mean, which holds
            less of the last lists' chance than the parameters themselves; 0: it is the parameters.
        validation: Share of the prompts that are held back (`held_back.split`).
        check_every: Steps between two looks at them.
        patience: Looks without a better order after which the fit ends; 0: those of a quarter of the steps, 20 at
            least, since the order improves again as the rate falls.
        seconds: The fit ends after so long, with the best found until then.
        seed: Of everything that is drawn.
    """

    loss: LossName = "pairwise"
    size: Size = "tiny"
    vocab_size: int = 0
    steps: int = 2000
    list_size: int = 48
    draws: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    average: float = 0.99
    validation: float = 0.15
    check_every: int = 25
    patience: int = 0
    seconds: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UserError: A value is outside its range; names it.
        """
        for name in ("steps", "draws", "check_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: 1 or more is needed")
        if self.list_size < 2:
            raise UserError(f"list_size = {self.list_size}: an order needs 2 prompts or more")
        if not 0 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise UserError(
                f"vocab_size = {self.vocab_size}: a number from 0 to {LARGEST_VOCABULARY} is needed"
            )
        if self.seed < 0:
            raise UserError(f"seed = {self.seed}: 0 or more is needed")
        if not 0.0 < self.validation < 0.9:
            raise UserError(f"validation = {self.validation}: a share between 0 and 0.9 is needed")
        if not 0.0 <= self.average < 1.0:
            raise UserError(f"average = {self.average}: a share from 0 to less than 1 is needed")
        for name in ("learning_rate", "seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)}: a number above 0 is needed")
        if self.patience < 0:
            raise UserError(f"patience = {self.patience}: 0 or more is needed")

    @property
    def patient_steps(self) -> int:
        """Steps without a better order after which the fit ends."""
        return self.patience * self.check_every or max(self.steps // 4, 20 * self.check_every)


class _Lists(NamedTuple):
    """One step's prompts, right-padded, with some observed lengths of each, in units of a typical answer."""

    tokens: Int[np.ndarray, "list len"]
    lengths: Int[np.ndarray, " list"]
    observed: Float32[np.ndarray, "draws list"]
    cut: Bool[np.ndarray, "draws list"]


def fit_ranker(
    rows: Sequence[ObservedLengths],
    options: FitOptions,
    start: Path | LengthRanker | None = None,
    *,
    device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm] (an alias at run time)
    report: Report = lambda line: None,
    where: str = "",
) -> LengthRanker:
    """Fits a ranker.

    Args:
        rows: Observed lengths; rows of the same prompt are joined.
        options: How.
        start: What to start from: a checkpoint directory of a policy, a critic or a ranker whose vocabulary is that of
            the prompts, or a ranker; None: from scratch. A ranker is kept as it is, but for its calibration, unless one
            with a better order is found.
        device: Where it computes; None: this process's first CPU device. A ranker to start from stays where it is.
        report: Is told in a line how it goes, at every look at the prompts held back.
        where: What the rows are of, for an error: files, as a rule.

    Returns:
        The ranker with the best order of the prompts held back, calibrated on them.

    Raises:
        LossNotFiniteError: The loss is not a number.
        UserError: There are too few prompts, the model cannot read one of them, or all answers are of one length.
    """
    prompts = merged(rows)
    training, held = split(prompts, options.validation, options.seed, where)
    model, params = _starting_point(prompts, options, start, device)
    told = f"{where}: " if where else ""
    names = [f"{told}prompt {row.prompt_id!r}" for row in prompts]
    check_prompts([row.token_ids for row in prompts], model.arch, names)
    found = _train(model, params, _Draws(training, options), held, report, keep_start=_is_ranker(start))
    scores = score_prompts(model, found.params, [row.token_ids for row in held])
    answers = np.array([len(row.lengths) for row in held], np.float64)
    calibration = calibrate(scores, np.array([row.mean for row in held]), answers)
    conditions = asdict(options) | {
        "seconds": round(found.seconds, 1),
        "prompts": len(training),
        "held_back": len(held),
        "answers": sum(len(row.lengths) for row in prompts),
        "steps": found.steps,
        "best_step": found.step,
        "concordance": round(found.concordance, 4),
        "start": start.name if isinstance(start, Path) else "scratch" if start is None else "a ranker",
    }
    source = start.source if isinstance(start, LengthRanker) else start
    met = digests(prompts)
    if start is not None:
        met = np.union1d(start.met if isinstance(start, LengthRanker) else read_met(start), met)
    return LengthRanker(model, found.params, calibration, conditions, source, met)


class _Draws:
    """The lists of a fit: every prompt once before any comes again; step n's list depends on the seed alone."""

    def __init__(self, prompts: Sequence[ObservedLengths], options: FitOptions) -> None:
        self._prompts = prompts
        self.options = options
        self._rng = np.random.default_rng([options.seed, 1])
        self._waiting: list[int] = []
        # Units in which a regression starts near zero; the other losses know no unit.
        self._unit = math.exp(float(np.mean([math.log(row.mean) for row in prompts])))

    def next(self) -> _Lists:
        """The next step's list."""
        size = min(self.options.list_size, len(self._prompts))
        while len(self._waiting) < size:
            self._waiting += self._rng.permutation(len(self._prompts)).tolist()
        chosen, self._waiting = self._waiting[:size], self._waiting[size:]
        rows = [self._prompts[index] for index in chosen]
        picks = [self._answers(len(row.lengths)) for row in rows]
        observed = [[row.lengths[pick] for pick in drawn] for row, drawn in zip(rows, picks, strict=True)]
        cut = [[row.cut[pick] for pick in drawn] for row, drawn in zip(rows, picks, strict=True)]
        packed = pack([row.token_ids for row in rows], size, bucket(max(len(row.token_ids) for row in rows)))
        tokens = np.asarray(observed, np.float32).T / np.float32(self._unit)
        return _Lists(packed.tokens, packed.lengths, tokens, np.asarray(cut, bool).T)

    def _answers(self, count: int) -> list[int]:
        """Which of a prompt's answers are drawn: each once before any comes again."""
        rounds = -(-self.options.draws // count)
        picks = np.concatenate([self._rng.permutation(count) for _ in range(rounds)])
        return picks[: self.options.draws].tolist()


@dataclass(frozen=True, eq=False)
class _Found:
    """The best of a fit: its parameters, where they were found, and how far the fit went."""

    params: Params
    step: int
    concordance: float
    steps: int
    seconds: float


def _train(
    model: Model,
    params: Params,
    draws: _Draws,
    held: Sequence[ObservedLengths],
    report: Report,
    *,
    keep_start: bool,
) -> _Found:
    """Steps until the order of the prompts held back gets no better, or the steps or the time are used up.

    What it starts from is the best of them where `keep_start` says so and no step has a better order.
    """
    options, began = draws.options, time.monotonic()
    state = _first_state(options.weight_decay, params)
    best = _Found(params, 0, _order(model, params, held) if keep_start else -math.inf, 0, 0.0)
    average, losses = params, list[jax.Array]()
    for step in range(1, options.steps + 1):
        rate, lists = _rate(options, step), draws.next()
        params, state, loss = _step(model, options.loss, options.weight_decay, rate, params, state, lists)
        average = _averaged(np.float32(min(options.average, (step - 1) / (step + 9))), average, params)
        losses.append(loss)
        spent = time.monotonic() - began
        last = step == options.steps or spent > options.seconds
        if step % options.check_every and not last:
            continue
        mean = float(np.mean(jax.device_get(losses)))
        losses.clear()
        if not math.isfinite(mean):
            raise LossNotFiniteError(step, mean, options.learning_rate)
        order = _order(model, average, held)
        if order > best.concordance:
            best = _Found(average, step, order, step, spent)
        report(
            f"step {step}/{options.steps}: loss {mean:.4f}, order of held-back answers {order:.4f} "
            f"(best {best.concordance:.4f} at step {best.step}), {spent:.0f} s"
        )
        if last or step - best.step >= options.patient_steps:
            return replace(best, steps=step, seconds=spent)
    raise AssertionError("the last step returns")


def _order(model: Model, params: Params, held: Sequence[ObservedLengths]) -> float:
    """How much of the order of the answers to prompts held back is right."""
    scores = score_prompts(model, params, [row.token_ids for row in held])
    return concordance(scores, [row.lengths for row in held], [row.cut for row in held])


def refresh_rate(arch: Arch) -> float:
    """The highest learning rate with which a ranker is trained on; a first fit's would be too high for it.

    0.1 over the width, as the size of a good step of Adam falls (Yang et al. 2022, "Tensor programs V"), and 2e-3 at
    the most: half of a first fit's (`FitOptions.learning_rate`) for `tiny`, 1.1e-4 for a pretrained model of width 896.
    """
    return min(2e-3, 0.1 / arch.embed)


def _rate(options: FitOptions, step: int) -> np.float32:
    """The learning rate of a step, from 1 on: linear over the first twentieth, then half a cosine down to 0."""
    warmup = max(1, options.steps // 20)
    if step <= warmup:
        return np.float32(options.learning_rate * step / warmup)
    done = (step - warmup) / max(options.steps - warmup, 1)
    return np.float32(options.learning_rate * (1 + math.cos(math.pi * done)) / 2)


def _optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without the learning rate, which a compiled step takes as an argument."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(weight_decay, mask=decayed),
    )


@jax.jit
def _averaged(kept: Float[Array, ""] | np.float32, average: Params, params: Params) -> Params:
    return jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, average, params)


@functools.partial(jax.jit, static_argnums=0)
def _first_state(weight_decay: float, params: Params) -> Any:
    return _optimizer(weight_decay).init(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(
    model: Model,
    loss_name: LossName,
    weight_decay: float,
    rate: Float[Array, ""] | np.float32,
    params: Params,
    state: Any,
    lists: _Lists,
) -> tuple[Params, Any, Float[Array, ""]]:
    """One update; gives the loss before it."""

    def mean_loss(params: Params) -> Float[Array, ""]:
        scores = last_scores(model, params, jnp.asarray(lists.tokens), jnp.asarray(lists.lengths))
        of_draw = functools.partial(LOSSES[loss_name], scores)
        return jnp.mean(jax.vmap(of_draw)(jnp.asarray(lists.observed), jnp.asarray(lists.cut)))

    loss, gradient = jax.value_and_grad(mean_loss)(params)
    # A sequence classifier's head has no bias.
    gradient["value_head"]["bias"] = jnp.zeros_like(gradient["value_head"]["bias"])
    direction, state = _optimizer(weight_decay).update(gradient, state, params)
    return jax.tree.map(lambda param, change: param - rate * change, params, direction), state, loss


def _is_ranker(start: Path | LengthRanker | None) -> bool:
    """A checkpoint of a policy or a critic has no order of lengths to lose."""
    return isinstance(start, LengthRanker) or (start is not None and (start / RANKER_FILE).is_file())


def _starting_point(
    prompts: Sequence[ObservedLengths],
    options: FitOptions,
    start: Path | LengthRanker | None,
    device: jax.Device | None,  # pyright: ignore[reportInvalidTypeForm] (an alias at run time)
) -> tuple[Model, Params]:
    if isinstance(start, LengthRanker):
        return start.model, start.params
    if start is not None:
        model = ranker_model(read_arch(start, critic=True), device)
        params = load_critic(start, model)
        params["value_head"]["bias"] = jnp.zeros_like(params["value_head"]["bias"])
        return model, params
    needed = 1 + max(int(row.token_ids.max()) for row in prompts)
    if needed > LARGEST_VOCABULARY:
        raise UserError(
            f"a prompt has the token id {needed - 1}, above any vocabulary (at most {LARGEST_VOCABULARY} tokens); "
            "collect the lengths again with streamrl rank collect"
        )
    model = ranker_model(scratch_arch(options.size, options.vocab_size or needed), device)
    return model, _fresh_params(model, options.seed)


def _fresh_params(model: Model, seed: int) -> Params:
    """The distribution of `Model.init_params`, drawn by NumPy: that one compiles for longer than a small fit takes."""
    rng = np.random.default_rng([seed, 2])
    template = model.abstract_params()
    params: Params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), template)
    for entry in names.entries(model.arch):
        value = names.leaf_at(params, entry.path)
        if entry.path[-1] == "scale":
            value[...] = 1.0
        elif entry.transposed or entry.path[0] == "embedding":
            value[...] = rng.standard_normal(value.shape, np.float32) * entry.checkpoint_shape[-1] ** -0.5
    return jax.tree.map(lambda value, leaf: put(value, leaf.sharding), params, template)
