"""Runs the user's reward function beside the controller's loop, with a bound on each call.

Worker threads, not processes: a function given to ``streamrl_jax.run(reward_fn=...)`` may be a closure that
cannot be pickled, and a process that has imported JAX must not be forked. The price: a thread that hangs
cannot be killed. So a call past its bound ends the run with the sample's name; the thread is a daemon and
does not keep the process alive. A function that holds the interpreter lock (a catastrophic regular
expression) holds the whole process with it: where the controller is a process of its own, the trainer notices that
it is silent, and reads off the `Board` which sample it was at.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from streamrl_jax.control.absence import leave_out
from streamrl_jax.control.board import Board
from streamrl_jax.control.faults import RewardError
from streamrl_jax.control.handover import Handover
from streamrl_jax.errors import UserError
from streamrl_jax.rewards import RewardFn, RewardResult
from streamrl_jax.types import Generation, Prompt, TokenIds

_EXCERPT = 200  # characters of an answer that a message shows


@dataclass(frozen=True, eq=False)
class _Call:
    prompt: Prompt
    generation: Generation
    done: Callable[[RewardResult | BaseException], None]


@dataclass(eq=False)
class _Running:
    since_s: float  # its start, later by what is forgiven
    call: _Call


class RewardWorkers:
    """A few threads that turn answers into rewards.

    Call order: ``start``, and ``attach`` on the loop; any number of ``order`` there, ``check`` now and then, after
    ``forgive`` when this process itself was stopped; ``close``.

    Args:
        function: the user's reward function.
        decode: token ids to text; runs on the worker too.
        timeout_s: bound on one call.
        workers: threads.
        board: shows other processes which calls run; None: nobody looks.
    """

    def __init__(
        self,
        function: RewardFn,
        decode: Callable[[TokenIds], str],
        timeout_s: float,
        workers: int,
        board: Board | None = None,
    ) -> None:
        self._function = function
        self._decode = decode
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}  # by thread number
        self._board = board
        self._closing = False
        self._back: Handover[tuple[_Call, RewardResult | BaseException]] | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"reward-{number}", daemon=True)
            for number in range(workers)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def attach(self) -> None:
        """Has the outcomes brought to the loop that runs now."""
        self._back = Handover(asyncio.get_running_loop(), lambda done: done[0].done(done[1]))

    def order(
        self, prompt: Prompt, generation: Generation, done: Callable[[RewardResult | BaseException], None]
    ) -> None:
        """Has one reward computed.

        Args:
            prompt: the answer's prompt.
            generation: the answer.
            done: takes the function's result, on the loop. Its score may be NaN or infinite: what that means is the
                trainer's to say. Or a `RewardError`: the function raised, or its score is no number.
        """
        self._calls.put(_Call(prompt, generation, done))

    def check(self) -> None:
        """Raises `RewardError` when a call runs for longer than its bound."""
        now = time.monotonic()
        for running in list(self._running.values()):
            if now - running.since_s > self._timeout_s:
                raise RewardError(
                    f"the reward function did not return within {self._timeout_s:g} s (reward.timeout_s) for "
                    f"{_name(running.call)}; put a bound into the function, or raise reward.timeout_s"
                )

    def forgive(self, seconds: float) -> None:
        """Leaves the time in which this process was stopped, and the calls with it, out of their bounds.

        Args:
            seconds: how long that was, until now.
        """
        now = time.monotonic()
        for running in list(self._running.values()):
            running.since_s = leave_out(running.since_s, seconds, now)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; what is queued is not computed any more.

        Args:
            timeout_s: bound on the wait for calls that run. One that still runs then is left to its thread,
                which ends with the process.
        """
        self._closing = True
        for _ in self._threads:
            self._calls.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self, number: int) -> None:
        while (call := self._calls.get()) is not None and not self._closing:
            self._running[number] = _Running(time.monotonic(), call)
            if self._board is not None:
                self._board.begin(number, _name(call))
            outcome = self._outcome(call)
            if self._board is not None:
                self._board.end(number)
            del self._running[number]
            assert self._back is not None, "it was attached before anything was ordered"
            with contextlib.suppress(RuntimeError):  # the loop is closed: a call that hung ends after the run
                self._back.put((call, outcome))

    def _outcome(self, call: _Call) -> RewardResult | BaseException:
        text = ""
        try:
            text = self._decode(call.generation.token_ids)
            result = self._function(call.prompt, text, call.generation)
            return replace(result, score=float(result.score))
        except UserError as error:  # what it returned is no reward; says so itself
            return RewardError(f"{error}: {_name(call)}, answer {_excerpt(text)}")
        except BaseException as error:  # whatever the user's code raises reaches the trainer's thread
            return RewardError(
                f"the reward function raised {type(error).__name__}: {error} for {_name(call)}, "
                f"answer {_excerpt(text)}",
                error,
            )


def _name(call: _Call) -> str:
    return f"sample {call.generation.sample_id} (prompt {call.prompt.prompt_id})"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")
