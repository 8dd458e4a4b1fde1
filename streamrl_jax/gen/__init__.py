"""The stream generation service: vLLM behind a gRPC stream, its client, its processes. No JAX in here."""
