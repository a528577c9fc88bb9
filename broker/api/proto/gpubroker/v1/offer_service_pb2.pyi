import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
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

class GetOfferHistoryRequest(_message.Message):
    __slots__ = ("gpu", "cloud", "region", "market", "gpus", "days", "until", "points", "limit")
    GPU_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    MARKET_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    gpu: _containers.RepeatedScalarFieldContainer[str]
    cloud: _containers.RepeatedScalarFieldContainer[str]
    region: _containers.RepeatedScalarFieldContainer[str]
    market: str
    gpus: int
    days: int
    until: _timestamp_pb2.Timestamp
    points: int
    limit: int
    def __init__(self, gpu: _Optional[_Iterable[str]] = ..., cloud: _Optional[_Iterable[str]] = ..., region: _Optional[_Iterable[str]] = ..., market: _Optional[str] = ..., gpus: _Optional[int] = ..., days: _Optional[int] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., points: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class GetOfferHistoryResponse(_message.Message):
    __slots__ = ("since", "until", "step_s", "total", "items")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    step_s: int
    total: int
    items: _containers.RepeatedCompositeFieldContainer[_offer_pb2.OfferSeries]
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step_s: _Optional[int] = ..., total: _Optional[int] = ..., items: _Optional[_Iterable[_Union[_offer_pb2.OfferSeries, _Mapping]]] = ...) -> None: ...
