from streamrl_jax.proto import streamrl_pb2 as _streamrl_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListInstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolInstance(_message.Message):
    __slots__ = ("name", "address", "state", "version", "slots", "held", "running", "waiting", "tokens_per_s", "restarts", "device", "host", "joined")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: str
    version: int
    slots: int
    held: int
    running: int
    waiting: int
    tokens_per_s: float
    restarts: int
    device: str
    host: str
    joined: bool
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., slots: _Optional[int] = ..., held: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., restarts: _Optional[int] = ..., device: _Optional[str] = ..., host: _Optional[str] = ..., joined: _Optional[bool] = ...) -> None: ...

class LeftInstance(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ListInstancesReply(_message.Message):
    __slots__ = ("fence", "version", "instances", "left")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    fence: _streamrl_pb2.Fence
    version: int
    instances: _containers.RepeatedCompositeFieldContainer[PoolInstance]
    left: _containers.RepeatedCompositeFieldContainer[LeftInstance]
    def __init__(self, fence: _Optional[_Union[_streamrl_pb2.Fence, _Mapping]] = ..., version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[PoolInstance, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[LeftInstance, _Mapping]]] = ...) -> None: ...

class AddInstancesRequest(_message.Message):
    __slots__ = ("pool", "count", "devices", "endpoint")
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    count: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    endpoint: str
    def __init__(self, pool: _Optional[str] = ..., count: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., endpoint: _Optional[str] = ...) -> None: ...

class AddInstancesReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainInstancesRequest(_message.Message):
    __slots__ = ("names", "at_once")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    at_once: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., at_once: _Optional[bool] = ...) -> None: ...

class DrainInstancesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("name", "life", "address", "host", "slots", "max_model_len")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    life: str
    address: str
    host: str
    slots: int
    max_model_len: int
    def __init__(self, name: _Optional[str] = ..., life: _Optional[str] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("word", "text", "fence")
    class Word(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WORD_UNSPECIFIED: _ClassVar[AnnounceReply.Word]
        STAY: _ClassVar[AnnounceReply.Word]
        WAIT: _ClassVar[AnnounceReply.Word]
        LEAVE: _ClassVar[AnnounceReply.Word]
        OVER: _ClassVar[AnnounceReply.Word]
    WORD_UNSPECIFIED: AnnounceReply.Word
    STAY: AnnounceReply.Word
    WAIT: AnnounceReply.Word
    LEAVE: AnnounceReply.Word
    OVER: AnnounceReply.Word
    WORD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    word: AnnounceReply.Word
    text: str
    fence: _streamrl_pb2.Fence
    def __init__(self, word: _Optional[_Union[AnnounceReply.Word, str]] = ..., text: _Optional[str] = ..., fence: _Optional[_Union[_streamrl_pb2.Fence, _Mapping]] = ...) -> None: ...
