"""The cost model's side of `streamrl bench dispatch`: the same rounds in simulated time, and pools that are not here.

Each job is arranged by the very function that the controller calls (`plan.dispatched`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl_jax.bench.dispatch_draws import POLICIES, Draw, Material, Policy, draw, order
from streamrl_jax.bench.dispatch_rounds import Size, job_of
from streamrl_jax.control.dispatching import DispatchSettings
from streamrl_jax.control.events import InstanceView
from streamrl_jax.plan.dispatched import run_job
from streamrl_jax.plan.generation import Conditions, Outcome
from streamrl_jax.ranker.cost import FLAT
from streamrl_jax.ranker.dispatch import Server
from streamrl_jax.types import Sampling

_UNBOUNDED: Final = 1 << 50
"""KV tokens of an instance that does not say."""

_POOL_ROUNDS: Final = 3
"""Of a larger pool: one holds as much work as many of the measured ones."""


@dataclass(frozen=True)
class Foretold:
    """One policy in one round, as the model plays it.

    Attributes:
        seconds: Of the makespan; decode steps where no cost is given.
        steps: Decode steps of each instance.
    """

    seconds: float
    steps: Mapping[str, int]

    @property
    def longest(self) -> int:
        """Decode steps of the instance that made the most."""
        return max(self.steps.values())

    @property
    def total(self) -> int:
        """Decode steps of all instances."""
        return sum(self.steps.values())


@dataclass(frozen=True)
class Model:
    """Instances in simulated time.

    Attributes:
        servers: One for each instance.
        settings: With which the controller plans.
        conditions: How it and the instances play together.
    """

    servers: tuple[Server, ...]
    settings: DispatchSettings
    conditions: Conditions

    @classmethod
    def of(cls, views: Iterable[InstanceView], settings: DispatchSettings, look_ahead: int) -> Model:
        """The model of instances that are there.

        Args:
            views: How they stand.
            settings: Those of their controller.
            look_ahead: Answers that each holds beyond its slots.
        """
        servers = (Server(one.name, one.slots, one.kv_tokens or _UNBOUNDED, settings.cost) for one in views)
        return cls(tuple(servers), settings, Conditions(look_ahead=look_ahead))

    @property
    def knows_seconds(self) -> bool:
        """Whether it was told how long a step takes."""
        return self.settings.cost != FLAT

    def round(self, material: Material, work: Draw, names: Sequence[str]) -> dict[str, Foretold]:
        """One round under each policy."""
        return {name: self._play(POLICIES[name], work, material) for name in names}

    def pool(
        self, material: Material, size: Size, names: Sequence[str], instances: int
    ) -> list[dict[str, Foretold]]:
        """A few rounds of a pool of another size, the work in proportion.

        Args:
            material: What the rounds are drawn from, a prompt more than once.
            size: Of the rounds of this model's instances.
            names: Of the policies.
            instances: Of the pool; each like one of this model's, in turn.
        """
        own = len(self.servers)
        servers = tuple(
            Server(str(place), like.slots, like.kv_tokens, like.cost)
            for place, like in ((place, self.servers[place % own]) for place in range(instances))
        )
        pool = Model(servers, self.settings, self.conditions)
        prompts = -(-size.prompts * instances // own)
        rounds = []
        for number in range(min(size.rounds, _POOL_ROUNDS)):
            work = draw(material, prompts, size.n, (size.seed, instances, number), again=True)
            rounds.append(pool.round(material, work, names))
        return rounds

    def _play(self, policy: Policy, work: Draw, material: Material) -> Foretold:
        met = order(policy, work, material)
        job = job_of("model", policy, met, material, Sampling(1.0, 1, (), evaluation=True))
        return self._told(run_job(job, met.lengths, self.settings, self.servers, self.conditions))

    def _told(self, outcome: Outcome) -> Foretold:
        steps = {server.name: int(count) for server, count in zip(self.servers, outcome.steps, strict=True)}
        return Foretold(outcome.makespan_s, steps)
