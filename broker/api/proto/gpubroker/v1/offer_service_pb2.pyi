from broker.api.proto.gpubroker.v1 import offer_pb2 as _offer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListOffersRequest(_message.Message):
    __slots__ = ("provider", "accelerator", "limit")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    provider: str
    accelerator: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    def __init__(self, provider: _Optional[str] = ..., accelerator: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListOffersResponse(_message.Message):
    __slots__ = ("items", "total", "providers")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_offer_pb2.Offer]
    total: int
    providers: _containers.RepeatedCompositeFieldContainer[_offer_pb2.ProviderStatus]
    def __init__(self, items: _Optional[_Iterable[_Union[_offer_pb2.Offer, _Mapping]]] = ..., total: _Optional[int] = ..., providers: _Optional[_Iterable[_Union[_offer_pb2.ProviderStatus, _Mapping]]] = ...) -> None: ...
