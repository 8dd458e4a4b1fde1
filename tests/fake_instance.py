"""An instance's process with a fake engine: ``python -m tests.fake_instance --spec FILE.json``.

Like the real one it spawns a process of its own (a stand-in for EngineCore), whose id goes into ``<address
file>.core``. ``engine.model`` of the spec says how it behaves: "" well, "deaf" (SIGTERM is ignored),
"broken" (ends at once); a checkpoint's directory: it answers with that policy, in NumPy.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from streamrl_jax.gen.parentage import be_parent, die_with_spawner, in_lasting_thread

if __name__ == "__mp_main__":
    die_with_spawner()


def core() -> int:
    """Starts the stand-in for EngineCore; its process id."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    assert process.pid is not None
    return process.pid


def main() -> None:
    from streamrl_jax.gen.options import read_spec
    from streamrl_jax.gen.serve import serve
    from tests.fakes import FakeEngine
    from tests.numpy_policy import PolicyEngine

    logging.basicConfig(level=logging.INFO)
    spec = read_spec(Path(sys.argv[2]))
    if spec.engine.model == "broken":
        sys.exit("the fake was told to break")
    be_parent()
    pid = in_lasting_thread(core).result(timeout=60)
    Path(f"{spec.address_file}.core").write_text(str(pid))

    model = Path(spec.engine.model)
    policy = model.is_absolute() and model.is_dir()
    slots = spec.engine.max_num_seqs

    async def run() -> int:
        engine = PolicyEngine.of(model, slots=slots) if policy else FakeEngine()
        served = asyncio.create_task(serve(spec, engine))
        while spec.engine.model == "deaf" and not Path(spec.address_file).exists():
            await asyncio.sleep(0.01)
        if spec.engine.model == "deaf":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return await served

    os._exit(asyncio.run(run()))  # as the real one


if __name__ == "__main__":
    main()
