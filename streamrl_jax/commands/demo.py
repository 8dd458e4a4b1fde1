"""`streamrl demo`: the whole way on one machine, from random weights to an exported checkpoint.

Each step is the command that a user would give; this module only puts them in a row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from streamrl_jax.commands.warmstart import run as warm_start
from streamrl_jax.config_io import load_config
from streamrl_jax.errors import STOPPED_EXIT_CODE, UserError
from streamrl_jax.main_job import RunResult, train
from streamrl_jax.rewards import load_reward
from streamrl_jax.setup.inputs import load_advantage, load_loss
from streamrl_jax.tasks.toy_model import write_toy_checkpoint

DEFAULT_CONFIG: Final = Path(__file__).parents[2] / "configs" / "demo.toml"


def run(files: Sequence[Path] = (), overrides: Sequence[str] = (), folder: Path | None = None) -> int:
    """Writes a random model, warms it up, trains it with RL, evaluates and exports it.

    Args:
        files: Configuration files; none: the shipped demo.
        overrides: ``section.key=value``.
        folder: Where everything goes; None: a new one under ``runs/``.

    Returns:
        Exit code: 0, or 75 when a signal ended the RL part.

    Raises:
        UserError: Something given is wrong.
    """
    begun = time.monotonic()
    home = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if home.exists():
        raise UserError(f"{home} exists; give another --run-dir, or remove it")
    paths = list(files) or [DEFAULT_CONFIG]
    start, warm, out = home / "random_model", home / "warm_start", home / "export"
    first = load_config(paths, [f"model.path={start}", *overrides])
    # Before minutes of warm start, not after them.
    load_reward(first.reward)
    load_loss(first)
    load_advantage(first)
    print(f"1/4 a random model with a character tokenizer: {start}", flush=True)
    write_toy_checkpoint(start, first.run.seed)
    print(f"2/4 streamrl sft: a supervised warm start, {warm}", flush=True)
    warm_start(first, warm)
    print(f"3/4 streamrl train: RL with {first.gen.instances} vLLM instances, {home / 'run'}", flush=True)
    second = load_config(paths, [f"model.path={warm}", *overrides])
    result = train(second, home / "run")
    if result.stopped_by:
        print(f"stopped by {result.stopped_by}; go on with streamrl train --resume {result.run_dir}")
        return STOPPED_EXIT_CODE
    print(f"4/4 streamrl export: {out}", flush=True)
    # Only now, where JAX is loaded anyhow.
    from streamrl_jax.commands.export import export

    export(result.run_dir, out)
    print(_summary(result, out, time.monotonic() - begun), flush=True)
    return 0


def _summary(result: RunResult, out: Path, seconds: float) -> str:
    found = [evaluation.accuracy for evaluation in result.evaluations]
    held_out = (
        f"{found[0]:.3f} before, {found[-1]:.3f} after {result.version} iterations"
        if found
        else "not asked for"
    )
    return "\n".join(
        [
            "",
            f"held-out accuracy  {held_out}",
            f"run directory      {result.run_dir} (config.toml, metrics.jsonl, samples/, checkpoints/, logs/)",
            f"exported           {out} (try: .venv/bin/vllm serve {out} --dtype float32 --gpu-memory-utilization 0.3)",
            f"took               {seconds:.0f} s",
        ]
    )
