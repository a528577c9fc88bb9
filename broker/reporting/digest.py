"""The spend digest: due periods and their contents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal
from zoneinfo import ZoneInfo

from broker.billing.spending import report
from broker.domain.job import Attempt, Job
from broker.domain.money import format_usd
from broker.domain.notifications import Notice
from broker.domain.spending import Paid, SpendRow, SpendWindow

Every = Literal["daily", "weekly"]
TOP = 5
"""Number of jobs and users that a digest names."""


@dataclass(frozen=True, kw_only=True)
class DigestPlan:
    """Schedule: at local time `at` of `zone` (IANA), for the previous day; on Mondays for the previous week."""

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
    """A job that costs money now."""

    job: Job
    attempt: Attempt


def periods(plan: DigestPlan, now: datetime) -> list[DigestPeriod]:
    """Return the latest due period of each kind; missed earlier periods are skipped."""
    zone = ZoneInfo(plan.zone)
    today = now.astimezone(zone).date()
    if now < datetime.combine(today, plan.at, zone):
        today -= timedelta(days=1)
    monday = today - timedelta(days=today.weekday())
    midnight = [datetime.combine(day, time(), zone) for day in (today - timedelta(days=1), today)]
    week = [datetime.combine(day, time(), zone) for day in (monday - timedelta(days=7), monday)]
    due: list[DigestPeriod] = []
    if plan.daily:
        due.append(_period("daily", midnight, plan.zone))
    if plan.weekly:
        due.append(_period("weekly", week, plan.zone))
    return due


def _period(every: Every, days: Sequence[datetime], zone: str) -> DigestPeriod:
    return DigestPeriod(every=every, window=SpendWindow(since=days[0], until=days[1], zone=zone))


def digests(period: DigestPeriod, paid: Paid, running: Sequence[RunningJob]) -> list[Notice]:
    """Return a digest for each team with spending or running jobs. Several teams: also one for the installation."""
    teams = sorted({paid.jobs[piece.job_id].team for piece in paid.slices} | {job.job.team for job in running})
    notices = [
        _digest(period, team, _of_team(paid, team), [job for job in running if job.job.team == team]) for team in teams
    ]
    return notices if len(teams) < 2 else [*notices, _digest(period, None, paid, running)]


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
            "running": [_running(job) for job in running[:TOP]],
            "running_jobs": len(running),
            "usd_per_hour": str(sum((_rate(job.attempt) for job in running), Decimal(0))),
        },
    )


def _message(period: DigestPeriod, team: str | None, total: SpendRow, running: int) -> str:
    saved = total.saved_on_demand_usd
    against = f"{format_usd(saved)} saved against" if saved >= 0 else f"{format_usd(-saved)} more than"
    parts = [
        f"{format_usd(total.usd)} spent",
        f"{format_usd(total.lost_usd)} of it lost work",
        f"{against} on-demand prices",
    ]
    return f"{team or 'all teams'}, {period.label}: {', '.join(parts)}; {running} running now"


def _job(paid: Paid, row: SpendRow) -> dict[str, Any]:
    job = next(job for job_id, job in paid.jobs.items() if job_id == row.key)
    return {"id": row.key, "name": job.name, "team": job.team, "owner": job.owner, "usd": str(row.usd)}


def _running(running: RunningJob) -> dict[str, Any]:
    offer = running.attempt.line.offer
    return {
        "id": running.job.id,
        "name": running.job.spec.name,
        "owner": running.job.owner,
        "state": running.attempt.state.value,
        "gpu": f"{offer.gpus} x {offer.accelerator}",
        "cloud": offer.cloud,
        "usd_per_hour": str(_rate(running.attempt)),
        "spent_usd": str(running.job.spent_usd),
        "cap_usd": str(running.job.cap_usd),
    }


def _rate(attempt: Attempt) -> Decimal:
    """Return dollars an hour of all its machines."""
    return attempt.line.offer.usd_per_hour * attempt.line.nodes
