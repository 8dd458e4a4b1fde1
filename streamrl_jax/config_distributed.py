"""The section of several trainer processes: how many, which one this is, where they meet."""

from __future__ import annotations

from pydantic import Field, model_validator

from streamrl_jax.config_section import Section


class DistributedSection(Section):
    """Several trainer processes that train as one (``jax.distributed``). Each is started by the same command."""

    processes: int = Field(default=1, ge=0)
    """So many; 1: this one alone. 0: as many as the scheduler started (SLURM, indexed Kubernetes jobs, Open MPI), with
    all else from there too, as JAX finds it."""
    process_id: int = Field(default=0, ge=0)
    """Which one this is. 0 leads: it makes the run directory, starts controller and instances, writes the records."""
    coordinator_address: str = ""
    """``host:port`` of process 0, where the processes meet; the port must be free there."""
    local_devices: int = Field(default=0, ge=0)
    """Devices of each process: so many CPU devices are made, or so many of the trainer's GPUs go to each process that
    ``spawn`` starts; 0: one CPU device, or equal shares of the GPUs."""
    spawn: bool = False
    """This process starts the others, on its own machine. They end with it."""
    insecure: bool = False
    """Permits a ``coordinator_address`` beyond loopback. What JAX's processes say to each other (coordination,
    gradients) is neither encrypted nor authenticated: for a network of one's own."""
    start_timeout_s: float = Field(default=300.0, ge=1.0)
    """Bound on the wait for each other at the start."""
    heartbeat_timeout_s: float = Field(default=100.0, ge=5.0)
    """JAX ends all processes when one is silent for so long. ``control.lease_s`` comes first, and names it."""

    @model_validator(mode="after")
    def _fits(self) -> DistributedSection:
        if self.processes and self.process_id >= self.processes:
            raise ValueError(
                f"trainer.distributed.process_id = {self.process_id} with processes = {self.processes}: they are "
                "numbered from 0"
            )
        if self.spawn and (self.processes < 2 or self.process_id):
            raise ValueError(
                f"trainer.distributed.spawn with processes = {self.processes} and process_id = {self.process_id}: "
                "process 0 starts the others, of which there must be some; set processes to 2 or more"
            )
        if self.processes > 1 and not self.spawn and not self.coordinator_address:
            raise ValueError(
                f"trainer.distributed.processes = {self.processes} without coordinator_address: give host:port of "
                "process 0, or spawn = true on one machine"
            )
        host, _, port = self.coordinator_address.rpartition(":")
        if self.coordinator_address and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"trainer.distributed.coordinator_address = {self.coordinator_address!r} is no host:port; give those "
                "of process 0, such as node-a:50060"
            )
        return self
