"""The instance's process: ``python -m streamrl_jax.gen.instance --spec FILE.json``.

Multiprocessing imports the main module again, as ``__mp_main__``, in every process that the instance spawns
(EngineCore, workers), before anything else of ours; here that ties the process to its parent, which vLLM
leaves undone for EngineCore. It does so for a module, not for a package's ``__main__`` nor for the
``streamrl`` script: those become this module by `become_instance`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from streamrl_jax.errors import USER_ERROR_EXIT_CODE, UserError
from streamrl_jax.gen.guard import GRACE_S
from streamrl_jax.gen.parentage import be_parent, die_with_spawner

if __name__ == "__mp_main__":
    die_with_spawner()


def become_instance(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the instance's guard, which starts the instance.

    Args:
        arguments: ``--spec FILE.json``; the file is there for a process other than this one, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    guard = ["-m", "streamrl_jax.gen.guard", "-1", "0", str(GRACE_S)]
    instance = [sys.executable, "-m", "streamrl_jax.gen.instance", *arguments]
    os.execv(sys.executable, [sys.executable, *guard, *instance])


def main() -> NoReturn:
    """Reads the spec, serves, and leaves with the exit code at once."""
    from streamrl_jax.gen.engine import VllmEngine
    from streamrl_jax.gen.options import read_spec
    from streamrl_jax.gen.serve import serve

    parser = argparse.ArgumentParser(prog="python -m streamrl_jax.gen", description="One SGS instance.")
    parser.add_argument("--spec", required=True, type=Path, help="JSON file of an InstanceSpec")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    be_parent()
    try:
        spec = read_spec(parser.parse_args().spec)
        code = asyncio.run(serve(spec, VllmEngine(spec.engine)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = USER_ERROR_EXIT_CODE
    except Exception:  # it must end: an ordinary exit would wait for the engine's processes
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads in the middle of an import or of a wait for EngineCore would hold an ordinary exit up.
    os._exit(code)


if __name__ == "__main__":
    main()
