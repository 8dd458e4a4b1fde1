"""An instance's process with a fake engine: ``python -m tests.fake_instance --spec FILE.json``.

Like the real one it spawns a process of its own (a stand-in for EngineCore), whose id goes into ``<address
file>.core``. ``engine.model`` of the spec says how it behaves: "" well, "deaf" (SIGTERM is ignored),
"broken" (ends at once); a checkpoint's directory: it answers with that policy, in NumPy; a JSON object: it counts
at that pace (`counting`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_jax.gen.parentage import be_parent, die_with_spawner, in_lasting_thread

if TYPE_CHECKING:
    from streamrl_jax.gen.options import InstanceSpec
    from tests.fakes import FakeEngine

if __name__ == "__mp_main__":
    die_with_spawner()


def core() -> int:
    """Starts the stand-in for EngineCore; its process id."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    assert process.pid is not None
    return process.pid


def counting(spec: InstanceSpec) -> FakeEngine:
    """An engine at the pace that the spec's model gives as JSON.

    ``tokens_per_s`` of one answer; lengths from ``shortest`` to ``longest``, which follow from the prompt;
    ``largest_file``: bytes, as on a disk with no room for more, while the file ``full`` exists.
    """
    from tests.fakes import FakeEngine

    how = json.loads(spec.engine.model)
    if (largest := how.get("largest_file")) is not None and Path(how["full"]).exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    shortest, longest = how.get("shortest", 5), how.get("longest", 5)
    return FakeEngine(
        slots=spec.engine.max_num_seqs,
        tokens_per_s=how.get("tokens_per_s", 1000.0),
        length=lambda asked: shortest + int(asked.prompt_ids.sum()) * 7919 % (longest - shortest + 1),
    )


def main() -> None:
    from streamrl_jax.errors import USER_ERROR_EXIT_CODE, UserError
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
        if spec.engine.model.startswith("{"):
            engine = counting(spec)
        else:
            engine = PolicyEngine.of(model, slots=slots) if policy else FakeEngine()
        served = asyncio.create_task(serve(spec, engine))
        while spec.engine.model == "deaf" and not Path(spec.address_file).exists():
            await asyncio.sleep(0.01)
        if spec.engine.model == "deaf":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return await served

    try:  # as the real one
        code = asyncio.run(run())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = USER_ERROR_EXIT_CODE
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
