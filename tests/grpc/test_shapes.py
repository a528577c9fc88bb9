"""Messages and pydantic models are one contract: the same fields, the same words, and "not set" where one can say so.

When this is red after a change of a model: give the message in broker/api/proto the same field, then `make proto`.
"""

import typing
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import AwareDatetime, BaseModel
from pydantic.fields import FieldInfo

from broker.api.app import APIS
from broker.api.grpc import artifacts
from broker.api.grpc.artifacts import ArtifactServicer
from broker.api.grpc.codec import NAMED, fill_message, parse
from broker.api.grpc.interceptor import MARK
from broker.api.grpc.jobs import JobServicer
from broker.api.grpc.market import BudgetServicer, OfferServicer, ProviderServicer, QuoteServicer
from broker.api.grpc.server import FILES
from broker.api.proto.gpubroker.v1 import artifact_service_pb2 as artifact_pb
from broker.api.proto.gpubroker.v1 import budget_pb2, job_pb2, offer_pb2, quote_pb2, spec_pb2
from broker.api.proto.gpubroker.v1 import budget_service_pb2 as budgets_pb
from broker.api.proto.gpubroker.v1 import job_service_pb2 as job_pb
from broker.api.proto.gpubroker.v1 import offer_service_pb2 as offers_pb
from broker.api.proto.gpubroker.v1 import quote_service_pb2 as quotes_pb
from broker.api.schemas import plans as models_plans
from broker.api.schemas import policies as models_policies
from broker.api.schemas.files import ArtifactList, UploadView
from broker.api.schemas.jobs import CapChange, EventView, JobDetail, JobPage, JobView, LedgerLine
from broker.api.schemas.metrics import MetricsQuery, MetricsView
from broker.api.schemas.offers import OfferHistoryView, OfferList, ProviderView
from broker.api.schemas.queries import (
    DataQuery,
    DecisionQuery,
    FollowQuery,
    GrpcRetryQuery,
    JobsQuery,
    OfferHistoryQuery,
    OffersQuery,
    QuoteQuery,
    UploadQuery,
    WatchQuery,
)
from broker.api.schemas.quotes import QuoteView
from broker.domain.spec import JobSpec
from trainer.contract.base import Config

PAIRS: tuple[tuple[type[Message], type[BaseModel], frozenset[str]], ...] = (
    # with the fields that only the message has, since HTTP has them in the path, a header or the body
    (spec_pb2.JobSpec, JobSpec, frozenset()),
    (job_pb2.Job, JobView, frozenset()),
    (job_pb2.JobDetail, JobDetail, frozenset()),
    (job_pb2.Event, EventView, frozenset()),
    (job_pb2.LedgerEntry, LedgerLine, frozenset()),
    (quote_pb2.Quote, QuoteView, frozenset()),
    (offer_pb2.Provider, ProviderView, frozenset()),
    (offers_pb.ListOffersResponse, OfferList, frozenset()),
    (offers_pb.ListOffersRequest, OffersQuery, frozenset()),
    (offers_pb.GetOfferHistoryRequest, OfferHistoryQuery, frozenset()),
    (offers_pb.GetOfferHistoryResponse, OfferHistoryView, frozenset()),
    (quotes_pb.CreateQuoteRequest, QuoteQuery, frozenset({"spec"})),
    (job_pb.ListJobsRequest, JobsQuery, frozenset()),
    (job_pb.ListJobsResponse, JobPage, frozenset()),
    (job_pb.RaiseCapRequest, CapChange, frozenset({"job_id"})),
    (job_pb.GetDecisionRequest, DecisionQuery, frozenset({"job_id"})),
    (job_pb.GetDecisionResponse, models_plans.DecisionView, frozenset()),
    (job_pb.GetMetricsRequest, MetricsQuery, frozenset({"job_id"})),
    (job_pb.GetMetricsResponse, MetricsView, frozenset()),
    (job_pb.DeleteJobDataRequest, DataQuery, frozenset({"job_id"})),
    (job_pb.RetryJobRequest, GrpcRetryQuery, frozenset({"job_id", "idempotency_key"})),
    (job_pb.WatchEventsRequest, WatchQuery, frozenset({"job_id"})),
    (job_pb.FollowLogsRequest, FollowQuery, frozenset({"job_id"})),
    (job_pb.ApproveJobRequest, models_policies.Approval, frozenset({"job_id"})),
    (budgets_pb.ListBudgetsResponse, models_policies.BudgetList, frozenset()),
    (artifact_pb.UploadHeader, UploadQuery, frozenset()),
    (artifact_pb.Upload, UploadView, frozenset()),
    (artifact_pb.ListArtifactsResponse, ArtifactList, frozenset()),
    (artifact_pb.DownloadArtifactRequest, artifacts.DownloadQuery, frozenset({"job_id"})),
)
HANDLERS = (JobServicer, QuoteServicer, OfferServicer, ProviderServicer, ArtifactServicer, BudgetServicer)
ONLY_MESSAGES = {"JobEnd", "LogChunk"}
"""Messages that HTTP has as frames of a stream."""
INTEGERS = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)


@pytest.mark.parametrize(("message", "model", "extra"), PAIRS, ids=lambda p: getattr(p, "__name__", ""))
def test_a_message_has_the_fields_of_its_model(
    message: type[Message], model: type[BaseModel], extra: frozenset[str]
) -> None:
    assert list(differences(message.DESCRIPTOR, model, extra)) == []


def test_every_message_is_a_model_or_the_frame_of_a_call() -> None:
    reached: set[str] = set()
    for message, _, _ in PAIRS:
        _reach(message.DESCRIPTOR, reached)
    pool = {m.name for file in (*FILES, budget_pb2, job_pb2, offer_pb2, quote_pb2, spec_pb2) for m in _messages(file)}
    assert {n for n in pool - reached if not n.endswith(("Request", "Response"))} == ONLY_MESSAGES


def test_no_method_is_open_to_everyone() -> None:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            handler = next(k for k in HANDLERS if k.__name__ == service.name.removesuffix("Service") + "Servicer")
            for method in service.methods:
                assert getattr(getattr(handler, method.name), MARK, None), f"{service.name}.{method.name} is open"


BY_GRPC = {
    "quote": "CreateQuote", "submit_job": "SubmitJob", "list_jobs": "ListJobs", "get_job": "GetJob",
    "cancel_job": "CancelJob", "retry_job": "RetryJob", "raise_cap": "RaiseCap", "get_ledger": "GetLedger",
    "list_offers": "ListOffers", "list_providers": "ListProviders", "check_providers": "CheckProviders",
    "job_events": "WatchEvents", "job_logs": "FollowLogs", "upload": "Upload", "list_artifacts": "ListArtifacts",
    "get_artifact": "DownloadArtifact", "list_budgets": "ListBudgets", "approve_job": "ApproveJob",
    "get_decision": "GetDecision", "refuse_job": "RefuseJob", "delete_data": "DeleteJobData",
    "offer_history": "GetOfferHistory", "job_metrics": "GetMetrics",
}  # fmt: skip
SHARED = ("/v1/quotes", "/v1/jobs", "/v1/offers", "/v1/providers", "/v1/uploads", "/v1/budgets")


def test_grpc_offers_every_job_and_offer_call_of_http_with_its_scope() -> None:
    """gRPC can do everything with jobs and offers that HTTP can, with the same scope."""
    scopes = {
        name: getattr(getattr(kind, name), MARK)
        for kind in HANDLERS
        for name in vars(kind)
        if hasattr(getattr(kind, name), MARK)
    }
    for operation in (o for api in APIS for o in api.operations if o.path.startswith(SHARED)):
        name = BY_GRPC.get(operation.handler.__name__)
        assert name is not None, f"{operation.method} {operation.path} has no method in broker/api/proto"
        assert scopes[name] == operation.scope, name
    assert set(BY_GRPC.values()) == set(scopes)


# ------------------------------------------------------------------------------------------------------------ the walk


def differences(message: Any, model: type[BaseModel], extra: frozenset[str] = frozenset()) -> Iterator[str]:
    unions = {o.name: o for o in message.oneofs if not o.name.startswith("_")}
    in_union = {f.name for o in unions.values() for f in o.fields}
    named = {f.name + NAMED for f in message.fields if f.enum_type is not None}
    theirs = ({f.name for f in message.fields} - in_union - named) | set(unions)
    ours = {name for name, info in model.model_fields.items() if not _is_kind(name, info)}
    for name in sorted(ours - theirs):
        yield f"{message.name} lacks {name}"
    for name in sorted(theirs - ours - extra):
        yield f"{model.__name__} lacks {name}"
    for name in sorted(ours & theirs):
        info, where = model.model_fields[name], f"{message.name}.{name}"
        if name in unions:
            kinds = {m.model_fields["kind"].default: m for m in _models(info.annotation)}
            if set(kinds) != {f.name for f in unions[name].fields}:
                yield f"{where}: has other kinds than {sorted(kinds)}"
            for field in unions[name].fields:
                yield from differences(field.message_type, kinds[field.name])
        else:
            field = message.fields_by_name[name]
            yield from (f"{where}: {text}" for text in _presence(field, info, model))
            yield from (f"{where}: {text}" for text in _type(field, info))


def _presence(field: FieldDescriptor, info: FieldInfo, model: type[BaseModel]) -> Iterator[str]:
    optional = type(None) in _flat(info.annotation)
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if field.is_repeated:
        if default or (optional and field.type != FieldDescriptor.TYPE_DOUBLE):  # of doubles, NaN is None
            yield "an empty list and none cannot be told apart; use a message with items"
    elif field.message_type is not None:
        return
    elif field.has_presence and not (optional or (issubclass(model, Config) and not info.is_required())):
        yield "is optional, and the model always has it"
    elif not field.has_presence and (optional or (issubclass(model, Config) and not info.is_required())):
        yield "must be optional: a default and a zero cannot be told apart"


def _type(field: Any, info: FieldInfo) -> Iterator[str]:
    words = _words(info.annotation)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        if field.enum_type.values[0].name == prefix or field.enum_type.values[0].number:
            yield "the enum's 0 must be ..._UNSPECIFIED"
        named = {v.name.removeprefix(prefix) for v in field.enum_type.values[1:]}
        if named != {w.upper().replace("-", "_") for w in words}:
            yield f"the enum has {sorted(named)}, the model {sorted(words)}"
        return
    inner = _models(info.annotation)
    if inner:
        yield from differences(field.message_type, inner[0])
        return
    if field.message_type is not None and not _is_map(field) and field.message_type.full_name.startswith("gpubroker"):
        yield from _type(field.message_type.fields_by_name["items"], info)  # a list that may be absent
        return
    expected = {_scalar(part) for part in _flat(info.annotation) if part is not type(None) and not _literal(part)}
    if words and not expected:
        expected = {_scalar(type(word)) for word in words}
    actual = _found(field)
    if expected != {actual}:
        yield f"is {actual}, the model has {sorted(map(str, expected))}"


def _found(field: Any) -> str:
    if _is_map(field):
        return f"map of {_found(field.message_type.fields_by_name['value'])}"
    if field.message_type is not None:
        return str(field.message_type.full_name)
    if field.type in INTEGERS:
        return "int"
    return {
        FieldDescriptor.TYPE_STRING: "string", FieldDescriptor.TYPE_BOOL: "bool", FieldDescriptor.TYPE_DOUBLE: "double",
    }.get(field.type, str(field.type))  # fmt: skip


def _scalar(part: Any) -> str:
    if typing.get_origin(part) in (dict, Mapping):
        value = typing.get_args(part)[1]
        return "google.protobuf.Struct" if value is Any else f"map of {_scalar(_flat(value)[0])}"
    if isinstance(part, type) and issubclass(part, bool):
        return "bool"
    if part is AwareDatetime:
        return "google.protobuf.Timestamp"
    names = {int: "int", float: "double", datetime: "google.protobuf.Timestamp", Decimal: "string", str: "string"}
    return next((name for kind, name in names.items() if isinstance(part, type) and issubclass(part, kind)), str(part))


def _flat(annotation: Any) -> tuple[Any, ...]:
    if hasattr(annotation, "__supertype__"):
        return _flat(annotation.__supertype__)
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _flat(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType, tuple):
        return tuple(p for a in typing.get_args(annotation) if a is not ... for p in _flat(a))
    return (annotation,)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [p for p in _flat(annotation) if isinstance(p, type) and issubclass(p, BaseModel)]


def _literal(part: Any) -> bool:
    return typing.get_origin(part) is Literal or (isinstance(part, type) and issubclass(part, Enum))


def _words(annotation: Any) -> list[str]:
    values: list[str] = []
    for part in _flat(annotation):
        if typing.get_origin(part) is Literal:
            values += typing.get_args(part)
        elif isinstance(part, type) and issubclass(part, Enum):
            values += [member.value for member in part]
    return values


def _is_kind(name: str, info: FieldInfo) -> bool:
    """Return True for the field `kind`, which gRPC expresses by a oneof."""
    return name == "kind" and _words(info.annotation) == [info.default]


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _messages(file: Any) -> list[Any]:
    return list(file.DESCRIPTOR.message_types_by_name.values())


def _reach(message: Any, reached: set[str]) -> None:
    reached.add(message.name)
    for inner in (f.message_type for f in message.fields if f.message_type is not None and not _is_map(f)):
        if inner.file.package == message.file.package:
            _reach(inner, reached)


@pytest.mark.parametrize("targets", ["attention", ["q_proj", "v_proj"]])
def test_a_keyword_and_a_list_in_its_place_round_trip(targets: Any) -> None:
    method = {"kind": "qlora", "bits": 8, "targets": targets}
    train = {"model": "m/m", "data": {"path": "a.csv", "completion": "{x}"}, "method": method}
    spec = JobSpec.model_validate({"name": "a", "cap_usd": "1", "train": train})
    assert parse(fill_message(spec_pb2.JobSpec(), spec), JobSpec) == spec
