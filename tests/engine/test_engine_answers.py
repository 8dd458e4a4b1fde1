"""Rule 4 and the stream's promises, on the real vLLM against Hugging Face's float32 forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from streamrl_jax.types import (
    Assignment,
    FinishReason,
    Generation,
    Partial,
    Rejection,
    RejectReason,
    Sampling,
    VersionRun,
)
from tests.engine.conftest import (
    ANSWER_S,
    FENCE,
    PADDED_VOCABULARY,
    STOP_ID,
    VOCABULARY,
    Rig,
    make_model,
    reference_logprobs,
)

TRAINING = Sampling(temperature=1.0, max_new_tokens=48, stop_token_ids=(STOP_ID, 2))


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Random prompts of different lengths; half of them begin alike, so that the prefix cache is used."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, VOCABULARY, 130)
    found = [random.integers(3, VOCABULARY, random.integers(1, 20)) for _ in range(count)]
    return [
        np.concatenate([shared, ids])[: 140 + i].astype(np.int32) if i % 2 else ids.astype(np.int32)
        for i, ids in enumerate(found)
    ]


def assignments(rig: Rig, count: int, sampling: Sampling = TRAINING) -> list[Assignment]:
    """Fresh samples."""
    return [Assignment(rig.sample_id(), 0, ids, sampling) for ids in prompts(count)]


def disagreement(rig: Rig, given: list[Assignment], answers: list[Generation], temperature: float) -> float:
    """The largest log-prob difference to Hugging Face over all tokens."""
    assert rig.model is not None
    worst = 0.0
    for assignment, answer in zip(given, answers, strict=True):
        ids = answer.token_ids.tolist()
        expected = reference_logprobs(rig.model, assignment.prompt_ids.tolist(), ids, temperature)
        worst = max(worst, float(np.abs(expected - answer.logprobs).max()))
    return worst


def test_the_instance_answers_while_it_loads(rig: Rig) -> None:
    assert rig.startup.first_answer_s < 60, "the phases below say that it loads meanwhile"
    assert rig.startup.phases[0] in ("starting", "importing vllm")
    assert any(phase.startswith("starting the engine core") for phase in rig.startup.phases)
    print(f"\nfirst answer {rig.startup.first_answer_s:.2f} s, slowest {rig.startup.slowest_answer_s:.2f} s")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(rig: Rig, temperature: float) -> None:
    given = assignments(rig, 24, replace(TRAINING, temperature=temperature))
    answers = rig.answer(given)
    for answer in answers:
        assert answer.versions == (VersionRun(rig.version, len(answer.token_ids)),)
        stopped = int(answer.token_ids[-1]) in TRAINING.stop_token_ids
        assert answer.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(answer.token_ids) == TRAINING.max_new_tokens
        assert not np.isin(answer.token_ids[:-1], TRAINING.stop_token_ids).any()
        assert answer.timings.decode_s > 0 or len(answer.token_ids) == 1
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}
    worst = disagreement(rig, given, answers, temperature)
    print(f"\nT = {temperature}: largest log-prob difference {worst:.2e}")
    assert worst < 1e-5


def test_nothing_of_the_generation_config_is_applied(rig: Rig) -> None:
    # Its top_k = 3 would leave three different first tokens, its eos ids would end answers.
    sampling = replace(TRAINING, max_new_tokens=1)
    ids = prompts(1)[0]
    firsts = rig.answer([Assignment(rig.sample_id(), 0, ids, sampling) for _ in range(64)])
    assert len({int(answer.token_ids[0]) for answer in firsts}) > 8


def test_a_seed_fixes_an_answer_and_answers_differ_without(rig: Rig) -> None:
    ids = prompts(1)[0]
    free_of_stops = replace(TRAINING, stop_token_ids=())
    seeded = replace(free_of_stops, seed=11)
    first, again = (rig.answer([Assignment(rig.sample_id(), 0, ids, seeded)])[0] for _ in range(2))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    free = rig.answer([Assignment(rig.sample_id(), 0, ids, free_of_stops) for _ in range(4)])
    assert len({tuple(answer.token_ids.tolist()) for answer in free}) == 4


def test_greedy_evaluation_follows_the_most_probable_token(rig: Rig) -> None:
    assert rig.model is not None
    greedy = Sampling(0.0, 12, (), evaluation=True)
    given = assignments(rig, 4, greedy)
    for assignment, answer in zip(given, rig.answer(given), strict=True):
        ids = assignment.prompt_ids.tolist()
        for token in answer.token_ids.tolist():
            with torch.no_grad():
                assert token == int(rig.model(torch.tensor([ids])).logits[0, -1, :VOCABULARY].argmax())
            ids.append(token)


def test_a_recorded_length_is_kept_whatever_is_sampled(rig: Rig) -> None:
    forced = replace(TRAINING, evaluation=True, forced_length=33, stop_token_ids=tuple(range(VOCABULARY)))
    answers = rig.answer(assignments(rig, 3, forced))
    assert [len(answer.token_ids) for answer in answers] == [33, 33, 33]


def test_a_partial_answer_goes_on_under_the_same_limit(rig: Rig) -> None:
    whole = assignments(rig, 1, replace(TRAINING, stop_token_ids=(), seed=5))[0]
    first = rig.answer([whole])[0]
    cut = 20
    partial = Partial(first.token_ids[:cut], first.logprobs[:cut], (VersionRun(rig.version, cut),))
    again = replace(whole, sample_id=rig.sample_id(), attempt=1, resumed=partial)
    answer = rig.answer([again])[0]
    assert answer.attempt == 1
    assert answer.token_ids[:cut].tolist() == first.token_ids[:cut].tolist()
    assert len(answer.token_ids) == TRAINING.max_new_tokens
    assert answer.versions == (VersionRun(rig.version, TRAINING.max_new_tokens),)
    # On CPU the seed alone would replay the noise of the beginning.
    assert answer.token_ids[cut : 2 * cut].tolist() != first.token_ids[:cut].tolist()
    assert disagreement(rig, [again], [answer], 1.0) < 1e-5


def test_contexts_beyond_a_steps_budget_wait_whole(rig: Rig) -> None:
    """What a lost instance held is handed out at once, with all that it had written: more tokens than a step takes in.
    In pieces they would end an engine on the CPU, since the answers have seeds."""
    ids = np.arange(3, 83, dtype=np.int32)
    given = []
    for number in range(8):
        left = np.roll(np.tile(ids, 5), number)
        partial = Partial(left, np.full(400, -1.0, np.float32), (VersionRun(rig.version, 400),))
        sampling = Sampling(1.0, 410, (), seed=number)
        given.append(Assignment(rig.sample_id(), 1, ids[: 9 + number], sampling, resumed=partial))
    assert sum(len(one.prompt_ids) + 400 for one in given) > 2048, "of one step"
    assert [len(answer.token_ids) for answer in rig.answer(given)] == [410] * 8


def test_an_aborted_answer_returns_its_tokens(rig: Rig) -> None:
    given = replace(assignments(rig, 1)[0], sampling=replace(TRAINING, max_new_tokens=480, stop_token_ids=()))

    async def work() -> list[Generation]:
        before = (await rig.status()).tokens_total
        await rig.assign([given])
        while (await rig.status()).tokens_total < before + 5:
            await asyncio.sleep(0.005)
        await rig.stream.abort(given.sample_id, 0)
        return await rig.collect(1)

    answer = rig.loop.run(work())[0]
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < len(answer.token_ids) < 480
    assert disagreement(rig, [given], [answer], 1.0) < 1e-5


def test_the_longest_goes_first(rig: Rig) -> None:
    # Priority is minus the predicted length. All wait when sampling begins, eight run at once, and as all
    # are in truth equally long they end in the waves in which they began.
    sampling = replace(TRAINING, stop_token_ids=(), max_new_tokens=4)
    predicted = np.random.default_rng(0).permutation(24).tolist()
    ids = np.array([5], np.int32)
    given = [Assignment(rig.sample_id(), 0, ids, sampling, priority=-length) for length in predicted]

    async def work() -> list[Generation]:
        await rig.client.pause(FENCE, keep=True, timeout_s=ANSWER_S)
        await rig.assign(given)
        while (await rig.status()).waiting < len(given):
            await asyncio.sleep(0.02)
        # EngineCore answers this after what was on its way to it before.
        await rig.client.pause(FENCE, keep=True, timeout_s=ANSWER_S)
        await rig.client.resume(FENCE)
        return await rig.collect(len(given))

    length_of = {assignment.sample_id: -assignment.priority for assignment in given}
    ended = [length_of[answer.sample_id] for answer in rig.loop.run(work())]
    waves = [sorted(ended[start : start + 8], reverse=True) for start in range(0, 24, 8)]
    assert waves == [list(range(23, 15, -1)), list(range(15, 7, -1)), list(range(7, -1, -1))]


def test_an_id_outside_the_vocabulary_is_refused(rig: Rig) -> None:
    unknown = Assignment(rig.sample_id(), 0, np.array([PADDED_VOCABULARY], np.int32), TRAINING)

    async def work() -> Rejection:
        await rig.assign([unknown])
        async for event in rig.stream.events():
            if isinstance(event, Rejection):
                return event
        raise AssertionError("the stream ended")

    rejection = rig.loop.run(work())
    assert (rejection.sample_id, rejection.reason) == (unknown.sample_id, RejectReason.INVALID)
    assert f"vocabulary of {PADDED_VOCABULARY}" in rejection.message


def test_new_weights_reach_every_parameter_of_a_tied_model(rig: Rig) -> None:
    given = assignments(rig, 8)
    rig.answer(given)  # the prefix cache holds keys of the old weights
    report = rig.push(make_model(rig.version + 1))
    given = assignments(rig, 8)  # the same prompts
    answers = rig.answer(given)
    worst = disagreement(rig, given, answers, 1.0)
    print(
        f"\nafter a push: largest difference {worst:.2e}; staged {report.staged_s * 1e3:.0f} ms, "
        f"paused {report.paused_s * 1e3:.0f} ms, applied {report.applied_s * 1e3:.0f} ms"
    )
    assert worst < 1e-5
    assert all(answer.versions[0].version == rig.version for answer in answers)


def forced(rig: Rig, lengths: list[int]) -> list[Assignment]:
    """Answers of exactly so many tokens, whatever is sampled."""
    sampling = replace(TRAINING, evaluation=True, max_new_tokens=max(lengths))
    ids = np.array([5, 6], np.int32)
    return [
        Assignment(rig.sample_id(), 0, ids, replace(sampling, forced_length=length)) for length in lengths
    ]


def steps_of(rig: Rig, given: list[Assignment]) -> int:
    """Steps that the engine counts while it answers what all begins at once."""

    async def work() -> int:
        before = (await rig.status()).steps_total
        await rig.client.pause(FENCE, keep=True, timeout_s=ANSWER_S)
        await rig.assign(given)
        while (await rig.status()).waiting < len(given):
            await asyncio.sleep(0.02)
        # EngineCore answers this after what was on its way to it before.
        await rig.client.pause(FENCE, keep=True, timeout_s=ANSWER_S)
        await rig.client.resume(FENCE)
        answers = await rig.collect(len(given))
        length_of = {assignment.sample_id: assignment.sampling.forced_length for assignment in given}
        assert all(len(answer.token_ids) == length_of[answer.sample_id] for answer in answers)
        return (await rig.status()).steps_total - before

    return rig.loop.run(work())


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([17], 17),
        ([1], 1),
        ([4, 9, 30, 12, 2, 30], 30),  # the last ones run alone
        ([5] * 16, 10),  # eight at once: a wave begins when one has ended
    ],
)
def test_each_step_that_samples_is_counted_once(rig: Rig, lengths: list[int], steps: int) -> None:
    assert steps_of(rig, forced(rig, lengths)) == steps


def test_the_kv_cache_is_as_large_as_it_was_asked_for(rig: Rig) -> None:
    # 2 (keys and values) · 2 layers · 2 heads · 32 wide · 4 bytes a token; a block that is never handed out is off it.
    asked = 0.25 * 2**30 / (2 * 2 * 2 * 32 * 4)
    _, info = rig.loop.run(rig.client.status(ANSWER_S))
    assert 0.99 * asked <= info.kv_tokens <= asked
