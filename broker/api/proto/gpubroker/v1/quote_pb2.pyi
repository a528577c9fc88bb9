import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from broker.api.proto.gpubroker.v1 import offer_pb2 as _offer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProspectAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROSPECT_ACTION_UNSPECIFIED: _ClassVar[ProspectAction]
    PROSPECT_ACTION_BUY: _ClassVar[ProspectAction]
    PROSPECT_ACTION_WAIT: _ClassVar[ProspectAction]

class ProspectMarket(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROSPECT_MARKET_UNSPECIFIED: _ClassVar[ProspectMarket]
    PROSPECT_MARKET_SPOT: _ClassVar[ProspectMarket]
    PROSPECT_MARKET_ON_DEMAND: _ClassVar[ProspectMarket]

class Hold(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_UNSPECIFIED: _ClassVar[Hold]
    HOLD_APPROVAL: _ClassVar[Hold]
    HOLD_WAIT: _ClassVar[Hold]

class SpeedTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEED_TIER_UNSPECIFIED: _ClassVar[SpeedTier]
    SPEED_TIER_MEASURED: _ClassVar[SpeedTier]
    SPEED_TIER_TRANSFERRED: _ClassVar[SpeedTier]
    SPEED_TIER_UNCHECKED: _ClassVar[SpeedTier]

class Parallelism(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARALLELISM_UNSPECIFIED: _ClassVar[Parallelism]
    PARALLELISM_SINGLE: _ClassVar[Parallelism]
    PARALLELISM_DDP: _ClassVar[Parallelism]
    PARALLELISM_FSDP: _ClassVar[Parallelism]
    PARALLELISM_HYBRID: _ClassVar[Parallelism]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_KEPT: _ClassVar[Verdict]
    VERDICT_DROPPED: _ClassVar[Verdict]

class Drop(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DROP_UNSPECIFIED: _ClassVar[Drop]
    DROP_PROVIDER: _ClassVar[Drop]
    DROP_ACCELERATOR: _ClassVar[Drop]
    DROP_REGION: _ClassVar[Drop]
    DROP_GPUS: _ClassVar[Drop]
    DROP_NODES: _ClassVar[Drop]
    DROP_SPOT: _ClassVar[Drop]
    DROP_UNREACHABLE: _ClassVar[Drop]
    DROP_UNSCOPED: _ClassVar[Drop]
    DROP_NO_TRAINER: _ClassVar[Drop]
    DROP_UNKNOWN_HARDWARE: _ClassVar[Drop]
    DROP_MEMORY: _ClassVar[Drop]
    DROP_PRICE: _ClassVar[Drop]
    DROP_HOURLY_LIMIT: _ClassVar[Drop]
    DROP_PREEMPTED_TOO_OFTEN: _ClassVar[Drop]
    DROP_CAP: _ClassVar[Drop]
    DROP_UNAVAILABLE: _ClassVar[Drop]
    DROP_EXCLUDED: _ClassVar[Drop]
    DROP_DEADLINE: _ClassVar[Drop]
    DROP_HOST: _ClassVar[Drop]
    DROP_TRUST: _ClassVar[Drop]
    DROP_NO_CHECKPOINTS: _ClassVar[Drop]
    DROP_NO_IMAGES: _ClassVar[Drop]
    DROP_CONTRACT: _ClassVar[Drop]
PROSPECT_ACTION_UNSPECIFIED: ProspectAction
PROSPECT_ACTION_BUY: ProspectAction
PROSPECT_ACTION_WAIT: ProspectAction
PROSPECT_MARKET_UNSPECIFIED: ProspectMarket
PROSPECT_MARKET_SPOT: ProspectMarket
PROSPECT_MARKET_ON_DEMAND: ProspectMarket
HOLD_UNSPECIFIED: Hold
HOLD_APPROVAL: Hold
HOLD_WAIT: Hold
SPEED_TIER_UNSPECIFIED: SpeedTier
SPEED_TIER_MEASURED: SpeedTier
SPEED_TIER_TRANSFERRED: SpeedTier
SPEED_TIER_UNCHECKED: SpeedTier
PARALLELISM_UNSPECIFIED: Parallelism
PARALLELISM_SINGLE: Parallelism
PARALLELISM_DDP: Parallelism
PARALLELISM_FSDP: Parallelism
PARALLELISM_HYBRID: Parallelism
VERDICT_UNSPECIFIED: Verdict
VERDICT_KEPT: Verdict
VERDICT_DROPPED: Verdict
DROP_UNSPECIFIED: Drop
DROP_PROVIDER: Drop
DROP_ACCELERATOR: Drop
DROP_REGION: Drop
DROP_GPUS: Drop
DROP_NODES: Drop
DROP_SPOT: Drop
DROP_UNREACHABLE: Drop
DROP_UNSCOPED: Drop
DROP_NO_TRAINER: Drop
DROP_UNKNOWN_HARDWARE: Drop
DROP_MEMORY: Drop
DROP_PRICE: Drop
DROP_HOURLY_LIMIT: Drop
DROP_PREEMPTED_TOO_OFTEN: Drop
DROP_CAP: Drop
DROP_UNAVAILABLE: Drop
DROP_EXCLUDED: Drop
DROP_DEADLINE: Drop
DROP_HOST: Drop
DROP_TRUST: Drop
DROP_NO_CHECKPOINTS: Drop
DROP_NO_IMAGES: Drop
DROP_CONTRACT: Drop

class Quote(_message.Message):
    __slots__ = ("check", "lines", "kept", "drops", "proposed_cap_usd", "cheapest_usd", "made_at", "expires_at", "unsold_regions", "held", "chosen", "on_demand", "latest_on_demand_start")
    class DropsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CHECK_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_CAP_USD_FIELD_NUMBER: _ClassVar[int]
    CHEAPEST_USD_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    UNSOLD_REGIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    LATEST_ON_DEMAND_START_FIELD_NUMBER: _ClassVar[int]
    check: _struct_pb2.Struct
    lines: _containers.RepeatedCompositeFieldContainer[QuoteLine]
    kept: int
    drops: _containers.ScalarMap[str, int]
    proposed_cap_usd: str
    cheapest_usd: str
    made_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    unsold_regions: _containers.RepeatedScalarFieldContainer[str]
    held: QuoteHold
    chosen: Prospect
    on_demand: Prospect
    latest_on_demand_start: _timestamp_pb2.Timestamp
    def __init__(self, check: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., lines: _Optional[_Iterable[_Union[QuoteLine, _Mapping]]] = ..., kept: _Optional[int] = ..., drops: _Optional[_Mapping[str, int]] = ..., proposed_cap_usd: _Optional[str] = ..., cheapest_usd: _Optional[str] = ..., made_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., unsold_regions: _Optional[_Iterable[str]] = ..., held: _Optional[_Union[QuoteHold, _Mapping]] = ..., chosen: _Optional[_Union[Prospect, _Mapping]] = ..., on_demand: _Optional[_Union[Prospect, _Mapping]] = ..., latest_on_demand_start: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Prospect(_message.Message):
    __slots__ = ("action", "market", "offer_id", "reason", "usd_p10", "usd_p50", "usd_p90", "finish_p50", "finish_p90", "deadline_chance")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MARKET_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USD_P10_FIELD_NUMBER: _ClassVar[int]
    USD_P50_FIELD_NUMBER: _ClassVar[int]
    USD_P90_FIELD_NUMBER: _ClassVar[int]
    FINISH_P50_FIELD_NUMBER: _ClassVar[int]
    FINISH_P90_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_CHANCE_FIELD_NUMBER: _ClassVar[int]
    action: ProspectAction
    market: ProspectMarket
    offer_id: str
    reason: str
    usd_p10: str
    usd_p50: str
    usd_p90: str
    finish_p50: _timestamp_pb2.Timestamp
    finish_p90: _timestamp_pb2.Timestamp
    deadline_chance: float
    def __init__(self, action: _Optional[_Union[ProspectAction, str]] = ..., market: _Optional[_Union[ProspectMarket, str]] = ..., offer_id: _Optional[str] = ..., reason: _Optional[str] = ..., usd_p10: _Optional[str] = ..., usd_p50: _Optional[str] = ..., usd_p90: _Optional[str] = ..., finish_p50: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_p90: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline_chance: _Optional[float] = ...) -> None: ...

class QuoteHold(_message.Message):
    __slots__ = ("hold", "policy", "reason")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    hold: Hold
    policy: str
    reason: str
    def __init__(self, hold: _Optional[_Union[Hold, str]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class QuoteLine(_message.Message):
    __slots__ = ("offer", "verdict", "reason", "drop", "memory", "hours_p50", "hours_p90", "usd_p50", "usd_p90", "step_s", "nodes", "plan", "hours", "costs", "evidence", "runs", "tier")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HOURS_P50_FIELD_NUMBER: _ClassVar[int]
    HOURS_P90_FIELD_NUMBER: _ClassVar[int]
    USD_P50_FIELD_NUMBER: _ClassVar[int]
    USD_P90_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    offer: _offer_pb2.Offer
    verdict: Verdict
    reason: str
    drop: Drop
    memory: MemoryNeed
    hours_p50: float
    hours_p90: float
    usd_p50: str
    usd_p90: str
    step_s: float
    nodes: int
    plan: Plan
    hours: Hours
    costs: Costs
    evidence: str
    runs: int
    tier: SpeedTier
    def __init__(self, offer: _Optional[_Union[_offer_pb2.Offer, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[str] = ..., drop: _Optional[_Union[Drop, str]] = ..., memory: _Optional[_Union[MemoryNeed, _Mapping]] = ..., hours_p50: _Optional[float] = ..., hours_p90: _Optional[float] = ..., usd_p50: _Optional[str] = ..., usd_p90: _Optional[str] = ..., step_s: _Optional[float] = ..., nodes: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., hours: _Optional[_Union[Hours, _Mapping]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., evidence: _Optional[str] = ..., runs: _Optional[int] = ..., tier: _Optional[_Union[SpeedTier, str]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("parallelism", "devices", "micro_batch", "accumulation", "gradient_checkpointing")
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CHECKPOINTING_FIELD_NUMBER: _ClassVar[int]
    parallelism: Parallelism
    devices: int
    micro_batch: int
    accumulation: int
    gradient_checkpointing: bool
    def __init__(self, parallelism: _Optional[_Union[Parallelism, str]] = ..., devices: _Optional[int] = ..., micro_batch: _Optional[int] = ..., accumulation: _Optional[int] = ..., gradient_checkpointing: _Optional[bool] = ...) -> None: ...

class Hours(_message.Message):
    __slots__ = ("boot", "load", "training", "evaluation", "checkpoints", "preemptions")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    boot: float
    load: float
    training: float
    evaluation: float
    checkpoints: float
    preemptions: float
    def __init__(self, boot: _Optional[float] = ..., load: _Optional[float] = ..., training: _Optional[float] = ..., evaluation: _Optional[float] = ..., checkpoints: _Optional[float] = ..., preemptions: _Optional[float] = ...) -> None: ...

class ConsideredOffer(_message.Message):
    __slots__ = ("offer", "usd_per_hour", "drop", "reason", "usd_p50")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USD_P50_FIELD_NUMBER: _ClassVar[int]
    offer: str
    usd_per_hour: str
    drop: Drop
    reason: str
    usd_p50: str
    def __init__(self, offer: _Optional[str] = ..., usd_per_hour: _Optional[str] = ..., drop: _Optional[_Union[Drop, str]] = ..., reason: _Optional[str] = ..., usd_p50: _Optional[str] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("machines", "traffic", "storage", "requests")
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    machines: str
    traffic: str
    storage: str
    requests: str
    def __init__(self, machines: _Optional[str] = ..., traffic: _Optional[str] = ..., storage: _Optional[str] = ..., requests: _Optional[str] = ...) -> None: ...

class MemoryNeed(_message.Message):
    __slots__ = ("weights", "gradients", "optimizer", "activations", "logits", "context", "peak", "required", "margin", "source", "correction", "runs")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    context: int
    peak: int
    required: int
    margin: float
    source: str
    correction: float
    runs: int
    def __init__(self, weights: _Optional[int] = ..., gradients: _Optional[int] = ..., optimizer: _Optional[int] = ..., activations: _Optional[int] = ..., logits: _Optional[int] = ..., context: _Optional[int] = ..., peak: _Optional[int] = ..., required: _Optional[int] = ..., margin: _Optional[float] = ..., source: _Optional[str] = ..., correction: _Optional[float] = ..., runs: _Optional[int] = ...) -> None: ...
