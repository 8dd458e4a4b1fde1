"""What a cluster would do: `profile` measures what the steps of a real instance cost, `generation` runs one generation
stage in simulated time (`engine_model`: one instance of it).

The planning functions are the very ones that a run calls (`ranker`).
"""
