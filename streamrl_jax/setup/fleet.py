"""From the configuration to what the run gets its instances from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from streamrl_jax.config import Config
from streamrl_jax.gen import net
from streamrl_jax.gen.launch import LocalLauncher, endpoint_names
from streamrl_jax.gen.launch.fleet import Fleet, Maker
from streamrl_jax.gen.launch.plan import FleetPlan, RayPlan
from streamrl_jax.gen.options import InstanceSpec
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.devices import DeviceSplit, Machine, device_for_another, look_around
from streamrl_jax.setup.inputs import Inputs
from streamrl_jax.setup.instances import pool_templates


def fleet_plan(
    cfg: Config, home: RunDir, inputs: Inputs, split: DeviceSplit, files: net.AccessFiles
) -> FleetPlan:
    """What the run gets its instances from.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        inputs: The policy's checkpoint and its tokenizer.
        split: Which instance runs on what.
        files: What run and instances share.
    """
    limit = inputs.tokenizer.vocab_limit(masked=cfg.rollout.mask_padded_vocab)
    machine = look_around(dict(os.environ))
    ray = cfg.gen.ray
    return FleetPlan(
        pools=pool_templates(cfg, inputs.model_dir, split, files, home.fence, limit, home.path),
        endpoints=endpoint_names(cfg.gen.endpoints),
        run_dir=str(home.path.absolute()),
        access=files,
        run_seed=cfg.run.seed,
        python=cfg.gen.python,
        launcher=cfg.gen.launcher,
        gpus=machine.gpus,
        cores=machine.cores,
        trainer=split.trainer,
        ray=RayPlan(ray.address, ray.cpus_per_worker, ray.gpus_per_worker, ray.placement_timeout_s),
    )


def open_fleet(plan: FleetPlan) -> Fleet:
    """The launcher that a plan describes; nothing is started yet.

    Args:
        plan: From `fleet_plan`.

    Raises:
        UserError: An endpoint is no address, named twice, or on another machine in plain text without
            ``security.insecure``.
    """
    machine = Machine(plan.gpus, plan.cores)

    def device(taken: Sequence[str], size: int) -> str:
        return "" if plan.launcher == "ray" else device_for_another(machine, taken, plan.trainer, size)

    access = net.Access.from_files(plan.access)
    return Fleet(partial(_maker, plan), plan.pools, plan.endpoints, device, access)


def _maker(plan: FleetPlan, specs: Sequence[InstanceSpec]) -> Maker:
    run_dir = Path(plan.run_dir)
    if plan.launcher == "ray":
        from streamrl_jax.gen.launch.ray import RayLauncher

        return RayLauncher(
            specs, run_dir, plan.ray, run_seed=plan.run_seed, python=plan.python, module=plan.module
        )
    return LocalLauncher(specs, run_dir, run_seed=plan.run_seed, python=plan.python, module=plan.module)
