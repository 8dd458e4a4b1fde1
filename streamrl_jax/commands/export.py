"""`streamrl export`: the policy of a run as a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from streamrl_jax import rundir
from streamrl_jax.config import Config
from streamrl_jax.config_io import load_config
from streamrl_jax.errors import UserError
from streamrl_jax.setup.model_source import model_directory
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import BEST_METRIC, best_step
from streamrl_jax.train.hf import save_params
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Arch, Model
from streamrl_jax.train.models.decoder import Compute

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The new checkpoint directory.
        step: The step whose weights it holds.
        dtype: Of the weights.
        source: Where configuration, generation configuration, tokenizer and chat template come from.
    """

    path: Path
    step: int
    dtype: Dtype
    source: Path


def export(run_dir: Path, out: Path, *, step: str = "newest", dtype: Dtype | None = None) -> Exported:
    """Writes the policy of one of a run's checkpoints; the run may go on meanwhile.

    Args:
        run_dir: The run.
        out: The directory to create; it must not exist, or be empty. It appears complete or not at all.
        step: A number, "newest" (the newest checkpoint that is whole) or "best" (by held-out accuracy).
        dtype: Of the weights; None: that of the run's engine, `gen.dtype`. bfloat16 rounds the float32
            masters to nearest even.

    Returns:
        What was written.

    Raises:
        UserError: There is no such run or step, the checkpoint is damaged, the model directory that the run
            started from is gone, or `out` cannot be written.
    """
    _refuse_used(out)
    run = rundir.look(run_dir)
    config = load_config([run.config])
    source = model_directory(config.model.path, f"{run.config}: model.path")
    arch = read_arch(source)
    with Checkpointer(run.checkpoints, keep=1) as checkpoints:
        chosen = choose_step(checkpoints, step, run.checkpoints)
        params = checkpoints.restore_part(chosen, ("actor", "params"), _abstract_params(arch, config))
    written = dtype or config.gen.dtype
    save_params(params, arch, out, source=source, dtype=written)
    return Exported(out, chosen, written, source)


def choose_step(checkpoints: Checkpointer, wanted: str, where: Path) -> int:
    """Turns what the user asked for into a step.

    Args:
        checkpoints: Of the run.
        wanted: A number, "newest" or "best".
        where: The directory, for the error.

    Returns:
        The step; whether a numbered one exists is found when it is read.

    Raises:
        UserError: It is none of these, or there is none such.
    """
    if wanted.isdecimal():
        return int(wanted)
    if wanted == "newest":
        newest = checkpoints.latest()
        if newest is None:
            raise UserError(
                f"{where} holds no whole checkpoint yet; the run writes one every trainer.save_freq steps."
            )
        return newest
    if wanted == "best":
        metrics = {step: checkpoints.read_meta(step).metrics for step in checkpoints.steps()}
        best = best_step(
            {step: found[BEST_METRIC] for step, found in metrics.items() if BEST_METRIC in found}
        )
        if best is None:
            raise UserError(
                f"{where}: none of the steps {list(metrics)} was evaluated, so none is the best; give --step "
                "N, or set data.test and trainer.test_freq."
            )
        return best
    raise UserError(f"--step {wanted!r} is neither a number nor newest nor best.")


def _refuse_used(out: Path) -> None:
    """Before minutes go into reading the checkpoint; `save_params` looks again."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists already; give a new directory for the checkpoint, or remove it.")


def _abstract_params(arch: Arch, config: Config) -> Any:
    """Shapes without shardings: the arrays come to the host's memory, whatever devices there are."""
    mesh = make_mesh(1, 1, 1, devices=jax.devices("cpu")[:1])
    model = Model(arch, mesh, "lm", Compute("float32", config.model.remat, config.model.attention_block))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.abstract_params())
