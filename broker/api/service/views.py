"""From the domain's objects to what goes over the wire."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from broker.api.schemas import core as models
from broker.api.schemas.job_data import DeletedView, ForecastView, StorageView
from broker.api.schemas.policies import HoldView
from broker.api.service.interfaces import Checked
from broker.billing.prices import price_now
from broker.domain.job import Attempt, Event, Job, JobState
from broker.domain.money import ZERO
from broker.domain.offer import Quote
from broker.lifecycle.retention import month_usd
from broker.policy.budgets import Refusal
from broker.ports import Upload


def job(row: Job) -> models.JobView:
    return models.JobView.model_construct(**_job_fields(row))


def _job_fields(row: Job) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.spec.name,
        "team": row.team,
        "owner": row.owner,
        "state": row.state,
        "reason": row.reason,
        "labels": row.spec.labels,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
        "cap_usd": row.cap_usd,
        "spent_usd": row.spent_usd,
        "attempts": row.attempts,
        "retries_used": row.retries_used,
        "stop_requested": row.stop_requested,
        "retry_of": row.retry_of,
        "forecast": _forecast(row),
    }


def _forecast(row: Job) -> ForecastView | None:
    known = row.state is JobState.ACTIVE and row.forecast is not None
    return ForecastView.model_validate(row.forecast) if known else None


def storage(row: Job, usd_per_gib_month: Decimal) -> StorageView | None:
    if row.stored is None:
        return None
    return StorageView(
        bytes=row.stored.bytes,
        usd=row.stored.charged_usd,
        usd_per_month=month_usd(row.stored.bytes, usd_per_gib_month),
        deleted=tuple(DeletedView(what=what, at=at) for what, at in sorted(row.deleted.items())),
    )


def job_detail(row: Job, attempts: Sequence[Attempt], usd_per_gib_month: Decimal = ZERO) -> models.JobDetail:
    held = sum((max(ZERO, a.reserved_usd - a.charged_usd) for a in attempts if a.live), ZERO)
    return models.JobDetail.model_construct(
        **_job_fields(row),
        spec=row.spec,
        reserved_usd=held,
        storage=storage(row, usd_per_gib_month),
        ran_out_of_memory=row.remedy.failed_plans if row.remedy else (),
        runs=tuple(attempt(a) for a in attempts),
    )


def attempt(row: Attempt) -> models.AttemptView:
    return models.AttemptView(
        id=row.id,
        number=row.number,
        instance=row.name,
        state=row.state,
        reason=row.reason,
        detail=row.detail,
        offer=models.OfferView.model_validate(row.line.offer),
        nodes=row.line.nodes,
        hours_p50=row.line.hours_p50,
        usd_p50=row.line.usd_p50,
        evidence=row.line.evidence,
        observed_runs=row.line.runs,
        created_at=row.created_at,
        create_sent_at=row.create_sent_at,
        first_beat_at=row.first_beat_at,
        ended_at=row.ended_at,
        reserved_usd=row.reserved_usd,
        charged_usd=row.charged_usd,
        traffic_usd=row.traffic_usd,
        usd_per_hour=price_now(row),
        idle=row.idle,
        resume_from=row.resume_from,
        beat=row.beat,
        final=row.final,
    )


def quote(checked: Checked, made: Quote, held: Refusal | None, limit: int) -> models.QuoteView:
    return models.QuoteView(
        check=dict(checked.report),
        lines=tuple(models.LineView.model_validate(line) for line in made.lines[:limit]),
        kept=made.kept,
        drops=dict(made.drops),
        proposed_cap_usd=made.proposed_cap_usd,
        cheapest_usd=made.cheapest_usd,
        unsold_regions=made.unsold_regions,
        held=None if held is None else HoldView.model_validate(held),
        made_at=made.made_at,
        expires_at=made.expires_at,
    )


def event(row: Event) -> models.EventView:
    return models.EventView.model_validate(row)


def upload(row: Upload) -> models.UploadView:
    return models.UploadView(
        ref=f"upload:{row.sha256}",
        sha256=row.sha256,
        bytes=row.bytes,
        name=row.name,
        summary=None if row.summary is None else dict(row.summary),
    )
