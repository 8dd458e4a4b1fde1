"""The tensors that a loaded vLLM model has places for, in the checkpoint's names and full shapes.

vLLM fuses (q, k, v into one matrix, gate and up into another, all experts of a layer into two), splits over
tensor-parallel ranks, pads the vocabulary, and on CPU repacks what matrix products read: a linear layer's parameter
is left empty, the experts' are padded and in another order. The modules still know what they were made from; this is
read off them, so that a version is held against the model itself and not against a second table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from streamrl_jax.bridge.manifest import Target

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""Dtypes of parameters, by the name that a manifest uses."""


def checkpoint_targets(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Target]:
    """Lists what must be loaded to replace every parameter of a model.

    Args:
        model: as vLLM built it, possibly one rank's share.
        dtype: of the engine.

    Returns:
        Full shape and dtype by checkpoint name.

    Raises:
        ValueError: two parameters would come from the same name.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            for name, shape in _parts(path, module, parameter, tuple(tensor.shape), packed):
                if name in targets:
                    raise ValueError(
                        f"{name} is the source of two parameters, the second is {path}.{parameter}"
                    )
                targets[name] = Target(shape, DTYPE_NAMES[dtype])
    return targets


def _parts(
    path: str,
    module: torch.nn.Module,
    parameter: str,
    held: tuple[int, ...],
    packed: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoint names and full shapes that one parameter is made from."""
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    if isinstance(module, LinearBase):
        sizes = _output_sizes(module)
        names = packed.get(leaf, [leaf]) if len(sizes) > 1 else [leaf]
        if len(names) != len(sizes):
            raise ValueError(
                f"{path} is fused of {len(sizes)} matrices and packed_modules_mapping names {names}"
            )
        for name, size in zip(names, sizes, strict=True):
            yield f"{prefix}{name}.{parameter}", (size,) if parameter == "bias" else (size, module.input_size)
    elif isinstance(module, RoutedExperts):
        yield from _expert_parts(module, parameter)
    elif isinstance(module, VocabParallelEmbedding) and parameter == "weight":
        yield f"{path}.weight", (module.org_vocab_size, module.embedding_dim)
    else:
        yield f"{path}.{parameter}" if path else parameter, held


def _expert_parts(module: RoutedExperts, parameter: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The matrices of all experts, over all ranks, that one fused parameter is made from."""
    config = module.moe_config
    embed, width = config.hidden_dim_unpadded, config.intermediate_size
    sources = {
        "w13_weight": {module.ckpt_gate_proj_name: (width, embed), module.ckpt_up_proj_name: (width, embed)},
        "w2_weight": {module.ckpt_down_proj_name: (embed, width)},
    }
    if parameter not in sources:
        raise ValueError(
            f"{module.layer_name}.{parameter}: a parameter of experts that checkpoints of ours lack"
        )
    for expert in range(config.num_logical_experts):
        for name, shape in sources[parameter].items():
            yield f"{module.layer_name}.{expert}.{name}.weight", shape


def _output_sizes(module: LinearBase) -> list[int]:
    """Rows of the matrices that a linear layer is fused of, over all ranks."""
    if isinstance(module, QKVParallelLinear):
        return [
            module.total_num_heads * module.head_size,
            module.total_num_kv_heads * module.head_size,
            module.total_num_kv_heads * module.v_head_size,
        ]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_sizes)
    return [module.output_size]
