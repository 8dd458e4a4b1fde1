"""The length ranker: the trainer's own decoder under a scalar head, read at the prompt's last token.

On disk it is a Hugging Face checkpoint `...ForSequenceClassification` with one label, which transformers loads, and
beside it `ranker.json`, how scores become tokens and how it was fitted, and `met.npy`, digests of the prompts that it
has met. The vocabulary is that of the model whose answers it ranks, since it reads the same token ids.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from streamrl_jax.bridge import names
from streamrl_jax.errors import UserError
from streamrl_jax.ranker.calibrate import Calibration
from streamrl_jax.ranker.held_back import Digests
from streamrl_jax.train.arch import Arch, arch_from_hf
from streamrl_jax.train.families import HEADS
from streamrl_jax.train.hf import load_params, save_params
from streamrl_jax.train.hf_directory import read_arch
from streamrl_jax.train.mesh import make_mesh
from streamrl_jax.train.models import Compute, Model, Params
from streamrl_jax.types import TokenIds

Size = Literal["tiny", "small"]

RANKER_FILE: Final = "ranker.json"
_MET_FILE: Final = "met.npy"
FORMAT: Final = 1

_HEAD: Final = "ForSequenceClassification"
_SHORTEST_BUCKET: Final = 16
_TOKENS_AT_ONCE: Final = 4096  # of a scoring batch, padding included
_LARGE: Final = 50_000_000  # parameters from which on activations are computed again in place of kept


@dataclass(frozen=True)
class Shape:
    """Sizes of a ranker that is trained from scratch.

    Attributes:
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, as many for keys and values.
        mlp: Width of the feed-forward layer.
    """

    embed: int
    layers: int
    heads: int
    mlp: int


SIZES: Final[Mapping[Size, Shape]] = MappingProxyType(
    {"tiny": Shape(64, 2, 4, 128), "small": Shape(128, 4, 4, 384)}
)


@dataclass(frozen=True)
class Packed:
    """Prompts of one batch, right-padded.

    Attributes:
        tokens: Token ids; 0 past the end.
        lengths: Tokens of each prompt, at least one.
    """

    tokens: Int[np.ndarray, "rows len"]
    lengths: Int[np.ndarray, " rows"]


@dataclass(frozen=True, eq=False)
class LengthRanker:
    """Orders prompts by how long their answers will be.

    Attributes:
        model: Decoder and scalar head, on a mesh of one device that is not the trainer's mesh.
        params: Its parameters, float32.
        calibration: From scores to tokens.
        conditions: What it was fitted on, for reading; JSON.
        source: A checkpoint whose tokenizer is saved along; None: none.
        met: `held_back.digests` of all prompts that it was fitted to or chosen by, in this fit and those before it.
    """

    model: Model
    params: Params
    calibration: Calibration
    conditions: Mapping[str, Any]
    source: Path | None = None
    met: Digests = field(default_factory=lambda: np.zeros(0, np.uint64))

    def scores(
        self, token_ids: Sequence[TokenIds], names: Sequence[str] = ()
    ) -> Float32[np.ndarray, " prompts"]:
        """Scores prompts; the higher one is expected to have the longer answer.

        Prompts of similar length are scored together, in batches of few shapes; the first call for each compiles.

        Args:
            token_ids: The prompts.
            names: What to call each of them in an error; none: by its place.

        Raises:
            UserError: A prompt is empty, has a token outside the vocabulary, or is longer than the model's context.
        """
        check_prompts(token_ids, self.model.arch, names)
        return score_prompts(self.model, self.params, token_ids)

    def lengths(
        self, token_ids: Sequence[TokenIds], names: Sequence[str] = ()
    ) -> Float32[np.ndarray, " prompts"]:
        """Expected tokens of an answer to each prompt, in the order of the scores; see `Calibration`.

        Args:
            token_ids: The prompts.
            names: As for `scores`.

        Raises:
            UserError: As for `scores`.
        """
        return self.calibration.lengths(self.scores(token_ids, names))

    def save(self, directory: Path) -> None:
        """Writes the ranker, whole or not at all; what `load` reads gives equal scores, to the bit.

        Args:
            directory: To make; it must not exist, or be empty.

        Raises:
            UserError: It is in use, or cannot be written.
        """
        record = {
            "format": FORMAT,
            "calibration": self.calibration.to_json(),
            "conditions": dict(self.conditions),
        }
        refuse_used(directory)
        draft = directory.parent / f".{directory.name}.ranker-{os.getpid()}"
        try:
            save_params(self.params, self.model.arch, draft, source=self.source)
            (draft / RANKER_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            np.save(draft / _MET_FILE, self.met, allow_pickle=False)
            os.replace(draft, directory)
        except OSError as error:
            raise UserError(f"{directory}: the ranker cannot be written: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @classmethod
    def load(cls, directory: Path, device: jax.Device | None = None) -> LengthRanker:  # pyright: ignore[reportInvalidTypeForm] (an alias at run time)
        """Reads a ranker.

        Args:
            directory: From `save`.
            device: Where it computes; None: this process's first CPU device.

        Raises:
            UserError: Files are missing, damaged, or do not belong together.
        """
        record = _read_record(directory)
        calibration = Calibration.from_json(record["calibration"], str(directory / RANKER_FILE))
        model = ranker_model(read_arch(directory, critic=True), device)
        params = load_params(directory, model)
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
            raise UserError(f"{directory}: the ranker's weights hold NaN or infinity; fit the ranker again")
        return cls(model, params, calibration, record["conditions"], directory, read_met(directory))


def ranker_model(arch: Arch, device: jax.Device | None = None) -> Model:  # pyright: ignore[reportInvalidTypeForm]
    """The decoder of a checkpoint with a ranker's head, on one device.

    Args:
        arch: Of a policy, a critic or a ranker.
        device: None: this process's first CPU device.
    """
    chosen = device if device is not None else jax.local_devices(backend="cpu")[0]
    remat = "full" if names.parameters(arch) > _LARGE else "none"
    return Model(_with_ranker_head(arch), make_mesh(1, 1, 1, [chosen]), "value", Compute(remat=remat))


def scratch_arch(size: Size, vocab_size: int, max_positions: int = 32_768) -> Arch:
    """The architecture of a ranker that is trained from scratch.

    Args:
        size: A name of `SIZES`.
        vocab_size: Of the tokenizer of the model whose answers are ranked.
        max_positions: Longest prompt, tokens.
    """
    shape = SIZES[size]
    config = {
        "architectures": ["Qwen2" + _HEAD],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": shape.embed,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "intermediate_size": shape.mlp,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "initializer_range": shape.embed**-0.5,
        "id2label": {"0": "length"},
    }
    return arch_from_hf(config, "the sizes of a new ranker", critic=True)


def refuse_used(directory: Path) -> None:
    """Says that a ranker cannot be written to a directory; before minutes go into the fit, too.

    Raises:
        UserError: It holds something, or cannot be made.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} exists already; give a new directory for the ranker, or remove it")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.ranker-", dir=directory.parent):
            pass
    except OSError as error:
        raise UserError(
            f"{directory}: the ranker cannot be written ({error.strerror}); give another directory"
        ) from error


def check_prompts(token_ids: Sequence[TokenIds], arch: Arch, names: Sequence[str] = ()) -> None:
    """Refuses what the ranker cannot read.

    Args:
        token_ids: The prompts.
        arch: Of the ranker.
        names: What to call each of them in an error: file and id, as a rule; none: by its place.

    Raises:
        UserError: A prompt is empty, has a token outside the vocabulary, or is longer than the context.
    """
    for place, prompt in enumerate(token_ids):
        name = names[place] if names else f"prompt {place}"
        if not len(prompt):
            raise UserError(f"{name} has no tokens; the ranker needs at least one")
        low, high = int(np.min(prompt)), int(np.max(prompt))
        if low < 0 or high >= arch.vocab_size:
            raise UserError(
                f"{name} has the token id {low if low < 0 else high}, but the ranker's vocabulary has "
                f"{arch.vocab_size} (vocab_size); fit the ranker for the tokenizer that made these prompts"
            )
        if len(prompt) > arch.max_positions:
            raise UserError(
                f"{name} has {len(prompt)} tokens, but the ranker reads {arch.max_positions} "
                "(max_position_embeddings); fit one from a checkpoint with a longer context"
            )


def bucket(length: int) -> int:
    """The padded length of prompts of `length` tokens: a power of two or the middle between two, 16 at least."""
    size = _SHORTEST_BUCKET
    while size < length:
        size = size * 3 // 2 if length <= size * 3 // 2 else size * 2
    return size


def pack(token_ids: Sequence[TokenIds], rows: int, length: int) -> Packed:
    """Pads prompts to one shape; rows past the last prompt hold the one token 0.

    Args:
        token_ids: At most `rows` prompts of at most `length` tokens.
        rows: Rows of the batch.
        length: Columns of the batch.
    """
    tokens, lengths = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
    for row, prompt in enumerate(token_ids):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return Packed(tokens, lengths)


def last_scores(
    model: Model, params: Params, tokens: Int[Array, "rows len"], lengths: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """The scalar head at each prompt's last token; differentiable.

    Args:
        model: Of head "value".
        params: Its parameters.
        tokens: Padded on the right.
        lengths: Tokens of each prompt.
    """
    place = jnp.arange(tokens.shape[1])[None, :]
    positions = jnp.broadcast_to(place, tokens.shape)
    segments = (place < lengths[:, None]).astype(jnp.int32)
    values = model.values(params, tokens, positions, segments)
    return jnp.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]


_score: Final = functools.partial(jax.jit, static_argnums=0)(last_scores)


def score_prompts(
    model: Model, params: Params, token_ids: Sequence[TokenIds]
) -> Float32[np.ndarray, " prompts"]:
    """`LengthRanker.scores` of prompts that have been checked."""
    found = np.empty(len(token_ids), np.float32)
    for chosen, packed in _batches(token_ids):
        scored = np.asarray(_score(model, params, packed.tokens, packed.lengths))
        found[chosen] = scored[: len(chosen)]
    return found


def _batches(token_ids: Sequence[TokenIds]) -> Iterator[tuple[Int[np.ndarray, " chosen"], Packed]]:
    """Prompts by length in batches of two sizes for each bucket, so that little is compiled and little is padding."""
    lengths = np.array([len(prompt) for prompt in token_ids], np.int64)
    buckets = np.array([bucket(length) for length in lengths.tolist()], np.int64)
    for size in np.unique(buckets).tolist():
        waiting = np.flatnonzero(buckets == size)
        large = max(1, _TOKENS_AT_ONCE // size)
        small = max(1, large // 8)
        while len(waiting):
            rows = large if len(waiting) > large // 2 else small
            chosen, waiting = waiting[:rows], waiting[rows:]
            yield chosen, pack([token_ids[index] for index in chosen.tolist()], rows, size)


def _with_ranker_head(arch: Arch) -> Arch:
    """The same decoder under a sequence classifier's head of one label, which has no bias: it would order nothing."""
    family = next(arch.architecture.removesuffix(head) for head in HEADS if arch.architecture.endswith(head))
    labels = {"id2label": {"0": "length"}, "label2id": {"length": 0}}
    kept = {key: value for key, value in arch.hf_config.items() if key != "num_labels"}
    return arch_from_hf(
        kept | labels | {"architectures": [family + _HEAD]}, "the ranker's config.json", critic=True
    )


def read_met(directory: Path) -> Digests:
    """What the ranker of a directory has met; nothing, if it is a checkpoint of another kind.

    Args:
        directory: From `LengthRanker.save`, or any checkpoint.

    Raises:
        UserError: The file cannot be read.
    """
    path = directory / _MET_FILE
    if not path.exists():
        return np.zeros(0, np.uint64)  # rankers were written without, once
    try:
        met = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fit the ranker again") from error
    if not isinstance(met, np.ndarray) or met.dtype != np.uint64 or met.ndim != 1:
        raise UserError(f"{path}: holds no list of 64-bit numbers; fit the ranker again")
    return met


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / RANKER_FILE
    if not path.is_file():
        raise UserError(
            f"{directory} is no ranker: it has no {RANKER_FILE}; give a directory that streamrl rank fit wrote"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fit the ranker again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else record
        raise UserError(
            f"{path}: field 'format' is {found!r}, this version reads {FORMAT}; fit the ranker again"
        )
    for name in ("calibration", "conditions"):
        if not isinstance(record.get(name), dict):
            raise UserError(
                f"{path}: field {name!r} is {record.get(name)!r}; an object is needed: fit the ranker again"
            )
    return record
