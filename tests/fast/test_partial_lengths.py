"""Interrupted answers are as long as others (decision 0003: nothing is kept or drawn again by its length).

A virtual pool: answers end at each token with the same probability, drawn from a seed as vLLM's V1 runner does, from
the first token of an *attempt* on; instances die all the time. No clock, no socket: `Work` and its partial answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from streamrl_jax.control.intake import Intake
from streamrl_jax.control.jobs import Job
from streamrl_jax.control.placing import Room
from streamrl_jax.control.queue import HeldQueue
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.work import Work
from streamrl_jax.rewards import RewardResult
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Progress,
    Prompt,
    Sampling,
    VersionRun,
)

LIFE = Fence("run", 0)
SAMPLES, SLOTS, INSTANCES = 1500, 16, 4
MEAN, LIMIT, STOP = 80, 2000, 0
LIFETIME = 60.0  # tokens; on the average an answer is interrupted more than once
RARELY = 400.0  # without progress a long answer would never end otherwise


@dataclass
class Running:
    """One attempt on an instance."""

    assignment: Assignment
    began: int  # tick
    left: int  # tokens until it ends
    told: int = 0

    @property
    def carried(self) -> int:
        return len(self.assignment.resumed.token_ids) if self.assignment.resumed else 0


@dataclass
class VirtualPool:
    """Instances that make one token a tick for each of their answers.

    ``interval``: ticks between two pieces of progress, 0: none. ``lifetime``: of an instance, in ticks on the average.
    ``redrawn``: a seed of its own for each attempt from the prompt, which is the mistake to be found out.
    """

    interval: int
    lifetime: float = LIFETIME
    redrawn: bool = False
    lengths: dict[str, int] = field(default_factory=dict)
    deaths: int = 0

    def __post_init__(self) -> None:
        rewards = RewardWorkers(lambda *_: RewardResult(0.0), str, 1.0, 1)
        intake = Intake(SAMPLES)
        self.work = Work(LIFE, rewards, HeldQueue(), 1000, intake, lambda coroutine, name: coroutine.close())
        sampling = Sampling(1.0, LIMIT, (STOP,), seed=7)
        prompt = Prompt("p", np.ones(3, np.int32), {})
        self.work.submit(Job("probe/0", [prompt], SAMPLES, sampling, 0, 0, probe=True))
        self.held: dict[str, dict[str, Running]] = {f"i{index}": {} for index in range(INSTANCES)}
        self.noise = np.random.default_rng(3)

    def run(self) -> np.ndarray:
        """Lengths of all answers, in the order of their ids."""
        dies = {name: self._lifetime() for name in self.held}
        tick = 0
        while len(self.lengths) < SAMPLES:
            for name, running in self.held.items():
                self._advance(name, running, tick)
                if tick >= dies[name]:
                    self.work.lost(name)
                    running.clear()
                    self.deaths += 1
                    dies[name] = tick + self._lifetime()
            rooms = [Room(name, 0, SLOTS, len(running)) for name, running in self.held.items()]
            for name, assignment in self.work.take(rooms):
                self.held[name][assignment.sample_id] = self._start(assignment, tick)
            tick += 1
        self.work.ledger.check()
        return np.asarray([self.lengths[name] for name in sorted(self.lengths)])

    def _lifetime(self) -> float:
        return 1 + self.noise.exponential() * self.lifetime

    def _start(self, assignment: Assignment, tick: int) -> Running:
        seed = [assignment.sampling.seed or 0, assignment.attempt if self.redrawn else 0]
        left = int(np.random.default_rng(seed).geometric(1 / MEAN))
        running = Running(assignment, tick, left)
        running.left = min(left, LIMIT - running.carried)
        return running

    def _advance(self, name: str, running: dict[str, Running], tick: int) -> None:
        for sample_id, one in list(running.items()):
            made = tick - one.began
            if made >= one.left:
                del running[sample_id]
                self._finish(name, one)
            elif self.interval and made and made % self.interval == 0:
                ids = np.ones(made - one.told, np.int32)
                offset, versions = one.carried + one.told, (VersionRun(0, ids.size),)
                piece = Progress(
                    sample_id, one.assignment.attempt, offset, ids, -ids.astype(np.float32), versions
                )
                self.work.progress(LIFE, piece, name)
                one.told = made

    def _finish(self, name: str, one: Running) -> None:
        ids = np.ones(one.carried + one.left, np.int32)
        self.lengths[one.assignment.sample_id] = ids.size
        reason = FinishReason.LENGTH if ids.size == LIMIT else FinishReason.STOP
        self.work.finished(
            LIFE,
            Generation(one.assignment.sample_id, one.assignment.attempt, ids, -ids.astype(np.float32),
                       (VersionRun(0, ids.size),), reason, name),
            name,
        )  # fmt: skip


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distributions."""
    points = np.union1d(one, other)
    return float(
        np.abs(
            np.searchsorted(np.sort(one), points, "right") / one.size
            - np.searchsorted(np.sort(other), points, "right") / other.size
        ).max()
    )


SAME = 1.63 * (2 / SAMPLES) ** 0.5
"""Two draws of one distribution are farther apart once in a hundred times."""


@pytest.fixture(scope="module")
def undisturbed() -> np.ndarray:
    lengths = VirtualPool(0, lifetime=np.inf).run()
    assert lengths.mean() == pytest.approx(MEAN, rel=0.07)
    return lengths


@pytest.mark.parametrize("interval", [1, 3])
def test_continued_answers_are_as_long_as_uninterrupted_ones(undisturbed: np.ndarray, interval: int) -> None:
    """What is lost between the last progress and a death is drawn anew: that much bias at the most."""
    pool = VirtualPool(interval)
    lengths = pool.run()
    counts = pool.work.ledger.counts()
    assert counts["continued"] > SAMPLES / 2, "most were interrupted"
    assert distance(lengths, undisturbed) < SAME
    redrawn = counts["taken_back"] / SAMPLES * (interval + 1) / 2  # tokens an answer, on the average
    assert abs(lengths.mean() - undisturbed.mean()) < redrawn + 3 * MEAN * (2 / SAMPLES) ** 0.5


def test_answers_that_start_anew_with_their_seed_are_the_very_same(undisturbed: np.ndarray) -> None:
    """Nothing is known of an answer whose instance sent no progress: the same noise gives the same answer."""
    pool = VirtualPool(0, lifetime=RARELY)
    np.testing.assert_array_equal(pool.run(), undisturbed)
    assert pool.work.ledger.counts()["taken_back"] > SAMPLES / 10


def test_what_would_be_wrong_is_found_out(undisturbed: np.ndarray) -> None:
    """Drawn anew from the prompt, the short answers win: the measure above sees it at once."""
    lengths = VirtualPool(0, lifetime=RARELY / 4, redrawn=True).run()
    assert distance(lengths, undisturbed) > 3 * SAME
    assert lengths.mean() < 0.8 * undisturbed.mean()


def test_a_continuation_draws_noise_of_its_own() -> None:
    """With the seed of the first attempt an engine would repeat the noise of the answer's first tokens."""
    pool = VirtualPool(1)
    seeds: dict[str, list[int | None]] = {}
    for tick in range(600):
        for name, assignment in pool.work.take([Room("i0", 0, SLOTS, len(pool.held["i0"]))]):
            pool.held[name][assignment.sample_id] = pool._start(assignment, tick)
            if assignment.resumed or not assignment.attempt:
                seeds.setdefault(assignment.sample_id, []).append(assignment.sampling.seed)
        pool._advance("i0", pool.held["i0"], tick)
        if tick % 20 == 19:
            pool.work.lost("i0")
            pool.held["i0"].clear()
    assert max(map(len, seeds.values())) > 3
    assert all(len(set(used)) == len(used) for used in seeds.values())
