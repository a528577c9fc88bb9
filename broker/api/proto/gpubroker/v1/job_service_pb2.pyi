import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from broker.api.proto.gpubroker.v1 import job_pb2 as _job_pb2
from broker.api.proto.gpubroker.v1 import quote_pb2 as _quote_pb2
from broker.api.proto.gpubroker.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitJobRequest(_message.Message):
    __slots__ = ("spec", "idempotency_key")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    spec: _spec_pb2.JobSpec
    idempotency_key: str
    def __init__(self, spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job", "replayed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    replayed: bool
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.JobDetail
    def __init__(self, job: _Optional[_Union[_job_pb2.JobDetail, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("label", "state", "owner", "since", "until", "cursor", "limit", "team")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    label: _containers.RepeatedScalarFieldContainer[str]
    state: _containers.RepeatedScalarFieldContainer[_job_pb2.JobState]
    owner: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    cursor: str
    limit: int
    team: str
    def __init__(self, label: _Optional[_Iterable[str]] = ..., state: _Optional[_Iterable[_Union[_job_pb2.JobState, str]]] = ..., owner: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ..., team: _Optional[str] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("items", "next")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_job_pb2.Job]
    next: str
    def __init__(self, items: _Optional[_Iterable[_Union[_job_pb2.Job, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ...) -> None: ...

class RetryJobRequest(_message.Message):
    __slots__ = ("job_id", "resume", "idempotency_key")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    resume: bool
    idempotency_key: str
    def __init__(self, job_id: _Optional[str] = ..., resume: _Optional[bool] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class RetryJobResponse(_message.Message):
    __slots__ = ("job", "replayed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    replayed: bool
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class RaiseCapRequest(_message.Message):
    __slots__ = ("job_id", "cap_usd")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CAP_USD_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    cap_usd: str
    def __init__(self, job_id: _Optional[str] = ..., cap_usd: _Optional[str] = ...) -> None: ...

class RaiseCapResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ...) -> None: ...

class ApproveJobRequest(_message.Message):
    __slots__ = ("job_id", "up_to_usd")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    UP_TO_USD_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    up_to_usd: str
    def __init__(self, job_id: _Optional[str] = ..., up_to_usd: _Optional[str] = ...) -> None: ...

class ApproveJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ...) -> None: ...

class RefuseJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class RefuseJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.Job
    def __init__(self, job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ...) -> None: ...

class DeleteJobDataRequest(_message.Message):
    __slots__ = ("job_id", "kind")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    kind: _containers.RepeatedScalarFieldContainer[_job_pb2.StoredKind]
    def __init__(self, job_id: _Optional[str] = ..., kind: _Optional[_Iterable[_Union[_job_pb2.StoredKind, str]]] = ...) -> None: ...

class DeleteJobDataResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.JobDetail
    def __init__(self, job: _Optional[_Union[_job_pb2.JobDetail, _Mapping]] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_job_pb2.LedgerEntry]
    def __init__(self, items: _Optional[_Iterable[_Union[_job_pb2.LedgerEntry, _Mapping]]] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ("job_id", "number")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    number: int
    def __init__(self, job_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_quote_pb2.ConsideredOffer]
    def __init__(self, items: _Optional[_Iterable[_Union[_quote_pb2.ConsideredOffer, _Mapping]]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ("job_id", "after", "points")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after: int
    points: int
    def __init__(self, job_id: _Optional[str] = ..., after: _Optional[int] = ..., points: _Optional[int] = ...) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("step", "attempt", "time", "loss", "lr", "tokens_per_s", "total", "skipped_bytes", "interruptions")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTIONS_FIELD_NUMBER: _ClassVar[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    time: _containers.RepeatedScalarFieldContainer[float]
    loss: _containers.RepeatedScalarFieldContainer[float]
    lr: _containers.RepeatedScalarFieldContainer[float]
    tokens_per_s: _containers.RepeatedScalarFieldContainer[float]
    total: int
    skipped_bytes: int
    interruptions: _containers.RepeatedCompositeFieldContainer[Interruption]
    def __init__(self, step: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., time: _Optional[_Iterable[float]] = ..., loss: _Optional[_Iterable[float]] = ..., lr: _Optional[_Iterable[float]] = ..., tokens_per_s: _Optional[_Iterable[float]] = ..., total: _Optional[int] = ..., skipped_bytes: _Optional[int] = ..., interruptions: _Optional[_Iterable[_Union[Interruption, _Mapping]]] = ...) -> None: ...

class Interruption(_message.Message):
    __slots__ = ("attempt", "step", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    reason: _job_pb2.Reason
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., reason: _Optional[_Union[_job_pb2.Reason, str]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("job_id", "after", "follow")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after: int
    follow: bool
    def __init__(self, job_id: _Optional[str] = ..., after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event", "end")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    event: _job_pb2.Event
    end: JobEnd
    def __init__(self, event: _Optional[_Union[_job_pb2.Event, _Mapping]] = ..., end: _Optional[_Union[JobEnd, _Mapping]] = ...) -> None: ...

class JobEnd(_message.Message):
    __slots__ = ("state", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: _job_pb2.JobState
    reason: str
    def __init__(self, state: _Optional[_Union[_job_pb2.JobState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class FollowLogsRequest(_message.Message):
    __slots__ = ("job_id", "attempt", "position", "follow")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    attempt: int
    position: str
    follow: bool
    def __init__(self, job_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[str] = ..., follow: _Optional[bool] = ...) -> None: ...

class FollowLogsResponse(_message.Message):
    __slots__ = ("chunk", "end")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    chunk: LogChunk
    end: JobEnd
    def __init__(self, chunk: _Optional[_Union[LogChunk, _Mapping]] = ..., end: _Optional[_Union[JobEnd, _Mapping]] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("position", "attempt", "node", "text")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    position: str
    attempt: int
    node: int
    text: str
    def __init__(self, position: _Optional[str] = ..., attempt: _Optional[int] = ..., node: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
