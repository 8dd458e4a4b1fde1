"""Puts a run's trainer side together: mesh, models, programs, state, and the doors of the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from streamrl_jax.bridge.blob import SHARED_MEMORY, sweep
from streamrl_jax.bridge.publish import Publisher
from streamrl_jax.bridge.store import StoreServer, WeightStore
from streamrl_jax.config import Config
from streamrl_jax.control.controller import Controller
from streamrl_jax.errors import UserError
from streamrl_jax.inputs import Inputs
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.metrics import MetricSink
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.train.agreement_gate import AgreementGate, probe_sampling
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import BEST_METRIC
from streamrl_jax.train.evaluator import Evaluator, evaluation_sampling
from streamrl_jax.train.hf import load_params, read_arch
from streamrl_jax.train.keeper import Keeper
from streamrl_jax.train.loop import Parts
from streamrl_jax.train.loss import PolicyLoss, clipped_policy_loss
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Arch, Params
from streamrl_jax.train.recorder import Hardware, Recorder
from streamrl_jax.train.rollouts import Rollouts, training_sampling
from streamrl_jax.train.state import TrainState
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.train.weights import Weights


@dataclass(frozen=True)
class Restore:
    """A checkpoint to start from: of this run (resume) or of another (fork)."""

    checkpoints: Path
    step: int


@dataclass(frozen=True)
class Edges:
    """What the trainer side talks to; whoever starts the run opens and closes them."""

    controller: Controller
    checkpointer: Checkpointer
    display: Display
    sink: MetricSink
    stop: StopSignal


@contextlib.contextmanager
def assembled(
    cfg: Config, home: RunDir, inputs: Inputs, edges: Edges, token: str, restore: Restore | None
) -> Iterator[tuple[Parts, int]]:
    """Builds the trainer and everything that the loop talks to, and compiles the run's shapes.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        inputs: Model, tokenizer, prompts, functions.
        edges: Open.
        token: Shared secret of run and instances.
        restore: Where to start from; None: the checkpoint of the configuration, at version 0.

    Yields:
        The parts, and the iteration to start with.

    Raises:
        UserError: Checkpoint, model or mesh do not fit the configuration.
    """
    steps = build_steps(cfg, inputs.model_dir, inputs.loss or clipped_policy_loss)
    trainer, start = _trainer(cfg, steps, inputs, edges.display, restore)
    with open_bridge(cfg, home, steps.actor.arch, edges.controller, token) as weights:
        yield _parts(cfg, home, inputs, edges, steps, trainer, weights, start), start


@contextlib.contextmanager
def open_bridge(
    cfg: Config, home: RunDir, arch: Arch, controller: Controller, token: str
) -> Iterator[Weights]:
    """Opens the trainer's side of the bridge: the publisher, and the store for instances on other hosts.

    Args:
        cfg: ``gen.dtype``, ``bridge`` and ``security`` are read.
        home: The run directory; versions lie there where shared memory is too small.
        arch: Of the policy.
        controller: Brings versions to the instances.
        token: Shared secret of run and instances.

    Yields:
        The loop's door to it.
    """
    places = [SHARED_MEMORY, home.path]
    sweep(places)
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher(arch, cfg.gen.dtype, home.fence, places))
        store = WeightStore(lambda: home.fence, lambda: publisher.held)
        server = StoreServer(store, cfg.bridge.listen, token=token, insecure=cfg.security.insecure)
        address = advertised(stack.enter_context(server).address, cfg.bridge.advertise)
        yield Weights(publisher, controller, address, cfg.bridge.update_timeout_s)


def build_steps(cfg: Config, model_dir: Path, policy_loss: PolicyLoss = clipped_policy_loss) -> Steps:
    """The run's programs on its mesh."""
    return Steps(read_arch(model_dir), build_mesh(cfg), cfg, policy_loss=policy_loss)


def build_mesh(cfg: Config) -> Mesh:
    """The one place where a configuration becomes a mesh, over all devices that JAX sees."""
    axes = cfg.trainer.mesh
    return make_mesh(axes.data, axes.fsdp, axes.tensor)


def advertised(address: str, host: str) -> str:
    """The store's address as other hosts reach it.

    Args:
        address: ``host:port`` that was bound.
        host: ``bridge.advertise``; empty: the bound one.
    """
    return f"{host}:{address.rpartition(':')[2]}" if host else address


def _trainer(
    cfg: Config, steps: Steps, inputs: Inputs, display: Display, restore: Restore | None
) -> tuple[Trainer, int]:
    display.phase("trainer", f"trainer: loading {inputs.model_dir.name} onto {steps.mesh.size} devices")
    policy = load_params(inputs.model_dir, steps.actor)
    reference = jax.tree.map(jax.numpy.copy, policy) if cfg.uses_reference else None
    if restore is None:
        state, start = steps.init_state(policy, _critic_params(steps, inputs.critic_dir)), 0
    else:
        del policy  # its memory is the restored state's
        state, start = _restored(restore, steps)
    trainer = Trainer(steps, state, reference, group_advantage=inputs.advantage)
    display.phase("trainer", "trainer: compiling the training step")
    trainer.warm_up()
    display.done("trainer")
    return trainer, start


def _parts(
    cfg: Config,
    home: RunDir,
    inputs: Inputs,
    edges: Edges,
    steps: Steps,
    trainer: Trainer,
    weights: Weights,
    start: int,
) -> Parts:
    controller = edges.controller
    stop_ids = (*inputs.tokenizer.eos_ids, *cfg.rollout.stop_token_ids)
    sampling = training_sampling(cfg, stop_ids)
    rollouts = Rollouts(cfg, controller, inputs.train_prompts, sampling, edges.stop, start)
    probes = inputs.train_prompts.iteration(0)
    gate = AgreementGate(cfg, controller, weights, steps, probes, probe_sampling(cfg, sampling))
    samples = SampleLog(home.samples, home.fence, inputs.tokenizer.decode)
    hardware = _hardware(cfg, steps)
    recorder = Recorder(
        cfg, edges.sink, samples, edges.display, controller, rollouts, weights, gate, hardware
    )
    held_out = inputs.test_prompts.all() if inputs.test_prompts else ()
    evaluator = Evaluator(cfg, controller, held_out, evaluation_sampling(cfg, stop_ids), recorder)
    keeper = Keeper(cfg, edges.checkpointer, trainer, evaluator, rollouts, home.fence, start)
    return Parts(cfg, trainer, rollouts, weights, gate, evaluator, keeper, recorder)


def _critic_params(steps: Steps, critic_dir: Path | None) -> Params | None:
    """The critic's own start; None where it starts from the policy, or there is no critic."""
    if steps.critic is None or critic_dir is None:
        return None
    arch = read_arch(critic_dir)
    if not _same_body(arch, steps.actor.arch):
        raise UserError(
            f"model.critic_path = {critic_dir}: its architecture differs from the policy's; give a checkpoint of the "
            "same architecture, or leave it empty"
        )
    return steps.critic.value_params_from(load_params(critic_dir, replace(steps.actor, arch=arch)))


def _same_body(one: Arch, other: Arch) -> bool:
    """Whether two checkpoints' decoders have the same parameters, whatever their heads."""
    return replace(one, tied=other.tied, hf_config_json="") == replace(other, hf_config_json="")


def _restored(restore: Restore, steps: Steps) -> tuple[TrainState, int]:
    with Checkpointer(restore.checkpoints, 1, BEST_METRIC) as source:
        state, meta = source.restore(restore.step, steps.abstract_state())
    return state, meta.frontier.iteration


def _hardware(cfg: Config, steps: Steps) -> Hardware:
    instances = cfg.gen.instances + len(cfg.gen.endpoints)
    kind = steps.mesh.devices.flat[0].device_kind
    return Hardware(steps.actor.arch, steps.mesh.size, instances * cfg.gen.tensor_parallel_size, kind)
