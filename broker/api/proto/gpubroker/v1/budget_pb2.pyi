import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BudgetPeriod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUDGET_PERIOD_UNSPECIFIED: _ClassVar[BudgetPeriod]
    BUDGET_PERIOD_DAY: _ClassVar[BudgetPeriod]
    BUDGET_PERIOD_WEEK: _ClassVar[BudgetPeriod]
    BUDGET_PERIOD_MONTH: _ClassVar[BudgetPeriod]

class BudgetWindow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUDGET_WINDOW_UNSPECIFIED: _ClassVar[BudgetWindow]
    BUDGET_WINDOW_CALENDAR: _ClassVar[BudgetWindow]
    BUDGET_WINDOW_ROLLING: _ClassVar[BudgetWindow]

class ThresholdAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    THRESHOLD_ACTION_UNSPECIFIED: _ClassVar[ThresholdAction]
    THRESHOLD_ACTION_NOTIFY: _ClassVar[ThresholdAction]
    THRESHOLD_ACTION_REQUIRE_APPROVAL: _ClassVar[ThresholdAction]
    THRESHOLD_ACTION_STOP_LAUNCHES: _ClassVar[ThresholdAction]
    THRESHOLD_ACTION_DRAIN: _ClassVar[ThresholdAction]
BUDGET_PERIOD_UNSPECIFIED: BudgetPeriod
BUDGET_PERIOD_DAY: BudgetPeriod
BUDGET_PERIOD_WEEK: BudgetPeriod
BUDGET_PERIOD_MONTH: BudgetPeriod
BUDGET_WINDOW_UNSPECIFIED: BudgetWindow
BUDGET_WINDOW_CALENDAR: BudgetWindow
BUDGET_WINDOW_ROLLING: BudgetWindow
THRESHOLD_ACTION_UNSPECIFIED: ThresholdAction
THRESHOLD_ACTION_NOTIFY: ThresholdAction
THRESHOLD_ACTION_REQUIRE_APPROVAL: ThresholdAction
THRESHOLD_ACTION_STOP_LAUNCHES: ThresholdAction
THRESHOLD_ACTION_DRAIN: ThresholdAction

class Standing(_message.Message):
    __slots__ = ("name", "team", "user", "timezone", "budgets", "outstanding_usd", "gpus", "max_gpus", "jobs", "max_jobs", "approval_above_usd")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_USD_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    MAX_GPUS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_ABOVE_USD_FIELD_NUMBER: _ClassVar[int]
    name: str
    team: str
    user: str
    timezone: str
    budgets: _containers.RepeatedCompositeFieldContainer[Budget]
    outstanding_usd: str
    gpus: int
    max_gpus: int
    jobs: int
    max_jobs: int
    approval_above_usd: str
    def __init__(self, name: _Optional[str] = ..., team: _Optional[str] = ..., user: _Optional[str] = ..., timezone: _Optional[str] = ..., budgets: _Optional[_Iterable[_Union[Budget, _Mapping]]] = ..., outstanding_usd: _Optional[str] = ..., gpus: _Optional[int] = ..., max_gpus: _Optional[int] = ..., jobs: _Optional[int] = ..., max_jobs: _Optional[int] = ..., approval_above_usd: _Optional[str] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("limit_usd", "per", "window", "charged_usd", "committed_usd", "since", "until", "thresholds")
    LIMIT_USD_FIELD_NUMBER: _ClassVar[int]
    PER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHARGED_USD_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_USD_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    limit_usd: str
    per: BudgetPeriod
    window: BudgetWindow
    charged_usd: str
    committed_usd: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    thresholds: _containers.RepeatedCompositeFieldContainer[Threshold]
    def __init__(self, limit_usd: _Optional[str] = ..., per: _Optional[_Union[BudgetPeriod, str]] = ..., window: _Optional[_Union[BudgetWindow, str]] = ..., charged_usd: _Optional[str] = ..., committed_usd: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., thresholds: _Optional[_Iterable[_Union[Threshold, _Mapping]]] = ...) -> None: ...

class Threshold(_message.Message):
    __slots__ = ("at", "action", "reached")
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    at: str
    action: ThresholdAction
    reached: bool
    def __init__(self, at: _Optional[str] = ..., action: _Optional[_Union[ThresholdAction, str]] = ..., reached: _Optional[bool] = ...) -> None: ...
