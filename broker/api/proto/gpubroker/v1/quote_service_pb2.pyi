from broker.api.proto.gpubroker.v1 import quote_pb2 as _quote_pb2
from broker.api.proto.gpubroker.v1 import spec_pb2 as _spec_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateQuoteRequest(_message.Message):
    __slots__ = ("spec", "limit")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    spec: _spec_pb2.JobSpec
    limit: int
    def __init__(self, spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class CreateQuoteResponse(_message.Message):
    __slots__ = ("quote",)
    QUOTE_FIELD_NUMBER: _ClassVar[int]
    quote: _quote_pb2.Quote
    def __init__(self, quote: _Optional[_Union[_quote_pb2.Quote, _Mapping]] = ...) -> None: ...
