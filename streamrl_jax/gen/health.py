"""The standard health service (``grpc.health.v1.Health/Check``), which schedulers and load balancers probe.

Its two messages are a string and an enum; their bytes are written here, which spares a further dependency.
Nobody needs a token for it: it tells whether the instance is up and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc

SERVICE: Final = "grpc.health.v1.Health"
CHECK: Final = f"/{SERVICE}/Check"

_SERVING: Final = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
_NOT_SERVING: Final = b"\x08\x02"


def add_health(server: grpc.aio.Server, serving: Callable[[], bool]) -> None:
    """Adds the health service to a server.

    Args:
        server: not yet started.
        serving: whether the instance can take work now.
    """

    async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return _SERVING if serving() else _NOT_SERVING

    handler = grpc.unary_unary_rpc_method_handler(check)  # without (de)serialisers: bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Check": handler}),))
