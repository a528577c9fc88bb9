"""Conversions of domain objects to wire models, and of query models to filters."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from broker.api.schemas.files import UploadView
from broker.api.schemas.job_data import DeletedView, ForecastView, JobMachineView, StorageView
from broker.api.schemas.jobs import AttemptView, EventView, JobDetail, JobView
from broker.api.schemas.offers import OfferView
from broker.api.schemas.plans import ConsideredOffer, DecisionView
from broker.api.schemas.policies import BudgetList, BudgetView, HoldView, StandingView, ThresholdView
from broker.api.schemas.queries import JobsQuery
from broker.api.schemas.quotes import LineView, ProspectView, QuoteView
from broker.api.service.interfaces import Checked
from broker.billing.prices import price_now
from broker.billing.spending import lost_share, on_demand_usd
from broker.domain.errors import InvalidInput, Problem
from broker.domain.job import Attempt, Event, Job, JobState
from broker.domain.money import ZERO, usd
from broker.domain.offer import OfferSummary, Quote
from broker.lifecycle.retention import month_usd
from broker.policy.budgets import Applied, Refusal, reached
from broker.policy.windows import window_end, window_start
from broker.ports import JobFilter, Upload
from broker.quote.prospects import prospects


def job(row: Job, latest: Attempt | None = None) -> JobView:
    """`latest`: the latest attempt, whose machines the view shows; None: they are not shown."""
    return JobView.model_construct(**_job_fields(row), machine=_machine(latest))


def _machine(latest: Attempt | None) -> JobMachineView | None:
    if latest is None:
        return None
    offer = latest.line.offer
    return JobMachineView(
        accelerator=offer.accelerator,
        gpus=offer.gpus,
        nodes=latest.line.nodes,
        cloud=offer.cloud,
        region=offer.region,
        spot=offer.spot,
        simulated=offer.simulated,
    )


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
    has_forecast = row.state is JobState.ACTIVE and row.forecast is not None
    return ForecastView.model_validate(row.forecast) if has_forecast else None


def storage(row: Job, usd_per_gib_month: Decimal) -> StorageView | None:
    if row.stored is None:
        return None
    return StorageView(
        bytes=row.stored.bytes,
        measured_at=row.stored.to,
        usd=row.stored.charged_usd,
        usd_per_month=month_usd(row.stored.bytes, usd_per_gib_month),
        deleted=tuple(DeletedView(what=what, at=at) for what, at in sorted(row.deleted.items())),
    )


def job_detail(row: Job, attempts: Sequence[Attempt], usd_per_gib_month: Decimal = ZERO) -> JobDetail:
    reserved_usd = sum((max(ZERO, a.reserved_usd - a.charged_usd) for a in attempts if a.live), ZERO)
    return JobDetail.model_construct(
        **_job_fields(row),
        machine=_machine(attempts[-1] if attempts else None),
        spec=row.spec,
        reserved_usd=reserved_usd,
        storage=storage(row, usd_per_gib_month),
        ran_out_of_memory=row.remedy.failed_plans if row.remedy else (),
        runs=tuple(attempt(a) for a in attempts),
    )


def attempt(row: Attempt) -> AttemptView:
    return AttemptView(
        id=row.id,
        number=row.number,
        instance=row.name,
        state=row.state,
        reason=row.reason,
        detail=row.detail,
        offer=OfferView.model_validate(row.line.offer),
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
        lost_usd=usd((row.charged_usd - row.traffic_usd) * lost_share(row)),
        on_demand_usd=None if (on_demand := on_demand_usd(row)) is None else usd(on_demand),
        usd_per_hour=price_now(row),
        idle=row.idle,
        resume_from=row.resume_from,
        beat=row.beat,
        final=row.final,
    )


def quote(checked: Checked, ranking: Quote, refusal: Refusal | None, limit: int) -> QuoteView:
    expected = prospects(ranking)
    return QuoteView(
        check=dict(checked.report),
        lines=tuple(LineView.model_validate(line) for line in ranking.lines[:limit]),
        kept=ranking.kept_count,
        drops=dict(ranking.drops),
        proposed_cap_usd=ranking.proposed_cap_usd,
        cheapest_usd=ranking.cheapest_usd,
        chosen=None if expected.chosen is None else ProspectView.model_validate(expected.chosen),
        on_demand=None if expected.on_demand is None else ProspectView.model_validate(expected.on_demand),
        latest_on_demand_start=ranking.latest_on_demand_start,
        unsold_regions=ranking.unsold_regions,
        held=None if refusal is None else HoldView.model_validate(refusal),
        made_at=ranking.made_at,
        expires_at=ranking.expires_at,
    )


def event(row: Event) -> EventView:
    return EventView.model_validate(row)


def upload(row: Upload) -> UploadView:
    return UploadView(
        ref=f"upload:{row.sha256}",
        sha256=row.sha256,
        bytes=row.bytes,
        name=row.name,
        summary=None if row.summary is None else dict(row.summary),
    )


def decision(offers: Sequence[OfferSummary]) -> DecisionView:
    return DecisionView(items=tuple(ConsideredOffer.model_validate(offer) for offer in offers))


def job_filter(query: JobsQuery) -> JobFilter:
    """Return the store's filter for a listing of jobs. Raises InvalidInput for a label given with two values."""
    labels: dict[str, str] = {}
    for text in query.label:
        key, _, value = text.partition(":")
        if labels.setdefault(key, value) != value:
            raise InvalidInput(Problem(field="label", message=f"{key} is given with two values; keep one"))
    return JobFilter(
        team=query.team,
        owner=query.owner,
        states=query.state,
        labels=labels,
        since=query.since,
        until=query.until,
        limit=query.limit,
    )


# ------------------------------------------------------------------------------------------------------------- budgets


def budget_list(now: datetime, applied: Sequence[Applied]) -> BudgetList:
    return BudgetList(at=now, items=tuple(_standing(policy, now) for policy in applied))


def _standing(applied: Applied, now: datetime) -> StandingView:
    policy, usage = applied.policy, applied.usage
    return StandingView(
        name=policy.name,
        team=policy.team,
        user=policy.user,
        timezone=policy.timezone,
        budgets=_budgets(applied, now),
        outstanding_usd=usage.outstanding_usd,
        gpus=usage.gpus,
        max_gpus=policy.max_gpus,
        jobs=usage.jobs,
        max_jobs=policy.max_jobs,
        approval_above_usd=policy.approval_above_usd,
    )


def _budgets(applied: Applied, now: datetime) -> tuple[BudgetView, ...]:
    policy, usage = applied.policy, applied.usage
    crossed = {(crossing.budget.key, crossing.threshold) for crossing in reached(policy, usage)}
    return tuple(
        BudgetView(
            limit_usd=budget.limit_usd,
            per=budget.per,
            window=budget.window,
            charged_usd=charged,
            committed_usd=charged + usage.outstanding_usd,
            since=window_start(budget, policy.zone, now),
            until=window_end(budget, policy.zone, now),
            thresholds=tuple(
                ThresholdView(at=threshold.at, action=threshold.action, reached=(budget.key, threshold) in crossed)
                for threshold in budget.thresholds
            ),
        )
        for budget, charged in zip(policy.budgets, usage.charged, strict=True)
    )
