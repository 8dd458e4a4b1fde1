"""Records <-> wire messages: the one place where `types.py` and `streamrl.proto` meet.

`*_to_proto` trusts its argument, which this program built; `*_from_proto` trusts nothing: every value that
came over the wire is checked for range and consistency; a bad one is a `ValueError` that names its field.
"""

from streamrl_jax.gen.codec.fences import (
    fence_from_proto,
    fence_to_proto,
)
from streamrl_jax.gen.codec.instances import (
    PROTOCOL,
    credit_from_proto,
    heartbeat_from_proto,
    heartbeat_to_proto,
    hello_from_proto,
    hello_to_proto,
    info_from_proto,
    info_to_proto,
    status_from_proto,
    status_to_proto,
    together,
)
from streamrl_jax.gen.codec.samples import (
    assignment_from_proto,
    assignment_to_proto,
    generation_from_proto,
    generation_to_proto,
    key_from_proto,
    progress_from_proto,
    progress_to_proto,
    rejection_from_proto,
    rejection_to_proto,
    runs_from_proto,
    runs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from streamrl_jax.gen.codec.weights import (
    FetchRequest,
    UpdateRequest,
    fetch_from_proto,
    manifest_from_proto,
    manifest_to_proto,
    report_from_proto,
    report_to_proto,
    update_from_proto,
)
from streamrl_jax.gen.codec.wire import MAX_NAME

__all__ = [
    "MAX_NAME",
    "PROTOCOL",
    "FetchRequest",
    "UpdateRequest",
    "assignment_from_proto",
    "assignment_to_proto",
    "credit_from_proto",
    "fence_from_proto",
    "fence_to_proto",
    "fetch_from_proto",
    "generation_from_proto",
    "generation_to_proto",
    "heartbeat_from_proto",
    "heartbeat_to_proto",
    "hello_from_proto",
    "hello_to_proto",
    "info_from_proto",
    "info_to_proto",
    "key_from_proto",
    "manifest_from_proto",
    "manifest_to_proto",
    "progress_from_proto",
    "progress_to_proto",
    "rejection_from_proto",
    "rejection_to_proto",
    "report_from_proto",
    "report_to_proto",
    "runs_from_proto",
    "runs_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "status_from_proto",
    "status_to_proto",
    "together",
    "update_from_proto",
]
