"""`streamrl sft`: a supervised warm start, with the trainer's own machinery, from checkpoint to checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_jax.config import Config
from streamrl_jax.data.sft import Example, ExampleSet, load_examples
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.metrics import JsonlSink, MetricRecord, record
from streamrl_jax.progress import Display
from streamrl_jax.setup.devices import Machine, look_around
from streamrl_jax.setup.jax_setup import prepare_jax
from streamrl_jax.setup.model_source import model_directory

if TYPE_CHECKING:
    from streamrl_jax.train.sft import SupervisedTrainer

METRICS_FILE = "sft_metrics.jsonl"


def run(cfg: Config, out: Path) -> Path:
    """Trains on given answers and writes the checkpoint.

    Args:
        cfg: ``model``, ``sft``, ``data``, ``trainer.mesh``, ``run.seed`` and ``rollout.mask_padded_vocab`` are read.
        out: The checkpoint directory to make.

    Returns:
        ``out``; beside the checkpoint it holds the metrics of each step.

    Raises:
        UserError: Something given is wrong, or an update was not finite.
    """
    _check_place(out)
    source = model_directory(cfg.model.path, "model.path")
    tokenizer = Tokenizer.load(source)
    examples = load_examples(cfg, tokenizer)
    prepare_jax(cfg, _environment(cfg, look_around(dict(os.environ))))
    from streamrl_jax.train.assemble import build_mesh
    from streamrl_jax.train.hf import load_params, save_params
    from streamrl_jax.train.hf_directory import read_arch
    from streamrl_jax.train.models import Model
    from streamrl_jax.train.sft import SupervisedTrainer

    with Display("warm start", cfg.sft.steps) as display:
        display.phase("sft", f"loading {source.name} and compiling")
        arch, mesh = read_arch(source), build_mesh(cfg)
        params = load_params(source, Model(arch, mesh))
        limit = tokenizer.vocab_limit(masked=cfg.rollout.mask_padded_vocab)
        trainer = SupervisedTrainer(arch, mesh, cfg, params, longest=cfg.longest_sample, vocab_limit=limit)
        trainer.warm_up()
        lines = list(_steps(cfg, trainer, examples, display))
        display.done("sft")
        save_params(trainer.network.params, arch, out, source=source)
        last = lines[-1]
        display.note(
            f"warm start: {last.step} steps, loss {last.number('sft/loss'):.3f}; checkpoint in {out}"
        )
    with contextlib.closing(JsonlSink(out / METRICS_FILE)) as sink:
        for line in lines:
            sink.write(line)
    return out


def _steps(
    cfg: Config, trainer: SupervisedTrainer, examples: ExampleSet, display: Display
) -> Iterator[MetricRecord]:
    """Updates until the stop set is learned, or `sft.steps`; yields what each measured."""
    from streamrl_jax.train.answer import Answer, taught_answer

    def taught(batch: Sequence[Example]) -> list[Answer]:
        return [taught_answer(example.name, example.prompt_ids, example.answer_ids) for example in batch]

    stop_set = taught(examples.stop_set)
    for step in range(1, cfg.sft.steps + 1):
        metrics = trainer.update(taught(examples.batch(step - 1)))
        if metrics["sft/update_refused"]:
            raise UserError(
                f"step {step}: loss or gradient is not finite; lower sft.optim.lr (now {cfg.sft.optim.lr:g})"
            )
        seen = f"step {step}/{cfg.sft.steps}: loss {metrics['sft/loss']:.3f}"
        if stop_set and (step % cfg.sft.stop_check_every == 0 or step == cfg.sft.steps):
            metrics["sft/accuracy"] = trainer.greedy_accuracy(stop_set)
            display.note(f"{seen}, greedy accuracy on the stop set {metrics['sft/accuracy']:.3f}")
        display.phase("sft", "warm start, step", step, cfg.sft.steps)
        yield record(step, time.time(), metrics)
        if cfg.sft.stop_accuracy < 1.0 and metrics.get("sft/accuracy", 0.0) >= cfg.sft.stop_accuracy:
            return


def _check_place(out: Path) -> None:
    """Says now, and not after the training, that the checkpoint cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; give a new directory for the checkpoint, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: its folder cannot be made: {error.strerror}; give another --out") from error
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"{out}: {out.parent} cannot be written to; give another --out")


def _environment(cfg: Config, machine: Machine) -> dict[str, str]:
    """Alone on the machine, the warm start takes the trainer's GPUs, or all."""
    gpus = cfg.trainer.devices or ",".join(machine.gpus)
    return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
