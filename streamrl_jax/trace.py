"""The timeline of a run in Chrome's trace format: what the trainer did, and each sample on the instance that wrote it.

Open `trace.json` in Perfetto or in chrome://tracing. The file is an array that is appended to and never closed, which
the format allows, so that a killed run leaves a whole timeline.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from streamrl_jax.types import Sample

_TRAINER: Final = 1
_FIRST_INSTANCE: Final = 2


class Trace:
    """Writes spans as they end, and sums the seconds of each phase of the trainer.

    All times are seconds of the monotonic clock; the file counts microseconds of the same clock, so that a resumed run
    on the same machine goes on to the right of its earlier life.

    Args:
        path: The file; it is appended to, after its last whole line.
    """

    def __init__(self, path: Path) -> None:
        whole = _whole_lines(path) if path.exists() else ""
        self._stream: TextIO = path.open("r+" if path.exists() else "w", encoding="utf-8")
        self._tracks: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._stream.seek(len(whole))  # the file is ASCII
        self._stream.truncate()
        if not whole:
            self._stream.write("[\n")
        self._name(_TRAINER, "trainer")

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *unused: object) -> None:
        self._stream.close()

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """A span on the trainer's track; its seconds are added to ``name``'s.

        Args:
            name: "update", "probe", "wait".
            **details: Shown beside it.
        """
        begun = time.monotonic()
        try:
            yield
        finally:
            self.span(name, begun, time.monotonic(), **details)

    def span(self, name: str, begun_s: float, ended_s: float, **details: Any) -> None:
        """What `phase` writes, for a span whose times are known."""
        self._seconds[name] = self._seconds.get(name, 0.0) + ended_s - begun_s
        self._write("X", _TRAINER, name, begun_s, dur=round((ended_s - begun_s) * 1e6), args=details)

    def take_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def sample(self, sample: Sample) -> None:
        """The life of a sample inside its instance: queued, then decoded.

        The instance's clock gives durations only; they are laid out backwards from the arrival at the controller.
        """
        answer, timings = sample.generation, sample.generation.timings
        track = self._track(answer.instance)
        ended = sample.arrived_s
        decoding = ended - timings.decode_s - timings.prefill_s
        reward = sample.reward if math.isfinite(sample.reward) else str(sample.reward)  # JSON has no NaN
        details = {"tokens": len(answer.token_ids), "attempt": answer.attempt, "reward": reward}
        for name, begun, until in (
            ("queued", decoding - timings.queued_s, decoding),
            ("generate", decoding, ended),
        ):
            self._write("b", track, name, begun, id=sample.sample_id, cat="sample", args=details)
            self._write("e", track, name, until, id=sample.sample_id, cat="sample")

    def flush(self) -> None:
        """Brings what was written to the file."""
        self._stream.flush()

    def _track(self, instance: str) -> int:
        if instance not in self._tracks:
            self._tracks[instance] = _FIRST_INSTANCE + len(self._tracks)
            self._name(self._tracks[instance], instance)
        return self._tracks[instance]

    def _name(self, track: int, name: str) -> None:
        self._write("M", track, "process_name", 0.0, args={"name": name})

    def _write(self, phase: str, track: int, name: str, at_s: float, **fields: Any) -> None:
        event = {"ph": phase, "pid": track, "tid": 0, "name": name, "ts": round(at_s * 1e6), **fields}
        self._stream.write(json.dumps(event, allow_nan=False) + ",\n")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Reads a timeline back.

    Args:
        path: The file; a last line that a kill tore is left out.

    Returns:
        Its events.
    """
    return json.loads(_whole_lines(path).rstrip().rstrip(",") + "]")


def _whole_lines(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1]
