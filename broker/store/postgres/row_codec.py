"""Conversion between domain values and rows. Queried and fenced fields are columns; documents are jsonb."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

import asyncpg
from pydantic import BaseModel, TypeAdapter

from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.job import (
    Attempt,
    AttemptState,
    Event,
    Forecast,
    Handle,
    Job,
    JobState,
    PlanAdjustment,
    PriceChange,
    Reason,
    Signal,
    StoredData,
    StoredKind,
    Traffic,
)
from broker.domain.money import LedgerCategory, LedgerEntry, LedgerKind
from broker.domain.offer import QuoteLine
from broker.domain.spec import JobSpec
from broker.domain.tenancy import AuditEntry, Team
from broker.domain.workload import RunObservation, Workload
from broker.ports import Leased, Token, Upload
from broker.store.rules.fences import clean
from trainer.contract.documents import Final, Heartbeat

Record = asyncpg.Record
ModelT = TypeVar("ModelT", bound=BaseModel)

_SPEC = TypeAdapter(JobSpec)
_WORKLOAD = TypeAdapter(Workload)
_LINE = TypeAdapter(QuoteLine)
_HANDLES = TypeAdapter(tuple[Handle, ...])
_BEAT = TypeAdapter(Heartbeat)
_FINAL = TypeAdapter(Final)
_REMEDY = TypeAdapter(PlanAdjustment)
_OBSERVATION = TypeAdapter(RunObservation)
_PRICES = TypeAdapter(tuple[PriceChange, ...])
_FORECAST = TypeAdapter(Forecast)
_STORED = TypeAdapter(StoredData)
_DELETED = TypeAdapter(dict[StoredKind, datetime])
_TEXTS = TypeAdapter(tuple[str, ...])
_OBJECT = TypeAdapter(dict[str, Any])

# An escaped NUL, which jsonb refuses: `\u0000` after an even number of backslashes.
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")

DOCUMENTS = 16_384
"""Number of parsed specs, workloads and quote lines that are cached: more than a broker has live attempts."""

JOB_FIELDS = (
    "id", "team", "owner", "spec", "workload", "created_at", "state", "reason", "attempts", "retries_used",
    "preemptions_without_progress", "remedy", "due_at", "lease_until", "finished_at", "spent_usd", "machine_s",
    "forecast", "stored", "deleted", "cap_usd", "approved_usd", "stop_requested", "retry_of", "epoch",
)  # fmt: skip
JOB_COLUMNS = ", ".join(f"j.{name} AS j_{name}" for name in JOB_FIELDS)
"""Columns of a job, with the prefix under which `leased` reads them next to those of an attempt."""
FIXED_JOB_FIELDS = ("id", "team", "owner", "spec", "workload", "created_at", "retry_of")
"""Columns of a job that no statement changes."""
FIXED_ATTEMPT_FIELDS = ("id", "job_id", "number", "name", "line", "created_at", "resume_from")
"""Columns of an attempt that no statement changes."""
_CHANGED_ATTEMPT_FIELDS = (
    "reserved_usd", "state", "reason", "detail", "create_sent_at", "launched_by", "handles", "running_at", "booted_at",
    "first_beat_at", "draining_since", "terminating_since", "destroy_failures", "absent_at", "ended_at", "beat",
    "earlier_sent", "earlier_received", "final", "charged_usd", "charged_to", "traffic_usd", "signal", "idle", "stays",
    "epoch",
)  # fmt: skip
CHANGED_COLUMNS = ", ".join(
    [f"a.{name}" for name in _CHANGED_ATTEMPT_FIELDS]
    + [f"j.{name} AS j_{name}" for name in JOB_FIELDS if name not in FIXED_JOB_FIELDS]
)
"""All other columns of an attempt and of its job, which `changed` reads."""


def _json(adapter: TypeAdapter[Any], value: Any) -> str:
    text = adapter.dump_json(value).decode()
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


# These documents never change, but are read with every transition of a job, so each text is parsed once.
@lru_cache(maxsize=DOCUMENTS)
def _spec(text: str) -> JobSpec:
    return _shared(_SPEC.validate_json(text))


_parts: dict[tuple[type, str], BaseModel] = {}
"""Parts of specs by class and JSON. Most parts are the defaults, and a spec without shared parts takes 15 KiB."""


def _shared(model: ModelT) -> ModelT:
    """Replace the parts of a frozen model with equal parts of models that were read before. Return the model."""
    for name, value in model.__dict__.items():
        if isinstance(value, BaseModel):
            part = _shared(value)
            if len(_parts) >= DOCUMENTS:
                _parts.clear()
            model.__dict__[name] = _parts.setdefault((type(part), part.model_dump_json()), part)
    return model


@lru_cache(maxsize=DOCUMENTS)
def _workload(text: str) -> Workload:
    return _WORKLOAD.validate_json(text)


@lru_cache(maxsize=DOCUMENTS)
def _line(text: str) -> QuoteLine:
    return _LINE.validate_json(text)


def job(row: Record, prefix: str = "") -> Job:
    """Return a job; `prefix` "j_" reads it from a row that begins with an attempt. While leased, `due_at` is None."""
    return Job(
        id=JobId(row[f"{prefix}id"]),
        team=row[f"{prefix}team"],
        owner=row[f"{prefix}owner"],
        spec=_spec(row[f"{prefix}spec"]),
        workload=_workload(row[f"{prefix}workload"]),
        created_at=row[f"{prefix}created_at"],
        retry_of=row[f"{prefix}retry_of"],
        **_job_changes(row, prefix),
    )


def _job_changes(row: Record, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a job that statements change."""
    get = row.__getitem__ if not prefix else lambda name: row[prefix + name]
    return {
        "state": JobState(get("state")),
        "reason": get("reason"),
        "attempts": get("attempts"),
        "retries_used": get("retries_used"),
        "preemptions_without_progress": get("preemptions_without_progress"),
        "remedy": _REMEDY.validate_json(get("remedy")) if get("remedy") else None,
        "machine_s": get("machine_s"),
        "due_at": get("due_at") if get("lease_until") is None else None,
        "finished_at": get("finished_at"),
        "spent_usd": get("spent_usd"),
        "forecast": _FORECAST.validate_json(get("forecast")) if get("forecast") else None,
        "stored": _STORED.validate_json(get("stored")) if get("stored") else None,
        "deleted": _DELETED.validate_json(get("deleted")),
        "cap_usd": get("cap_usd"),
        "approved_usd": get("approved_usd"),
        "stop_requested": get("stop_requested"),
        "epoch": get("epoch"),
    }


def attempt(row: Record) -> Attempt:
    """Return an attempt from its whole row."""
    return Attempt(
        id=AttemptId(row["id"]),
        job_id=JobId(row["job_id"]),
        number=row["number"],
        name=InstanceName(row["name"]),
        line=_line(row["line"]),
        created_at=row["created_at"],
        resume_from=_TEXTS.validate_json(row["resume_from"]),
        **_attempt_changes(row),
    )


def _attempt_changes(row: Record) -> dict[str, Any]:
    """Return the fields of an attempt that statements change."""
    return {
        "reserved_usd": row["reserved_usd"],
        "state": AttemptState(row["state"]),
        "reason": Reason(row["reason"]) if row["reason"] else None,
        "detail": row["detail"],
        "create_sent_at": row["create_sent_at"],
        "launched_by": row["launched_by"],
        "handles": _HANDLES.validate_json(row["handles"]),
        "running_at": row["running_at"],
        "booted_at": row["booted_at"],
        "first_beat_at": row["first_beat_at"],
        "draining_since": row["draining_since"],
        "terminating_since": row["terminating_since"],
        "destroy_failures": row["destroy_failures"],
        "absent_at": row["absent_at"],
        "ended_at": row["ended_at"],
        "beat": _BEAT.validate_json(row["beat"]) if row["beat"] else None,
        "earlier_traffic": Traffic(sent=row["earlier_sent"], received=row["earlier_received"]),
        "final": _FINAL.validate_json(row["final"]) if row["final"] else None,
        "charged_usd": row["charged_usd"],
        "charged_to": row["charged_to"],
        "traffic_usd": row["traffic_usd"],
        "prices": _PRICES.validate_json(row["prices"]) if row["prices"] else (),
        "signal": Signal(row["signal"]) if row["signal"] else None,
        "idle": row["idle"],
        "stays": row["stays"],
        "epoch": row["epoch"],
    }


def changed(read: Leased, row: Record) -> Leased:
    """Return an attempt and its job as of a row of `CHANGED_COLUMNS`; the fixed fields are those of `read`."""
    return Leased(
        attempt=replace(read.attempt, **_attempt_changes(row)), job=replace(read.job, **_job_changes(row, "j_"))
    )


def event(row: Record) -> Event:
    return Event(
        job_id=JobId(row["job_id"]),
        kind=row["kind"],
        message=row["message"],
        attempt_id=AttemptId(row["attempt_id"]) if row["attempt_id"] else None,
        data=_OBJECT.validate_json(row["data"]),
        seq=row["seq"],
        at=row["at"],
    )


def ledger_entry(row: Record) -> LedgerEntry:
    return LedgerEntry(
        job_id=JobId(row["job_id"]),
        attempt_id=AttemptId(row["attempt_id"]) if row["attempt_id"] else None,
        kind=LedgerKind(row["kind"]),
        usd=row["usd"],
        note=row["note"],
        category=LedgerCategory(row["category"]),
    )


def token(row: Record) -> Token:
    return Token(
        id=row["id"],
        team=row["team"],
        owner=row["owner"],
        scopes=tuple(row["scopes"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        note=row["note"],
    )


def team(row: Record) -> Team:
    return Team(name=row["name"], created_at=row["created_at"], note=row["note"])


def audit_entry(row: Record) -> AuditEntry:
    return AuditEntry(
        team=row["team"],
        actor=row["actor"],
        token_id=row["token_id"],
        action=row["action"],
        target=row["target"],
        before=_OBJECT.validate_json(row["before"]) if row["before"] else None,
        after=_OBJECT.validate_json(row["after"]) if row["after"] else None,
        usd=row["usd"],
        id=str(row["id"]),
        at=row["at"],
    )


def upload(row: Record) -> Upload:
    summary = _OBJECT.validate_json(row["summary"]) if row["summary"] else None
    return Upload(sha256=row["sha256"], bytes=row["bytes"], name=row["name"], summary=summary, gone_at=row["gone_at"])


def summary_json(summary: Mapping[str, Any] | None) -> str | None:
    """Return an upload's summary as jsonb."""
    return None if summary is None else _json(_OBJECT, dict(summary))


# The tuples below are rows of the arrays that `unnest` takes, in the order of the statement of that name.


def submitted(value: Job, key: str | None, body_sha256: str, events: int) -> tuple[Any, ...]:
    """Return a row of `submit`."""
    return (
        value.id, value.team, value.owner, _json(_SPEC, value.spec), _json(_WORKLOAD, value.workload),
        value.state.value, clean(value.reason), value.attempts, value.retries_used,
        value.finished_at, value.spent_usd, value.cap_usd, value.stop_requested, value.retry_of, key, body_sha256,
        events,
    )  # fmt: skip


def written_job(value: Job, due_in_s: float) -> tuple[Any, ...]:
    """Return the controllers' columns of a row of `write_jobs`, after the id."""
    return (
        value.state.value, clean(value.reason), value.attempts, value.retries_used, value.preemptions_without_progress,
        _json(_REMEDY, value.remedy) if value.remedy else None, value.finished_at, value.machine_s, due_in_s,
    )  # fmt: skip


def written_attempt(read: Attempt, value: Attempt, due_in_s: float) -> tuple[Any, ...]:
    """Return a row of `write_attempts`. An unchanged `launched_by` becomes None, which leaves the stored value."""
    launched_by = None if value.launched_by == read.launched_by else value.launched_by
    return (
        value.id, value.state.value, value.reason and value.reason.value, clean(value.detail), value.create_sent_at,
        launched_by, _json(_HANDLES, value.handles), value.booted_at, value.first_beat_at,
        value.draining_since, value.terminating_since, value.destroy_failures, value.ended_at,
        _json(_BEAT, value.beat) if value.beat else None, _json(_FINAL, value.final) if value.final else None,
        value.absent_at, value.running_at, value.earlier_traffic.sent, value.earlier_traffic.received, due_in_s,
    )  # fmt: skip


def admitted(value: Attempt, stop_requested: bool) -> tuple[Any, ...]:
    """Return a row of `admit_attempts`."""
    return (
        value.id, value.job_id, value.number, value.name, _json(_LINE, value.line), value.created_at,
        value.reserved_usd, _json(_TEXTS, value.resume_from), value.state.value,
        value.reason and value.reason.value, clean(value.detail), value.create_sent_at, value.launched_by,
        value.line.offer.host_key, stop_requested,
    )  # fmt: skip


def written_entry(value: LedgerEntry, at: datetime | None) -> tuple[Any, ...]:
    """Return a row of `write_ledger`. `at`: the trusted time; None: the database's clock gives the time."""
    return (value.job_id, value.attempt_id, value.kind.value, value.usd, clean(value.note), value.category.value, at)


def audited(value: AuditEntry) -> tuple[Any, ...]:
    """Return a row of `write_audit`."""
    before, after = (None if side is None else _json(_OBJECT, dict(side)) for side in (value.before, value.after))
    return (
        value.team, value.actor, value.token_id, value.action, clean(value.target), before, after, value.usd,
    )  # fmt: skip


def written_observation(value: RunObservation) -> tuple[Any, ...]:
    """Return a row of `write_observations`."""
    family = value.workload.shape.family if value.workload.shape else ""
    return (value.attempt_id, value.hardware, value.workload.method, family, _json(_OBSERVATION, value))


def observation(row: Record) -> RunObservation:
    return _OBSERVATION.validate_json(row["seen"])


def forecast_json(value: Forecast | None) -> str | None:
    return None if value is None else _json(_FORECAST, value)


def stored_json(value: StoredData) -> str:
    return _json(_STORED, value)


def written_event(value: Event, seq: int) -> tuple[Any, ...]:
    """Return a row of `write_events`."""
    return (value.job_id, seq, value.kind, clean(value.message), value.attempt_id, _json(_OBJECT, value.data))
