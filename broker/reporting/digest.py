"""The spend digest: which period is told when, and what is said of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal
from zoneinfo import ZoneInfo

from broker.billing.spending import report
from broker.domain.job import Attempt, Job
from broker.domain.money import show
from broker.domain.notifications import Notice
from broker.domain.spending import Paid, SpendRow, SpendWindow

Every = Literal["daily", "weekly"]
TOP = 5
"""Jobs and users that are named."""


@dataclass(frozen=True, kw_only=True)
class DigestPlan:
    """When people are told: at `at`, local time of `zone` (IANA), of the day before; on Mondays of the week before."""

    at: time = time(9)
    zone: str = "UTC"
    daily: bool = True
    weekly: bool = True


@dataclass(frozen=True, kw_only=True)
class DigestPeriod:
    """Whole local days: [since, until)."""

    every: Every
    window: SpendWindow

    @property
    def label(self) -> str:
        """`2026-03-01`, or the first and last day of a week."""
        zone = ZoneInfo(self.window.zone)
        first = self.window.since.astimezone(zone).date()
        last = self.window.until.astimezone(zone).date() - timedelta(days=1)
        return f"{first}" if first == last else f"{first} to {last}"


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """What costs money now."""

    job: Job
    attempt: Attempt


def periods(plan: DigestPlan, now: datetime) -> list[DigestPeriod]:
    """The latest period of each kind whose time to be told has come; what was missed before it is told no more."""
    zone = ZoneInfo(plan.zone)
    today = now.astimezone(zone).date()
    if now < datetime.combine(today, plan.at, zone):
        today -= timedelta(days=1)
    monday = today - timedelta(days=today.weekday())
    midnight = [datetime.combine(day, time(), zone) for day in (today - timedelta(days=1), today)]
    week = [datetime.combine(day, time(), zone) for day in (monday - timedelta(days=7), monday)]
    found: list[DigestPeriod] = []
    if plan.daily:
        found.append(_period("daily", midnight, plan.zone))
    if plan.weekly:
        found.append(_period("weekly", week, plan.zone))
    return found


def _period(every: Every, days: Sequence[datetime], zone: str) -> DigestPeriod:
    return DigestPeriod(every=every, window=SpendWindow(since=days[0], until=days[1], zone=zone))


def digests(period: DigestPeriod, paid: Paid, running: Sequence[RunningJob]) -> list[Notice]:
    """One for each team that spent or is spending, and one of the installation where there are several such teams."""
    teams = sorted({paid.jobs[piece.job_id].team for piece in paid.slices} | {one.job.team for one in running})
    found = [_digest(period, team, _of_team(paid, team), [r for r in running if r.job.team == team]) for team in teams]
    return found if len(teams) < 2 else [*found, _digest(period, None, paid, running)]


def _of_team(paid: Paid, team: str) -> Paid:
    return replace(paid, slices=[piece for piece in paid.slices if paid.jobs[piece.job_id].team == team])


def _digest(period: DigestPeriod, team: str | None, paid: Paid, running: Sequence[RunningJob]) -> Notice:
    jobs, users = report(paid, "job"), report(paid, "user")
    total = jobs.total
    day = period.window.until.astimezone(ZoneInfo(period.window.zone)).date()
    return Notice(
        id=f"digest-{period.every}-{day}-{team or ''}",
        kind=f"digest.{period.every}",
        team=team,
        message=_message(period, team, total, len(running)),
        data={
            "since": period.window.since.isoformat(),
            "until": period.window.until.isoformat(),
            "zone": period.window.zone,
            "spent_usd": str(total.usd),
            "lost_usd": str(total.lost_usd),
            "saved_on_demand_usd": str(total.saved_on_demand_usd),
            "users": [{"user": row.key, "usd": str(row.usd)} for row in users.rows[:TOP]],
            "jobs": [_job(paid, row) for row in jobs.rows[:TOP]],
            "running": [_running(one) for one in running[:TOP]],
            "running_jobs": len(running),
            "usd_per_hour": str(sum((_rate(one.attempt) for one in running), Decimal(0))),
        },
    )


def _message(period: DigestPeriod, team: str | None, total: SpendRow, running: int) -> str:
    saved = total.saved_on_demand_usd
    against = f"{show(saved)} saved against" if saved >= 0 else f"{show(-saved)} more than"
    told = [f"{show(total.usd)} spent", f"{show(total.lost_usd)} of it lost work", f"{against} on-demand prices"]
    return f"{team or 'all teams'}, {period.label}: {', '.join(told)}; {running} running now"


def _job(paid: Paid, row: SpendRow) -> dict[str, Any]:
    job = next(one for own, one in paid.jobs.items() if own == row.key)
    return {"id": row.key, "name": job.name, "team": job.team, "owner": job.owner, "usd": str(row.usd)}


def _running(one: RunningJob) -> dict[str, Any]:
    offer = one.attempt.line.offer
    return {
        "id": one.job.id,
        "name": one.job.spec.name,
        "owner": one.job.owner,
        "state": one.attempt.state.value,
        "gpu": f"{offer.gpus} x {offer.accelerator}",
        "cloud": offer.cloud,
        "usd_per_hour": str(_rate(one.attempt)),
        "spent_usd": str(one.job.spent_usd),
        "cap_usd": str(one.job.cap_usd),
    }


def _rate(attempt: Attempt) -> Decimal:
    """Of all its machines."""
    return attempt.line.offer.usd_per_hour * attempt.line.nodes
