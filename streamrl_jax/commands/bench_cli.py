"""The command line of `streamrl bench`: each measurement is a module of `streamrl_jax.bench`, imported when it is asked
for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

Row = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int], str]
"""Of a command: summary, its options, what runs it, what its configuration files are called (empty: it takes none)."""


def command(module: str) -> tuple[Callable[[ArgumentParser], None], Callable[[Namespace], int]]:
    """A measurement's options and what runs it.

    Args:
        module: of `streamrl_jax.bench`; it has ``add_options`` and ``run``.
    """

    def options(parser: ArgumentParser) -> None:
        import_module(f"streamrl_jax.bench.{module}").add_options(parser)

    def run(arguments: Namespace) -> int:
        return import_module(f"streamrl_jax.bench.{module}").run(arguments)

    return options, run


TABLE: Final[Mapping[str, Row]] = {
    "packing": ("padding, shapes and speed of the packer on a file of lengths", *command("packing"), ""),
    "learning": (
        "the algorithms, and corrections for staleness, on the demo's task: a table",
        *command("learning"),
        "",
    ),
    "stream": (
        "samples/s and added latency through a controller, beside bare gRPC streams",
        *command("stream"),
        "",
    ),
    "dispatch": (
        "what knowing the answers' lengths is worth, on real instances and by the cost model",
        *command("dispatch"),
        "CONFIG",
    ),
    "plan": (
        "dispatch policies side by side by a cost model: planning time, predicted and simulated makespan",
        *command("plan_speed"),
        "",
    ),
    "tls": ("what encryption costs, for samples and for weights", *command("encryption"), ""),
}
"""By the second word of the command."""
