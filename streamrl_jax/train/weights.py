"""The loop's door to the bridge: a version is snapshotted, published, and travels while training goes on.

Of several trainer processes the first writes and publishes (`Weights`). The conversion is a program of all devices, so
the others run it too, and keep nothing of it (`Conversions`).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import jax

from streamrl_jax.bridge.publish import BUCKET_BYTES, Published, Publisher, convert, list_pieces, make_buckets
from streamrl_jax.control.protocol import RunController
from streamrl_jax.errors import UserError
from streamrl_jax.train.models import Arch, Params
from streamrl_jax.train.plan import Plan
from streamrl_jax.types import UpdateReport, WeightSource


class WeightDoor(Protocol):
    """What the loop and the agreement gate ask of either."""

    def publish(self, params: Params, version: int) -> None:
        """Takes a snapshot of the parameters, which may be donated as soon as this returns."""
        ...

    def served(self, timeout_s: float) -> object:
        """Returns when the instances have the newest version, as far as this process is the one that knows."""
        ...


class Weights:
    """Publishes versions to all instances.

    The trainer is kept only while the converted copies are dispatched; digests, bytes and the updates of the instances
    run behind it. A failure there ends the wait for samples, wherever the trainer stands.

    Args:
        publisher: Converts and writes.
        controller: Brings a version to each instance.
        address: Of the trainer's weight store, for instances on other hosts; empty: none.
        timeout_s: Bound on the wait for a version's bytes.
        plan: Of several trainer processes.
    """

    def __init__(
        self,
        publisher: Publisher,
        controller: RunController,
        address: str,
        timeout_s: float,
        plan: Plan | None = None,
    ) -> None:
        self._plan = plan or Plan()
        self._publisher = publisher
        self._controller = controller
        self._address = address
        self._timeout_s = timeout_s
        self._written: Future[Published] | None = None
        self._updated: Future[list[UpdateReport]] = Future()
        self._blocked_s = 0.0
        self._costs: dict[str, float] = {}

    def publish(self, params: Params, version: int) -> None:
        """Takes a snapshot of the parameters and sends it on its way.

        Args:
            params: The policy's; they may be donated as soon as this returns.
            version: Its number.
        """
        begun = time.monotonic()
        if self._written is not None:  # one version at a time, so that host memory stays bounded
            self._costs = self._known_costs(self._written)
        self._updated = Future()
        self._plan.whole("convert", version)
        self._written = self._publisher.publish(params, version).future
        self._written.add_done_callback(partial(self._hand_over, self._updated))
        self._blocked_s = time.monotonic() - begun

    def served(self, timeout_s: float) -> list[UpdateReport]:
        """Waits until every instance has the newest version, or is lost (it gets it when it is back).

        Raises:
            UserError: Not in time.
        """
        try:
            return self._updated.result(timeout_s)
        except TimeoutError as error:
            raise UserError(
                f"the instances did not all load the newest version within {timeout_s:g} s "
                "(trainer.sample_timeout_s); look at their logs, raise it where weights take so long, or go on with "
                "--resume"
            ) from error

    def metrics(self) -> dict[str, float]:
        """What publishing cost: the newest version's hold on the trainer, and what the one before it took.

        The newest is still on its way when an iteration is recorded. Seconds, bytes.
        """
        return {"timing_s/publish_blocked": self._blocked_s} | self._costs

    def _known_costs(self, written: Future[Published]) -> dict[str, float]:
        """Waits until the bytes of the version before lie ready."""
        try:
            stats = written.result(self._timeout_s).stats
        except TimeoutError as error:
            raise UserError(
                f"the bytes of the version before were not written within bridge.update_timeout_s = "
                f"{self._timeout_s:g} s; raise it where a version takes so long, or go on with --resume"
            ) from error
        found = {"weights/bytes": float(stats.nbytes), "timing_s/publish": stats.total_s}
        if self._updated.done():
            reports = self._updated.result()
            for part in ("staged", "paused", "applied"):
                slowest = max((getattr(report, f"{part}_s") for report in reports), default=0.0)
                found[f"timing_s/update_weights_{part}"] = slowest
        return found

    def _hand_over(self, updated: Future[list[UpdateReport]], written: Future[Published]) -> None:
        """On the publisher's thread: the bytes lie ready, or could not be written."""
        try:
            published = written.result()
            source = WeightSource(path=str(published.path), address=self._address)
            release = partial(self._publisher.release, published.manifest.version)
            reports = self._controller.publish(published.manifest, source, release)
        except BaseException as error:
            updated.set_exception(error)
            self._controller.fail(error)
            return
        reports.add_done_callback(partial(_copy_outcome, updated))


class Conversions:
    """`Weights` of a trainer process that is not the first: takes part in the conversion, bucket by bucket.

    Nothing is copied to the host, and the devices hold one bucket at a time.

    Args:
        arch: Of the policy.
        dtype: What is shipped.
        plan: Of several trainer processes.
    """

    def __init__(self, arch: Arch, dtype: str, plan: Plan) -> None:
        self._buckets = make_buckets(list_pieces(arch), dtype, BUCKET_BYTES)
        self._dtype = dtype
        self._plan = plan

    def publish(self, params: Params, version: int) -> None:
        """Runs the conversion that the first process takes its snapshot by."""
        self._plan.whole("convert", version)
        for bucket in self._buckets:
            jax.block_until_ready(convert(params, bucket, self._dtype))

    def served(self, timeout_s: float) -> None:
        """The first process waits for the instances, and this one for it, at the probe that follows."""


def _copy_outcome(target: Future[list[UpdateReport]], source: Future[list[UpdateReport]]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())
