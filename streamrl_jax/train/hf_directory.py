"""What a Hugging Face checkpoint directory holds, read and checked without JAX: a run refuses it before it starts.

Which tensor is which parameter says `streamrl_jax.bridge.names`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.train.arch import Arch, arch_from_hf
from streamrl_jax.train.tensorfile import map_tensors

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


def read_arch(directory: Path, *, critic: bool = False) -> Arch:
    """Reads and checks a checkpoint's config.json.

    Args:
        directory: The checkpoint.
        critic: Whether it may have a scalar head (`...ForTokenClassification`, `...ForSequenceClassification`).

    Raises:
        UserError: The directory or the file is missing, is not JSON, or describes what is not supported.
    """
    if not directory.is_dir():
        raise UserError(
            f"model directory {directory} does not exist; give a Hugging Face checkpoint directory"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory}: no config.json; this is not a Hugging Face checkpoint directory")
    return arch_from_hf(_read_json_object(path), str(path), critic=critic)


def map_tensors_of(directory: Path, arch: Arch) -> dict[str, np.ndarray]:
    """Maps a checkpoint's weights, whose names and shapes are those of its architecture.

    Args:
        directory: It holds `model.safetensors`, or shards with an index; float32, float16, bfloat16.
        arch: Of the checkpoint.

    Returns:
        name -> read-only array, read from disk when it is touched.

    Raises:
        UserError: Files are missing or broken, or names and shapes do not fit the architecture.
    """
    tensors = _map_checkpoint(directory)
    names.check_names(arch, {name: array.shape for name, array in tensors.items()}, str(directory))
    _check_tied_head(directory, arch, tensors)
    return tensors


def _map_checkpoint(directory: Path) -> dict[str, np.ndarray]:
    if (directory / SINGLE_FILE).is_file():
        return map_tensors(directory / SINGLE_FILE)
    index = directory / INDEX_FILE
    if not index.is_file():
        raise UserError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints can be loaded"
        )
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: field 'weight_map' must be an object of tensor names and file names")
    tensors: dict[str, np.ndarray] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        if Path(file_name).name != file_name:
            raise UserError(f"{index}: {file_name!r} is not the name of a file beside the index")
        listed = {name for name, value in weight_map.items() if value == file_name}
        held = map_tensors(directory / file_name)
        if listed != held.keys():
            difference = ", ".join(sorted(listed ^ held.keys()))
            raise UserError(
                f"{index}: does not list the tensors that {file_name} holds; they differ in: {difference}"
            )
        tensors |= held
    return tensors


def _check_tied_head(directory: Path, arch: Arch, tensors: Mapping[str, np.ndarray]) -> None:
    head = tensors.get(names.HEAD_NAME)
    if arch.tied and head is not None and not np.array_equal(head, tensors[names.EMBEDDING_NAME]):
        raise UserError(
            f"{directory}: config.json says tie_word_embeddings = true, but {names.HEAD_NAME} differs from "
            f"{names.EMBEDDING_NAME}; set tie_word_embeddings to false to train both"
        )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is needed, found {type(value).__name__}")
    return value
