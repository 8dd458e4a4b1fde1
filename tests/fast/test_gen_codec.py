"""Rule: what goes over the wire comes back equal; what is malformed is refused by the name of its field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.gen import codec
from streamrl_jax.gen.codec import wire
from streamrl_jax.proto import streamrl_pb2 as pb
from streamrl_jax.types import (
    Assignment,
    Fence,
    FinishReason,
    Generation,
    Hello,
    InstanceInfo,
    InstanceState,
    InstanceStatus,
    Manifest,
    Partial,
    Progress,
    Rejection,
    RejectReason,
    Sampling,
    TensorSpec,
    Timings,
    UpdateReport,
    VersionRun,
    group_runs,
)

FENCE = Fence("run", 3)
RUN = pb.Fence(run_id="r")
NAN = float("nan")
names = st.text(st.characters(categories=["L", "M", "N", "P", "S"]), min_size=1, max_size=40)
versions = st.integers(0, 2**31 - 1)
token_ids = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6)
float32 = st.floats(0.015625, 100, width=32)


@st.composite
def answers(draw: st.DrawFn, min_size: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[VersionRun, ...]]:
    """Ids, log-probs and versions of one length."""
    ids = draw(st.lists(token_ids, min_size=min_size, max_size=30))
    size = len(ids)
    logprobs = draw(st.lists(st.floats(-1e4, 0, width=32), min_size=size, max_size=size))
    versions = draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size))
    return np.array(ids, np.int32), np.array(logprobs, np.float32), group_runs(versions)


samplings = st.builds(
    Sampling,
    temperature=float32,
    max_new_tokens=st.integers(31, 10_000),
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    seed=st.none() | st.integers(0, 2**63 - 1),
    evaluation=st.booleans(),
    top_p=st.none() | st.floats(0.0625, 1.0, width=32),
    top_k=st.none() | st.integers(1, 2**31 - 1),
    min_p=st.none() | st.floats(0.0625, 1.0, width=32),
    forced_length=st.none() | st.just(31),
)
assignments = st.builds(
    Assignment,
    sample_id=names,
    attempt=st.integers(0, 2**32 - 1),
    prompt_ids=st.lists(token_ids, min_size=1, max_size=30).map(lambda ids: np.array(ids, np.int32)),
    sampling=samplings,
    priority=st.integers(-(2**63), 2**63 - 1),
    min_version=st.just(-1) | versions,
    resumed=st.none() | answers(min_size=1).map(lambda arrays: Partial(*arrays)),
    probe=st.booleans(),
)
generations = st.builds(
    lambda arrays, **rest: Generation(token_ids=arrays[0], logprobs=arrays[1], versions=arrays[2], **rest),
    answers(),
    sample_id=names,
    attempt=st.integers(0, 2**32 - 1),
    finish_reason=st.sampled_from(FinishReason),
    instance=names,
    timings=st.builds(Timings, seconds, seconds, seconds),
)
statuses = st.builds(
    InstanceStatus,
    state=st.sampled_from(InstanceState),
    version=st.just(-1) | versions,
    running=st.integers(0, 1000),
    waiting=st.integers(0, 1000),
    engine_age_s=seconds,
    steps_total=st.integers(0, wire.MAX_TOTAL),
)
digests = st.binary(min_size=32, max_size=32)
specs = st.builds(
    TensorSpec,
    name=names,
    shape=st.lists(st.integers(0, 4096), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    offset=st.integers(0, 2**49),
    nbytes=st.integers(0, 2**49),
    digest=digests,
)
manifests = st.builds(
    Manifest,
    fence=st.builds(Fence, names, st.integers(0, 1000)),
    version=versions,
    tensors=st.lists(specs, max_size=5).map(tuple),
    total_bytes=st.just(2**50),
    digest=digests,
    architecture=names,
    base_version=st.integers(-1, 10),
)


def plain(record: Any) -> Any:
    """A record as nested tuples and lists, so that arrays compare by value and dtype."""
    if isinstance(record, np.ndarray):
        return record.dtype.str, record.tolist()
    if dataclasses.is_dataclass(record):
        return [(f.name, plain(getattr(record, f.name))) for f in dataclasses.fields(record)]
    return record


def reparse(message: Any) -> Any:
    """The message as the other side of a socket sees it."""
    return type(message).FromString(message.SerializeToString())


@given(assignments)
def test_an_assignment_survives_the_wire(assignment: Assignment) -> None:
    back = codec.assignment_from_proto(reparse(codec.assignment_to_proto(assignment)))
    assert plain(back) == plain(assignment)


@given(generations)
def test_a_generation_survives_the_wire(generation: Generation) -> None:
    message = reparse(codec.generation_to_proto(FENCE, generation, 7))
    assert plain(codec.generation_from_proto(message)) == plain(generation)
    assert (codec.fence_from_proto(message.fence), message.sequence) == (FENCE, 7)


@given(manifests)
@settings(max_examples=50)
def test_a_manifest_survives_the_wire(manifest: Manifest) -> None:
    assert codec.manifest_from_proto(reparse(codec.manifest_to_proto(manifest))) == manifest


@given(statuses, st.integers(0, 1000), st.text(max_size=20))
@settings(max_examples=50)
def test_a_status_survives_the_wire(status: InstanceStatus, tokens: int, text: str) -> None:
    beat = dataclasses.replace(status, tokens_since_last=tokens)
    assert codec.heartbeat_from_proto(reparse(codec.heartbeat_to_proto(FENCE, beat))) == beat
    full = dataclasses.replace(status, message=text, phase=text, tokens_total=tokens, uptime_s=1.5)
    info = InstanceInfo("instance-0", 8, 2, tokens, status.version, True, "host", "fake", kv_tokens=tokens)
    message = reparse(codec.status_to_proto(full, info))
    assert codec.status_from_proto(message) == full
    assert codec.info_from_proto(message.welcome) == info


def test_the_small_records_survive_the_wire() -> None:
    hello = Hello(FENCE, 0.5, 0.25)
    assert codec.hello_from_proto(reparse(codec.hello_to_proto(hello))) == hello
    for reason in RejectReason:
        rejection = Rejection("s", 1, reason, "why")
        assert codec.rejection_from_proto(reparse(codec.rejection_to_proto(FENCE, rejection))) == rejection
    report = UpdateReport("instance-0", False, 4, "torn", True, 0.5, 0.25, 0.125)
    assert codec.report_from_proto("instance-0", reparse(codec.report_to_proto(report))) == report
    ids, logprobs = np.array([1, 2], np.int32), np.array([-1, -2], np.float32)
    progress = Progress("s", 1, 5, ids, logprobs, (VersionRun(0, 2),))
    assert plain(codec.progress_from_proto(reparse(codec.progress_to_proto(FENCE, progress)))) == plain(
        progress
    )


def assign(**change: Any) -> pb.Assign:
    """A valid assignment but for ``change``; keys of Sampling change the sampling."""
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "seed": -1}
    sampling |= {
        key: change.pop(key) for key in tuple(change) if key in pb.Sampling.DESCRIPTOR.fields_by_name
    }
    fields = {"sample_id": "s", "prompt_ids": wire.ids_to_bytes([1])} | change
    return pb.Assign(**fields, sampling=pb.Sampling(**sampling))


def finished(**change: Any) -> pb.Finished:
    """A valid answer but for ``change``."""
    fields = {
        "sample_id": "s",
        "instance": "i",
        "token_ids": wire.ids_to_bytes([1, 2]),
        "logprobs": wire.logprobs_to_bytes([-1, -2]),
        "versions": [pb.VersionRun(version=0, length=2)],
        "finish_reason": pb.FINISH_REASON_STOP,
    }
    return pb.Finished(**(fields | change))


def version(**change: Any) -> pb.Manifest:
    """A valid manifest but for ``change``."""
    fields = {
        "fence": RUN,
        "total_bytes": 16,
        "digest": bytes(32),
        "architecture": "Tiny",
        "base_version": -1,
    }
    return pb.Manifest(**(fields | change))


def tensor(**change: Any) -> pb.Manifest:
    """A manifest whose only tensor is valid but for ``change``."""
    fields = {"name": "w", "shape": [1], "dtype": "float32", "offset": 0, "nbytes": 4, "digest": bytes(32)}
    return version(tensors=[pb.TensorEntry(**(fields | change))])


def same_host(path: str, **change: Any) -> pb.UpdateWeightsRequest:
    """A request for an update from a file."""
    return pb.UpdateWeightsRequest(same_host=pb.SameHostSource(path=path), **change)


@pytest.mark.parametrize(
    ("read", "message", "named"),
    [
        (codec.assignment_from_proto, assign(sample_id=""), "assign.sample_id"),
        (codec.assignment_from_proto, assign(prompt_ids=b""), "assign.prompt_ids"),
        (codec.assignment_from_proto, assign(prompt_ids=b"abc"), "assign.prompt_ids"),
        (codec.assignment_from_proto, assign(prompt_ids=wire.ids_to_bytes([1, -2])), "assign.prompt_ids"),
        (codec.assignment_from_proto, assign(min_version=-2), "assign.min_version"),
        (codec.assignment_from_proto, assign(resumed_ids=wire.ids_to_bytes([1])), "assign.resumed_logprobs"),
        (
            codec.assignment_from_proto,
            assign(
                max_new_tokens=1,
                resumed_ids=wire.ids_to_bytes([1]),
                resumed_logprobs=wire.logprobs_to_bytes([-1]),
                resumed_versions=[pb.VersionRun(version=0, length=1)],
            ),
            "assign.resumed_ids",
        ),
        (codec.assignment_from_proto, assign(temperature=float("nan")), "sampling.temperature"),
        (codec.assignment_from_proto, assign(temperature=-1.0), "sampling.temperature"),
        (codec.assignment_from_proto, assign(max_new_tokens=0), "sampling.max_new_tokens"),
        (codec.assignment_from_proto, assign(top_p=1.5), "sampling.top_p"),
        (codec.assignment_from_proto, assign(top_k=-3), "sampling.top_k"),
        (codec.assignment_from_proto, assign(stop_token_ids=[-1]), "sampling.stop_token_ids"),
        (codec.assignment_from_proto, assign(forced_length=9), "sampling.forced_length"),
        (codec.generation_from_proto, finished(logprobs=wire.logprobs_to_bytes([-1])), "finished.logprobs"),
        (
            codec.generation_from_proto,
            finished(logprobs=wire.logprobs_to_bytes([-1, float("nan")])),
            r"finished.logprobs\[1\]",
        ),
        (
            codec.generation_from_proto,
            finished(logprobs=wire.logprobs_to_bytes([0.5, -1])),
            r"finished.logprobs\[0\]",
        ),
        (codec.generation_from_proto, finished(versions=[]), "finished.versions"),
        (
            codec.generation_from_proto,
            finished(versions=[pb.VersionRun(length=2), pb.VersionRun(length=0)]),
            "finished.versions",
        ),
        (codec.generation_from_proto, finished(finish_reason=0), "finished.finish_reason"),
        (codec.generation_from_proto, finished(finish_reason=9), "finished.finish_reason"),
        (codec.fence_from_proto, pb.Fence(), "fence.run_id"),
        (codec.hello_from_proto, pb.Hello(fence=pb.Fence(run_id="r"), protocol=2), "hello.protocol"),
        (codec.manifest_from_proto, version(version=-1), r"manifest\.version = -1 "),
        (codec.manifest_from_proto, version(version=2**31), r"manifest\.version = 2147483648 "),
        (codec.manifest_from_proto, version(base_version=-2), r"manifest\.base_version = -2 "),
        (codec.manifest_from_proto, version(total_bytes=2**51), r"manifest\.total_bytes = 2251799813685248 "),
        (codec.manifest_from_proto, version(digest=b"short"), r"manifest\.digest has 5 bytes"),
        (codec.manifest_from_proto, version(architecture=""), r"manifest\.architecture is empty"),
        (codec.manifest_from_proto, version(fence=pb.Fence()), r"fence\.run_id is empty"),
        (codec.manifest_from_proto, tensor(name=""), r"manifest\.tensors\[0\]\.name is empty"),
        (codec.manifest_from_proto, tensor(name="w\n"), r"manifest\.tensors\[0\]\.name = 'w\\n' .* printed"),
        (codec.manifest_from_proto, tensor(nbytes=17), r"manifest\.tensors\[0\]\.nbytes = 17 "),
        (codec.manifest_from_proto, tensor(offset=13), r"manifest\.tensors\[0\]\.offset = 13 "),
        (codec.manifest_from_proto, tensor(offset=2**64 - 1), r"manifest\.tensors\[0\]\.offset = "),
        (codec.manifest_from_proto, tensor(shape=[2**40, 2**40]), r"manifest\.tensors\[0\]\.shape = "),
        (
            codec.manifest_from_proto,
            tensor(shape=[1] * 9),
            r"dimensions of manifest\.tensors\[0\]\.shape = 9",
        ),
        (codec.manifest_from_proto, tensor(digest=bytes(31)), r"manifest\.tensors\[0\]\.digest has 31 bytes"),
        (codec.update_from_proto, pb.UpdateWeightsRequest(), r"update\.source is neither"),
        (codec.update_from_proto, same_host(""), r"same_host\.path is empty"),
        (codec.update_from_proto, same_host("/dev/shm/a\0b"), r"same_host\.path = .* printed"),
        (codec.update_from_proto, same_host("/b", deadline_s=NAN), r"update\.deadline_s = nan "),
        (codec.update_from_proto, same_host("/b", deadline_s=-1), r"update\.deadline_s = -1\.0 "),
        (codec.update_from_proto, same_host("/b", deadline_s=1e6), r"update\.deadline_s = 1000000\.0 "),
        (codec.fetch_from_proto, pb.ManifestRequest(fence=RUN, version=-1), r"fetch\.version = -1 "),
        (codec.fetch_from_proto, pb.FetchRequest(), r"fence\.run_id is empty"),
        (codec.key_from_proto, pb.Abort(), r"abort\.sample_id is empty"),
        (codec.key_from_proto, pb.Acknowledge(sample_id="s" * 1025), r"acknowledge\.sample_id has 1025"),
        (codec.credit_from_proto, pb.Credit(count=2**20 + 1), r"credit\.count = 1048577 "),
        (codec.assignment_from_proto, assign(stop_token_ids=[1] * 1025), r"stop_token_ids = 1025 "),
        (codec.assignment_from_proto, assign(min_version=2**31), r"assign\.min_version = 2147483648 "),
        (codec.assignment_from_proto, assign(max_new_tokens=2**20 + 1), r"max_new_tokens = 1048577 "),
        (codec.assignment_from_proto, assign(sample_id="a\x1b[31m"), r"assign\.sample_id = .* printed"),
        (
            codec.generation_from_proto,
            finished(versions=[pb.VersionRun(version=2**31, length=2)]),
            r"finished\.versions\.version = 2147483648 ",
        ),
        (
            codec.generation_from_proto,
            finished(versions=[pb.VersionRun(length=2**32 - 1)] * 2),
            r"finished\.versions covers 8589934590 tokens of 2",
        ),
        (
            codec.generation_from_proto,
            finished(versions=[pb.VersionRun(length=1)] * 3),
            "3 runs for 2 tokens",
        ),
        (
            codec.generation_from_proto,
            finished(timings=pb.Timings(queued_s=NAN)),
            r"timings\.queued_s = nan ",
        ),
        (
            codec.generation_from_proto,
            finished(timings=pb.Timings(decode_s=-1)),
            r"timings\.decode_s = -1\.0 ",
        ),
        (
            codec.progress_from_proto,
            pb.Progress(sample_id="s", offset=2**32 - 1),
            r"progress\.offset = 4294967295 ",
        ),
        (
            codec.rejection_from_proto,
            pb.Rejected(reason=pb.Rejected.TOO_LONG, message="x" * 65537),
            r"rejected\.message has 65537",
        ),
        (codec.report_from_proto, pb.UpdateWeightsResponse(staged_s=NAN), r"update\.staged_s = nan "),
        (codec.report_from_proto, pb.UpdateWeightsResponse(reason="x" * 65537), r"update\.reason has 65537"),
        (codec.info_from_proto, pb.Welcome(instance="i", slots=2**32 - 1), r"welcome\.slots = 4294967295 "),
        (
            codec.heartbeat_from_proto,
            pb.Heartbeat(state=pb.LOADING, running=2**32 - 1),
            r"heartbeat\.running = 4294967295",
        ),
        (
            codec.heartbeat_from_proto,
            pb.Heartbeat(state=pb.LOADING, engine_age_s=NAN),
            r"heartbeat\.engine_age_s = nan ",
        ),
        (
            codec.status_from_proto,
            pb.StatusReply(state=pb.LOADING, tokens_total=2**63),
            r"status\.tokens_total = ",
        ),
        (
            codec.status_from_proto,
            pb.StatusReply(state=pb.LOADING, steps_total=2**53 + 1),
            r"status\.steps_total = 9007199254740993 ",
        ),
        (
            codec.heartbeat_from_proto,
            pb.Heartbeat(state=pb.LOADING, steps_total=2**64 - 1),
            r"heartbeat\.steps_total = ",
        ),
        (
            codec.info_from_proto,
            pb.Welcome(instance="i", slots=1, max_model_len=512, kv_tokens=511),
            r"welcome\.kv_tokens = 511 is less than welcome\.max_model_len = 512",
        ),
        (
            codec.heartbeat_from_proto,
            pb.Heartbeat(state=pb.LOADING, tokens_since_last=2**32 + 1),
            r"heartbeat\.tokens_since_last = 4294967297 ",
        ),
        (
            codec.info_from_proto,
            pb.Welcome(instance="i", slots=1, kv_tokens=2**53 + 1),
            r"welcome\.kv_tokens = ",
        ),
        (
            codec.status_from_proto,
            pb.StatusReply(state=pb.LOADING, phase="x" * 65537),
            r"status\.phase has 65537",
        ),
        (codec.info_from_proto, pb.Welcome(instance="i"), "welcome.slots"),
        (codec.heartbeat_from_proto, pb.Heartbeat(), "heartbeat.state"),
    ],
)
def test_a_bad_value_is_refused_by_name(read: Callable[..., Any], message: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read("i", message) if read is codec.report_from_proto else read(message)


def test_what_is_said_at_length_is_cut_by_who_says_it() -> None:
    long = "why " * 100_000
    rejection = codec.rejection_to_proto(FENCE, Rejection("s", 1, RejectReason.INVALID, long))
    assert codec.rejection_from_proto(reparse(rejection)).message.endswith("…")
    report = codec.report_to_proto(UpdateReport("i", False, 0, long))
    assert len(codec.report_from_proto("i", reparse(report)).reason) == wire.MAX_TEXT
    failed = InstanceStatus(InstanceState.FAILED, 0, message=long, phase=long)
    info = InstanceInfo("i", 1, 0, 8, 0, True, "host", "fake")
    assert codec.status_from_proto(reparse(codec.status_to_proto(failed, info))).message[:4] == "why "
