"""The stream generation service: vLLM behind a gRPC stream, its client, its processes. No JAX in here."""

import os

# gRPC's C core reports every peer that ends a connection on stderr, in the middle of a run's live display.
# What matters reaches the caller as an error. Read when gRPC is first used, hence here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
