"""Throughput and model FLOPs utilisation, from counts, seconds and a table of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

# Dense bfloat16 peak, FLOP/s, from the vendors' data sheets. The first entry that `device_kind` contains counts.
PEAK_BF16_FLOPS: Final[Mapping[str, float]] = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "TPU v6": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


class Shape(Protocol):
    """The sizes of a decoder; `train.models.Arch` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...


def matmul_parameters(shape: Shape, *, value_head: bool = False) -> int:
    """Parameters that take part in a matrix product for each token.

    Per layer: query and output E·H·D each, key and value E·K·D each, SwiGLU 3·E·M; then the head, E·V (or E
    for a value head). In a mixture of X experts the layer has the router, E·X, and those k experts alone that
    work on the token, 3·k·E·M. The embedding is a look-up and costs none, tied or not.

    Args:
        shape: The decoder's sizes.
        value_head: Whether the head gives one value instead of logits.

    Returns:
        Their number.
    """
    attention = 2 * shape.embed * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = (
        attention + shape.embed * shape.experts + 3 * (shape.experts_per_token or 1) * shape.embed * shape.mlp
    )
    return shape.layers * layer + shape.embed * (1 if value_head else shape.vocab_size)


def forward_flops(shape: Shape, lengths: Sequence[int], *, value_head: bool = False) -> float:
    """FLOPs of one forward pass.

    2 per parameter and token (a multiply and an add); attention's scores and their product with the values
    cost 4·H·D per pair of tokens and layer, and a causal model has L²/2 pairs. (PaLM, arXiv 2204.02311,
    appendix B, which counts the pairs without the causal half.)

    Args:
        shape: The decoder's sizes.
        lengths: Tokens of each sequence.
        value_head: Whether the head gives one value instead of logits.

    Returns:
        Their number. Padding and recomputation do not count: this is useful work.
    """
    linear = 2.0 * matmul_parameters(shape, value_head=value_head) * sum(lengths)
    pairs = sum(length * length for length in lengths) / 2
    return linear + 4.0 * shape.layers * shape.heads * shape.head_dim * pairs


def update_flops(
    shape: Shape,
    lengths: Sequence[int],
    *,
    epochs: int = 1,
    scoring_passes: int = 0,
    value_head: bool = False,
) -> float:
    """FLOPs of an update: forward and backward (twice a forward) per epoch, and passes that only score.

    Args:
        shape: The decoder's sizes.
        lengths: Tokens of each sequence.
        epochs: Passes over the samples.
        scoring_passes: Further forward passes (old log-probs, reference).
        value_head: Whether this is the critic.

    Returns:
        Their number.
    """
    return forward_flops(shape, lengths, value_head=value_head) * (3 * epochs + scoring_passes)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Looks up a device's dense peak.

    Args:
        device_kind: As JAX names it (`jax.devices()[0].device_kind`): "NVIDIA H800", "TPU v5 lite", "cpu".
        dtype: Of the arithmetic.

    Returns:
        FLOP/s; None for a device that the table lacks (CPUs above all), and for float32, whose peak rests on
        the matrix precision in force.
    """
    if dtype != "bfloat16":
        return None
    kind = device_kind.lower()
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name.lower() in kind), None)


def mfu(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: useful FLOPs over what the devices could have done in the time.

    Args:
        flops: From `update_flops`.
        seconds: The time it took.
        devices: How many took part.
        peak: FLOP/s of one, or None.

    Returns:
        A share of 1; None when the peak is unknown or no time passed.
    """
    return flops / (seconds * devices * peak) if peak and seconds > 0 else None


def throughput(tokens: int, seconds: float, devices: int) -> float:
    """Tokens of prompts and answers per second and device, over the whole step (verl's `perf/throughput`).

    Args:
        tokens: Of the step.
        seconds: Of the step.
        devices: Trainer and generator together.

    Returns:
        Tokens/s per device; 0 when no time passed.
    """
    return tokens / (seconds * devices) if seconds > 0 else 0.0
