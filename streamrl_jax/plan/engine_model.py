"""One simulated generation instance: continuous batching under a cost model. Pure Python.

Between two events (an answer ends, one comes in, the KV cache is full) the batch stays the same and each context grows
by one token a step. A step's seconds are linear in the contexts, so that d steps take, exactly,

    base(k) · d + kv_token_s · (C · d + k · d (d − 1) / 2)

for k answers whose contexts sum to C before the first of them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from streamrl_jax.ranker.plans import Server

_HEADROOM: Final = 0.99
"""Of the KV cache: up to here an answer is let in, so that it is not put off again at once."""


@dataclass(slots=True)
class Answer:
    """One answer on its way.

    Attributes:
        group: Its prompt.
        number: Among all answers of the stage.
        tokens: That it has when it ends.
        predicted: Tokens that were expected.
        prompt: Tokens of its prompt.
        done: Tokens that it has, while it does not run.
        ends: While it runs, the instance's step at which it ends; else −1.
    """

    group: int
    number: int
    tokens: int
    predicted: float
    prompt: int
    done: int = 0
    ends: int = -1


class Engine:
    """An instance's steps.

    Call order: `hand` gives answers, `admit` starts those that fit; `next_s` says when something happens; `run` goes on
    until a time, and returns the answers that end there.

    Invariants: every answer takes as many steps as it has tokens, whatever is put off in between. At most as many
    answers run as it has slots. The contexts fit the KV cache, or one answer runs alone.

    Args:
        server: The instance.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.clock = 0.0  # at the end of the last step that was run
        self.steps = 0  # that decoded at least one token
        self.tokens = 0
        self.busy_s = 0.0
        self.put_off = 0
        self.expected = 0.0  # predicted tokens still to come of what it holds
        self.waiting: deque[Answer] = deque()  # handed out, not running
        self._base: list[float] = server.cost.step_s(np.arange(server.slots + 1), 0).tolist()
        self._each = server.cost.kv_token_s
        self._kv = 0
        self._running: list[tuple[int, int, Answer]] = []  # a heap by the step at which an answer ends
        self._admitted: list[Answer] = []  # in the order they came in; those that ended are skipped
        self._known: set[int] = set()  # prompts whose contexts are in the cache
        self._prefill_0 = float(server.cost.prefill_s(0))

    @property
    def running(self) -> int:
        """Answers that it decodes."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Answers that were handed out and have not ended."""
        return len(self._running) + len(self.waiting)

    def hand(self, answer: Answer, now: float) -> None:
        """Gives it an answer, which starts at the next `admit`."""
        if not self.held:
            self.clock = max(self.clock, now)
        self.expected += answer.predicted - answer.done
        self.waiting.append(answer)

    def admit(self) -> None:
        """Starts what fits the batch and the KV cache, in order; takes in the prompts that it does not know."""
        prompts = 0
        limit = self.server.kv_tokens * _HEADROOM
        while self.waiting and len(self._running) < self.server.slots:
            answer = self.waiting[0]
            context = answer.prompt + answer.done
            if self._running and self._kv + context + len(self._running) + 1 > limit:
                break
            self.waiting.popleft()
            prompts += answer.done + (0 if answer.group in self._known else answer.prompt)
            self._known.add(answer.group)
            answer.ends = self.steps + answer.tokens - answer.done
            heapq.heappush(self._running, (answer.ends, answer.number, answer))
            self._admitted.append(answer)
            self._kv += context
        if prompts:
            seconds = float(self.server.cost.prefill_s(prompts)) - self._prefill_0
            self.clock += seconds
            self.busy_s += seconds

    def next_s(self) -> float:
        """When an answer ends or the KV cache is full; infinite with nothing running."""
        if not self._running:
            return math.inf
        return self.clock + self._seconds(min(self._running[0][0] - self.steps, self._room()))

    def run(self, until: float) -> list[Answer]:
        """Runs whole steps up to the next event, or to the first end of a step at ``until`` or after.

        Args:
            until: Not later than `next_s` in exact arithmetic.

        Returns:
            The answers that ended, by their numbers.
        """
        if not self._running:
            self.clock = max(self.clock, until)
            return []
        most = min(self._running[0][0] - self.steps, self._room())
        # What is due now happens now, whatever rounding makes of the steps until then.
        self._go(most if until >= self.next_s() else min(most, self._steps_until(until)))
        ended: list[Answer] = []
        while self._running and self._running[0][0] == self.steps:
            answer = heapq.heappop(self._running)[2]
            answer.done = answer.tokens
            answer.ends = -1
            self._kv -= answer.prompt + answer.tokens
            self.expected -= answer.predicted - answer.tokens
            ended.append(answer)
        while len(self._running) > 1 and self._room() < 1:
            self._put_off()
        return ended

    def expected_at(self, now: float) -> float:
        """Predicted tokens still to come at a time since the last event, at least 0."""
        if not self._running:
            return max(0.0, self.expected)
        step = self._base[len(self._running)] + self._each * self._kv
        since = (now - self.clock) / step if step else 0.0
        return max(0.0, self.expected - max(0.0, since) * len(self._running))

    def longest(self) -> float:
        """Predicted tokens that the longest of its running answers has still to come, at the last event."""
        steps = self.steps
        return max(
            (answer.predicted - answer.tokens + end - steps for end, _, answer in self._running), default=0.0
        )

    def _room(self) -> int:
        """Steps for which the contexts fit; a single answer is not put off."""
        if len(self._running) == 1:
            return self._running[0][0] - self.steps
        return (self.server.kv_tokens - self._kv) // len(self._running)

    def _seconds(self, steps: int) -> float:
        running = len(self._running)
        reads = self._kv * steps + running * steps * (steps - 1) / 2
        return self._base[running] * steps + self._each * reads

    def _steps_until(self, until: float) -> int:
        """The fewest steps that last until then, at least 0."""
        left = until - self.clock
        if left <= 0:
            return 0
        running = len(self._running)
        curve = self._each * running / 2
        slope = self._base[running] + self._each * self._kv - curve
        # The root of curve · d² + slope · d = left in the form that no small curve cancels in.
        below = slope + math.sqrt(slope * slope + 4 * curve * left)
        exact = 2 * left / below if below > 0 else 0.0
        return math.ceil(exact * (1 - 1e-12) - 1e-9)  # exact but for rounding

    def _go(self, steps: int) -> None:
        seconds = self._seconds(steps)
        running = len(self._running)
        self.clock += seconds
        self.busy_s += seconds
        self.steps += steps
        self.tokens += running * steps
        self.expected -= running * steps
        self._kv += running * steps

    def _put_off(self) -> None:
        """The answer that came last gives up its contexts; it goes on from its tokens later."""
        answer = self._admitted.pop()
        while answer.ends < 0:
            answer = self._admitted.pop()
        answer.done = answer.tokens - (answer.ends - self.steps)
        self._running.remove((answer.ends, answer.number, answer))
        heapq.heapify(self._running)
        self._kv -= answer.prompt + answer.done
        answer.ends = -1
        self.waiting.appendleft(answer)
        self.put_off += 1
