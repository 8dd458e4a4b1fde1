"""Ties a process to the one that started it (DESIGN rule 10), with the kernel's parent-death signal."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

_PARENT: Final = "STREAMRL_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, also if either is stopped then.

    The kernel counts the *thread* that started this process as its parent: that thread must last.

    Args:
        parent: process id of the parent, read before it could have died.

    Raises:
        SystemExit: it has died already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this one, has ended")


def be_parent() -> None:
    """Leaves this process's id to the children that will call `die_with_spawner`."""
    os.environ[_PARENT] = str(os.getpid())


def die_with_spawner() -> None:
    """`die_with` for a process that multiprocessing spawned, and `be_parent` for its own children.

    Raises:
        SystemExit: the parent has ended already.
    """
    die_with(int(os.environ[_PARENT]))
    be_parent()


def adopt_orphans() -> None:
    """Makes descendants whose parents end children of this process, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument}) failed")


def in_lasting_thread(work: Callable[[], T]) -> Future[T]:
    """Runs ``work`` in a thread that never ends, and so may start processes that call `die_with`.

    A daemon: it does not keep the interpreter from ending, not even in the middle of ``work``.

    Args:
        work: what to do.

    Returns:
        Its result, to be waited for elsewhere.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="lasting", daemon=True).start()
    return result
