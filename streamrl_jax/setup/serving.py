"""Real instances that serve a checkpoint, without a trainer: for evaluation, collecting lengths and measuring."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl_jax.config import Config
from streamrl_jax.control.protocol import RunController
from streamrl_jax.interrupt import StopRequested, StopSignal
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.setup.devices import look_around, split_devices, trainer_environment
from streamrl_jax.setup.generation import GenerationSide, open_generation
from streamrl_jax.setup.inputs import NO_FUNCTIONS, Functions, Inputs, read_inputs
from streamrl_jax.setup.jax_setup import prepare_jax
from streamrl_jax.types import Fence, Generation, Prompt


@dataclass(frozen=True)
class Served:
    """Instances that serve version 0, the checkpoint's weights.

    Attributes:
        controller: Jobs in, samples out; `train.rollouts.arriving` gives them as they come.
        inputs: Model, tokenizer and prompts.
        stop: Signals; raised at each wait that is `interruptible`.
        display: Open.
        stop_token_ids: What ends an answer.
    """

    controller: RunController
    inputs: Inputs
    stop: StopSignal
    display: Display
    stop_token_ids: tuple[int, ...]


def unscored(prompt: Prompt, text: str, generation: Generation) -> float:
    """The reward where nobody asks what an answer is worth."""
    return 0.0


UNSCORED: Final = Functions(reward=unscored)
"""For `serving` where answers are counted and not scored: the configured reward is not even loaded."""


@contextlib.contextmanager
def serving(
    cfg: Config,
    title: str,
    functions: Functions = NO_FUNCTIONS,
    check: Callable[[Inputs], None] = lambda inputs: None,
) -> Iterator[Served]:
    """Starts the instances that ``gen`` describes, brings them the checkpoint's weights, and waits for them.

    Logs and weights lie in a temporary directory. Nothing is left behind but the logs of one that failed.

    Args:
        cfg: ``model``, ``data``, ``gen``, ``control``, ``bridge``, ``security`` and ``reward`` are read.
        title: What the display calls it; one word, which is in the name of the temporary directory too.
        functions: Those given from Python go before the configuration's.
        check: Looks at what was read before any instance starts, and raises what it finds wrong.

    Yields:
        The instances, ready, at version 0.

    Raises:
        ControlError: They are not ready within ``gen.start_timeout_s``.
        StopRequested: A signal came while it waited for them.
        UserError: Something given is wrong.
    """
    split = split_devices(cfg, look_around(dict(os.environ)))
    inputs = read_inputs(cfg, functions)
    check(inputs)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal().listening())
        folder = stack.enter_context(scratch(title))
        home = RunDir(folder, Fence(f"{title}-{uuid.uuid4().hex[:8]}", 0))
        display = stack.enter_context(Display(title))
        generation = stack.enter_context(open_generation(cfg, home, inputs, split, display))
        prepare_jax(cfg, trainer_environment(cfg, split))
        stack.enter_context(_published(cfg, home, inputs, generation))
        with stop.interruptible():
            generation.controller.wait_ready(cfg.gen.start_timeout_s)
        stop_ids = (*inputs.tokenizer.eos_ids, *cfg.rollout.stop_token_ids)
        yield Served(generation.controller, inputs, stop, display, stop_ids)


@contextlib.contextmanager
def scratch(title: str) -> Iterator[Path]:
    """A temporary directory with a folder ``logs``, which alone is kept where what is done in it fails.

    Args:
        title: In its name.

    Yields:
        The directory.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"streamrl-{title}-"))
    logs = folder / "logs"
    logs.mkdir()
    failed = False
    try:
        yield folder
    except Exception as error:
        failed = not isinstance(error, StopRequested) and any(logs.iterdir())
        raise
    finally:
        if failed:
            print(f"streamrl: note: the logs of what failed are kept: {logs}", file=sys.stderr)
            for path in set(folder.iterdir()) - {logs}:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:  # a process that is ending may take its own away
                    path.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _published(cfg: Config, home: RunDir, inputs: Inputs, generation: GenerationSide) -> Iterator[None]:
    """Publishes the checkpoint's weights as version 0, and keeps them for instances that start again."""
    from streamrl_jax.train.assemble import build_mesh, open_bridge
    from streamrl_jax.train.hf import load_params
    from streamrl_jax.train.models import Model

    model = Model(inputs.arch, build_mesh(cfg))
    with open_bridge(cfg, home, model.arch, generation) as weights:
        weights.publish(load_params(inputs.model_dir, model), version=0)
        yield
