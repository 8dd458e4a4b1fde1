"""A tiny process between a launcher and an instance, which ends the whole instance when either is gone.

    launcher ──pipe──▶ guard ──▶ instance (a session of its own) ──▶ EngineCore ──▶ workers

The guard imports nothing heavy and runs one thread, so that it works when the launcher was killed, and when
the instance or its engine is stopped or hangs. What ends it ends the instance: the launcher closes the pipe
(or dies, which closes it too), SIGTERM, or the instance's own end. Everything is then ended: SIGTERM to the
instance, and after a grace SIGKILL to its whole process group and to whatever of it had left that group. If
the guard itself is killed, the chain of parent-death signals (`parentage.die_with`) takes the instance down.
A launcher that was killed cannot tidy up: the weights that it left in shared memory are removed here.

Run as ``python -m streamrl_jax.gen.guard PIPE_FD PARENT_PID GRACE_S COMMAND...``; exits as the instance
did, or with 128 and the number of the signal that ended it. With -1 for the pipe nobody launched it
(`streamrl gen`): it guards until the instance ends or a signal comes, whatever becomes of its parent.

Shared memory that an engine's processes made for each other (`_SEGMENT`) outlives a kill -9 of all of them, and nothing
about its name tells whose it was. So the guard looks now and then at what they have mapped, and removes it after them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final

from streamrl_jax.gen.parentage import adopt_orphans, die_with

GRACE_S: Final = 8.0
"""What an instance gets by default to end in good order before its group is killed."""
_TICK_S: Final = 0.5
_SEGMENTS_S: Final = 2.0
"""Between two looks at the shared memory of an instance; one takes milliseconds."""
TRACKERS_S: Final = 5.0
"""Python's resource trackers get so long to unlink the shared memory of the processes that were killed."""
REAP_S: Final = 3.0
"""Bound on the end of what was killed: a process that hangs in the kernel is left to it."""

_SEGMENT: Final = re.compile(rb" (/dev/shm/(?:psm_|vllm_|sem\.)\S+)")
"""Shared memory that an engine's processes made for each other; blobs belong to their publisher."""


def group_members(group: int) -> Iterator[tuple[int, bytes]]:
    """Processes of a group that have not ended: id and command line."""
    return ((pid, command) for pid, _, its_group, command in _processes() if its_group == group)


def _processes() -> Iterator[tuple[int, int, int, bytes]]:
    """Processes that have not ended: id, parent's id, group, command line."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                command = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in (b"Z", b"X"):
            yield int(entry.name), int(parent), int(group), command


def shared_segments(group: int) -> set[bytes]:
    """Files of shared memory that processes of a group have mapped for each other."""
    found: set[bytes] = set()
    for pid, _ in group_members(group):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                found.update(_SEGMENT.findall(file.read()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kill_group(group: int, segments: Iterable[bytes] = ()) -> None:
    """Kills every process of a group and removes the shared memory that they held.

    Python's resource trackers go last: they know the segments of processes that had ended before. They do
    not know those that vLLM's own code makes, which are read off the processes' maps.

    Args:
        group: its id.
        segments: what processes that have ended meanwhile had mapped.
    """
    held = shared_segments(group).union(segments)
    _kill_members(group)
    for path in held:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _kill_members(group: int) -> None:
    for pid, command in group_members(group):
        if b"resource_tracker" not in command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKERS_S
    while time.monotonic() < deadline and any(True for _ in group_members(group)):
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _watch(lifeline: int, parent: int, child: subprocess.Popen[bytes], told: list[int]) -> set[bytes]:
    """Returns when the launcher or the instance is gone, or a signal came: the segments that were seen meanwhile."""
    poller = select.poll()
    if lifeline >= 0:
        poller.register(lifeline, select.POLLIN | select.POLLHUP)
    segments: set[bytes] = set()
    looked = 0.0
    while child.poll() is None and not told:
        # A forked child of the launcher may hold the pipe open after its death; the new parent tells.
        if poller.poll(_TICK_S * 1000) or (lifeline >= 0 and os.getppid() != parent):
            break
        if time.monotonic() - looked >= _SEGMENTS_S:
            segments |= shared_segments(child.pid)
            looked = time.monotonic()
    return segments


def _end(child: subprocess.Popen[bytes], grace_s: float, segments: set[bytes]) -> int:
    """Ends the instance and all that it started; its exit code, or 128 and a signal's number."""
    segments |= shared_segments(child.pid)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
    kill_group(child.pid, segments)
    code = child.wait()
    _end_orphans()
    return code if code >= 0 else 128 - code


def _end_orphans() -> None:
    """Kills and reaps what came to the guard when its parents ended, of any group: one may bring others."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid, parent, _, _ in _processes():
            if parent == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _tidy_up() -> None:
    """Removes the weights of processes that were killed."""
    from streamrl_jax.bridge.blob import SHARED_MEMORY, sweep

    sweep([SHARED_MEMORY])


def main(arguments: list[str]) -> int:
    """Guards one instance; see the module's docstring for the arguments."""
    lifeline, parent, grace_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.append(got))
    adopt_orphans()
    guard = os.getpid()
    child = subprocess.Popen(
        arguments[3:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with(guard),
    )
    segments = _watch(lifeline, parent, child, told)
    code = _end(child, grace_s, segments)
    if lifeline >= 0 and os.getppid() != parent:
        _tidy_up()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
