"""Running several coroutines as one, without losing an exception."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from streamrl_jax.control.faults import InstanceLost


async def to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Awaits a coroutine that bounds itself, also when this call is cancelled meanwhile (a process must be
    ended)."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines beside each other until one of them ends; the others are cancelled and awaited.

    Args:
        coroutines: what to run.

    Raises:
        Exception: what one of them raised; of several, one that ends the run goes before the loss of an
            instance.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    # Not reached when this call itself was cancelled: that must not turn into the loss of an instance.
    errors = [o for o in outcomes if isinstance(o, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, InstanceLost)):
        raise error
