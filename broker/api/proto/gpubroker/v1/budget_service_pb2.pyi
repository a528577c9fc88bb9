import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from broker.api.proto.gpubroker.v1 import budget_pb2 as _budget_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListBudgetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBudgetsResponse(_message.Message):
    __slots__ = ("at", "items")
    AT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    items: _containers.RepeatedCompositeFieldContainer[_budget_pb2.Standing]
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., items: _Optional[_Iterable[_Union[_budget_pb2.Standing, _Mapping]]] = ...) -> None: ...
