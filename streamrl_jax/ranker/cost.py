"""Per-token latency (PTL): what a decode step costs an instance, by its batch and its contexts. NumPy only.

The paper's model (section on skewness) is that an answer of L tokens takes PTL(batch) · L. Here a step also
depends on the tokens whose keys and values it reads::

    step_s(batch, kv_tokens) = base(batch) + kv_token_s · kv_tokens
    ptl(batch, context)      = step_s(batch, batch · context)

`base` holds what does not grow with the contexts (weights read, products, launches, all-reduce). It rises
piecewise linearly: slowly while memory binds, faster once arithmetic does. `cost_fit.py` fits it to
measurements, `hardware.py` derives it from data sheets, and `FLAT` is the neutral one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from streamrl_jax.errors import UserError
from streamrl_jax.files import write_atomically

Seconds = Float[np.ndarray, "..."]
Numbers = float | np.ndarray

_MANY: Final = 10**9  # sequences or tokens, more than any instance holds
_ENDLESS_S: Final = 1e12  # no profile comes near; sums of such seconds are still finite
FORMAT: Final = 1
"""Of a profile's file."""

MEDIAN: Final = 0.5


@dataclass(frozen=True)
class Ramp:
    """A piecewise-linear function of one quantity, flat below its first knot; the last slope goes on for ever.

    Invariant: it never falls, since no slope is negative.

    Attributes:
        start: Its value at the first knot and below, seconds.
        knots: Where its slope changes, rising.
        slopes: From each knot to the next, seconds for each unit; as many as knots.

    Raises:
        ValueError: The attributes do not make such a function; names the attribute.
    """

    start: float
    knots: tuple[float, ...]
    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.knots or len(self.knots) != len(self.slopes):
            raise ValueError(
                f"knots and slopes: {len(self.knots)} and {len(self.slopes)} numbers; as many of one as of the other "
                f"are needed, one at least"
            )
        for name, values in (("start", (self.start,)), ("knots", self.knots), ("slopes", self.slopes)):
            if bad := [value for value in values if not 0 <= value < math.inf]:
                raise ValueError(f"{name}: {bad[0]} is no finite number from 0 up")
        if any(later <= earlier for earlier, later in zip(self.knots, self.knots[1:], strict=False)):
            raise ValueError(f"knots: {list(self.knots)} do not rise")

    def __call__(self, x: Numbers) -> Seconds:
        """Its value.

        Args:
            x: Of any shape.

        Returns:
            Seconds, of the shape of `x`.
        """
        x = np.asarray(x, np.float64)
        beyond = np.maximum(x - self.knots[-1], 0.0)
        return np.asarray(np.interp(x, self.knots, self.values) + self.slopes[-1] * beyond)

    @cached_property
    def values(self) -> Float[np.ndarray, " knots"]:
        """Its values at the knots, rising."""
        rises = np.diff(np.asarray(self.knots)) * np.asarray(self.slopes[:-1])
        return self.start + np.concatenate([[0.0], np.cumsum(rises)])


@dataclass(frozen=True)
class TokenLatency:
    """What steps of one instance cost. All functions are vectorised, and none falls in any of its arguments.

    Attributes:
        batch: Seconds of a decode step by the sequences in it, contexts apart; its first knot is 1, so that an
            empty step costs as much as one of a single sequence.
        kv_token_s: What each token of the contexts adds to a step, seconds.
        prefill: Seconds of a step by the prompt tokens that it takes in.

    Raises:
        ValueError: An attribute is outside its range; names it.
    """

    batch: Ramp
    kv_token_s: float
    prefill: Ramp

    def __post_init__(self) -> None:
        if self.batch.knots[0] != 1.0:
            raise ValueError(f"batch.knots: the first is {self.batch.knots[0]}, not 1")
        if not 0 <= self.kv_token_s < math.inf:
            raise ValueError(f"kv_token_s: {self.kv_token_s} is no finite number from 0 up")

    def step_s(self, batch: Numbers, kv_tokens: Numbers) -> Seconds:
        """Seconds of one decode step.

        Args:
            batch: Sequences in it; broadcasts with `kv_tokens`.
            kv_tokens: Tokens of all their contexts together.
        """
        return np.asarray(self.batch(batch) + self.kv_token_s * np.asarray(kv_tokens, np.float64))

    def ptl(self, batch: Numbers, context: Numbers) -> Seconds:
        """Seconds for each token of an answer while `batch` sequences of `context` tokens run.

        Args:
            batch: Sequences that run; broadcasts with `context`.
            context: Mean tokens of prompt and answer so far.
        """
        return self.step_s(batch, np.asarray(batch, np.float64) * np.asarray(context, np.float64))

    def prefill_s(self, tokens: Numbers) -> Seconds:
        """Seconds of a step that takes in prompts and decodes nothing.

        Args:
            tokens: Of the prompts together.
        """
        return self.prefill(tokens)

    def to_json(self) -> dict[str, Any]:
        """A plain object that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "cost") -> TokenLatency:
        """Reads what `to_json` gave.

        Args:
            data: The object.
            where: What to call it in an error.

        Raises:
            UserError: A field is missing or outside its range; names it.
        """
        parts = Part(data, where)
        batch, prefill = (_ramp(parts.part(name)) for name in ("batch", "prefill"))
        try:
            cost = cls(batch, parts.number("kv_token_s"), prefill)
        except ValueError as error:
            raise UserError(f"{where}: {error}; write the file anew with `streamrl plan profile`") from error
        with np.errstate(over="ignore"):
            quickest, slowest = float(cost.step_s(1, 1)), float(cost.step_s(_MANY, _MANY))
            ends = slowest < _ENDLESS_S and float(cost.prefill_s(_MANY)) < _ENDLESS_S
        if not (quickest > 0.0 and ends):
            raise UserError(
                f"{where}: a step takes from {quickest:g} s to {slowest:g} s: it must take time, and end; write "
                "the file anew with `streamrl plan profile`"
            )
        return cost


FLAT: Final = TokenLatency(Ramp(1.0, (1.0,), (0.0,)), 0.0, Ramp(0.0, (0.0,), (0.0,)))
"""The neutral model: each step takes 1 s whatever the batch, so that its seconds are decode steps."""


@dataclass(frozen=True)
class StepPoint:
    """One measurement of decode steps."""

    batch: int  # sequences that decoded
    kv_tokens: float  # of their contexts together, the mean over the steps measured
    seconds: float  # of one step


@dataclass(frozen=True)
class PrefillPoint:
    """One measurement of taking in prompts."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Conditions:
    """What a profile was measured with: it holds for nothing else."""

    model: str
    dtype: str
    device: str
    tensor_parallel: int
    engine: str  # e.g. "vllm 0.32.0"
    date: str  # ISO, UTC
    note: str = ""  # what else ran on the machine
    quantile: float = MEDIAN  # of the repeats of a point, which the model was fitted to
    shape: Mapping[str, int] = field(default_factory=dict)  # `hardware.ModelShape`; empty: not recorded


@dataclass(frozen=True)
class HeldOut:
    """Relative error |model / measured - 1| on steps that the fit did not see."""

    points: int
    median: float
    largest: float


@dataclass(frozen=True)
class Profile:
    """A measured `TokenLatency`, and how good it is."""

    cost: TokenLatency
    conditions: Conditions
    points: tuple[StepPoint, ...]
    prefill_points: tuple[PrefillPoint, ...]
    held_out: HeldOut


@dataclass(frozen=True)
class Part:
    """An object of a JSON file; errors name file, field and value.

    Attributes:
        data: The parsed object.
        where: What to call it: the file's path, and the field it lies under.
    """

    data: Any
    where: str

    def part(self, name: str) -> Part:
        """An object within it."""
        return Part(self.value(name, Mapping, "an object"), f"{self.where}: {name}")

    def parts(self, name: str) -> tuple[Part, ...]:
        """A list of objects within it."""
        rows = self.value(name, list, "a list of objects")
        return tuple(Part(row, f"{self.where}: {name}[{index}]") for index, row in enumerate(rows))

    def number(self, name: str) -> float:
        """A finite number from 0 up."""
        return self._number(name, self.value(name, int | float, "a number"))

    def whole(self, name: str) -> int:
        """A whole number from 0 up."""
        value = self.value(name, int, "a whole number")
        self._number(name, value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of such numbers."""
        return tuple(self._number(name, value) for value in self.value(name, list, "a list of numbers"))

    def value(self, name: str, kind: Any, called: str) -> Any:
        """A field of a kind.

        Raises:
            UserError: It is missing or of another kind.
        """
        if not isinstance(self.data, Mapping):
            raise UserError(f"{self.where}: {json.dumps(self.data)} stands where an object is needed")
        value = self.data.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            shown = json.dumps(value) if name in self.data else "missing"
            raise UserError(
                f"{self.where}: field {name!r} is {shown}: {called} is needed; write the file anew with "
                f"`streamrl plan profile`"
            )
        return value

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(
                f"{self.where}: field {name!r} holds {value}: a finite number from 0 up is needed"
            )
        try:
            return float(value)
        except OverflowError as error:
            raise UserError(f"{self.where}: field {name!r} holds a number beyond all bounds") from error


def _shape(said: Part) -> dict[str, int]:
    if "shape" not in said.data:
        return {}  # profiles were written without, once
    shape = said.part("shape")
    return {name: shape.whole(name) for name in shape.data}


def _ramp(part: Part) -> Ramp:
    try:
        return Ramp(part.number("start"), part.numbers("knots"), part.numbers("slopes"))
    except ValueError as error:
        raise UserError(f"{part.where}: {error}; write the file anew with `streamrl plan profile`") from error


def write_cost(path: Path, profile: Profile) -> None:
    """Writes a profile as JSON.

    Args:
        path: The file; its directory exists.
        profile: What to write.
    """
    write_atomically(path, (json.dumps({"format": FORMAT, **asdict(profile)}, indent=1) + "\n").encode())


def read_cost(path: Path) -> Profile:
    """Reads a profile.

    Args:
        path: A file that `write_cost` wrote.

    Raises:
        UserError: It is missing, no profile, or of another format; names file, field and value.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); `streamrl plan profile` writes a cost profile"
        ) from error
    except (ValueError, RecursionError) as error:  # the latter: nested too deeply
        raise UserError(
            f"{path}: is no JSON ({error}); `streamrl plan profile` writes a cost profile"
        ) from error
    file = Part(data, str(path))
    if (found := file.whole("format")) != FORMAT:
        raise UserError(f"{path}: field 'format' is {found}; this version reads {FORMAT}: profile again")
    said, held_out = file.part("conditions"), file.part("held_out")
    texts = {
        name: said.value(name, str, "a text")
        for name in ("model", "dtype", "device", "engine", "date", "note")
    }
    return Profile(
        TokenLatency.from_json(file.part("cost").data, f"{path}: cost"),
        Conditions(
            **texts,
            tensor_parallel=said.whole("tensor_parallel"),
            quantile=said.number("quantile"),
            shape=_shape(said),
        ),
        tuple(
            StepPoint(row.whole("batch"), row.number("kv_tokens"), row.number("seconds"))
            for row in file.parts("points")
        ),
        tuple(
            PrefillPoint(row.whole("tokens"), row.number("seconds")) for row in file.parts("prefill_points")
        ),
        HeldOut(held_out.whole("points"), held_out.number("median"), held_out.number("largest")),
    )
