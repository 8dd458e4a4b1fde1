"""From what the configuration calls a model to a directory: a path, or a hub id that is fetched once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from streamrl_jax.errors import UserError

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def looks_like_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` of a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def model_directory(name: str, field: str) -> Path:
    """Finds a checkpoint directory.

    Args:
        name: A directory, or a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        field: The configuration's field, for the error.

    Returns:
        The directory; a hub model lies in the hub's cache.

    Raises:
        UserError: Neither is there.
    """
    if not name:
        raise UserError(
            f"{field} is empty; give a checkpoint directory, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not looks_like_hub_id(name) or path.is_absolute():
        raise UserError(
            f"{field} = {name!r}: there is no such directory, and it has not the form of a hub id (owner/name)"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field} = {name!r}: there is no such directory, and without the package huggingface_hub nothing can be "
            "fetched; install the extra `hub`, or put the checkpoint on disk and give its directory"
        ) from error

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise UserError(
            f"{field} = {name!r}: there is no such directory, and the hub did not give a model of this name "
            f"({why}). Check the name, or put the checkpoint on "
            "disk and give its directory"
        ) from error
