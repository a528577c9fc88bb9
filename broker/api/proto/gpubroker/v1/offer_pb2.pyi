import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUST_UNSPECIFIED: _ClassVar[Trust]
    TRUST_OWN: _ClassVar[Trust]
    TRUST_SECURE: _ClassVar[Trust]
    TRUST_COMMUNITY: _ClassVar[Trust]
TRUST_UNSPECIFIED: Trust
TRUST_OWN: Trust
TRUST_SECURE: Trust
TRUST_COMMUNITY: Trust

class Offer(_message.Message):
    __slots__ = ("id", "provider", "cloud", "region", "instance_type", "accelerator", "gpus", "gpu_memory_bytes", "vcpus", "ram_bytes", "disk_bytes", "spot", "usd_per_hour", "on_demand_usd_per_hour", "billing_quantum_s", "available", "preemptions_per_hour", "emulated_on", "simulated", "trust", "facts", "source", "seen_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_TYPE_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VCPUS_FIELD_NUMBER: _ClassVar[int]
    RAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    BILLING_QUANTUM_S_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    EMULATED_ON_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    provider: str
    cloud: str
    region: str
    instance_type: str
    accelerator: str
    gpus: int
    gpu_memory_bytes: int
    vcpus: int
    ram_bytes: int
    disk_bytes: int
    spot: bool
    usd_per_hour: str
    on_demand_usd_per_hour: str
    billing_quantum_s: int
    available: bool
    preemptions_per_hour: float
    emulated_on: str
    simulated: bool
    trust: Trust
    facts: HostFacts
    source: str
    seen_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., provider: _Optional[str] = ..., cloud: _Optional[str] = ..., region: _Optional[str] = ..., instance_type: _Optional[str] = ..., accelerator: _Optional[str] = ..., gpus: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ..., vcpus: _Optional[int] = ..., ram_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., spot: _Optional[bool] = ..., usd_per_hour: _Optional[str] = ..., on_demand_usd_per_hour: _Optional[str] = ..., billing_quantum_s: _Optional[int] = ..., available: _Optional[bool] = ..., preemptions_per_hour: _Optional[float] = ..., emulated_on: _Optional[str] = ..., simulated: _Optional[bool] = ..., trust: _Optional[_Union[Trust, str]] = ..., facts: _Optional[_Union[HostFacts, _Mapping]] = ..., source: _Optional[str] = ..., seen_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("host", "disk_usd_per_gib_month", "disk_mb_s", "down_mbit_s", "up_mbit_s", "ingress_usd_per_gib", "egress_usd_per_gib", "cuda_max", "driver", "interconnect", "reliability")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_USD_PER_GIB_MONTH_FIELD_NUMBER: _ClassVar[int]
    DISK_MB_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_MBIT_S_FIELD_NUMBER: _ClassVar[int]
    UP_MBIT_S_FIELD_NUMBER: _ClassVar[int]
    INGRESS_USD_PER_GIB_FIELD_NUMBER: _ClassVar[int]
    EGRESS_USD_PER_GIB_FIELD_NUMBER: _ClassVar[int]
    CUDA_MAX_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    INTERCONNECT_FIELD_NUMBER: _ClassVar[int]
    RELIABILITY_FIELD_NUMBER: _ClassVar[int]
    host: str
    disk_usd_per_gib_month: str
    disk_mb_s: float
    down_mbit_s: float
    up_mbit_s: float
    ingress_usd_per_gib: str
    egress_usd_per_gib: str
    cuda_max: str
    driver: str
    interconnect: str
    reliability: float
    def __init__(self, host: _Optional[str] = ..., disk_usd_per_gib_month: _Optional[str] = ..., disk_mb_s: _Optional[float] = ..., down_mbit_s: _Optional[float] = ..., up_mbit_s: _Optional[float] = ..., ingress_usd_per_gib: _Optional[str] = ..., egress_usd_per_gib: _Optional[str] = ..., cuda_max: _Optional[str] = ..., driver: _Optional[str] = ..., interconnect: _Optional[str] = ..., reliability: _Optional[float] = ...) -> None: ...

class ProviderStatus(_message.Message):
    __slots__ = ("name", "offers", "dropped", "seen_at", "error")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    offers: int
    dropped: _containers.ScalarMap[str, int]
    seen_at: _timestamp_pb2.Timestamp
    error: str
    def __init__(self, name: _Optional[str] = ..., offers: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., seen_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class Provider(_message.Message):
    __slots__ = ("name", "offers", "dropped", "seen_at", "error", "problem", "self_stop", "identity")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SELF_STOP_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    offers: int
    dropped: _containers.ScalarMap[str, int]
    seen_at: _timestamp_pb2.Timestamp
    error: str
    problem: str
    self_stop: str
    identity: str
    def __init__(self, name: _Optional[str] = ..., offers: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., seen_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[str] = ..., problem: _Optional[str] = ..., self_stop: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class PricePoint(_message.Message):
    __slots__ = ("at", "lowest_usd", "median_usd", "available")
    AT_FIELD_NUMBER: _ClassVar[int]
    LOWEST_USD_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_USD_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    lowest_usd: str
    median_usd: str
    available: float
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., lowest_usd: _Optional[str] = ..., median_usd: _Optional[str] = ..., available: _Optional[float] = ...) -> None: ...

class OfferSeries(_message.Message):
    __slots__ = ("provider", "cloud", "region", "accelerator", "gpus", "spot", "points")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    provider: str
    cloud: str
    region: str
    accelerator: str
    gpus: int
    spot: bool
    points: _containers.RepeatedCompositeFieldContainer[PricePoint]
    def __init__(self, provider: _Optional[str] = ..., cloud: _Optional[str] = ..., region: _Optional[str] = ..., accelerator: _Optional[str] = ..., gpus: _Optional[int] = ..., spot: _Optional[bool] = ..., points: _Optional[_Iterable[_Union[PricePoint, _Mapping]]] = ...) -> None: ...
