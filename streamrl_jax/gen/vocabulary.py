"""Keeps ids that only pad a checkpoint's vocabulary from being sampled, in the worker that computes the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor


def limit_vocabulary(model: torch.nn.Module, limit: int) -> None:
    """Gives every id from ``limit`` on the logit minus infinity, in all that the model answers from now on.

    It acts where the logits arise: both of vLLM's model runners read them there, before anything is made of them, so
    that what is sampled and the log-probs are those of the masked distribution, of training and of evaluation alike. A
    logits processor of vLLM's would need one class for each runner, and a bias or a list of allowed ids a
    vocabulary's width of memory for each request. It costs one write to the surplus columns of a step's logits, which
    keep their shape: to cut them off would break the sizes that samplers assume.

    Args:
        model: As the worker has loaded it.
        limit: How many ids the tokenizer has.

    Raises:
        RuntimeError: The model computes its logits in another way.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LogitsProcessor)]
    if not layers:
        raise RuntimeError(
            f"{type(model).__name__} has no LogitsProcessor, and ids that pad its vocabulary cannot be masked; set "
            "rollout.mask_padded_vocab = false"
        )

    def hide(
        layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: torch.Tensor | None
    ) -> None:
        if kwargs.get("skip_gather"):
            raise RuntimeError(
                "a rank that holds a part of the vocabulary alone cannot tell which ids pad it"
            )
        if logits is not None:  # ranks other than the first may get none
            logits[..., limit:] = -math.inf

    for layer in layers:
        layer.register_forward_hook(hide, with_kwargs=True)
