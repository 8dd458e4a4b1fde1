"""Several trainer processes: which one this is, how they are started on one machine, how they meet."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from streamrl_jax.config import Config
from streamrl_jax.config_distributed import DistributedSection
from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.protocol import RunController
from streamrl_jax.errors import UserError
from streamrl_jax.gen.host import free_port
from streamrl_jax.interrupt import StopRequested, part_badly
from streamrl_jax.rundir import RunDir

if TYPE_CHECKING:
    from streamrl_jax.train.assemble import Restore

_GRACE_S: Final = 10.0  # a process that was told to end is killed after so long
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Member:
    """One of the trainer processes.

    Attributes:
        index: Its number; 0 leads.
        count: How many there are.
        coordinator: ``host:port`` where they meet; empty: there is one process.
        local_devices: Ids of its own devices among those that it sees; None: all of them.
    """

    index: int = 0
    count: int = 1
    coordinator: str = ""
    local_devices: tuple[int, ...] | None = None

    @property
    def leads(self) -> bool:
        """Whether it makes the run directory and keeps the records."""
        return self.index == 0


def membership(cfg: Config) -> Member:
    """Which of the trainer processes this one is.

    Args:
        cfg: `trainer.distributed` is read; with `processes` = 0, what the scheduler says.

    Raises:
        UserError: No scheduler says anything, or the processes would meet beyond loopback without consent.
    """
    section = cfg.trainer.distributed
    if section.processes == 1:
        return Member()
    if section.spawn:
        return Member(0, section.processes, f"127.0.0.1:{free_port()}")
    if section.processes:
        member = Member(section.process_id, section.processes, section.coordinator_address)
    else:
        member = _scheduled(section)
    host = member.coordinator.rpartition(":")[0]
    if member.count > 1 and host not in _LOOPBACK and not section.insecure:
        raise UserError(
            f"the trainer processes would meet at {member.coordinator}, beyond this machine, and what JAX's processes "
            "say to each other is neither encrypted nor authenticated; on a network of your own set "
            "trainer.distributed.insecure = true"
        )
    return member


def _scheduled(section: DistributedSection) -> Member:
    """What the scheduler says, as JAX finds it."""
    # JAX has no public question for this, and the first process must be known before they meet: it starts the
    # instances, which take the longest.
    from jax._src.clusters import ClusterEnv

    coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
        section.coordinator_address or None, None, None, None, None, int(section.start_timeout_s)
    )
    if coordinator is None or count is None or index is None:
        raise UserError(
            "trainer.distributed.processes = 0, and JAX finds no scheduler here (SLURM, indexed Kubernetes jobs, Open "
            "MPI) that would say how many there are; give processes, process_id and coordinator_address"
        )
    return Member(index, count, coordinator, None if devices is None else tuple(devices))


@contextlib.contextmanager
def met(cfg: Config, member: Member, gpus: Sequence[str] = ()) -> Iterator[None]:
    """Waits until all trainer processes are here, before JAX's devices are touched; at the end they part in good order.

    After an error there is no good order: this process is to end as soon as everything else is closed
    (`interrupt.parted_badly`), without a wait for others, which may hang in a collective that it will never enter.

    Args:
        cfg: `trainer.distributed` is read.
        member: From `membership`.
        gpus: Those of this process; empty: it computes on the CPU.

    Raises:
        UserError: They did not all come in time.
    """
    import jax

    if cfg.trainer.distributed.local_devices and not gpus:
        jax.config.update("jax_num_cpu_devices", cfg.trainer.distributed.local_devices)
    if member.count == 1:
        yield
        return
    _initialize(cfg.trainer.distributed, member)
    try:
        yield
    except BaseException:
        part_badly()
        raise
    jax.distributed.shutdown()


def _initialize(section: DistributedSection, member: Member) -> None:
    import jax

    # It would take SIGTERM from `interrupt.StopSignal`, for a service that tells all processes of it; here the
    # controller does.
    jax.config.update("jax_enable_preemption_service", False)
    bound = int(section.start_timeout_s)
    try:
        jax.distributed.initialize(
            member.coordinator,
            member.count,
            member.index,
            local_device_ids=member.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=bound,
            heartbeat_timeout_seconds=int(section.heartbeat_timeout_s),
            shutdown_timeout_seconds=int(_GRACE_S),
            coordinator_bind_address=member.coordinator,  # JAX's own choice would be every address of the machine
        )
    except RuntimeError as error:
        raise UserError(
            f"trainer process {member.index} of {member.count} waited {bound} s (trainer.distributed.start_timeout_s) "
            f"for all of them to meet at {member.coordinator}, in vain. JAX says: {error}. Look at the logs of the "
            "others, and at coordinator_address"
        ) from error


@contextlib.contextmanager
def failures_told(controller: RunController) -> Iterator[None]:
    """Tells the controller what ends this trainer process, and so the others, which would wait for it otherwise."""
    try:
        yield
    except StopRequested:
        raise
    except BaseException as error:
        with contextlib.suppress(ControlError):  # it is gone, or this is what it told
            controller.fail(error)
        raise


@dataclass(frozen=True)
class Orders:
    """What the first trainer process has decided for all of them; plain values, as they travel.

    Attributes:
        run_dir: The run directory, absolute.
        run_id: Of this life of the run.
        incarnation: Of this life of the run.
        config: The first process's configuration, as JSON.
        checkpoints: Where the checkpoint to start from lies; empty: the run starts from the model.
        step: Its number.
        forked: It is another run's.
    """

    run_dir: str
    run_id: str
    incarnation: int
    config: str
    checkpoints: str = ""
    step: int = 0
    forked: bool = False


def tell(home: RunDir, cfg: Config, restore: Restore | None) -> None:
    """Tells the other trainer processes what this, the first, has decided."""
    from streamrl_jax.train.processes import told_by_the_first

    orders = Orders(
        str(home.path.absolute()), home.fence.run_id, home.fence.incarnation, cfg.model_dump_json()
    )
    told = dict(vars(orders))
    if restore is not None:
        source = str(restore.source.directory)
        told |= {"checkpoints": source, "step": restore.step, "forked": restore.forked}
    told_by_the_first(told)


def own_share(gpus: Sequence[str], index: int, section: DistributedSection) -> tuple[str, ...]:
    """GPUs of one of the processes that share a machine's.

    Args:
        gpus: The trainer's on this machine.
        index: Which process.
        section: With `spawn`, each takes `local_devices` of them in turn, or equal shares.

    Raises:
        UserError: They do not suffice.
    """
    if not section.spawn or not gpus:
        return tuple(gpus)
    size = section.local_devices or len(gpus) // section.processes
    share = tuple(gpus[index * size : (index + 1) * size])
    if not share or len(share) < size:
        raise UserError(
            f"trainer.distributed.spawn: {section.processes} trainer processes with {size} GPUs each need more than "
            f"the {len(gpus)} GPUs of this machine that are the trainer's ({', '.join(gpus)}); lower processes or "
            "local_devices"
        )
    return share


@contextlib.contextmanager
def spawned(cfg: Config, home: RunDir, member: Member, gpus: Sequence[str]) -> Iterator[None]:
    """Starts the other trainer processes on this machine, if the configuration says so; ends them, whatever happens.

    Each is in a session of its own behind a guard, which ends it as soon as this process has ended. What it says is in
    ``RUN_DIR/logs/trainer-K.log``.

    Args:
        cfg: `trainer.distributed` is read.
        home: The run directory, with the configuration that they read.
        member: This process.
        gpus: The trainer's on this machine, to be shared out.
    """
    section = cfg.trainer.distributed
    with contextlib.ExitStack() as stack:
        if section.spawn:
            for index in range(1, member.count):
                share = own_share(gpus, index, section)
                stack.enter_context(_process(home, index, member.coordinator, share))
        yield


@contextlib.contextmanager
def _process(home: RunDir, index: int, coordinator: str, gpus: Sequence[str]) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "streamrl_jax", "train", str(home.config)]
    command += ["--run-dir", str(home.path.absolute())]
    changed = {"spawn": "false", "process_id": index, "coordinator_address": coordinator}
    command += [f"--trainer.distributed.{name}={value}" for name, value in changed.items()]
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command.append("--trainer.devices=")
    read_end, write_end = os.pipe()
    guard = [
        sys.executable,
        "-P",
        "-m",
        "streamrl_jax.gen.guard",
        str(read_end),
        str(os.getpid()),
        str(_GRACE_S),
    ]
    with trainer_log(home.logs, index).open("ab") as output, os.fdopen(write_end, "wb") as lifeline:
        try:
            process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end,),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(read_end)
        try:
            yield
        except BaseException:
            lifeline.close()  # its guard ends it
            raise
        finally:
            _end(process, lifeline, index)


def _end(process: subprocess.Popen[bytes], lifeline: IO[bytes], index: int) -> None:
    """Lets a process end by itself, since it does so in good order; then its guard ends it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    lifeline.close()
    try:
        process.wait(2 * _GRACE_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"trainer process {index} did not end within {3 * _GRACE_S:g} s") from None


def trainer_log(logs: Path, index: int) -> Path:
    """Where a trainer process that is not the first says what it does."""
    return logs / f"trainer-{index}.log"
