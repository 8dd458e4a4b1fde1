"""The live display: what a user and a plain log are told, and that it never leaves a mess behind."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from streamrl_jax.control.events import ControlEvent, EventKind, InstanceView
from streamrl_jax.metrics import Missing, record
from streamrl_jax.progress import ConsoleSink, Display, StepLine, step_line
from streamrl_jax.types import InstanceState

VIEW = InstanceView("instance-0", "a:1", InstanceState.GENERATING, 3, 9, 8, 1, 1234.6, 99, 2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlainLog:
    """A display that writes to a file, not entered, so that the test is its only clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.file = io.StringIO()
        console = Console(file=self.file, width=60)
        self.display = Display("demo", console=console, quiet_s=5.0, announce_s=1.0, clock=self.clock)

    def pass_s(self, seconds: int) -> None:
        for _ in range(2 * seconds):
            self.clock.now += 0.5
            self.display.tick()

    def lines(self) -> list[str]:
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text.splitlines()


def test_a_plain_log_tells_of_a_phase_its_duration_and_never_falls_silent() -> None:
    log = PlainLog()
    log.display.phase("a", "instance-0: importing vllm")
    assert log.lines() == []
    log.pass_s(12)
    assert log.lines() == [
        "[    1 s] instance-0: importing vllm",
        "[    6 s] … instance-0: importing vllm, 6 s",
        "[   11 s] … instance-0: importing vllm, 11 s",
    ]
    log.display.phase("a", "instance-0: loading")
    log.pass_s(2)
    log.display.done("a")
    assert log.lines() == ["[   13 s] instance-0: loading", "[   14 s] instance-0: loading: done in 2 s"]
    log.pass_s(20)
    assert log.lines() == []


def test_a_plain_log_keeps_quiet_about_what_is_quick_and_what_recurs() -> None:
    log = PlainLog()
    for count in range(4):
        log.display.phase("samples", "waiting for samples", count, 256)
        log.pass_s(1)
    log.display.done("samples")
    log.display.phase("b", "saving")
    log.display.done("b")
    assert log.lines() == []
    log.display.phase("samples", "waiting for samples", 1000, 2560)
    log.display.instances([VIEW])
    log.pass_s(6)
    assert log.lines() == [
        "[    5 s] … waiting for samples 1,000/2,560, 1 s; instance-0: generating, version 3, 8 running, "
        "1 waiting, 1,235 tokens/s, 2 restarts",
        "[   10 s] … waiting for samples 1,000/2,560, 6 s; instance-0: generating, version 3, 8 running, "
        "1 waiting, 1,235 tokens/s, 2 restarts",
    ]


def test_steps_are_rows_under_headers() -> None:
    log = PlainLog()
    log.display.step(StepLine(1, 0.25, None, 3.654, 2000.4, 0.0, 0.5, 0.034, 10.06))
    headers, row = (line[10:] for line in log.lines())
    names = [
        " step",
        "reward",
        "held-out",
        "length",
        "tokens/s",
        "stale",
        "trainer idle",
        "gen idle",
        "seconds",
    ]
    assert [headers.index(name) for name in names] == sorted(headers.index(name) for name in names)
    assert len(headers) == len(row)
    assert row.split() == ["1", "0.250", "-", "3.7", "2,000", "0.00", "50%", "3%", "10.1"]
    log.display.step(StepLine(2))
    assert len(log.lines()) == 1


def test_the_row_of_a_step_comes_from_its_metrics() -> None:
    metrics = {
        "critic/score/mean": 0.5,
        "val/accuracy": 0.9,
        "response_length/mean": 4.0,
        "perf/gen_tokens_per_s": 100.0,
        "training/staleness/mean": 1.0,
        "trainer/idle_ratio": 0.25,
        "rollouter/idle_ratio": Missing("nan"),
        "perf/time_per_step": 2.0,
    }
    assert step_line(record(3, 0.0, metrics)) == StepLine(3, 0.5, 0.9, 4.0, 100.0, 1.0, 0.25, None, 2.0)
    log = PlainLog()
    ConsoleSink(log.display).write(record(3, 0.0, metrics))
    assert log.lines()[-1].split()[-9:] == ["3", "0.500", "0.900", "4.0", "100", "1.00", "25%", "-", "2.0"]


def test_it_tells_when_lengths_begin_to_be_predicted_and_when_no_longer() -> None:
    log = PlainLog()
    sink = ConsoleSink(log.display)
    silent = {"ranker/unpredicted": 32.0, "ranker/kendall_tau": Missing("nothing is known yet")}
    even = {
        "ranker/unpredicted": 32.0,
        "ranker/kendall_tau": Missing("the answers are of about the same length"),
    }
    told = {"ranker/unpredicted": 0.0, "ranker/kendall_tau": 0.5}
    said: list[str] = []
    for step, metrics in enumerate([silent, silent, {"val/accuracy": 0.5}, told, told, even]):
        before = len(log.lines())
        sink.write(record(step, 0.0, metrics))
        said.append(
            "; ".join(line.partition("the lengths of")[2] for line in log.lines()[before:]).strip("; ")
        )
    assert said == [
        "answers are not predicted: nothing is known yet",
        "",
        "",
        "answers are predicted; ranker/recall_20 and ranker/kendall_tau tell how well",
        "",
        "answers are not predicted: the answers are of about the same length",
    ]
    sink.write(record(9, 0.0, {"critic/score/mean": 0.5}))
    assert "the lengths" not in log.lines()[-1], "nothing predicts in this run"


def test_an_instance_that_starts_is_told_once() -> None:
    log = PlainLog()
    fresh = replace(
        VIEW, name="instance-1", state=InstanceState.LOADING, version=-1, running=0, waiting=0, restarts=0
    )
    log.display.event(ControlEvent(EventKind.PHASE, "instance-0", "importing vllm"))
    log.display.instances([VIEW, replace(fresh, tokens_per_s=0.0)])
    log.pass_s(6)
    assert log.lines()[-1].partition("… ")[2] == (
        "instance-0: importing vllm, 6 s; instance-1: loading, no weights yet, 0 running, 0 waiting, 0 tokens/s"
    )


def test_one_that_has_left_is_waited_for_no_more() -> None:
    log = PlainLog()
    log.display.event(ControlEvent(EventKind.PHASE, "instance-1", "no answer yet"))
    log.display.event(ControlEvent(EventKind.GONE, "instance-1", "it was drained"))
    log.pass_s(20)
    assert [line[10:] for line in log.lines()] == ["instance-1 has left the pool: it was drained"]


def test_what_the_controller_reports_is_told() -> None:
    log = PlainLog()
    log.display.event(ControlEvent(EventKind.PHASE, "instance-1", "importing vllm"))
    log.pass_s(2)
    log.display.event(ControlEvent(EventKind.READY, "instance-1"))
    log.display.event(ControlEvent(EventKind.LOST, "instance-1", "no heartbeat for 20 s"))
    log.display.event(ControlEvent(EventKind.RESTART, "instance-1", count=1))
    log.display.event(ControlEvent(EventKind.REDISPATCH, "instance-1", count=7))
    log.display.event(ControlEvent(EventKind.UPDATED, "instance-1", version=2))
    assert [line[10:] for line in log.lines()] == [
        "instance-1: importing vllm",
        "instance-1: importing vllm: done in 2 s",
        "instance-1 is ready",
        "instance-1 is lost: no heartbeat for 20 s",
        "instance-1 is started again (restart 1)",
        "7 samples of instance-1 are handed out again",
    ]


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=140, color_system=None), file


def test_a_terminal_shows_phases_instances_and_the_last_steps() -> None:
    console, file = terminal()
    with Display("demo [red]", total_steps=20, console=console, clock=Clock()) as display:
        display.phase("a", "waiting for samples", 37, 256)
        display.instances([VIEW])
        display.note("resumed from step [3]")
        for step in range(20):
            display.step(StepLine(step, reward=step / 100))
        display.step(StepLine(19, accuracy=0.987))
    shown = file.getvalue()
    last_frame = shown[shown.rindex("demo [red]") :]
    assert "resumed from step [3]" in shown
    assert "step 19/20" in last_frame and "0.987" in last_frame and "0.190" in last_frame
    assert "0.080" in last_frame and "0.070" not in last_frame
    assert "… waiting for samples 37/256, 0 s" in last_frame
    assert "instance-0: generating, version 3" in last_frame


@pytest.mark.parametrize("interactive", [False, True])
def test_an_exception_leaves_the_terminal_whole_and_says_what_went_on(interactive: bool) -> None:
    console, file = terminal() if interactive else (Console(file=(plain := io.StringIO())), plain)
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), Display("demo", console=console, clock=Clock()) as display:
        display.phase("a", "waiting for samples", 3, 8)
        display.summary("The run is over", {"run directory": "runs/demo", "steps": "3"})
        raise KeyboardInterrupt
    shown = file.getvalue()
    assert "stopped while: waiting for samples 3/8, 0 s" in shown
    assert shown.endswith("The run is over\n  run directory  runs/demo\n  steps          3\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is shown again
    deadline = time.monotonic() + 60.0
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.02)  # rich's own thread ends at its next tick
    assert not left


def test_a_plain_log_ticks_by_itself() -> None:
    file = io.StringIO()
    with Display("demo", console=Console(file=file), quiet_s=0.1, announce_s=0.0) as display:
        display.phase("a", "compiling")
        deadline = time.monotonic() + 60.0
        while "… compiling" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "… compiling" in file.getvalue()


def test_many_threads_may_speak_at_once() -> None:
    console, file = terminal()
    with Display("demo", console=console) as display:

        def speak(number: int) -> None:
            for count in range(50):
                display.phase(f"{number}", f"phase {number}", count, 50)
                display.instances([VIEW])
                display.step(StepLine(count))
                if count % 10 == 0:
                    display.note(f"note {number}/{count}")
            display.done(f"{number}")

        speakers = [threading.Thread(target=speak, args=(number,), daemon=True) for number in range(4)]
        for speaker in speakers:
            speaker.start()
        for speaker in speakers:
            speaker.join(timeout=120.0)
        assert not any(speaker.is_alive() for speaker in speakers)
    assert all(
        f"note {number}/{count}" in file.getvalue() for number in range(4) for count in range(0, 50, 10)
    )
