"""What a user sees of a run: what it waits for and for how long, the last steps, the instances.

On a terminal this is one live block; elsewhere (a log, CI) plain lines, and never more than a few seconds of
silence. Any thread may call a `Display`. Its own lock is never held while rich is called: rich's refresh
thread holds rich's lock and asks for our lines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from streamrl_jax.control.events import ControlEvent, EventKind, InstanceView
from streamrl_jax.metrics import MetricRecord, Missing

_SHOWN_STEPS: Final = 12
_TICK_S: Final = 0.5
_HEADERS_EVERY: Final = 20  # plain lines of steps between two lines of headers


@dataclass(frozen=True)
class StepLine:
    """One row of the table of steps; None: not measured at this step.

    Attributes:
        step: Iterations completed; 0 is the evaluation before training.
        reward: Mean score of the samples.
        accuracy: On the held-out prompts.
        length: Mean tokens of an answer.
        tokens_per_s: Answer tokens per second, all instances.
        staleness: Mean versions that the tokens lagged behind.
        trainer_idle: Share of the step that the trainer waited, 0 to 1.
        generator_idle: Share of the step that instances had nothing to do, 0 to 1.
        seconds: Of the step.
    """

    step: int
    reward: float | None = None
    accuracy: float | None = None
    length: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    trainer_idle: float | None = None
    generator_idle: float | None = None
    seconds: float | None = None


_COLUMNS: Final[Mapping[str, Callable[[StepLine], str]]] = {
    "step": lambda line: str(line.step),
    "reward": lambda line: _number(line.reward, "{:.3f}"),
    "held-out": lambda line: _number(line.accuracy, "{:.3f}"),
    "length": lambda line: _number(line.length, "{:.1f}"),
    "tokens/s": lambda line: _number(line.tokens_per_s, "{:,.0f}"),
    "stale": lambda line: _number(line.staleness, "{:.2f}"),
    "trainer idle": lambda line: _number(line.trainer_idle, "{:.0%}"),
    "gen idle": lambda line: _number(line.generator_idle, "{:.0%}"),
    "seconds": lambda line: _number(line.seconds, "{:.1f}"),
}


def step_line(record: MetricRecord) -> StepLine:
    """Picks from a step's metrics what the table shows."""
    return StepLine(
        step=record.step,
        reward=record.number("critic/score/mean"),
        accuracy=record.number("val/accuracy"),
        length=record.number("response_length/mean"),
        tokens_per_s=record.number("perf/gen_tokens_per_s"),
        staleness=record.number("training/staleness/mean"),
        trainer_idle=record.number("trainer/idle_ratio"),
        generator_idle=record.number("rollouter/idle_ratio"),
        seconds=record.number("perf/time_per_step"),
    )


def prediction(record: MetricRecord) -> str:
    """Whether the answers of a step came in the order of predicted lengths; empty: nothing predicts in this run."""
    if (unpredicted := record.number("ranker/unpredicted")) is None:
        return ""
    if not unpredicted:
        return "the lengths of answers are predicted; ranker/recall_20 and ranker/kendall_tau tell how well"
    why = record.metrics.get("ranker/kendall_tau")
    return f"the lengths of answers are not predicted: {why.reason if isinstance(why, Missing) else 'no reason told'}"


@dataclass(frozen=True)
class _Phase:
    text: str
    since: float
    count: int | None = None
    of: int | None = None
    announced: str = ""  # what a plain log has said of it

    def line(self, now: float) -> str:
        counted = "" if self.count is None else f" {self.count:,}" + (f"/{self.of:,}" if self.of else "")
        return f"{self.text}{counted}, {now - self.since:.0f} s"


@dataclass
class _State:
    """What there is to show; guarded by the display's lock."""

    phases: dict[str, _Phase] = field(default_factory=dict)
    instances: tuple[InstanceView, ...] = ()
    steps: deque[StepLine] = field(default_factory=lambda: deque(maxlen=_SHOWN_STEPS))
    summary: tuple[str, Mapping[str, str]] | None = None


class Display:
    """Shows a run while it is entered; leaving it, also by an exception, restores the terminal.

    Args:
        title: Stands above the table.
        total_steps: Iterations of the run; 0: unknown.
        console: Where to write; None: standard output.
        quiet_s: A plain log says what is waited for after so many seconds without a line.
        announce_s: A plain log speaks of a phase once it lasts for so long.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        title: str,
        total_steps: int = 0,
        *,
        console: Console | None = None,
        quiet_s: float = 5.0,
        announce_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._title = title
        self._total_steps = total_steps
        self._quiet_s, self._announce_s = quiet_s, announce_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = _State()
        self._started = self._last_line = clock()
        self._plain_steps = 0
        self._closing = threading.Event()
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick_until_closed, name="progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._live is not None:
            self._live.stop()
        if self._ticker is not None:
            self._ticker.join(timeout=5.0)
        with self._lock:
            open_phases = [phase.line(self._clock()) for phase in self._state.phases.values()]
            summary = self._state.summary
        if kind is not None and open_phases:
            self._say(f"stopped while: {'; '.join(open_phases)}")
        if summary is not None:
            self._print_summary(*summary)

    def phase(self, key: str, text: str, count: int | None = None, of: int | None = None) -> None:
        """Says what is going on or waited for; the seconds run from the first call with this text.

        Args:
            key: Names the phase until `done`; a new text under it takes its place.
            text: "instance-0: importing vllm".
            count: How far it is; a counted phase recurs, so that a plain log tells of it only when it drags
                on.
            of: How far it will go.
        """
        with self._lock:
            old = self._state.phases.get(key)
            if old is not None and old.text == text:
                self._state.phases[key] = replace(old, count=count, of=of)
            else:
                self._state.phases[key] = _Phase(text, self._clock(), count, of)

    def done(self, key: str) -> None:
        """Ends a phase; one that a plain log spoke of gets its duration there."""
        with self._lock:
            phase = self._state.phases.pop(key, None)
        if phase is not None and phase.announced and self._live is None:
            self._say(f"{phase.text}: done in {self._clock() - phase.since:.0f} s")

    def instances(self, views: Sequence[InstanceView]) -> None:
        """Shows the generation instances."""
        with self._lock:
            self._state.instances = tuple(views)

    def step(self, line: StepLine) -> None:
        """Adds a row to the table of steps; rows of one step, its training and its evaluation, become one."""
        with self._lock:
            steps = self._state.steps
            if steps and steps[-1].step == line.step:
                steps[-1] = _joined(steps[-1], line)
            else:
                steps.append(line)
        if self._live is None:
            if self._plain_steps % _HEADERS_EVERY == 0:
                self._say(_plain_row(_COLUMNS))
            self._plain_steps += 1
            self._say(_plain_row(cell(line) for cell in _COLUMNS.values()))

    def note(self, text: str) -> None:
        """Says something once; it stays on the screen above the live block."""
        self._say(text)

    def summary(self, title: str, rows: Mapping[str, str]) -> None:
        """Keeps what is printed last, when the display is left."""
        with self._lock:
            self._state.summary = (title, dict(rows))

    def event(self, event: ControlEvent) -> None:
        """Shows what the controller reports."""
        key = f"instance/{event.instance}"
        if event.kind is EventKind.PHASE:
            self.phase(key, f"{event.instance}: {event.text}")
        elif event.kind is EventKind.READY:
            self.done(key)
            self.note(f"{event.instance} is ready")
        elif event.kind in _NOTES:
            if event.kind is EventKind.GONE:  # nobody waits for it any more
                with self._lock:
                    self._state.phases.pop(key, None)
            self.note(_NOTES[event.kind].format(event=event))

    # --- rendering ------------------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        now = self._clock()
        with self._lock:
            phases = [phase.line(now) for phase in self._state.phases.values()]
            views, steps = self._state.instances, list(self._state.steps)
        parts: list[RenderableType] = [self._step_table(steps, now)] if steps else []
        parts += [Text(line, style="dim") for line in _others(views, phases)]
        parts += [Text(f"… {line}", style="cyan") for line in phases]
        return Group(*parts)

    def _step_table(self, steps: Sequence[StepLine], now: float) -> Table:
        of = f" · step {steps[-1].step}/{self._total_steps}" if self._total_steps else ""
        title = f"{escape(self._title)}{of} · {now - self._started:.0f} s"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for line in steps:
            table.add_row(*(cell(line) for cell in _COLUMNS.values()))
        return table

    def _say(self, text: str) -> None:
        stamp = "" if self._live is not None else f"[{self._clock() - self._started:5.0f} s] "
        with self._lock:
            self._last_line = self._clock()
        self._console.print(f"{stamp}{text}", markup=False, highlight=False, soft_wrap=True)

    def _print_summary(self, title: str, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows), default=0)
        self._console.print(Text(title, style="bold"))
        for name, value in rows.items():
            self._console.print(f"  {name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)

    # --- plain logs -----------------------------------------------------------------------------------------

    def _tick_until_closed(self) -> None:
        while not self._closing.wait(_TICK_S):
            self.tick()

    def tick(self) -> None:
        """Says what a plain log owes its reader by now; the display's own thread calls it."""
        now = self._clock()
        with self._lock:
            fresh = {
                key: phase
                for key, phase in self._state.phases.items()
                if phase.count is None and not phase.announced and now - phase.since >= self._announce_s
            }
            for key, phase in fresh.items():
                self._state.phases[key] = replace(phase, announced=phase.text)
            waiting = [phase.line(now) for phase in self._state.phases.values()]
            waiting += _others(self._state.instances, waiting) if waiting else []
            silent = now - self._last_line >= self._quiet_s
        for phase in fresh.values():
            self._say(phase.text)
        if silent and not fresh and waiting:
            self._say(f"… {'; '.join(waiting)}")


class ConsoleSink:
    """The metrics' way to the screen (`metrics.MetricSink`).

    Args:
        display: Open as long as records come.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._predicts: bool | None = None  # what was last said

    def write(self, record: MetricRecord) -> None:
        """Shows the step's row, and tells when the lengths of answers begin to be predicted, and when they no longer
        are."""
        self._display.step(step_line(record))
        if (said := prediction(record)) and (
            predicts := not record.number("ranker/unpredicted")
        ) != self._predicts:
            self._display.note(said)
            self._predicts = predicts

    def close(self) -> None:
        """The display is closed by whoever opened it."""


_NOTES: Final[Mapping[EventKind, str]] = {
    EventKind.LOST: "{event.instance} is lost: {event.text}",
    EventKind.RESTART: "{event.instance} is started again (restart {event.count})",
    EventKind.GONE: "{event.instance} has left the pool: {event.text}",
    EventKind.ADDED: "{event.instance} joins the run",
    EventKind.RECONNECTED: "{event.instance}: the stream broke and is connected again",
    EventKind.REDISPATCH: "{event.count} samples of {event.instance} are handed out again",
}


def _joined(old: StepLine, new: StepLine) -> StepLine:
    return replace(old, **{name: value for name, value in vars(new).items() if value is not None})


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _plain_row(cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{max(len(name), 7)}}" for name, cell in zip(_COLUMNS, cells, strict=True))


def _others(views: Sequence[InstanceView], phases: Sequence[str]) -> list[str]:
    """A line for each instance that no phase tells of already."""
    return [
        _instance_line(view)
        for view in views
        if not any(phase.startswith(f"{view.name}: ") for phase in phases)
    ]


def _instance_line(view: InstanceView) -> str:
    restarts = f", {view.restarts} restarts" if view.restarts else ""
    load = f"{view.running} running, {view.waiting} waiting, {view.tokens_per_s:,.0f} tokens/s"
    version = f"version {view.version}" if view.version >= 0 else "no weights yet"
    return f"{view.name}: {view.state.value}, {version}, {load}{restarts}"
