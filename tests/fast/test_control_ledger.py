"""Rule 1: each opened sample is delivered exactly once, whatever the messages' order and the deaths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl_jax.control.ledger import REMEMBERED, Ledger, Stage, Verdict
from streamrl_jax.types import Fence

LIFE = Fence("run", 1)
EARLIER = Fence("run", 0)
INSTANCES = ("a", "b", "c")


def open_all(ledger: Ledger, job: str, ids: Sequence[str]) -> None:
    """Opens a job whose samples are about to be handed out."""
    ledger.open(job, len(ids))
    for sample_id in ids:
        ledger.admit(job, sample_id)


class DeliveryMachine(RuleBasedStateMachine):
    """Answers arrive late, twice, out of order, or after their instance is dead."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(LIFE)
        self.waiting: list[str] = []
        self.network: list[tuple[Fence, str, int, str]] = []  # each may arrive at any time
        self.finished: list[str] = []
        self.rewarded: list[str] = []
        self.delivered: Counter[str] = Counter()
        self.opened: set[str] = set()
        self.ended: set[str] = set()
        self.accepted = self.dropped = self.jobs = 0

    @rule(size=st.integers(1, 5))
    def open(self, size: int) -> None:
        job = f"train/{self.jobs}"
        ids = [f"{job}/{index}" for index in range(size)]
        open_all(self.ledger, job, ids)
        self.waiting += ids
        self.opened |= set(ids)
        self.jobs += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), instance=st.sampled_from(INSTANCES))
    def dispatch(self, data: st.DataObject, instance: str) -> None:
        sample = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(sample)
        attempt = self.ledger.dispatch(sample, instance)
        self.network.append((LIFE, sample, attempt, instance))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), fence=st.sampled_from((LIFE, LIFE, LIFE, EARLIER)))
    def arrive(self, data: st.DataObject, fence: Fence) -> None:
        _, sample, attempt, instance = data.draw(st.sampled_from(self.network))
        if self.ledger.accept(fence, sample, attempt, instance) is Verdict.ACCEPTED:
            assert fence == LIFE
            self.finished.append(sample)
            self.accepted += 1
        else:
            self.dropped += 1

    @rule(sample=st.text("x/0", min_size=1, max_size=4), attempt=st.integers(0, 3))
    def arrive_unheard_of(self, sample: str, attempt: int) -> None:
        assert self.ledger.accept(LIFE, sample, attempt, "a") is Verdict.UNKNOWN
        self.dropped += 1

    @rule(instance=st.sampled_from(INSTANCES))
    def die(self, instance: str) -> None:
        self.waiting += self.ledger.requeue_instance(instance)

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def reward(self, data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(self.finished))
        self.finished.remove(sample)
        self.ledger.rewarded(sample)
        self.rewarded.append(sample)

    @precondition(lambda self: self.rewarded)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(self.rewarded))
        self.rewarded.remove(sample)
        if self.ledger.deliver(sample):
            self.ended.add(sample.rsplit("/", 1)[0])
        self.delivered[sample] += 1

    @invariant()
    def account_agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        counts, stages = self.ledger.counts(), self.ledger.stages()
        assert counts["finished"] == self.accepted
        assert sum(n for name, n in counts.items() if name.endswith("_dropped")) == self.dropped
        assert stages[Stage.WAITING] == len(self.waiting)
        assert stages[Stage.FINISHED] == len(self.finished)
        assert stages[Stage.REWARDED] == len(self.rewarded)
        assert set(self.delivered.values()) <= {1}

    def teardown(self) -> None:
        """Whatever happened, the rest can be finished, and then every sample was delivered once."""
        if not hasattr(self, "ledger"):
            return
        for instance in INSTANCES:
            self.waiting += self.ledger.requeue_instance(instance)
        for sample in list(self.waiting):
            attempt = self.ledger.dispatch(sample, "a")
            assert self.ledger.accept(LIFE, sample, attempt, "a") is Verdict.ACCEPTED
            self.finished.append(sample)
        for sample in list(self.finished):
            self.ledger.rewarded(sample)
            self.rewarded.append(sample)
        for sample in self.rewarded:
            self.ledger.deliver(sample)
            self.delivered[sample] += 1
        assert self.delivered == Counter(self.opened)
        assert not any(self.ledger.stages().values()), "a job that is done is forgotten"


DeliveryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestDelivery = DeliveryMachine.TestCase


def test_random_deaths_and_repeats_at_scale() -> None:
    """2,000 samples over 4 instances with deaths and repeats: delivered equals opened, each once."""
    draw = random.Random(7)
    ledger = Ledger(LIFE)
    ids = [f"train/0/{index}" for index in range(2000)]
    open_all(ledger, "train/0", ids)
    waiting, network, delivered = list(ids), [], Counter[str]()
    while sum(delivered.values()) < len(ids):
        for _ in range(draw.randrange(50)):
            if waiting:
                sample, instance = waiting.pop(), draw.choice("abcd")
                network.append((sample, ledger.dispatch(sample, instance), instance))
        draw.shuffle(network)
        for sample, attempt, instance in network[: draw.randrange(60)]:
            if ledger.accept(LIFE, sample, attempt, instance) is Verdict.ACCEPTED:
                ledger.rewarded(sample)
                ledger.deliver(sample)
                delivered[sample] += 1
        network = network[draw.randrange(40) :]  # some of what arrived stays and arrives again
        if not network or draw.random() < 0.1:
            for instance in "abcd" if not network else draw.choice("abcd"):
                waiting += ledger.requeue_instance(instance)
        ledger.check() if draw.random() < 0.1 else None
    assert delivered == Counter(ids)
    counts = ledger.counts()
    ledger.check()
    assert (
        counts["dispatched"] == len(ids) + counts["redispatched"] == counts["finished"] + counts["taken_back"]
    )
    assert counts["redispatched"] > 100
    assert counts["stale_attempts_dropped"] > 0


def test_each_kind_of_wrong_message_is_counted() -> None:
    ledger = Ledger(LIFE)
    open_all(ledger, "j", ["j/0", "j/1"])
    assert ledger.accept(LIFE, "j/0", 0, "a") is Verdict.UNKNOWN  # not handed out yet
    ledger.dispatch("j/0", "a")
    assert ledger.accept(EARLIER, "j/0", 0, "a") is Verdict.OTHER_FENCE
    assert ledger.accept(Fence("another", 1), "j/0", 0, "a") is Verdict.OTHER_FENCE
    assert ledger.accept(LIFE, "j/0", 0, "b") is Verdict.OTHER_INSTANCE
    assert ledger.accept(LIFE, "j/0", 1, "a") is Verdict.UNKNOWN
    assert ledger.requeue_instance("a") == ["j/0"]
    assert ledger.accept(LIFE, "j/0", 0, "a") is Verdict.STALE_ATTEMPT
    assert ledger.dispatch("j/0", "b") == 1
    assert ledger.accept(LIFE, "j/0", 0, "a") is Verdict.STALE_ATTEMPT
    assert ledger.accept(LIFE, "j/0", 1, "b") is Verdict.ACCEPTED
    assert ledger.accept(LIFE, "j/0", 1, "b") is Verdict.DUPLICATE
    assert ledger.accept(LIFE, "j/0", 0, "a") is Verdict.STALE_ATTEMPT
    assert ledger.counts() == {
        "opened": 2,
        "dispatched": 2,
        "taken_back": 1,
        "redispatched": 1,
        "continued": 0,
        "tokens_kept": 0,
        "finished": 1,
        "delivered": 0,
        "cancelled": 0,
        "other_fence_dropped": 2,
        "unknown_dropped": 2,
        "stale_attempts_dropped": 3,
        "other_instance_dropped": 1,
        "duplicates_dropped": 1,
    }


def test_moves_out_of_order_are_faults_of_the_program() -> None:
    ledger = Ledger(LIFE)
    open_all(ledger, "j", ["j/0"])
    with pytest.raises(RuntimeError, match="j/0 is waiting"):
        ledger.rewarded("j/0")
    with pytest.raises(RuntimeError, match="j/9 is not open"):
        ledger.deliver("j/9")
    with pytest.raises(ValueError, match="open already"):
        ledger.open("j", 1)
    with pytest.raises(ValueError, match="one more than job j was opened with"):
        ledger.admit("j", "j/1")
    ledger.open("k", 2)
    ledger.admit("k", "k/0")
    with pytest.raises(ValueError, match="k/0 is open already"):
        ledger.admit("k", "k/0")


def test_a_cancelled_probe_ends_its_job() -> None:
    ledger = Ledger(LIFE)
    open_all(ledger, "probe/1/a", ["p/0", "p/1"])
    ledger.dispatch("p/0", "a")
    ledger.accept(LIFE, "p/0", 0, "a")
    ledger.rewarded("p/0")
    assert not ledger.cancel("p/1")
    assert ledger.deliver("p/0")
    assert ledger.left("probe/1/a") == 0


def test_memory_follows_what_is_admitted_and_not_delivered() -> None:
    """Neither what waits in a job nor what was delivered keeps an entry; a late repeat is known, up to a bound."""
    ledger = Ledger(LIFE)
    size = REMEMBERED + 100
    ledger.open("j", size)
    for number in range(size - 1):
        sample = f"j/{number}"
        ledger.admit("j", sample)
        ledger.dispatch(sample, "a")
        ledger.accept(LIFE, sample, 0, "a")
        ledger.rewarded(sample)
        assert not ledger.deliver(sample)
    assert ledger.stages() == {**dict.fromkeys(Stage, 0), Stage.WAITING: 1}
    assert ledger.left("j") == 1
    assert ledger.accept(LIFE, "j/100", 0, "a") is Verdict.DUPLICATE
    assert ledger.accept(LIFE, "j/98", 0, "a") is Verdict.UNKNOWN, "long ago: dropped all the same"
    ledger.check()
