import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from broker.api.proto.gpubroker.v1 import offer_pb2 as _offer_pb2
from broker.api.proto.gpubroker.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_AWAITING_APPROVAL: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_ACTIVE: _ClassVar[JobState]
    JOB_STATE_RECOVERING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_CAPPED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]

class StoredKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORED_KIND_UNSPECIFIED: _ClassVar[StoredKind]
    STORED_KIND_ARTIFACTS: _ClassVar[StoredKind]
    STORED_KIND_CHECKPOINTS: _ClassVar[StoredKind]
    STORED_KIND_LOGS: _ClassVar[StoredKind]
    STORED_KIND_DATA: _ClassVar[StoredKind]

class IdleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IDLE_KIND_UNSPECIFIED: _ClassVar[IdleKind]
    IDLE_KIND_GPU: _ClassVar[IdleKind]
    IDLE_KIND_NO_PROGRESS: _ClassVar[IdleKind]
    IDLE_KIND_DOWNLOAD: _ClassVar[IdleKind]

class AttemptState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_STATE_UNSPECIFIED: _ClassVar[AttemptState]
    ATTEMPT_STATE_PLANNED: _ClassVar[AttemptState]
    ATTEMPT_STATE_LAUNCHING: _ClassVar[AttemptState]
    ATTEMPT_STATE_BOOTING: _ClassVar[AttemptState]
    ATTEMPT_STATE_TRAINING: _ClassVar[AttemptState]
    ATTEMPT_STATE_DRAINING: _ClassVar[AttemptState]
    ATTEMPT_STATE_TERMINATING: _ClassVar[AttemptState]
    ATTEMPT_STATE_ENDED: _ClassVar[AttemptState]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_COMPLETED: _ClassVar[Reason]
    REASON_STOPPED: _ClassVar[Reason]
    REASON_CAPPED: _ClassVar[Reason]
    REASON_USER_ERROR: _ClassVar[Reason]
    REASON_DATA: _ClassVar[Reason]
    REASON_OOM: _ClassVar[Reason]
    REASON_PREEMPTED: _ClassVar[Reason]
    REASON_LOST: _ClassVar[Reason]
    REASON_NO_CAPACITY: _ClassVar[Reason]
    REASON_REJECTED: _ClassVar[Reason]
    REASON_MISMATCH: _ClassVar[Reason]
    REASON_QUOTE_EXPIRED: _ClassVar[Reason]
    REASON_HUNG: _ClassVar[Reason]
    REASON_DEADMAN: _ClassVar[Reason]
    REASON_INFRASTRUCTURE: _ClassVar[Reason]
    REASON_OUT_OF_TIME: _ClassVar[Reason]
    REASON_IDLE: _ClassVar[Reason]
    REASON_IMAGE: _ClassVar[Reason]
    REASON_BUDGET: _ClassVar[Reason]
    REASON_MOVED: _ClassVar[Reason]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_LOADING: _ClassVar[Phase]
    PHASE_EVALUATING: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_SAVING: _ClassVar[Phase]
    PHASE_SAMPLING: _ClassVar[Phase]
    PHASE_DRAINING: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]
    PHASE_SETUP: _ClassVar[Phase]

class RanOut(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAN_OUT_UNSPECIFIED: _ClassVar[RanOut]
    RAN_OUT_DEVICE: _ClassVar[RanOut]
    RAN_OUT_HOST: _ClassVar[RanOut]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMPLETED: _ClassVar[Outcome]
    OUTCOME_DRAINED: _ClassVar[Outcome]
    OUTCOME_USER_ERROR: _ClassVar[Outcome]
    OUTCOME_DATA: _ClassVar[Outcome]
    OUTCOME_OOM: _ClassVar[Outcome]
    OUTCOME_INFRASTRUCTURE: _ClassVar[Outcome]
    OUTCOME_DEADMAN: _ClassVar[Outcome]

class LedgerCategory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEDGER_CATEGORY_UNSPECIFIED: _ClassVar[LedgerCategory]
    LEDGER_CATEGORY_COMPUTE: _ClassVar[LedgerCategory]
    LEDGER_CATEGORY_STORAGE: _ClassVar[LedgerCategory]
    LEDGER_CATEGORY_EGRESS: _ClassVar[LedgerCategory]

class LedgerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEDGER_KIND_UNSPECIFIED: _ClassVar[LedgerKind]
    LEDGER_KIND_RESERVATION: _ClassVar[LedgerKind]
    LEDGER_KIND_CHARGE: _ClassVar[LedgerKind]
    LEDGER_KIND_RELEASE: _ClassVar[LedgerKind]
    LEDGER_KIND_ADJUSTMENT: _ClassVar[LedgerKind]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_AWAITING_APPROVAL: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_ACTIVE: JobState
JOB_STATE_RECOVERING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_CAPPED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_FAILED: JobState
STORED_KIND_UNSPECIFIED: StoredKind
STORED_KIND_ARTIFACTS: StoredKind
STORED_KIND_CHECKPOINTS: StoredKind
STORED_KIND_LOGS: StoredKind
STORED_KIND_DATA: StoredKind
IDLE_KIND_UNSPECIFIED: IdleKind
IDLE_KIND_GPU: IdleKind
IDLE_KIND_NO_PROGRESS: IdleKind
IDLE_KIND_DOWNLOAD: IdleKind
ATTEMPT_STATE_UNSPECIFIED: AttemptState
ATTEMPT_STATE_PLANNED: AttemptState
ATTEMPT_STATE_LAUNCHING: AttemptState
ATTEMPT_STATE_BOOTING: AttemptState
ATTEMPT_STATE_TRAINING: AttemptState
ATTEMPT_STATE_DRAINING: AttemptState
ATTEMPT_STATE_TERMINATING: AttemptState
ATTEMPT_STATE_ENDED: AttemptState
REASON_UNSPECIFIED: Reason
REASON_COMPLETED: Reason
REASON_STOPPED: Reason
REASON_CAPPED: Reason
REASON_USER_ERROR: Reason
REASON_DATA: Reason
REASON_OOM: Reason
REASON_PREEMPTED: Reason
REASON_LOST: Reason
REASON_NO_CAPACITY: Reason
REASON_REJECTED: Reason
REASON_MISMATCH: Reason
REASON_QUOTE_EXPIRED: Reason
REASON_HUNG: Reason
REASON_DEADMAN: Reason
REASON_INFRASTRUCTURE: Reason
REASON_OUT_OF_TIME: Reason
REASON_IDLE: Reason
REASON_IMAGE: Reason
REASON_BUDGET: Reason
REASON_MOVED: Reason
PHASE_UNSPECIFIED: Phase
PHASE_STARTING: Phase
PHASE_LOADING: Phase
PHASE_EVALUATING: Phase
PHASE_TRAINING: Phase
PHASE_SAVING: Phase
PHASE_SAMPLING: Phase
PHASE_DRAINING: Phase
PHASE_DONE: Phase
PHASE_SETUP: Phase
RAN_OUT_UNSPECIFIED: RanOut
RAN_OUT_DEVICE: RanOut
RAN_OUT_HOST: RanOut
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMPLETED: Outcome
OUTCOME_DRAINED: Outcome
OUTCOME_USER_ERROR: Outcome
OUTCOME_DATA: Outcome
OUTCOME_OOM: Outcome
OUTCOME_INFRASTRUCTURE: Outcome
OUTCOME_DEADMAN: Outcome
LEDGER_CATEGORY_UNSPECIFIED: LedgerCategory
LEDGER_CATEGORY_COMPUTE: LedgerCategory
LEDGER_CATEGORY_STORAGE: LedgerCategory
LEDGER_CATEGORY_EGRESS: LedgerCategory
LEDGER_KIND_UNSPECIFIED: LedgerKind
LEDGER_KIND_RESERVATION: LedgerKind
LEDGER_KIND_CHARGE: LedgerKind
LEDGER_KIND_RELEASE: LedgerKind
LEDGER_KIND_ADJUSTMENT: LedgerKind

class Job(_message.Message):
    __slots__ = ("id", "name", "owner", "state", "reason", "labels", "created_at", "finished_at", "cap_usd", "spent_usd", "attempts", "retries_used", "stop_requested", "retry_of", "team", "forecast", "machine")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    CAP_USD_FIELD_NUMBER: _ClassVar[int]
    SPENT_USD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_USED_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    RETRY_OF_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    owner: str
    state: JobState
    reason: str
    labels: _containers.ScalarMap[str, str]
    created_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    cap_usd: str
    spent_usd: str
    attempts: int
    retries_used: int
    stop_requested: bool
    retry_of: str
    team: str
    forecast: Forecast
    machine: JobMachine
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cap_usd: _Optional[str] = ..., spent_usd: _Optional[str] = ..., attempts: _Optional[int] = ..., retries_used: _Optional[int] = ..., stop_requested: _Optional[bool] = ..., retry_of: _Optional[str] = ..., team: _Optional[str] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ..., machine: _Optional[_Union[JobMachine, _Mapping]] = ...) -> None: ...

class JobMachine(_message.Message):
    __slots__ = ("accelerator", "gpus", "nodes", "cloud", "region", "spot", "simulated")
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    accelerator: str
    gpus: int
    nodes: int
    cloud: str
    region: str
    spot: bool
    simulated: bool
    def __init__(self, accelerator: _Optional[str] = ..., gpus: _Optional[int] = ..., nodes: _Optional[int] = ..., cloud: _Optional[str] = ..., region: _Optional[str] = ..., spot: _Optional[bool] = ..., simulated: _Optional[bool] = ...) -> None: ...

class JobDetail(_message.Message):
    __slots__ = ("id", "name", "owner", "state", "reason", "labels", "created_at", "finished_at", "cap_usd", "spent_usd", "attempts", "retries_used", "stop_requested", "retry_of", "spec", "reserved_usd", "runs", "team", "forecast", "storage", "ran_out_of_memory", "machine")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    CAP_USD_FIELD_NUMBER: _ClassVar[int]
    SPENT_USD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_USED_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    RETRY_OF_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RESERVED_USD_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    RAN_OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    owner: str
    state: JobState
    reason: str
    labels: _containers.ScalarMap[str, str]
    created_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    cap_usd: str
    spent_usd: str
    attempts: int
    retries_used: int
    stop_requested: bool
    retry_of: str
    spec: _spec_pb2.JobSpec
    reserved_usd: str
    runs: _containers.RepeatedCompositeFieldContainer[Attempt]
    team: str
    forecast: Forecast
    storage: Storage
    ran_out_of_memory: _containers.RepeatedScalarFieldContainer[str]
    machine: JobMachine
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cap_usd: _Optional[str] = ..., spent_usd: _Optional[str] = ..., attempts: _Optional[int] = ..., retries_used: _Optional[int] = ..., stop_requested: _Optional[bool] = ..., retry_of: _Optional[str] = ..., spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ..., reserved_usd: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., team: _Optional[str] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ..., storage: _Optional[_Union[Storage, _Mapping]] = ..., ran_out_of_memory: _Optional[_Iterable[str]] = ..., machine: _Optional[_Union[JobMachine, _Mapping]] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("usd", "finish_at", "step_s", "over_cap", "late", "interval")
    USD_FIELD_NUMBER: _ClassVar[int]
    FINISH_AT_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    OVER_CAP_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    usd: str
    finish_at: _timestamp_pb2.Timestamp
    step_s: float
    over_cap: bool
    late: bool
    interval: ForecastInterval
    def __init__(self, usd: _Optional[str] = ..., finish_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step_s: _Optional[float] = ..., over_cap: _Optional[bool] = ..., late: _Optional[bool] = ..., interval: _Optional[_Union[ForecastInterval, _Mapping]] = ...) -> None: ...

class ForecastInterval(_message.Message):
    __slots__ = ("usd_low", "usd_high", "finish_earliest", "finish_latest")
    USD_LOW_FIELD_NUMBER: _ClassVar[int]
    USD_HIGH_FIELD_NUMBER: _ClassVar[int]
    FINISH_EARLIEST_FIELD_NUMBER: _ClassVar[int]
    FINISH_LATEST_FIELD_NUMBER: _ClassVar[int]
    usd_low: str
    usd_high: str
    finish_earliest: _timestamp_pb2.Timestamp
    finish_latest: _timestamp_pb2.Timestamp
    def __init__(self, usd_low: _Optional[str] = ..., usd_high: _Optional[str] = ..., finish_earliest: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_latest: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Storage(_message.Message):
    __slots__ = ("bytes", "usd", "usd_per_month", "deleted", "measured_at")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    USD_PER_MONTH_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    usd: str
    usd_per_month: str
    deleted: _containers.RepeatedCompositeFieldContainer[Deleted]
    measured_at: _timestamp_pb2.Timestamp
    def __init__(self, bytes: _Optional[int] = ..., usd: _Optional[str] = ..., usd_per_month: _Optional[str] = ..., deleted: _Optional[_Iterable[_Union[Deleted, _Mapping]]] = ..., measured_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Deleted(_message.Message):
    __slots__ = ("what", "at")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    what: StoredKind
    at: _timestamp_pb2.Timestamp
    def __init__(self, what: _Optional[_Union[StoredKind, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("id", "number", "instance", "state", "reason", "detail", "offer", "nodes", "hours_p50", "usd_p50", "created_at", "create_sent_at", "first_beat_at", "ended_at", "reserved_usd", "charged_usd", "resume_from", "beat", "final", "traffic_usd", "usd_per_hour", "idle", "evidence", "observed_runs", "lost_usd", "on_demand_usd")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HOURS_P50_FIELD_NUMBER: _ClassVar[int]
    USD_P50_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CREATE_SENT_AT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BEAT_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_USD_FIELD_NUMBER: _ClassVar[int]
    CHARGED_USD_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_USD_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_RUNS_FIELD_NUMBER: _ClassVar[int]
    LOST_USD_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_USD_FIELD_NUMBER: _ClassVar[int]
    id: str
    number: int
    instance: str
    state: AttemptState
    reason: Reason
    detail: str
    offer: _offer_pb2.Offer
    nodes: int
    hours_p50: float
    usd_p50: str
    created_at: _timestamp_pb2.Timestamp
    create_sent_at: _timestamp_pb2.Timestamp
    first_beat_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    reserved_usd: str
    charged_usd: str
    resume_from: _containers.RepeatedScalarFieldContainer[str]
    beat: Beat
    final: Final
    traffic_usd: str
    usd_per_hour: str
    idle: IdleKind
    evidence: str
    observed_runs: int
    lost_usd: str
    on_demand_usd: str
    def __init__(self, id: _Optional[str] = ..., number: _Optional[int] = ..., instance: _Optional[str] = ..., state: _Optional[_Union[AttemptState, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., offer: _Optional[_Union[_offer_pb2.Offer, _Mapping]] = ..., nodes: _Optional[int] = ..., hours_p50: _Optional[float] = ..., usd_p50: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., create_sent_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., first_beat_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reserved_usd: _Optional[str] = ..., charged_usd: _Optional[str] = ..., resume_from: _Optional[_Iterable[str]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., traffic_usd: _Optional[str] = ..., usd_per_hour: _Optional[str] = ..., idle: _Optional[_Union[IdleKind, str]] = ..., evidence: _Optional[str] = ..., observed_runs: _Optional[int] = ..., lost_usd: _Optional[str] = ..., on_demand_usd: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("attempt", "node", "boot", "seq", "phase", "message", "step", "total_steps", "resumed_from", "loss", "heldout_loss", "tokens_per_s", "rows_per_s", "peak_memory_bytes", "gpu_utilisation", "checkpoint", "notice_s", "received_bytes", "sent_bytes", "network_bytes", "messages", "gpu_memory_bytes", "gpu_power_w")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FROM_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_POWER_W_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    node: int
    boot: str
    seq: int
    phase: Phase
    message: str
    step: int
    total_steps: int
    resumed_from: int
    loss: float
    heldout_loss: float
    tokens_per_s: float
    rows_per_s: float
    peak_memory_bytes: int
    gpu_utilisation: float
    checkpoint: CheckpointRef
    notice_s: float
    received_bytes: int
    sent_bytes: int
    network_bytes: int
    messages: _containers.RepeatedCompositeFieldContainer[AgentMessage]
    gpu_memory_bytes: int
    gpu_power_w: float
    def __init__(self, attempt: _Optional[str] = ..., node: _Optional[int] = ..., boot: _Optional[str] = ..., seq: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., message: _Optional[str] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., resumed_from: _Optional[int] = ..., loss: _Optional[float] = ..., heldout_loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., rows_per_s: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., gpu_utilisation: _Optional[float] = ..., checkpoint: _Optional[_Union[CheckpointRef, _Mapping]] = ..., notice_s: _Optional[float] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., network_bytes: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[AgentMessage, _Mapping]]] = ..., gpu_memory_bytes: _Optional[int] = ..., gpu_power_w: _Optional[float] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("seq", "kind", "message")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    kind: str
    message: str
    def __init__(self, seq: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CheckpointRef(_message.Message):
    __slots__ = ("manifest", "step", "save_s", "stall_s", "bytes")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    step: int
    save_s: float
    stall_s: float
    bytes: int
    def __init__(self, manifest: _Optional[str] = ..., step: _Optional[int] = ..., save_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("attempt", "outcome", "message", "exit_code", "step", "total_steps", "resumed_from", "checkpoint", "heldout_loss_before", "heldout_loss_after", "peak_memory_bytes", "tokens_per_s", "boot", "received_bytes", "sent_bytes", "ran_out", "bad_host", "messages")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FROM_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_LOSS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_LOSS_AFTER_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAN_OUT_FIELD_NUMBER: _ClassVar[int]
    BAD_HOST_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    outcome: Outcome
    message: str
    exit_code: int
    step: int
    total_steps: int
    resumed_from: int
    checkpoint: CheckpointRef
    heldout_loss_before: float
    heldout_loss_after: float
    peak_memory_bytes: int
    tokens_per_s: float
    boot: str
    received_bytes: int
    sent_bytes: int
    ran_out: RanOut
    bad_host: bool
    messages: _containers.RepeatedCompositeFieldContainer[AgentMessage]
    def __init__(self, attempt: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., message: _Optional[str] = ..., exit_code: _Optional[int] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., resumed_from: _Optional[int] = ..., checkpoint: _Optional[_Union[CheckpointRef, _Mapping]] = ..., heldout_loss_before: _Optional[float] = ..., heldout_loss_after: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., boot: _Optional[str] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., ran_out: _Optional[_Union[RanOut, str]] = ..., bad_host: _Optional[bool] = ..., messages: _Optional[_Iterable[_Union[AgentMessage, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("seq", "at", "kind", "message", "attempt_id", "data")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    seq: int
    at: _timestamp_pb2.Timestamp
    kind: str
    message: str
    attempt_id: str
    data: _struct_pb2.Struct
    def __init__(self, seq: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., attempt_id: _Optional[str] = ..., data: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("attempt_id", "kind", "usd", "note", "category")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    kind: LedgerKind
    usd: str
    note: str
    category: LedgerCategory
    def __init__(self, attempt_id: _Optional[str] = ..., kind: _Optional[_Union[LedgerKind, str]] = ..., usd: _Optional[str] = ..., note: _Optional[str] = ..., category: _Optional[_Union[LedgerCategory, str]] = ...) -> None: ...
