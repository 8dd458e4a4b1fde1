"""The command line of `streamrl bench`: each measurement is a module of `streamrl_jax.bench`, imported when it is asked
for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module


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
