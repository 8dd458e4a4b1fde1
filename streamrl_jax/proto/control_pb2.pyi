from streamrl_jax.proto import streamrl_pb2 as _streamrl_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("type", "message", "details")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    details: str
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., details: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("reader",)
    READER_FIELD_NUMBER: _ClassVar[int]
    reader: int
    def __init__(self, reader: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class TextRequest(_message.Message):
    __slots__ = ("reader", "text")
    READER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    reader: int
    text: str
    def __init__(self, reader: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class TextReply(_message.Message):
    __slots__ = ("error", "text")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    error: Error
    text: str
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class NumbersReply(_message.Message):
    __slots__ = ("error", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    error: Error
    numbers: _containers.ScalarMap[str, int]
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., numbers: _Optional[_Mapping[str, int]] = ...) -> None: ...

class FailRequest(_message.Message):
    __slots__ = ("reader", "failure")
    READER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    reader: int
    failure: Error
    def __init__(self, reader: _Optional[int] = ..., failure: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("reader", "world", "interval_s", "seen")
    READER_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    reader: int
    world: int
    interval_s: float
    seen: int
    def __init__(self, reader: _Optional[int] = ..., world: _Optional[int] = ..., interval_s: _Optional[float] = ..., seen: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("beat", "event", "updated", "released", "failure", "sequence")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    beat: Beat
    event: ControlEvent
    updated: Updated
    released: int
    failure: Error
    sequence: int
    def __init__(self, beat: _Optional[_Union[Beat, _Mapping]] = ..., event: _Optional[_Union[ControlEvent, _Mapping]] = ..., updated: _Optional[_Union[Updated, _Mapping]] = ..., released: _Optional[int] = ..., failure: _Optional[_Union[Error, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("clock_s", "host_id", "rss_bytes", "cpu_s")
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    clock_s: float
    host_id: str
    rss_bytes: int
    cpu_s: float
    def __init__(self, clock_s: _Optional[float] = ..., host_id: _Optional[str] = ..., rss_bytes: _Optional[int] = ..., cpu_s: _Optional[float] = ...) -> None: ...

class ControlEvent(_message.Message):
    __slots__ = ("kind", "instance", "text", "version", "count", "seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    instance: str
    text: str
    version: int
    count: int
    seconds: float
    def __init__(self, kind: _Optional[str] = ..., instance: _Optional[str] = ..., text: _Optional[str] = ..., version: _Optional[int] = ..., count: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Updated(_message.Message):
    __slots__ = ("version", "reports", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    error: Error
    def __init__(self, version: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("instance", "response")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    response: _streamrl_pb2.UpdateWeightsResponse
    def __init__(self, instance: _Optional[str] = ..., response: _Optional[_Union[_streamrl_pb2.UpdateWeightsResponse, _Mapping]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("reader", "job", "prompts", "last")
    READER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    reader: int
    job: JobHead
    prompts: _containers.RepeatedCompositeFieldContainer[PromptRow]
    last: bool
    def __init__(self, reader: _Optional[int] = ..., job: _Optional[_Union[JobHead, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptRow, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class JobHead(_message.Message):
    __slots__ = ("job_id", "into", "n", "sampling", "iteration", "min_version", "priority", "evaluation", "probe", "pinned", "digest", "policy")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    into: str
    n: int
    sampling: _streamrl_pb2.Sampling
    iteration: int
    min_version: int
    priority: int
    evaluation: bool
    probe: bool
    pinned: str
    digest: bytes
    policy: str
    def __init__(self, job_id: _Optional[str] = ..., into: _Optional[str] = ..., n: _Optional[int] = ..., sampling: _Optional[_Union[_streamrl_pb2.Sampling, _Mapping]] = ..., iteration: _Optional[int] = ..., min_version: _Optional[int] = ..., priority: _Optional[int] = ..., evaluation: _Optional[bool] = ..., probe: _Optional[bool] = ..., pinned: _Optional[str] = ..., digest: _Optional[bytes] = ..., policy: _Optional[str] = ...) -> None: ...

class PromptRow(_message.Message):
    __slots__ = ("prompt_id", "token_ids", "columns", "predicted", "forced")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    token_ids: bytes
    columns: bytes
    predicted: float
    forced: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., columns: _Optional[bytes] = ..., predicted: _Optional[float] = ..., forced: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("error", "job_ids")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    error: Error
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., job_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SamplesRequest(_message.Message):
    __slots__ = ("reader", "job_id", "taken", "waits")
    READER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    reader: int
    job_id: str
    taken: int
    waits: bool
    def __init__(self, reader: _Optional[int] = ..., job_id: _Optional[str] = ..., taken: _Optional[int] = ..., waits: _Optional[bool] = ...) -> None: ...

class SamplesReply(_message.Message):
    __slots__ = ("position", "samples", "next", "end", "stop", "error")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    position: int
    samples: _containers.RepeatedCompositeFieldContainer[RunSample]
    next: int
    end: bool
    stop: str
    error: Error
    def __init__(self, position: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[RunSample, _Mapping]]] = ..., next: _Optional[int] = ..., end: _Optional[bool] = ..., stop: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class RunSample(_message.Message):
    __slots__ = ("prompt_id", "iteration", "group_index", "reward", "reward_extras", "arrived_s", "rewarded_s", "generation")
    class RewardExtrasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_EXTRAS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    REWARDED_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    iteration: int
    group_index: int
    reward: float
    reward_extras: _containers.ScalarMap[str, float]
    arrived_s: float
    rewarded_s: float
    generation: _streamrl_pb2.Finished
    def __init__(self, prompt_id: _Optional[str] = ..., iteration: _Optional[int] = ..., group_index: _Optional[int] = ..., reward: _Optional[float] = ..., reward_extras: _Optional[_Mapping[str, float]] = ..., arrived_s: _Optional[float] = ..., rewarded_s: _Optional[float] = ..., generation: _Optional[_Union[_streamrl_pb2.Finished, _Mapping]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("reader", "manifest", "path", "address")
    READER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    reader: int
    manifest: _streamrl_pb2.Manifest
    path: str
    address: str
    def __init__(self, reader: _Optional[int] = ..., manifest: _Optional[_Union[_streamrl_pb2.Manifest, _Mapping]] = ..., path: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WaitReadyRequest(_message.Message):
    __slots__ = ("reader", "timeout_s", "at_least")
    READER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    reader: int
    timeout_s: float
    at_least: int
    def __init__(self, reader: _Optional[int] = ..., timeout_s: _Optional[float] = ..., at_least: _Optional[int] = ...) -> None: ...

class PoolReply(_message.Message):
    __slots__ = ("error", "instances")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    error: Error
    instances: _containers.RepeatedCompositeFieldContainer[InstanceRow]
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., instances: _Optional[_Iterable[_Union[InstanceRow, _Mapping]]] = ...) -> None: ...

class InstanceRow(_message.Message):
    __slots__ = ("name", "address", "state", "version", "held", "running", "waiting", "tokens_per_s", "tokens", "restarts", "seconds", "slots", "kv_tokens", "steps_total")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: str
    version: int
    held: int
    running: int
    waiting: int
    tokens_per_s: float
    tokens: int
    restarts: int
    seconds: _containers.ScalarMap[str, float]
    slots: int
    kv_tokens: int
    steps_total: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., held: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., tokens: _Optional[int] = ..., restarts: _Optional[int] = ..., seconds: _Optional[_Mapping[str, float]] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., steps_total: _Optional[int] = ...) -> None: ...

class DispatchedReply(_message.Message):
    __slots__ = ("error", "jobs")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    error: Error
    jobs: _containers.RepeatedCompositeFieldContainer[DispatchedRow]
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[DispatchedRow, _Mapping]]] = ...) -> None: ...

class DispatchedRow(_message.Message):
    __slots__ = ("job_id", "policy", "samples", "planned_s", "actual_s", "in_lines", "steals", "as_planned")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_S_FIELD_NUMBER: _ClassVar[int]
    IN_LINES_FIELD_NUMBER: _ClassVar[int]
    STEALS_FIELD_NUMBER: _ClassVar[int]
    AS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    policy: str
    samples: int
    planned_s: float
    actual_s: float
    in_lines: bool
    steals: int
    as_planned: int
    def __init__(self, job_id: _Optional[str] = ..., policy: _Optional[str] = ..., samples: _Optional[int] = ..., planned_s: _Optional[float] = ..., actual_s: _Optional[float] = ..., in_lines: _Optional[bool] = ..., steals: _Optional[int] = ..., as_planned: _Optional[int] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("reader", "sequence", "kind", "shape", "digest")
    READER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    reader: int
    sequence: int
    kind: str
    shape: str
    digest: bytes
    def __init__(self, reader: _Optional[int] = ..., sequence: _Optional[int] = ..., kind: _Optional[str] = ..., shape: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class AcknowledgeReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
