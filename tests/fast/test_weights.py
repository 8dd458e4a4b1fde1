"""The loop's door to the bridge: what it costs, and that a wait which fails says what it waited for."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamrl_jax.errors import UserError
from streamrl_jax.train.weights import Weights
from streamrl_jax.types import UpdateReport


class Publisher:
    """Its bytes are written when the test says so."""

    def __init__(self) -> None:
        self.written: list[Future[Any]] = []

    def publish(self, params: Any, version: int) -> Any:
        self.written.append(Future())
        return SimpleNamespace(future=self.written[-1])

    def release(self, version: int) -> None:
        pass

    def finish(self, version: int) -> None:
        stats = SimpleNamespace(nbytes=8, total_s=0.5)
        manifest = SimpleNamespace(version=version)
        self.written[-1].set_result(SimpleNamespace(path=Path("/blob"), manifest=manifest, stats=stats))


class Controller:
    """Its instances load when the test says so."""

    def __init__(self) -> None:
        self.reports: Future[list[UpdateReport]] = Future()
        self.failures: list[BaseException] = []

    def publish(self, manifest: Any, source: Any, release: Any) -> Future[list[UpdateReport]]:
        return self.reports

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)


@pytest.fixture
def parts() -> tuple[Weights, Publisher, Controller]:
    publisher, controller = Publisher(), Controller()
    return Weights(cast(Any, publisher), cast(Any, controller), "", 0.01), publisher, controller


def test_costs_are_those_of_the_version_before(parts: tuple[Weights, Publisher, Controller]) -> None:
    weights, publisher, controller = parts
    weights.publish({}, 0)
    publisher.finish(0)
    controller.reports.set_result(
        [UpdateReport("a", True, 0, applied_s=1.0), UpdateReport("b", True, 0, applied_s=3.0)]
    )
    assert weights.served(0.01)[1].instance == "b"
    weights.publish({}, 1)
    found = weights.metrics()
    assert (found["weights/bytes"], found["timing_s/publish"], found["timing_s/update_weights_applied"]) == (
        8,
        0.5,
        3,
    )


def test_waits_that_fail_say_what_they_waited_for(parts: tuple[Weights, Publisher, Controller]) -> None:
    weights, _, _ = parts
    weights.publish({}, 0)
    with pytest.raises(UserError, match=r"did not all load the newest version within 0\.01 s"):
        weights.served(0.01)
    with pytest.raises(UserError, match=r"not written within bridge\.update_timeout_s = 0\.01 s"):
        weights.publish({}, 1)


def test_bytes_that_cannot_be_written_end_every_wait(parts: tuple[Weights, Publisher, Controller]) -> None:
    weights, publisher, controller = parts
    weights.publish({}, 0)
    publisher.written[-1].set_exception(error := OSError("disk"))
    assert controller.failures == [error]
    with pytest.raises(OSError, match="disk"):
        weights.served(0.01)
