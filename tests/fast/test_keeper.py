"""Which versions are written down, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from streamrl_jax.config import Config
from streamrl_jax.train.checkpoint_meta import BEST_METRIC, Meta
from streamrl_jax.train.evaluator import Evaluation
from streamrl_jax.train.keeper import Keeper
from streamrl_jax.types import Fence


@dataclass
class Written:
    """Stands where the checkpointer does."""

    events: list[str] = field(default_factory=list)
    metas: list[Meta] = field(default_factory=list)
    metrics: list[object] = field(default_factory=list)

    def save(self, step: int, state: object, meta: Meta, metrics: object) -> None:
        self.events.append(f"save {step} of {state}")
        self.metas.append(meta)
        self.metrics.append(metrics)

    def wait(self) -> None:
        self.events.append("wait")


@dataclass
class Around:
    """The rest that a keeper looks at."""

    state: str = "state"
    results: list[Evaluation] = field(default_factory=list)
    open_iterations: range = range(5)


def keeper(start: int = 0, **trainer: Any) -> tuple[Keeper, Written, Around]:
    cfg = Config.model_validate({"trainer": {"total_training_steps": 7, **trainer}})
    written, around = Written(), Around()
    door = cast(Any, around)
    return Keeper(cfg, cast(Any, written), door, door, door, Fence("run", 3), start), written, around


@pytest.mark.parametrize(("freq", "due"), [(3, [3, 6, 7]), (0, [7]), (7, [7])])
def test_every_so_many_versions_and_the_last_are_written(freq: int, due: list[int]) -> None:
    found, _, _ = keeper(save_freq=freq)
    assert [version for version in range(1, 8) if found.due(version)] == due


def test_the_last_whole_version_is_written_once() -> None:
    found, written, _ = keeper()
    found.completed(1)
    found.save(1)
    assert found.save_now() == 1
    found.completed(2)
    assert found.save_now() == 2
    assert written.events == ["save 1 of state", "wait", "save 2 of state", "wait"]


@pytest.mark.parametrize("start", [0, 4])
def test_what_a_run_started_from_is_not_written_again(start: int) -> None:
    found, written, _ = keeper(start)
    assert found.save_now() == start
    assert written.events == ["wait"]


def test_a_checkpoint_says_where_the_run_stood() -> None:
    found, written, around = keeper()
    around.results.append(Evaluation(2, 0.5, {}, 3.0, 8, 1.0))
    found.completed(3)
    found.save(3)
    around.results.append(Evaluation(4, 0.75, {}, 3.0, 8, 1.0))
    found.save(4)
    meta = written.metas[0]
    assert (meta.step, meta.version, meta.incarnation) == (3, 3, 3)
    assert meta.frontier.iteration == 3 and meta.frontier.in_flight == (3, 4)
    around.results.append(Evaluation(5, math.nan, {}, 3.0, 8, 1.0))
    found.save(5)
    assert written.metrics == [None, {BEST_METRIC: 0.75}, None], (
        "an evaluation counts for its own version only, and one without an accuracy for none"
    )
