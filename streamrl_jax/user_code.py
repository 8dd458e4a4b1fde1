"""Functions that a user names in the configuration as `file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from streamrl_jax.errors import UserError


def load_function(name: str, field: str) -> Callable[..., Any] | None:
    """Loads a function from a file of the user's.

    Args:
        name: "file.py:function"; the file's own folder is not put on the path.
        field: The configuration key that holds the name, for errors.

    Returns:
        The function; None if `name` is empty.

    Raises:
        UserError: The form is wrong, there is no such file or function, or the file raises when it is
            imported.
    """
    if not name:
        return None
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise UserError(f"{field} = {name!r}: the form file.py:function is needed")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{field} = {name!r}: there is no file {path.absolute()}; correct the path")
    module = _load_module(path.resolve(), name, field)
    found = getattr(module, function, None)
    if found is None:
        raise UserError(
            f"{field} = {name!r}: {path} has no function {function!r}; {_others(module, function)}"
        )
    if not callable(found):
        raise UserError(
            f"{field} = {name!r}: {function!r} in {path} is {type(found).__name__}; a function is needed"
        )
    return found


def _load_module(path: Path, name: str, field: str) -> ModuleType:
    """Imports a file once, whatever number of functions are taken from it."""
    key = f"streamrl_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}_{path.stem}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None, path  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # before it runs: dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the run without a word
        del sys.modules[key]
        raise UserError(
            f"{field} = {name!r}: importing {path} raises {type(error).__name__}: "
            f"{error}{_line_of(error, path)}; correct the file"
        ) from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f" (line {lines[-1]})" if lines else ""


def _others(module: ModuleType, function: str) -> str:
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(function, public, 1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(public)) or 'none at all'}"
