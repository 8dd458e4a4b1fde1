"""The trainer: an SPMD program over a `jax.sharding.Mesh`. It never imports torch, vLLM or transformers."""
