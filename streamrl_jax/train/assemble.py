"""Puts a run's trainer side together: mesh, models, programs, state, and the doors of the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from streamrl_jax.bridge.blob import SHARED_MEMORY, sweep
from streamrl_jax.bridge.publish import Publisher
from streamrl_jax.config import Config
from streamrl_jax.control.protocol import RunController
from streamrl_jax.interrupt import StopSignal
from streamrl_jax.metrics import MetricSink
from streamrl_jax.progress import Display
from streamrl_jax.rundir import RunDir
from streamrl_jax.samples_log import SampleLog
from streamrl_jax.setup.generation import GenerationSide
from streamrl_jax.setup.inputs import Inputs
from streamrl_jax.trace import Trace
from streamrl_jax.train.agreement_gate import AgreementGate, probe_sampling
from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.checkpoint_meta import BEST_METRIC, Meta
from streamrl_jax.train.evaluator import Evaluator, evaluation_sampling
from streamrl_jax.train.hf import load_critic, load_params
from streamrl_jax.train.keeper import Keeper
from streamrl_jax.train.loop import Parts
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Arch, Params
from streamrl_jax.train.own import checked_advantage, checked_loss
from streamrl_jax.train.plan import Plan
from streamrl_jax.train.recorder import Hardware, NoRecords, Recorder, Records
from streamrl_jax.train.rollouts import Rollouts, training_sampling
from streamrl_jax.train.state import TrainState
from streamrl_jax.train.step import Steps
from streamrl_jax.train.trainer import Trainer
from streamrl_jax.train.weights import Conversions, Weights

if TYPE_CHECKING:
    from streamrl_jax.ranker.online import OnlineForecast

_NOTICE_S: Final = 5.0
"""Added to two leases: the bound on the wait for the controller to name a trainer process that is gone. It does so
after one lease, or later where it was stopped itself meanwhile."""


@dataclass(frozen=True)
class Restore:
    """A checkpoint to start from.

    Attributes:
        source: Open where it lies. It reads and compares every byte of a checkpoint once, so whoever chose the step
            hands on the one that it chose with.
        step: Its number.
        forked: It is another run's, which may have been of another algorithm.
    """

    source: Checkpointer
    step: int
    forked: bool = False


@dataclass(frozen=True)
class Leading:
    """What the first trainer process has, and no other."""

    generation: GenerationSide
    sink: MetricSink


@dataclass(frozen=True)
class Edges:
    """What the trainer side talks to; whoever starts the run opens and closes them.

    Attributes:
        controller: Of the run, as this trainer process reaches it.
        leading: None in a trainer process that is not the first: it keeps no records and writes no version.
    """

    controller: RunController
    checkpointer: Checkpointer
    display: Display
    trace: Trace
    stop: StopSignal
    leading: Leading | None = None


@contextlib.contextmanager
def assembled(
    cfg: Config, home: RunDir, inputs: Inputs, edges: Edges, restore: Restore | None
) -> Iterator[tuple[Parts, int]]:
    """Builds the trainer and everything that the loop talks to, and compiles the run's shapes.

    The trainer takes the longest, and may be interrupted: nothing is trained yet.

    Args:
        cfg: The run's configuration.
        home: The run directory.
        inputs: Model, tokenizer, prompts, functions.
        edges: Open.
        restore: Where to start from; None: the checkpoint of the configuration, at version 0.

    Yields:
        The parts, and the iteration to start with.

    Raises:
        StopRequested: A signal came meanwhile.
        UserError: Checkpoint, model or mesh do not fit the configuration.
        ControlError: Another trainer process is missing.
    """
    steps = build_steps(cfg, inputs)
    plan = Plan(edges.controller.acknowledge if edges.controller.world > 1 else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(missing_named(plan, 2 * cfg.control.lease_s + _NOTICE_S))
        with edges.stop.interruptible():
            trainer, meta = _warm_trainer(steps, inputs, edges.display, restore, plan)
        weights = _open_weights(cfg, home, inputs, edges, plan, stack)
        forecast = _open_forecast(cfg, home, inputs, restore, stack) if edges.leading else None
        parts = _parts(cfg, home, inputs, edges, trainer, weights, plan, meta, forecast)
        yield parts, meta.version if meta else 0


@contextlib.contextmanager
def missing_named(plan: Plan, bound_s: float) -> Iterator[None]:
    """What fails first where a trainer process has died is often a connection, whose error does not say so.

    Args:
        plan: Knows whom to ask.
        bound_s: On the wait for an answer.

    Raises:
        ControlError: Names the process that is missing, in place of the program's own error.
    """
    try:
        yield
    except JaxRuntimeError as error:
        if (missing := plan.missing(bound_s)) is None:
            raise
        raise missing from error


@contextlib.contextmanager
def open_bridge(
    cfg: Config, home: RunDir, arch: Arch, generation: GenerationSide, plan: Plan | None = None
) -> Iterator[Weights]:
    """Opens the trainer's side of the bridge: the publisher, behind the store for instances on other hosts.

    Args:
        cfg: ``gen.dtype`` and ``bridge`` are read.
        home: The run directory; versions lie there where shared memory is too small.
        arch: Of the policy.
        generation: Brings versions to the instances.
        plan: Of several trainer processes; None: there is one.

    Yields:
        The loop's door to it.
    """
    places = [SHARED_MEMORY, home.path]
    sweep(places)
    with Publisher(arch, cfg.gen.dtype, home.fence, places) as publisher:
        store = generation.store
        store.versions = lambda: publisher.held
        yield Weights(publisher, generation.controller, store.address, cfg.bridge.update_timeout_s, plan)


def _open_weights(
    cfg: Config, home: RunDir, inputs: Inputs, edges: Edges, plan: Plan, stack: contextlib.ExitStack
) -> Weights | Conversions:
    if edges.leading is None:
        return Conversions(inputs.arch, cfg.gen.dtype, plan)
    return stack.enter_context(open_bridge(cfg, home, inputs.arch, edges.leading.generation, plan))


def _open_forecast(
    cfg: Config, home: RunDir, inputs: Inputs, restore: Restore | None, stack: contextlib.ExitStack
) -> OnlineForecast | None:
    """The predictor of answers' lengths, where dispatch asks for one."""
    if cfg.dispatch.policy == "arrival":
        return None
    from streamrl_jax.ranker.model import LengthRanker
    from streamrl_jax.ranker.online import OnlineForecast
    from streamrl_jax.ranker.restore import begin

    origin = restore and (restore.source.directory.parent, restore.step)
    known, said = begin(cfg.ranker, LengthRanker.load, inputs.train_prompts, origin)
    longest, vocabulary = cfg.data.max_response_length, inputs.arch.vocab_size
    sizes = {"longest": longest, "vocab_size": vocabulary, "seed": cfg.run.seed}
    forecast = OnlineForecast(cfg.ranker, known, said, home.path, **sizes)
    stack.callback(forecast.close)
    return forecast


def build_steps(cfg: Config, inputs: Inputs) -> Steps:
    """The run's programs on its mesh."""
    limit = inputs.tokenizer.vocab_limit(masked=cfg.rollout.mask_padded_vocab)
    loss = inputs.loss and checked_loss(inputs.loss, cfg.algorithm.loss_fn)
    return Steps(inputs.arch, build_mesh(cfg), cfg, policy_loss=loss, vocab_limit=limit)


def build_mesh(cfg: Config) -> Mesh:
    """The one place where a configuration becomes a mesh, over all devices that JAX sees."""
    axes = cfg.trainer.mesh
    return make_mesh(axes.data, axes.fsdp, axes.tensor)


def build_trainer(
    steps: Steps, inputs: Inputs, restore: Restore | None, plan: Plan | None = None
) -> tuple[Trainer, Meta | None]:
    """The trainer at its beginning.

    Args:
        steps: The run's programs.
        inputs: Model and functions.
        restore: The checkpoint to start from; None: the model's, at version 0.
        plan: Of several trainer processes; None: there is one.

    Returns:
        The trainer, and what goes with the checkpoint.

    Raises:
        UserError: Model or checkpoint do not fit the configuration.
    """
    cfg = steps.cfg
    reference = load_params(inputs.model_dir, steps.actor) if cfg.uses_reference else None
    meta = None
    if restore is None:
        state = steps.init_state(load_params(inputs.model_dir, steps.actor), _critic_params(steps, inputs))
    elif restore.forked:
        meta = restore.source.read_meta(restore.step)
        state = _forked_state(restore.source, restore.step, steps, inputs)
    else:
        state, meta = restore.source.restore(restore.step, steps.abstract_state())
    advantage = inputs.advantage and checked_advantage(inputs.advantage, cfg.algorithm.advantage_fn)
    return Trainer(steps, state, reference, group_advantage=advantage, plan=plan), meta


def _forked_state(source: Checkpointer, step: int, steps: Steps, inputs: Inputs) -> TrainState:
    """The state of another run, which may have had a critic where this one has none, or the other way round.

    A critic that is not used is left behind. One that is missing begins as in a new run: from `model.critic_path`, or
    from the policy, here as it is at the fork.
    """
    wanted = steps.abstract_state()

    def part(name: str) -> Any:
        return source.restore_part(step, (name,), getattr(wanted, name))

    actor = part("actor")
    if wanted.critic is None:
        critic = None
    elif source.holds(step, ("critic",)):
        critic = part("critic")
    else:
        critic = steps.init_critic(actor.params, _critic_params(steps, inputs))
    return TrainState(actor, critic, part("updates"), part("advantages"))


def _critic_params(steps: Steps, inputs: Inputs) -> Params | None:
    """The critic's own start; None where it starts from the policy, or there is no critic."""
    if steps.critic is None or inputs.critic_dir is None:
        return None
    return load_critic(inputs.critic_dir, steps.critic)


def _warm_trainer(
    steps: Steps, inputs: Inputs, display: Display, restore: Restore | None, plan: Plan
) -> tuple[Trainer, Meta | None]:
    display.phase("trainer", f"trainer: loading {inputs.model_dir.name} onto {steps.mesh.size} devices")
    trainer, meta = build_trainer(steps, inputs, restore, plan)
    display.phase("trainer", "trainer: compiling the training step")
    trainer.warm_up()
    display.done("trainer")
    return trainer, meta


def _parts(
    cfg: Config,
    home: RunDir,
    inputs: Inputs,
    edges: Edges,
    trainer: Trainer,
    weights: Weights | Conversions,
    plan: Plan,
    meta: Meta | None,
    forecast: OnlineForecast | None,
) -> Parts:
    controller, stop, trace = edges.controller, edges.stop, edges.trace
    start = meta.version if meta else 0
    evaluated = meta is not None and BEST_METRIC in meta.metrics
    stop_ids = (*inputs.tokenizer.eos_ids, *cfg.rollout.stop_token_ids)
    sampling = training_sampling(cfg, stop_ids)
    rollouts = Rollouts(cfg, controller, inputs.train_prompts, sampling, trace, stop, start, forecast)
    probes = inputs.train_prompts.iteration(0)
    gate = AgreementGate(cfg, controller, weights, probes, probe_sampling(cfg, sampling), stop)
    recorder: Records = NoRecords()
    if edges.leading is not None and isinstance(weights, Weights):
        samples = SampleLog(home.samples, home.fence, inputs.tokenizer.decode)
        hardware = _hardware(cfg, inputs.arch, trainer.mesh)
        doors = controller, rollouts, weights, gate
        recorder = Recorder(cfg, edges.leading.sink, samples, trace, edges.display, *doors, hardware)
    held_out = inputs.test_prompts.all() if inputs.test_prompts else ()
    evaluator = Evaluator(
        cfg, controller, held_out, evaluation_sampling(cfg, stop_ids), recorder, stop, evaluated
    )
    keeper = Keeper(cfg, edges.checkpointer, trainer, evaluator, rollouts, home.fence, start, plan, forecast)
    return Parts(cfg, trainer, rollouts, weights, gate, evaluator, keeper, recorder, trace)


def _hardware(cfg: Config, arch: Arch, mesh: Mesh) -> Hardware:
    pools = cfg.gen.all_pools
    elsewhere = max(len(cfg.gen.endpoints), cfg.gen.min_instances - sum(pool.instances for pool in pools))
    generating = sum(pool.instances * pool.tensor_parallel_size for pool in pools)
    generating += elsewhere * cfg.gen.tensor_parallel_size
    kind = mesh.devices.flat[0].device_kind
    return Hardware(arch, mesh.size, generating, kind)
