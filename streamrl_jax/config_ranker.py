"""The sections of skewness-aware dispatch and of the ranker that predicts how long answers will be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from streamrl_jax.config_section import Section

Policy = Literal["arrival", "lpt", "paper", "skewness"]
"""Which instance answers what, and in which order; see `DispatchSection`."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


class DispatchSection(Section):
    """Which instance answers what, in which order, and how many answers at once (docs/ranker.md)."""

    policy: Policy = "arrival"
    """``arrival``: in the order of the prompts, each to the emptiest instance; nothing is predicted. ``lpt``: the same,
    the longest predicted answers first. ``paper``: algorithm 2 of arXiv 2504.15930, which gives long answers instances
    of their own with smaller batches. ``skewness``: batches and shares of every instance from a bound on the time of
    the whole; an instance that runs dry takes over what waits elsewhere."""
    alpha: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of the prompts that the policy ``paper`` takes for long."""
    cost: str = ""
    """How long a decode step takes: a profile that ``streamrl plan profile`` wrote, or the name of a GPU (``H800``) for
    an estimate from its data sheet. Empty: a step takes the same time whatever the batch."""


class RankerSection(Section):
    """The predictor of answer lengths, which every policy of dispatch but the first one reads."""

    path: str = ""
    """A ranker that ``streamrl rank fit`` wrote. Empty: the prompts' own histories, and a small ranker that is learned
    during the run."""
    refresh_every: int = Field(default=5, ge=0)
    """Iterations between two refreshes: the ranker is trained on from the run's newest answers, behind the training, on
    the host's CPU. 0: never; without a ``path`` a prompt's history is then all there is. While answers are of about the
    same length nothing is trained."""
    refresh_steps: int = Field(default=100, ge=1)
    """Steps of a refresh; it should take less time than an iteration."""
    window: int = Field(default=2048, ge=64)
    """A refresh learns from the newest answers to so many prompts."""
    max_wait_s: float = Field(default=0.2, ge=0.0)
    """An iteration that is not predicted when it is to begin waits so long for it, then goes without."""


def dispatch_faults(dispatch: DispatchSection, ranker: RankerSection) -> Iterator[str]:
    """Yields one sentence for each thing about dispatch and ranker that makes no sense, with the remedy."""
    said = f"dispatch.policy = '{dispatch.policy}'"
    if dispatch.policy != "paper" and dispatch.alpha != DispatchSection.model_fields["alpha"].default:
        yield (
            f"dispatch.alpha = {dispatch.alpha} is read with dispatch.policy = 'paper' only, not with "
            f"'{dispatch.policy}'; remove it"
        )
    if dispatch.policy != "arrival":
        return
    if dispatch.cost:
        yield f"dispatch.cost = {dispatch.cost!r} with {said}: nothing is planned; choose a policy, or remove it"
    if ranker.path:
        yield f"ranker.path = {ranker.path!r} with {said}: nothing is predicted; choose a policy, or remove it"
