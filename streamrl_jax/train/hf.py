"""Hugging Face checkpoint directories: in, straight to sharded device arrays, and out.

Which tensor is which parameter says `streamrl_jax.bridge.names`; here are only files. An export appears under
its name when it is complete, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.train.hf_directory import INDEX_FILE, SINGLE_FILE, map_tensors_of, read_arch
from streamrl_jax.train.mesh import put
from streamrl_jax.train.models import Arch, Model, Params
from streamrl_jax.train.tensorfile import write_tensors

# What belongs to a checkpoint beside weights and configuration; an export copies it as it is.
_COMPANIONS: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def load_params(directory: Path, model: Model) -> Params:
    """Loads a checkpoint's parameters onto the model's mesh.

    Each device reads its own part through a memory map, so that a process reads only what its devices hold; the host
    never holds more than the parts of one parameter.

    Args:
        directory: A checkpoint directory: `model.safetensors`, or shards with an index; float32, float16,
            bfloat16.
        model: The model to load into; its architecture must be the directory's, and so must its head.

    Returns:
        float32 parameters, sharded as `model.abstract_params()` says.

    Raises:
        UserError: Files are missing or broken, or names and shapes do not fit the architecture.
    """
    tensors = map_tensors_of(directory, model.arch)
    template = model.abstract_params()
    params: Params = {}
    for entry in names.entries(model.arch):
        struct = names.leaf_at(template, entry.path)
        parts = np.empty(entry.stacked, object)
        for place, name in zip(entry.places, entry.names, strict=True):
            parts[place] = entry.from_checkpoint(tensors[name])
        names.place(params, entry.path, _sharded(struct, parts))
    if model.head == "value" and not model.arch.head_bias:
        bias = template["value_head"]["bias"]
        params["value_head"]["bias"] = put(np.zeros(bias.shape, bias.dtype), bias.sharding)
    return params


def load_critic(directory: Path, critic: Model) -> Params:
    """Loads a critic's parameters: with the head of a checkpoint that has a scalar one, else under a head of zeros.

    Args:
        directory: A checkpoint with the critic's decoder: a policy, or a `...ForTokenClassification` or
            `...ForSequenceClassification` with one label, whose `score` is the head (a bias that it lacks is zero).
        critic: The model to load into, of head "value".

    Returns:
        float32 parameters, sharded as `critic.abstract_params()` says.

    Raises:
        UserError: Files are missing or broken, or names and shapes do not fit the architecture.
    """
    held = replace(critic, arch=read_arch(directory, critic=True))
    if held.arch.head == "value":
        return load_params(directory, held)
    return critic.value_params_from(load_params(directory, replace(held, head="lm")))


def save_params(
    params: Params,
    arch: Arch,
    out: Path,
    *,
    source: Path | None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint directory that transformers and vLLM load.

    Args:
        params: A policy's parameters.
        arch: Its architecture, whose original configuration is written back with the new dtype.
        out: The directory to create; it must not exist, or be empty.
        source: Where generation config, tokenizer and chat template are copied from; None where there are
            none.
        dtype: "bfloat16" rounds the float32 masters to nearest even.
        max_shard_bytes: Larger checkpoints are split into several files with an index.

    Raises:
        UserError: `out` is in use, or cannot be written; nothing is left behind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; give a new directory for the checkpoint, or remove it")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        _write_weights(partial, params, arch, dtype, max_shard_bytes)
        _write_json(partial / "config.json", _config_for(arch, dtype))
        if source is not None:
            _copy_companions(source, partial)
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out}: the checkpoint cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sharded(struct: jax.ShapeDtypeStruct, parts: np.ndarray) -> jax.Array:
    """One parameter from its parts, an array of arrays of as many dimensions as the parameter is stacked over."""

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        chosen, within = parts[(*index[: parts.ndim], ...)], index[parts.ndim :]
        whole = np.empty(
            [len(range(*part.indices(size))) for part, size in zip(index, struct.shape, strict=True)],
            struct.dtype,
        )
        for place in np.ndindex(chosen.shape):
            whole[place] = chosen[place][within]
        return whole

    assert struct.sharding is not None
    return jax.make_array_from_callback(struct.shape, struct.sharding, read)


def _write_weights(
    directory: Path, params: Params, arch: Arch, dtype: Literal["float32", "bfloat16"], max_shard_bytes: int
) -> None:
    itemsize = 2 if dtype == "bfloat16" else 4
    shapes = names.checkpoint_shapes(arch)
    sizes = {name: int(np.prod(shape)) * itemsize for name, shape in shapes.items()}
    shards = _split(sizes, max_shard_bytes)
    count = len(shards)
    files = (
        [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    tensors = names.to_checkpoint(arch, params, fetch=np.asarray)
    for file_name, shard in zip(files, shards, strict=True):
        layout = {name: shapes[name] for name in shard}
        write_tensors(directory / file_name, layout, dtype, _take(tensors, shard))
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(
            directory / INDEX_FILE,
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map},
        )


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `limit` bytes (a larger tensor gets a file of its own)."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _take(tensors: Iterator[tuple[str, Any]], expected: list[str]) -> Iterator[Any]:
    for want in expected:
        name, array = next(tensors)
        assert name == want
        yield array


def _config_for(arch: Arch, dtype: str) -> dict[str, Any]:
    config = arch.hf_config | {"dtype": dtype, "tie_word_embeddings": arch.tied}
    if "torch_dtype" in config:  # transformers 4's name for the same thing
        config["torch_dtype"] = dtype
    return config


def _copy_companions(source: Path, target: Path) -> None:
    for name in _COMPANIONS:
        item = source / name
        if item.is_dir():
            shutil.copytree(item, target / name)
        elif item.is_file():
            shutil.copyfile(item, target / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
