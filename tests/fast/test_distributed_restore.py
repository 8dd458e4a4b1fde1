"""Two trainer processes of four devices go on from what one process with eight has written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from streamrl_jax.train.checkpoint import Checkpointer
from streamrl_jax.train.state import TrainState

from .test_checkpoint import META, _abstract_train_state, _filled

STEP = 4
PROCESSES = 2

_READER = """
import sys
from pathlib import Path
import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]), cluster_detection_method="deactivate")
from tests.fast.test_distributed_restore import compare

compare(Path(sys.argv[1]))
print("equal", jax.process_index(), jax.device_count(), len(jax.local_devices()))
jax.distributed.shutdown()
"""


def compare(directory: Path) -> None:
    """In each of the processes: every shard of its own devices is what was written, bit by bit."""
    abstract: TrainState = _abstract_train_state((2, 4, 1))
    with Checkpointer(directory, keep=2) as checkpointer:
        restored, meta = checkpointer.restore(STEP, abstract)
    assert meta == META
    rng = np.random.default_rng(0)  # as `_filled` draws
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        written = (rng.standard_normal(wanted.shape) * 100).astype(wanted.dtype)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(written[shard.index]).tobytes()


def test_two_processes_read_bitwise_what_one_has_written(tmp_path: Path) -> None:
    """Written along eight devices of `fsdp`, read as two times four."""
    directory = tmp_path / "checkpoints"
    with Checkpointer(directory, keep=2) as checkpointer:
        checkpointer.save(STEP, _filled(_abstract_train_state((1, 8, 1))), META)
    kept = socket.socket()  # so that nobody else takes the port; gRPC shares one
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{kept.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", _READER, str(directory), address, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    try:
        for index, reader in enumerate(readers):
            said, _ = reader.communicate(timeout=600)
            assert reader.returncode == 0, said[-3000:]
            assert f"equal {index} 8 4" in said
    finally:
        for reader in readers:
            reader.kill()
        kept.close()
