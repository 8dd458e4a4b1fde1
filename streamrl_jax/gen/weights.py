"""vLLM's side of a weight update: a weight-transfer engine that checks everything before it touches anything.

Two phases on every rank (DESIGN rule 6). *Stage*: map the blob, hold all bytes against their digests and
all names, shapes and dtypes against the model; this runs in a thread behind generation and changes nothing.
*Apply*, only when no rank found a fault and generation stands still: vLLM's layer-wise reload, which on CPU
rebuilds the repacked matrices. vLLM's loading has no way back, so a failure while applying is the caller's
cue to restart the engine.

How vLLM finds it. `AsyncEngineArgs(worker_extension_cls=WORKER_EXTENSION)` makes every worker process, of
whatever start method and on whatever host, import this module before it builds the model, and importing it
registers the backend. That needs nothing but an importable package. The entry point
``vllm.general_plugins`` in `pyproject.toml` calls the same idempotent `register`, but exists only where the
package is installed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl_jax.bridge.blob import map_blob
from streamrl_jax.bridge.manifest import ALIGNMENT, check, check_targets, tensor_bytes
from streamrl_jax.gen import codec
from streamrl_jax.gen.targets import DTYPE_NAMES, checkpoint_targets
from streamrl_jax.gen.vocabulary import limit_vocabulary
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import Manifest

BACKEND: Final = "streamrl"
"""Name under which the engine is registered (`WeightTransferConfig(backend=BACKEND)`)."""

WORKER_EXTENSION: Final = "streamrl_jax.gen.weights.StagingExtension"
"""What `AsyncEngineArgs(worker_extension_cls=...)` takes."""

_TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def register() -> None:
    """Makes the backend known to vLLM in this process; harmless when it is."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class ApplyStaged(WeightTransferUpdateInfo):
    """Which staged version to apply."""

    version: int


@dataclass(frozen=True)
class _Staged:
    """A version that was found whole, and its bytes."""

    manifest: Manifest
    blob: memoryview


class _Staging:
    """One check in a thread of its own; `faults` is None until it is done."""

    def __init__(self, engine: StagedWeights, manifest: bytes, path: str) -> None:
        self.faults: list[str] | None = None
        self.staged: _Staged | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, manifest, path), daemon=True)
        self._thread.start()

    def _run(self, engine: StagedWeights, manifest: bytes, path: str) -> None:
        try:
            self.staged, faults = engine.inspect(manifest, path)
        except Exception as error:  # whatever it is, the version was not found whole
            faults = [f"staging failed: {type(error).__name__}: {error}"]
        self.faults = faults


class StagedWeights(WeightTransferEngine[NoInit, ApplyStaged]):
    """Loads a version that was staged.

    Call order: `stage`, `staging_faults` until it is not None; then either `discard`, or with generation
    paused vLLM's own `start_weight_update`, `update_weights`, `finish_weight_update`.

    Invariant: the model is untouched unless the staged version has no fault.
    """

    init_info_cls = NoInit
    update_info_cls = ApplyStaged
    supports_draft_weight_update = False

    _staging: _Staging | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def stage(self, manifest: bytes, path: str) -> None:
        """Begins to check a version, behind whatever the worker does.

        Args:
            manifest: a serialised `Manifest` message.
            path: file that holds the bytes, on this host.
        """
        self._staging = _Staging(self, manifest, path)

    def staging_faults(self) -> list[str] | None:
        """What is wrong with the version; empty: nothing; None: the check goes on.

        Raises:
            RuntimeError: nothing is being staged.
        """
        if self._staging is None:
            raise RuntimeError("nothing is being staged")
        return self._staging.faults

    def discard(self) -> None:
        """Lets go of what was staged."""
        self._staging = None

    def inspect(self, manifest: bytes, path: str) -> tuple[_Staged, list[str]]:
        """Maps and checks a version.

        Returns:
            The version and every fault found.

        Raises:
            ValueError, OSError: it cannot be read at all.
        """
        version = codec.manifest_from_proto(pb.Manifest.FromString(manifest))
        blob = map_blob(Path(path), version.total_bytes)
        faults = check(version, blob)
        faults += check_targets(version, checkpoint_targets(self.model, self.model_config.dtype))
        architectures = self.model_config.architectures
        if version.architecture not in architectures:
            faults.append(f"architecture is {version.architecture!r}, the model is one of {architectures}")
        return _Staged(version, blob), faults

    def start_weight_update(self) -> None:
        """Sets the model up for layer-wise reloading.

        Raises:
            RuntimeError: no version without faults is staged.
        """
        self._whole()
        if self.device.type == "cpu":
            _let_experts_be_packed_again(self.model)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, int]) -> None:
        """Applies the staged version. The base class would then wait for an accelerator; a CPU has none."""
        self.receive_weights(self.parse_update_info(dict(update_info)))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ApplyStaged) -> None:
        """Loads every tensor of the staged version.

        Raises:
            RuntimeError: another version is staged, or vLLM left a parameter out.
        """
        staged = self._whole()
        if staged.manifest.version != update_info.version:
            raise RuntimeError(f"version {staged.manifest.version} is staged, not {update_info.version}")
        expected = {name for name, _ in self.model.named_parameters()}
        with torch.device(self.device):
            loaded = self._loader().load_weights(
                (spec.name, _tensor(staged, index)) for index, spec in enumerate(staged.manifest.tensors)
            )
        if left := sorted(expected - set(loaded)):
            raise RuntimeError(f"vLLM loaded no weights into {', '.join(left)}")

    def finish_weight_update(self) -> None:
        """Repacks what layer-wise reloading deferred, and lets go of the blob."""
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        self._staging = None

    def shutdown(self) -> None:
        """Lets go of the blob."""
        self._staging = None

    def _loader(self) -> Any:
        return self.model  # whose class, one of vLLM's models, has `load_weights`

    def _whole(self) -> _Staged:
        staging = self._staging
        if staging is None or staging.staged is None or staging.faults is None or staging.faults:
            raise RuntimeError("no version is staged that was found whole")
        return staging.staged


class StagingExtension:
    """What a vLLM worker gains, for `collective_rpc`: what vLLM's own interface lacks."""

    weight_transfer_engine: StagedWeights
    get_model: Callable[[], torch.nn.Module]

    def streamrl_limit_vocabulary(self, limit: int) -> None:
        """`limit_vocabulary` of this rank's model."""
        limit_vocabulary(self.get_model(), limit)

    def streamrl_weight_bytes(self) -> int:
        """Bytes that a version for this model has at most, gaps between tensors included."""
        dtype = self.weight_transfer_engine.model_config.dtype
        targets = checkpoint_targets(self.get_model(), dtype).values()
        return sum(-(-target.nbytes // ALIGNMENT) * ALIGNMENT for target in targets)

    def streamrl_stage(self, manifest: bytes, path: str) -> None:
        """`StagedWeights.stage` on this rank."""
        self.weight_transfer_engine.stage(manifest, path)

    def streamrl_staging_faults(self) -> list[str] | None:
        """`StagedWeights.staging_faults` of this rank."""
        return self.weight_transfer_engine.staging_faults()

    def streamrl_discard(self) -> None:
        """`StagedWeights.discard` on this rank."""
        self.weight_transfer_engine.discard()


def _let_experts_be_packed_again(model: torch.nn.Module) -> None:
    """Makes the reload pad and pack the experts' matrices for the CPU's kernel, as the first loading did.

    vLLM (0.32) does that only where it makes the kernel, and later only copies plain matrices into the packed ones'
    place. Without its kernel, the reload makes a new one. On GPUs the copy is right, and captured graphs hold on to
    the kernel's memory.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def _tensor(staged: _Staged, index: int) -> torch.Tensor:
    """One tensor of the blob, not copied; the loader copies it and never writes to it."""
    spec = staged.manifest.tensors[index]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(tensor_bytes(staged.blob, spec), dtype=_TORCH_DTYPES[spec.dtype])
    return flat.reshape(spec.shape)


register()
