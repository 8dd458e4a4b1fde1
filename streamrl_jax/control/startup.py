"""Starting an instance, and waiting while it loads, with a word about what it does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from streamrl_jax.control.faults import InstanceLost
from streamrl_jax.control.link import user_error
from streamrl_jax.control.tenure import Tenure
from streamrl_jax.errors import UserError
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.launch import Launched, Launcher
from streamrl_jax.types import InstanceState

_POLL_S = 1.0  # between two looks
_ANSWER_S = 5.0  # bound on one answer


async def launch(name: str, launcher: Launcher, tenure: Tenure) -> Launched:
    """Starts an instance's process, or finds the one that is there.

    Raises:
        UserError: it cannot be started, and the run begins with it.
        InstanceLost: it cannot, though it worked before, or others go on without it.
    """
    try:
        return await launcher.start(name)
    except UserError as error:
        if tenure.founding and not tenure.loaded:
            raise
        raise InstanceLost(str(error)) from error  # one of the restarts that are allowed


async def until_loaded(
    name: str,
    client: InstanceClient,
    launched: Launched,
    timeout_s: float,
    tell: Callable[[str, float], None],
    poll_s: float = _POLL_S,
    lease_s: float = math.inf,
) -> None:
    """Returns when the instance can be greeted.

    One that was started elsewhere and has failed may be replaced by whoever started it: it is waited for, and so is
    one whose engine has stopped answering, which would get samples only to lose them again. One of the run's own
    that has failed is lost at once.

    Args:
        name: of the instance.
        client: its calls.
        launched: its process.
        timeout_s: bound on the whole, ``gen.start_timeout_s``.
        tell: takes the phase and the seconds waited, at each look.
        poll_s: rest between two looks.
        lease_s: an engine that has not answered for half of it is waited for.

    Raises:
        InstanceLost: it ended, failed, or was not ready in time.
        UserError: it refuses this run.
    """
    began = time.monotonic()
    phase, detail = "the process starts" if launched.managed else f"{launched.address} is asked", ""
    while True:
        check_process(launched)
        try:
            status, _ = await client.status(timeout_s=_ANSWER_S)
        except InstanceError as error:
            if not error.transient:
                raise user_error(name, error) or InstanceLost(str(error)) from error
            phase, detail = "no answer yet", f" ({error})"
        else:
            if status.state is InstanceState.FAILED:
                phase = f"it reports that it failed: {status.message}"
                if launched.managed:
                    raise InstanceLost(phase)
            elif status.engine_age_s > lease_s / 2:
                phase, detail = "its engine does not answer", f" ({status.engine_age_s:.1f} s)"
            elif status.state is not InstanceState.LOADING:
                return
            else:
                phase, detail = status.phase or phase, ""
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise InstanceLost(
                f"it was not loaded within {timeout_s:g} s (gen.start_timeout_s); its last phase: {phase}{detail}"
            )
        tell(phase, waited)
        await asyncio.sleep(poll_s)


def check_process(launched: Launched) -> None:
    """Raises `InstanceLost` when the process has ended."""
    if (ended := launched.ended()) is not None:
        raise InstanceLost(f"its process ended ({ended})")
