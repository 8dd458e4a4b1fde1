"""What a decode step costs on a GPU that nobody has profiled: a roofline over the model's shape. NumPy only.

A step of B sequences whose contexts hold K tokens, on t GPUs in tensor parallel::

    products   max(bytes of weights / (t · bandwidth),   2 · weights · B / (t · FLOP/s))   for each kind of layer
    attention  max(bytes of keys and values, FLOPs of the scores) likewise, both proportional to K
    all-reduce 2 · layers · (latency + 2 · (t - 1)/t · B · width · bytes / NVLink), where t > 1
    launches   a constant for each layer and step

Worked example: Qwen2.5-7B in bfloat16 has 7.07e9 weights in its products. On one H800 reading them takes
14.1 GB / (0.85 · 3.35 TB/s) = 5.0 ms (4.2 ms at the full bandwidth), and the arithmetic overtakes it at
B = (0.75 · 989e12) / (0.85 · 3.35e12) = 260 sequences, on an H20 (148e12, 4.0e12) at 33.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from streamrl_jax.errors import UserError
from streamrl_jax.flops import PEAK_BF16_FLOPS, matmul_parameters
from streamrl_jax.ranker.cost import FLAT, Conditions, Ramp, TokenLatency, read_cost
from streamrl_jax.train.hf_fields import Fields

BANDWIDTH_SHARE: Final = 0.85
"""Of the data sheet's memory bandwidth that decoding kernels reach."""

FLOPS_SHARE: Final = 0.75
"""Of the data sheet's dense peak that large products reach."""

NVLINK_SHARE: Final = 0.7
"""Of the data sheet's NVLink bandwidth that an all-reduce reaches."""

LAYER_S: Final = 10e-6
"""Launches and small kernels (norms, rotary embedding, KV write) of a layer, in a captured graph."""

STEP_S: Final = 1e-3
"""Scheduling, sampling and what else a step costs on the host."""

ALL_REDUCE_S: Final = 8e-6
"""Latency of one all-reduce within a node."""

MEMORY_SHARE: Final = 0.9
"""Of a GPU's memory that weights and KV cache may fill (vLLM's own default for both and its work space)."""

_EXPERT_SEGMENTS: Final = 12
"""Segments of the share of experts that a batch touches."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, from its data sheet.

    Attributes:
        name: As in `GPUS`.
        bandwidth: Of its memory, bytes/s.
        flops: Dense bfloat16, FLOP/s.
        memory: Bytes.
        nvlink: To its neighbours, both directions together, bytes/s.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    nvlink: float


def _gpu(name: str, bandwidth: float, memory: float, nvlink: float, peak: str = "") -> Gpu:
    return Gpu(name, bandwidth * 1e12, PEAK_BF16_FLOPS[peak or name], memory * 1e9, nvlink * 1e9)


# SXM modules; TB/s, GB, GB/s. NVIDIA's data sheets of A100 80GB, H100 and H200; of H800 the H100's with NVLink at 400
# GB/s. H20 and H800 as the StreamRL paper gives them (arXiv 2504.15930, table of GPUs), NVLink as sold.
GPUS: Final[Mapping[str, Gpu]] = {
    gpu.name: gpu
    for gpu in (
        _gpu("H800", 3.35, 80, 400),
        _gpu("H20", 4.0, 96, 900),
        _gpu("H100", 3.35, 80, 900),
        _gpu("H200", 4.8, 141, 900),
        _gpu("A100", 2.039, 80, 600),
    )
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide what its steps cost.

    Attributes:
        vocab_size: Rows of the output head.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
        mlp: Width of the feed-forward layer; in a mixture, of each expert.
        experts: Experts of each feed-forward layer; 0: the layers are dense.
        experts_per_token: How many of them work on a token; 0 in a dense model.
        value_bytes: Of a weight, a key and an activation: 2 in bfloat16.
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int = 0
    experts_per_token: int = 0
    value_bytes: int = 2

    @classmethod
    def from_config_json(cls, path: Path, value_bytes: int = 2) -> ModelShape:
        """Reads a checkpoint's configuration.

        Args:
            path: Its config.json.
            value_bytes: Of the dtype that it is served in.

        Raises:
            UserError: The file cannot be read, or lacks a field; names both.
        """
        try:
            config = json.loads(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); a checkpoint's config.json is needed"
            ) from error
        except ValueError as error:
            raise UserError(f"{path}: is no JSON ({error}); a checkpoint's config.json is needed") from error
        if not isinstance(config, dict):
            raise UserError(f"{path}: holds no object; a checkpoint's config.json is needed")
        fields = Fields(config, str(path))
        embed, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
        name = next((name for name in ("num_experts", "num_local_experts") if config.get(name)), "")
        width = "moe_intermediate_size" if name and "moe_intermediate_size" in config else "intermediate_size"
        return cls(
            vocab_size=fields.positive("vocab_size"),
            embed=embed,
            layers=fields.positive("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.positive("num_key_value_heads", heads),
            head_dim=fields.positive("head_dim", max(1, embed // heads)),
            mlp=fields.positive(width),
            experts=fields.positive(name) if name else 0,
            experts_per_token=fields.positive("num_experts_per_tok") if name else 0,
            value_bytes=value_bytes,
        )

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in all layers; 0 in a dense model."""
        return 3 * self.layers * self.embed * self.mlp if self.experts else 0

    @property
    def dense_weights(self) -> int:
        """Weights that take part in the products of every token, the experts' apart."""
        return matmul_parameters(self) - self.experts_per_token * self.expert_weights

    @property
    def weight_bytes(self) -> int:
        """All weights, the embedding among them even where it is the head too."""
        weights = self.dense_weights + self.experts * self.expert_weights + self.vocab_size * self.embed
        return weights * self.value_bytes


def roofline(shape: ModelShape, gpu: Gpu, tensor_parallel: int = 1) -> TokenLatency:
    """Estimates what steps cost, from data sheets alone.

    Args:
        shape: Of the model.
        gpu: What it runs on.
        tensor_parallel: GPUs of one instance.

    Raises:
        ValueError: No GPU.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel = {tensor_parallel}: an instance has 1 GPU at least")
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * tensor_parallel
    flops = gpu.flops * FLOPS_SHARE * tensor_parallel
    scores = 4 * shape.layers * shape.heads * shape.head_dim  # FLOPs for each token of context
    kv_token_s = max(shape.kv_token_bytes * _copies(shape, tensor_parallel) / bandwidth, scores / flops)
    fixed, each = _overheads(shape, gpu, tensor_parallel)
    products = _products(shape, bandwidth, flops)
    batch = Ramp(products.start + fixed, products.knots, tuple(slope + each for slope in products.slopes))
    # Taking in a prompt makes the same products; its attention, small next to them below 10,000 tokens, is left out.
    return TokenLatency(batch, kv_token_s, batch)


def kv_capacity(shape: ModelShape, gpu: Gpu, tensor_parallel: int = 1) -> int:
    """Tokens of context that an instance has memory for, beside the weights; 0 where these alone do not fit.

    Args:
        shape: Of the model.
        gpu: What it runs on.
        tensor_parallel: GPUs of one instance.
    """
    free = MEMORY_SHARE * gpu.memory * tensor_parallel - shape.weight_bytes
    return max(0, int(free / (shape.kv_token_bytes * _copies(shape, tensor_parallel))))


def _copies(shape: ModelShape, tensor_parallel: int) -> float:
    """How often an instance keeps keys and values: where it has more GPUs than they have heads, GPUs share a head."""
    return tensor_parallel / min(tensor_parallel, shape.kv_heads)


def _overheads(shape: ModelShape, gpu: Gpu, tensor_parallel: int) -> tuple[float, float]:
    """Seconds of a step, and of each sequence in it, beside products and attention."""
    fixed = STEP_S + shape.layers * LAYER_S
    if tensor_parallel == 1:
        return fixed, 0.0
    # A ring sends each byte twice but for one rank's share; data sheets count both directions of a link.
    one_way = gpu.nvlink / 2 * NVLINK_SHARE
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * shape.embed * shape.value_bytes
    return fixed + 2 * shape.layers * ALL_REDUCE_S, 2 * shape.layers * sent / one_way


def _products(shape: ModelShape, bandwidth: float, flops: float) -> Ramp:
    """Seconds of the products by the batch: the sum over the kinds of layers of the larger of reading and computing.

    Exact at the knots: where arithmetic overtakes reading and, in a mixture, at batches that touch more and more of the
    experts (1 - (1 - k/X)^B of them in expectation, for even routing).
    """

    def seconds(batch: float) -> float:
        dense = max(
            shape.dense_weights * shape.value_bytes / bandwidth, 2 * shape.dense_weights * batch / flops
        )
        if not shape.experts:
            return dense
        touched = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** batch)
        read = touched * shape.expert_weights * shape.value_bytes / bandwidth
        return dense + max(read, 2 * shape.experts_per_token * shape.expert_weights * batch / flops)

    turning = shape.value_bytes * flops / (2 * bandwidth)
    last = turning * (shape.experts / shape.experts_per_token if shape.experts else 1.0)
    inner = [turning, *(np.geomspace(1, last, _EXPERT_SEGMENTS) if shape.experts else [])]
    knots = sorted({1.0, *(float(knot) for knot in inner if knot > 1.0)})
    values = [seconds(knot) for knot in (*knots, 2 * knots[-1])]
    ends = (*knots[1:], 2 * knots[-1])
    slopes = [
        max(0.0, after - before) / (end - knot)
        for knot, end, before, after in zip(knots, ends, values[:-1], values[1:], strict=True)
    ]
    return Ramp(values[0], tuple(knots), tuple(slopes))


_DTYPES: Final = {2: "bfloat16", 4: "float32"}
"""What ``gen.dtype`` may be, by the bytes of a value."""


def named_cost(cost: str, config_json: Path, value_bytes: int = 2, tensor_parallel: int = 1) -> TokenLatency:
    """What `dispatch.cost` names.

    Args:
        cost: A GPU of `GPUS`, the path of a profile, or nothing: `FLAT`.
        config_json: Of the checkpoint that is served.
        value_bytes: Of the dtype that it is served in.
        tensor_parallel: GPUs of one instance.

    Raises:
        UserError: It is neither a known GPU nor a profile, the data sheet does not tell of the dtype, or the profile
            is one of another model, dtype or number of GPUs.
    """
    if not cost:
        return FLAT
    if (gpu := GPUS.get(cost)) is not None:
        if value_bytes != 2:
            raise UserError(
                f"dispatch.cost = {cost!r} stands for a data sheet, read for 2 bytes a value, and gen.dtype has "
                f'{value_bytes}; set gen.dtype = "bfloat16", or measure a step: streamrl plan profile'
            )
        return roofline(ModelShape.from_config_json(config_json, value_bytes), gpu, tensor_parallel)
    path = Path(cost)
    if not path.exists():
        raise UserError(
            f"dispatch.cost = {cost!r} is neither a file nor a GPU that is known ({', '.join(GPUS)}): `streamrl plan "
            f"profile` writes such a file"
        )
    profile = read_cost(path)
    _check_same(cost, profile.conditions, config_json, value_bytes, tensor_parallel)
    return profile.cost


_SMALL: Final = ("vocab_size", "value_bytes")
"""Fields of a shape that a step's cost hardly depends on (it is padded here and there), or that are held apart."""


def _check_same(
    cost: str, measured: Conditions, config_json: Path, value_bytes: int, tensor_parallel: int
) -> None:
    """Refuses a profile of something else than what is served: its steps would be too quick or too slow by a factor.

    A checkpoint that is still to be fetched has no configuration to compare with: a dry run asks for it too.
    """
    faults: list[str] = []
    if measured.tensor_parallel != tensor_parallel:
        faults.append(f"gen.tensor_parallel_size is {tensor_parallel}, there {measured.tensor_parallel}")
    if measured.dtype != (dtype := _DTYPES.get(value_bytes)):
        faults.append(f"gen.dtype is {dtype}, there {measured.dtype}")
    if measured.shape and config_json.is_file():
        served = asdict(ModelShape.from_config_json(config_json, value_bytes))
        faults += [
            f"{config_json} says {name} = {served[name]}, there {value}"
            for name, value in measured.shape.items()
            if name in served and name not in _SMALL and served[name] != value
        ]
    if faults:
        raise UserError(
            f"dispatch.cost = {cost!r} is a profile of something else ({measured.model}): {'; '.join(faults)}. Measure "
            "what is served with streamrl plan profile; where endpoints serve, let these keys say what they are"
        )
