from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    LOADING: _ClassVar[InstanceState]
    UPDATING: _ClassVar[InstanceState]
    PAUSED: _ClassVar[InstanceState]
    IDLE: _ClassVar[InstanceState]
    GENERATING: _ClassVar[InstanceState]
    DRAINING_STATE: _ClassVar[InstanceState]
    FAILED: _ClassVar[InstanceState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
INSTANCE_STATE_UNSPECIFIED: InstanceState
LOADING: InstanceState
UPDATING: InstanceState
PAUSED: InstanceState
IDLE: InstanceState
GENERATING: InstanceState
DRAINING_STATE: InstanceState
FAILED: InstanceState

class Fence(_message.Message):
    __slots__ = ("run_id", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("hello", "assign", "abort", "credit", "acknowledge", "several")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    assign: Assign
    abort: Abort
    credit: Credit
    acknowledge: Acknowledge
    several: GenerateRequests
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., several: _Optional[_Union[GenerateRequests, _Mapping]] = ...) -> None: ...

class GenerateRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("welcome", "progress", "finished", "rejected", "credit", "heartbeat", "drained", "several")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    progress: Progress
    finished: Finished
    rejected: Rejected
    credit: Credit
    heartbeat: Heartbeat
    drained: Drained
    several: GenerateResponses
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., several: _Optional[_Union[GenerateResponses, _Mapping]] = ...) -> None: ...

class GenerateResponses(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("fence", "protocol", "heartbeat_interval_s", "progress_interval_s", "answers")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    protocol: int
    heartbeat_interval_s: float
    progress_interval_s: float
    answers: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., protocol: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., progress_interval_s: _Optional[float] = ..., answers: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("instance", "slots", "lookahead", "max_model_len", "version", "accepts_same_host_weights", "host_id", "engine", "kv_tokens")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_SAME_HOST_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    slots: int
    lookahead: int
    max_model_len: int
    version: int
    accepts_same_host_weights: bool
    host_id: str
    engine: str
    kv_tokens: int
    def __init__(self, instance: _Optional[str] = ..., slots: _Optional[int] = ..., lookahead: _Optional[int] = ..., max_model_len: _Optional[int] = ..., version: _Optional[int] = ..., accepts_same_host_weights: _Optional[bool] = ..., host_id: _Optional[str] = ..., engine: _Optional[str] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "max_new_tokens", "stop_token_ids", "seed", "evaluation", "top_p", "top_k", "min_p", "forced_length")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FORCED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    evaluation: bool
    top_p: float
    top_k: int
    min_p: float
    forced_length: int
    def __init__(self, temperature: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., evaluation: _Optional[bool] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., forced_length: _Optional[int] = ...) -> None: ...

class VersionRun(_message.Message):
    __slots__ = ("version", "length")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    version: int
    length: int
    def __init__(self, version: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("sample_id", "attempt", "prompt_ids", "sampling", "priority", "min_version", "resumed_ids", "resumed_logprobs", "resumed_versions", "probe")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    prompt_ids: bytes
    sampling: Sampling
    priority: int
    min_version: int
    resumed_ids: bytes
    resumed_logprobs: bytes
    resumed_versions: _containers.RepeatedCompositeFieldContainer[VersionRun]
    probe: bool
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., min_version: _Optional[int] = ..., resumed_ids: _Optional[bytes] = ..., resumed_logprobs: _Optional[bytes] = ..., resumed_versions: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., probe: _Optional[bool] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("sample_id", "attempt")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("sample_id", "attempt")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fence", "sample_id", "attempt", "offset", "token_ids", "logprobs", "versions")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    sample_id: str
    attempt: int
    offset: int
    token_ids: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[VersionRun]
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queued_s", "prefill_s", "decode_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("fence", "sample_id", "attempt", "token_ids", "logprobs", "versions", "finish_reason", "instance", "timings", "sequence")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    sample_id: str
    attempt: int
    token_ids: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[VersionRun]
    finish_reason: FinishReason
    instance: str
    timings: Timings
    sequence: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., instance: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("fence", "sample_id", "attempt", "reason", "message")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Rejected.Reason]
        TOO_LONG: _ClassVar[Rejected.Reason]
        SAMPLING_NOT_ALLOWED: _ClassVar[Rejected.Reason]
        WRONG_VERSION: _ClassVar[Rejected.Reason]
        DRAINING: _ClassVar[Rejected.Reason]
        INVALID: _ClassVar[Rejected.Reason]
        ENGINE_FAILED: _ClassVar[Rejected.Reason]
    REASON_UNSPECIFIED: Rejected.Reason
    TOO_LONG: Rejected.Reason
    SAMPLING_NOT_ALLOWED: Rejected.Reason
    WRONG_VERSION: Rejected.Reason
    DRAINING: Rejected.Reason
    INVALID: Rejected.Reason
    ENGINE_FAILED: Rejected.Reason
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    sample_id: str
    attempt: int
    reason: Rejected.Reason
    message: str
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[Rejected.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("fence", "state", "tokens_since_last", "running", "waiting", "version", "engine_age_s", "steps_total")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SINCE_LAST_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    state: InstanceState
    tokens_since_last: int
    running: int
    waiting: int
    version: int
    engine_age_s: float
    steps_total: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., tokens_since_last: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., version: _Optional[int] = ..., engine_age_s: _Optional[float] = ..., steps_total: _Optional[int] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("fence", "keep")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    keep: bool
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., keep: _Optional[bool] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "instance", "version", "running", "waiting", "tokens_total", "message", "engine_age_s", "welcome", "start_seconds", "phase", "steps_total")
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    state: InstanceState
    instance: str
    version: int
    running: int
    waiting: int
    tokens_total: int
    message: str
    engine_age_s: float
    welcome: Welcome
    start_seconds: float
    phase: str
    steps_total: int
    def __init__(self, state: _Optional[_Union[InstanceState, str]] = ..., instance: _Optional[str] = ..., version: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens_total: _Optional[int] = ..., message: _Optional[str] = ..., engine_age_s: _Optional[float] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., start_seconds: _Optional[float] = ..., phase: _Optional[str] = ..., steps_total: _Optional[int] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "shape", "dtype", "offset", "nbytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    offset: int
    nbytes: int
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("fence", "version", "tensors", "total_bytes", "digest", "base_version", "architecture")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    total_bytes: int
    digest: bytes
    base_version: int
    architecture: str
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., base_version: _Optional[int] = ..., architecture: _Optional[str] = ...) -> None: ...

class SameHostSource(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StoreSource(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("manifest", "same_host", "store", "keep_running", "deadline_s")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEEP_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    same_host: SameHostSource
    store: StoreSource
    keep_running: bool
    deadline_s: float
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., same_host: _Optional[_Union[SameHostSource, _Mapping]] = ..., store: _Optional[_Union[StoreSource, _Mapping]] = ..., keep_running: _Optional[bool] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("accepted", "version", "reason", "quarantined", "staged_s", "paused_s", "applied_s")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    STAGED_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    APPLIED_S_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    version: int
    reason: str
    quarantined: bool
    staged_s: float
    paused_s: float
    applied_s: float
    def __init__(self, accepted: _Optional[bool] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., quarantined: _Optional[bool] = ..., staged_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., applied_s: _Optional[float] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("fence", "version")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    version: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("fence", "version", "offset", "nbytes")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    version: int
    offset: int
    nbytes: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
