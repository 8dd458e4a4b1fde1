"""What stands before every call of a server: the question for the token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from streamrl_jax.gen import health


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call that does not carry the token, but for the question whether the instance is up."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Lets the call pass or replaces its handler by one that refuses."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method == health.CHECK:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        if handler is None or hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return _REFUSING


async def _unauthenticated(requests: Any, context: grpc.aio.ServicerContext) -> Any:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call carries no valid token; give both sides the same security.token_file",
    )


_REFUSING: Final = grpc.stream_unary_rpc_method_handler(_unauthenticated)
"""In the place of any handler. It takes a stream: so no message of a stranger is read."""
