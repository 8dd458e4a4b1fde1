"""The fence on every call of `RunControl`: what an earlier life of the run left alive is not listened to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from streamrl_jax.types import Fence

_KEY: Final = "streamrl-fence"
_WRITES_S: Final = 10.0  # for what a refused caller is still sending
_CALLS: Final = "/streamrl.v1.RunControl/"


def fence_metadata(fence: Fence) -> tuple[tuple[str, str], ...]:
    """What goes with each call of a trainer process."""
    return ((_KEY, _written(fence)),)


class FenceInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call of `RunControl` that comes from another run, or from another life of this one.

    A trainer process that survived its run (it hangs in a collective, say) goes on to ask at the address that it knows.
    Where a resumed run's controller has taken the same one, it must neither acknowledge steps there nor take samples.

    Args:
        fence: of the controller.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = _written(fence)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Lets the call pass or replaces its handler by one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_CALLS):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get(_KEY, "none")
        if given == self._fence:
            return handler

        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if handler.request_streaming and not handler.response_streaming:
                # A client that is cut off while it writes reports an error of its own in place of the refusal.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WRITES_S):
                        async for _ in requests:
                            pass
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this controller is of the run {self._fence} (run id, life), and the caller of {given}: it belongs to "
                "another run, or to a life of this one that is over",
            )

        return grpc.stream_unary_rpc_method_handler(
            refuse
        )  # it takes a stream: so no message is read as such


def _written(fence: Fence) -> str:
    return f"{fence.run_id}/{fence.incarnation}"
