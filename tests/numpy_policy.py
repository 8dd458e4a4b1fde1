"""A policy in NumPy behind the fake engine: the main job runs on it as on vLLM, without vLLM.

It computes with the weights that were pushed and returns the log-probs of what it sampled, so that trainer and
generator can be held to agree, and a wrong name, layout or version on the way shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamrl_jax.bridge.blob import map_blob
from streamrl_jax.bridge.manifest import read_tensor
from streamrl_jax.gen.protocol import Delta
from streamrl_jax.types import Assignment, FinishReason, Manifest, Timings, UpdateReport, VersionRun
from tests.fakes import FakeEngine


@dataclass(frozen=True, eq=False)
class NumpyPolicy:
    """A Qwen2 decoder as the paper writes it: no cache, no batch, one sequence.

    Attributes:
        config: Of the checkpoint.
        weights: By checkpoint name.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]

    def next_logits(self, ids: np.ndarray) -> np.ndarray:
        """Logits of the token that follows."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(f"model.layers.{layer}.self_attn.", self._norm(x, layer, "input"))
            x = x + self._mlp(f"model.layers.{layer}.mlp.", self._norm(x, layer, "post_attention"))
        return self.weights["lm_head.weight"] @ self._scaled(x[-1], self.weights["model.norm.weight"])

    def _norm(self, x: np.ndarray, layer: int, which: str) -> np.ndarray:
        return self._scaled(x, self.weights[f"model.layers.{layer}.{which}_layernorm.weight"])

    def _scaled(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config["rms_norm_eps"]) * scale

    def _attention(self, at: str, x: np.ndarray) -> np.ndarray:
        heads, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            (x @ self.weights[f"{at}{name}_proj.weight"].T + self.weights[f"{at}{name}_proj.bias"]).reshape(
                len(x), count, -1
            )
            for name, count in (("q", heads), ("k", shared), ("v", shared))
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = np.repeat(k, heads // shared, 1), np.repeat(v, heads // shared, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", share, v).reshape(len(x), -1)
        return mixed @ self.weights[f"{at}o_proj.weight"].T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(len(x)), self.config["rope_theta"] ** (-np.arange(half) / half))
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def _mlp(self, at: str, x: np.ndarray) -> np.ndarray:
        gate, up = (x @ self.weights[f"{at}{name}_proj.weight"].T for name in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{at}down_proj.weight"].T


@dataclass
class PolicyEngine(FakeEngine):
    """`FakeEngine` whose tokens are a policy's: temperature, stop ids or forced length, seed and greedy decoding are
    kept."""

    length: Callable[[Assignment], int] = lambda assignment: assignment.sampling.max_new_tokens
    config: Mapping[str, Any] = field(default_factory=dict)
    policy: NumpyPolicy | None = None
    written: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Path, **fields: Any) -> PolicyEngine:
        """An engine for a checkpoint; its weights come by a push."""
        return cls(config=json.loads((model / "config.json").read_text()), **fields)

    async def update_weights(
        self, manifest: Manifest, blob: Path, *, in_flight: bool, timeout_s: float
    ) -> UpdateReport:
        report = await super().update_weights(manifest, blob, in_flight=in_flight, timeout_s=timeout_s)
        if report.accepted:
            held = map_blob(blob, manifest.total_bytes)
            self.policy = NumpyPolicy(
                self.config, {spec.name: np.array(read_tensor(held, spec)) for spec in manifest.tensors}
            )
        return report

    def _delta(self, assignment: Assignment, index: int, last: bool, full: bool, timings: Timings) -> Delta:
        assert self.policy is not None, "work needs a version"
        start = assignment.resumed.token_ids.tolist() if assignment.resumed else []
        key = f"{assignment.sample_id}/{assignment.attempt}"
        answer = self.written.setdefault(key, start)
        logits = self.policy.next_logits(np.concatenate([assignment.prompt_ids, np.array(answer, np.int32)]))
        token, logprob = sampled(logits, assignment, index)
        answer.append(token)
        self._count()
        stopped = not assignment.sampling.forced_length and token in assignment.sampling.stop_token_ids
        if stopped or last:
            del self.written[key]
        return Delta(
            np.array([token], np.int32),
            np.array([logprob], np.float32),
            (VersionRun(self.version, 1),),
            FinishReason.STOP if stopped else FinishReason.LENGTH if last else None,
            timings,
        )


def sampled(logits: np.ndarray, assignment: Assignment, index: int) -> tuple[int, float]:
    """Draws a token; gives its log-prob under the distribution that it was drawn from."""
    temperature = assignment.sampling.temperature
    if temperature == 0:
        return int(logits.argmax()), 0.0
    scaled = logits.astype(np.float64) / temperature
    logprobs = scaled - scaled.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    draw = np.random.default_rng((assignment.sampling.seed or 0, index)).random()
    token = min(int(np.searchsorted(np.cumsum(np.exp(logprobs)), draw)), len(logprobs) - 1)
    return token, float(logprobs[token])
