from broker.api.proto.gpubroker.v1 import offer_pb2 as _offer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListProvidersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListProvidersResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_offer_pb2.Provider]
    def __init__(self, items: _Optional[_Iterable[_Union[_offer_pb2.Provider, _Mapping]]] = ...) -> None: ...

class CheckProvidersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckProvidersResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_offer_pb2.Provider]
    def __init__(self, items: _Optional[_Iterable[_Union[_offer_pb2.Provider, _Mapping]]] = ...) -> None: ...
