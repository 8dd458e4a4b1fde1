"""The way out: one order for all trainer processes, each sample once in each, the end and a stop at one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.control.faults import ControlError
from streamrl_jax.control.inbox import Inbox
from streamrl_jax.control.once import Once
from streamrl_jax.control.outbox import Batch, End, Outbox, Reading, Stop
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.types import FinishReason, Generation, Prompt, Sample

NO_IDS = np.zeros(0, np.int32)


def sample(name: str) -> Sample:
    answer = Generation(name, 0, NO_IDS, np.zeros(0, np.float32), (), FinishReason.STOP, "a")
    return Sample(name, 0, Prompt("0", NO_IDS, {}), 0, answer, 0.0)


@dataclass(eq=False)
class Reader:
    """A trainer process over an outbox, both in this thread."""

    outbox: Outbox
    number: int = 0
    window: int = 2
    inbox: Inbox = field(default_factory=lambda: Inbox("train/3", 2))
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """A new stream: what the old one brought and nobody took comes again."""
        self.reading = Reading(self.outbox, self.number, self.inbox.position, self.window, self.inbox.put)
        self.reading.go_on()

    def report(self, position: int, waits: bool) -> None:
        self.reading.taken(position, waits)

    def take(self, count: int = 10**6, timeout_s: float = 0.0) -> list[str]:
        """Takes what there is; ends where it would wait, if no time is given."""
        names: list[str] = []
        stream = self.inbox.drain(timeout_s, self.report, lambda: "instance-0 is loading")
        try:
            while len(names) < count and (found := next(stream, None)) is not None:
                names.append(found.sample_id)
                self.seen.append(found.sample_id)
        except ControlError:
            if timeout_s:
                raise
        return names


def test_each_sample_once_over_several_calls() -> None:
    taken: list[str] = []
    outbox = Outbox("train/3", 4, on_taken=lambda s: taken.append(s.sample_id))
    for name in "abcd":
        outbox.put(sample(name))
    reader = Reader(outbox)
    assert reader.take(1) == ["a"]
    assert reader.take() == ["b", "c", "d"]
    assert taken == ["a", "b", "c", "d"]
    assert reader.take() == []


def test_silence_names_what_is_missing() -> None:
    outbox = Outbox("train/3", 2)
    outbox.put(sample("a"))
    reader = Reader(outbox)
    with pytest.raises(ControlError, match=r"no sample of train/3 arrived .* 1 of 2 are here. instance-0 is"):
        reader.take(timeout_s=0.05)


def test_a_failure_reaches_every_call_behind_what_is_here() -> None:
    outbox = Outbox("train/3", 2)
    outbox.put(sample("a"))
    outbox.fail(ValueError("boom"))
    reader = Reader(outbox)
    assert reader.take(1) == ["a"]
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            reader.take()


def test_a_way_that_is_complete_ends_also_after_a_failure() -> None:
    outbox = Outbox("train/3", 1)
    outbox.put(sample("a"))
    reader = Reader(outbox)
    outbox.fail(ValueError("boom"))
    assert reader.take(1) == ["a"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_the_end_comes_short_of_what_was_cancelled(missing: int) -> None:
    outbox = Outbox("probe/1/a", 3)
    for place in range(3):
        if place == missing:
            outbox.cancel()
        else:
            outbox.put(sample(str(place)))
    assert len(Reader(outbox).take(timeout_s=1)) == 2


def test_a_job_that_is_added_at_the_last_sample_goes_on() -> None:
    outbox = Outbox("train/3", 1)
    outbox.put(sample("a"))
    reader = Reader(outbox)
    assert reader.take(1) == ["a"]
    outbox.grow(1)
    outbox.put(sample("b"))
    assert reader.take(timeout_s=1) == ["b"]


def test_no_more_than_the_window_is_under_way() -> None:
    outbox = Outbox("train/3", 9)
    got: list[object] = []
    reading = Reading(outbox, 0, 0, 3, got.append)
    for number in range(9):
        outbox.put(sample(str(number)))
    assert sum(len(b.samples) for b in got if isinstance(b, Batch)) == 3
    reading.taken(2, False)
    assert sum(len(b.samples) for b in got if isinstance(b, Batch)) == 5


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["put", "cancel", "take", "break", "stop"]), st.integers(0, 1), st.integers(1, 4)
    ),
    max_size=60,
)


@given(MOVES)
def test_all_readers_see_one_order_whatever_happens_when(
    moves: list[tuple[str, int, int]],
) -> None:
    """Samples, broken streams and a stop in any interleaving: equal sequences, each sample once, one stop."""
    size, done = 12, []
    taken: list[str] = []
    outbox = Outbox(
        "train/3", size, 2, on_taken=lambda s: taken.append(s.sample_id), on_end=lambda: done.append(1)
    )
    readers = [Reader(outbox, number) for number in range(2)]
    filled, stopped = 0, [False, False]

    def take(number: int, count: int) -> None:
        try:
            if not stopped[number]:
                readers[number].take(count)
        except StopRequested:
            stopped[number] = True

    for move, number, count in moves:
        if move in ("put", "cancel") and filled < size:
            outbox.put(sample(str(filled))) if move == "put" else outbox.cancel()
            filled += 1
        elif move == "take":
            take(number, count)
        elif move == "break":
            readers[number].reading.close()
            readers[number].open()
        elif move == "stop":
            outbox.stop("SIGTERM")
    while filled < size:
        outbox.put(sample(str(filled)))
        filled += 1
    for number in range(2):
        for _ in range(size + 1):
            take(number, size)
    seen = [reader.seen for reader in readers]
    assert seen[0] == seen[1] == sorted(set(seen[0]), key=int)
    assert stopped[0] == stopped[1]
    assert taken == seen[0]
    assert bool(done) != stopped[0], "either all read the end or all were stopped"


def test_a_stop_comes_behind_what_any_reader_was_given() -> None:
    outbox = Outbox("train/3", 3, 2)
    outbox.put(sample("a"))
    assert isinstance(outbox.read(0, 0, 9, False), Batch)
    outbox.stop("SIGTERM")
    outbox.put(sample("b"))
    behind = outbox.read(1, 0, 9, False)
    assert isinstance(behind, Batch) and [s.sample_id for s in behind.samples] == ["a"]
    assert isinstance(outbox.read(0, 1, 9, False), Stop) and isinstance(outbox.read(1, 1, 9, False), Stop)


def test_a_stop_comes_too_late_where_one_has_read_the_end() -> None:
    outbox = Outbox("train/3", 1, 2)
    outbox.put(sample("a"))
    assert isinstance(outbox.read(0, 1, 9, True), End)
    outbox.stop("SIGTERM")
    assert isinstance(outbox.read(1, 1, 9, True), End)


def test_what_readers_ask_for_together_is_done_once() -> None:
    once = Once(2)
    assert once.first("job a", 1, b"1")
    assert once.first("job b", 1, b"1")
    assert not once.first("job a", 0, b"1")
    assert len(once) == 1
    with pytest.raises(ControlError, match="trainer processes 1 and 0 ask for different things as job b"):
        once.first("job b", 0, b"2")
    with pytest.raises(ControlError, match="trainer process 1 asks for job b a second time"):
        once.first("job b", 1, b"1")
