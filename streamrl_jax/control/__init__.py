"""The controller: what is asked for, which instance answers, and that each answer arrives once.

No JAX, torch or vLLM in here. Policies (`ledger`, `queue`, `lease`, `shelf`, `jobs`) are pure; sockets,
processes and threads are in `instance`, `pool`, `rewards` and `controller`.
"""
