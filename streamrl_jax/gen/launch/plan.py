"""What a run's instances come from, as plain data: it travels to the process that starts them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.options import PoolTemplate, spec_from_fields


@dataclass(frozen=True)
class RayPlan:
    """The keys of ``gen.ray``."""

    address: str = "auto"
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 1.0
    placement_timeout_s: float = 300.0


@dataclass(frozen=True)
class FleetPlan:
    """All that the launcher of a run is made from.

    Attributes:
        pools: The pools, the default one first.
        endpoints: Addresses by name.
        run_dir: The run directory.
        access: What run and instances share.
        run_seed: ``run.seed``.
        python: Interpreter of the generation environment; empty: this one.
        launcher: What starts the run's own instances.
        gpus: This machine's.
        cores: This machine's.
        trainer: GPU ids of the trainer.
        ray: With the launcher ``ray``.
        module: What an instance's process runs (tests start a fake).
    """

    pools: tuple[PoolTemplate, ...]
    endpoints: Mapping[str, str]
    run_dir: str
    access: AccessFiles
    run_seed: int = 0
    python: str = ""
    launcher: Literal["local", "ray"] = "local"
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    trainer: tuple[str, ...] = ()
    ray: RayPlan = field(default_factory=RayPlan)
    module: str = "streamrl_jax.gen.instance"

    def to_json(self) -> str:
        """A text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FleetPlan:
        """Reads what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["pools"] = tuple(
            PoolTemplate(pool["name"], spec_from_fields(pool["spec"]), tuple(pool["devices"]))
            for pool in fields["pools"]
        )
        fields["access"] = AccessFiles(**fields["access"])
        fields["ray"] = RayPlan(**fields["ray"])
        for name in ("gpus", "cores", "trainer"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
